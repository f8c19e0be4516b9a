//! Pointers to memory that another process exported, by an IPC handle or from a memory pool.
//!
//! It is charged to this process too while the process holds it: the exporter may end first, and the memory exists until
//! its last holder releases it. The driver returns its size only after it was opened. So it is charged then, and closed
//! again if the share has no room for it.

use tranche_shim_core::Entry;

use crate::abi::{CUdeviceptr, CUresult};
use crate::charge::{Reserved, note};
use crate::device::Device;
use crate::driver::{Call, real};
use crate::keys::{Kind, key};
use crate::process::{self, Process};
use crate::stream::current_context;

/// `cuIpcOpenMemHandle`. A handle may be opened several times, for the same pointer.
pub fn open(pointer: *mut CUdeviceptr, driver: Call<'_>) -> CUresult {
    let imported = |process: &'static Process, pointer: CUdeviceptr| {
        let number = key(Kind::Import, pointer);
        if process.physical.with(|physical| physical.use_again(number)) {
            return Ok(());
        }
        if let Some(reserved) = reserve(process, pointer)? {
            reserved.import(number, current_context());
        }
        Ok(())
    };
    // SAFETY: closes what was just opened, and nothing else uses it.
    let close = |pointer| unsafe { real!(cuIpcCloseMemHandle: fn(CUdeviceptr))(pointer) };
    import(pointer, driver, imported, close)
}

/// `cuIpcCloseMemHandle`.
pub fn close(pointer: CUdeviceptr, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let number = key(Kind::Import, pointer);
    let release = process
        .physical
        .with(|physical| physical.begin_release(number));
    let result = driver.make();
    process.note_physical(|physical, freed| {
        physical.end_release(&release, result.is_ok(), freed);
    });
    result
}

/// `cuMemPoolImportPointer`. Such a pointer is freed like any other.
pub fn import_from_pool(pointer: *mut CUdeviceptr, driver: Call<'_>) -> CUresult {
    let imported = |process: &'static Process, pointer: CUdeviceptr| {
        if let Some(reserved) = reserve(process, pointer)? {
            let entry = Entry {
                device: reserved.device.number,
                bytes: reserved.keep(),
                context: process.contexts.current(),
            };
            note(process, pointer, entry);
        }
        Ok(())
    };
    // SAFETY: frees what was just imported, and nothing else uses it.
    let free = |pointer| unsafe { real!(cuMemFree_v2: fn(CUdeviceptr))(pointer) };
    import(pointer, driver, imported, free)
}

fn import(
    pointer: *mut CUdeviceptr,
    driver: Call<'_>,
    imported: impl FnOnce(&'static Process, CUdeviceptr) -> Result<(), CUresult>,
    let_go: impl FnOnce(CUdeviceptr) -> CUresult,
) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let result = driver.make();
    if !result.is_ok() || pointer.is_null() {
        return result;
    }
    // SAFETY: not null, and the driver has just written to it.
    let pointer = unsafe { pointer.read() };
    match imported(process, pointer) {
        Ok(()) => result,
        Err(code) => {
            let_go(pointer);
            code
        }
    }
}

/// Reserves the size of the memory at a pointer, if it lies on a device with a cap.
fn reserve(process: &'static Process, pointer: CUdeviceptr) -> Result<Option<Reserved>, CUresult> {
    let Some(device) = device_of(process, pointer).filter(|device| device.is_capped()) else {
        return Ok(None);
    };
    let (_, bytes) = range_of(pointer)?;
    let bytes = device.taken_by(bytes);
    Reserved::new(process, device, bytes, bytes).map(Some)
}

/// The first address and the bytes of the allocation into which a pointer points.
pub fn range_of(pointer: CUdeviceptr) -> Result<(CUdeviceptr, u64), CUresult> {
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: writes to the local numbers.
    let result = unsafe {
        real!(cuMemGetAddressRange_v2: fn(*mut CUdeviceptr, *mut usize, CUdeviceptr))(
            &raw mut start,
            &raw mut bytes,
            pointer,
        )
    };
    if result.is_ok() {
        Ok((start, bytes as u64))
    } else {
        Err(result)
    }
}

/// The device of a pointer's memory.
pub fn device_of(process: &'static Process, pointer: CUdeviceptr) -> Option<&'static Device> {
    const DEVICE_ORDINAL: u32 = 9;
    if let Some(only) = process.only_device() {
        return Some(only);
    }
    match attribute(pointer, DEVICE_ORDINAL) {
        Some(ordinal) => process.device_numbered(u8::try_from(ordinal).ok()?),
        None => process.current_device().ok(),
    }
}

/// Whether a pointer points to host memory.
pub fn is_on_host(pointer: CUdeviceptr) -> bool {
    const MEMORY_TYPE: u32 = 2;
    const HOST: i32 = 1;
    attribute(pointer, MEMORY_TYPE) == Some(HOST)
}

/// A pointer's attribute of 32 bits; `None` if the driver does not return it.
fn attribute(pointer: CUdeviceptr, which: u32) -> Option<i32> {
    let mut value = 0;
    // SAFETY: writes an int to the local.
    let result = unsafe {
        real!(cuPointerGetAttribute: fn(*mut i32, u32, CUdeviceptr))(&raw mut value, which, pointer)
    };
    result.is_ok().then_some(value)
}
