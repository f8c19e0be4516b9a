//! Memory, BAR1 and ECC.

use std::sync::atomic::Ordering;

use nvml_wrapper_sys::bindings::{
    nvmlBAR1Memory_t, nvmlDevice_t, nvmlEccErrorCounts_t, nvmlMemory_t, nvmlMemory_v2_t,
};

use tranche_simulator_machine::description::MIB;

use crate::code::Code;
use crate::export::{export, get, put};
use crate::state::{AnyDevice, any_device, device, device_of_any};

/// `nvmlMemory_v2`
const MEMORY_V2: u32 = struct_version(size_of::<nvmlMemory_v2_t>(), 2);

/// nvml.h's `NVML_STRUCT_VERSION`: a struct's size and its version.
pub const fn struct_version(bytes: usize, version: u32) -> u32 {
    #[allow(clippy::cast_possible_truncation, reason = "structs are small")]
    let bytes = bytes as u32;
    bytes | (version << 24)
}

/// Memory in bytes.
struct MemoryInfo {
    total: u64,
    reserved: u64,
    free: u64,
}

/// The memory of a GPU or of a MIG device. The total of a MIG device does not include the driver's reserve.
fn memory_of(of: AnyDevice) -> MemoryInfo {
    let state = of.device.state;
    match of.partition {
        None => MemoryInfo {
            total: state.memory_total,
            reserved: state.memory_reserved,
            free: state.free(),
        },
        Some(it) => {
            let total = it.gpu_instance.profile.memory_mib * MIB;
            MemoryInfo {
                total,
                reserved: 0,
                free: total.saturating_sub(it.gpu_instance.used),
            }
        }
    }
}

/// Refuses GPUs that remap rows and do not retire pages: Ampere and later.
fn check_retires_pages(of: nvmlDevice_t) -> Result<(), Code> {
    if device(of)?.state.architecture < 7 {
        Ok(())
    } else {
        Err(Code::NOT_SUPPORTED)
    }
}

export! {
    fn nvmlDeviceGetMemoryInfo(of: nvmlDevice_t, memory: *mut nvmlMemory_t) {
        let info = memory_of(any_device(of)?);
        // The first version counts the driver's reserve as used.
        put(memory, nvmlMemory_t { total: info.total, free: info.free, used: info.total - info.free })
    }
    fn nvmlDeviceGetMemoryInfo_v2(of: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) {
        let info = memory_of(any_device(of)?);
        // Reads only this field, because the caller may not have set the others.
        if get((&raw const (*memory).version).cast::<u32>())? != MEMORY_V2 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        put(memory, nvmlMemory_v2_t {
            version: MEMORY_V2,
            total: info.total,
            reserved: info.reserved,
            free: info.free,
            used: info.total - info.reserved - info.free,
        })
    }
    fn nvmlDeviceGetBAR1MemoryInfo(of: nvmlDevice_t, memory: *mut nvmlBAR1Memory_t) {
        let any = any_device(of)?;
        let state = any.device.state;
        // A real driver maps a few MiB of each GPU, and more while it is used.
        let mut used = if state.used.load(Ordering::Relaxed) > 0 { 2 << 20 } else { 1 << 20 };
        let mut total = state.bar1_bytes;
        if let (Some(it), Some(model)) = (any.partition, state.model()) {
            let profile = it.gpu_instance.profile;
            total = total * u64::from(profile.size) / u64::from(model.whole().size);
            used = 0;
        }
        put(memory, nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - used, bar1Used: used })
    }
    fn nvmlDeviceGetEccMode(of: nvmlDevice_t, current: *mut u32, pending: *mut u32) {
        device(of)?;
        put(current, 1)?;
        put(pending, 1)
    }
    fn nvmlDeviceGetDefaultEccMode(of: nvmlDevice_t, mode: *mut u32) {
        device(of)?;
        put(mode, 1)
    }
    fn nvmlDeviceGetTotalEccErrors(of: nvmlDevice_t, _kind: u32, _counter: u32, count: *mut u64) {
        device_of_any(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetDetailedEccErrors(of: nvmlDevice_t, _kind: u32, _counter: u32, counts: *mut nvmlEccErrorCounts_t) {
        device(of)?;
        put(counts, nvmlEccErrorCounts_t { l1Cache: 0, l2Cache: 0, deviceMemory: 0, registerFile: 0 })
    }
    fn nvmlDeviceGetMemoryErrorCounter(of: nvmlDevice_t, _kind: u32, _counter: u32, _location: u32, count: *mut u64) {
        device_of_any(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetRemappedRows(of: nvmlDevice_t, corrected: *mut u32, uncorrected: *mut u32, pending: *mut u32, failed: *mut u32) {
        if check_retires_pages(of).is_ok() {
            return Err(Code::NOT_SUPPORTED);
        }
        for count in [corrected, uncorrected, pending, failed] {
            put(count, 0)?;
        }
        Ok(())
    }
    fn nvmlDeviceGetRetiredPages(of: nvmlDevice_t, _cause: u32, count: *mut u32, _pages: *mut u64) {
        check_retires_pages(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetRetiredPages_v2(of: nvmlDevice_t, _cause: u32, count: *mut u32, _pages: *mut u64, _stamps: *mut u64) {
        check_retires_pages(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetRetiredPagesPendingStatus(of: nvmlDevice_t, pending: *mut u32) {
        check_retires_pages(of)?;
        put(pending, 0)
    }
}
