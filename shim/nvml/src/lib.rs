//! `libnvidia-ml.so.1` of a capped container: it shows the container's shares in place of the GPU.
//!
//! It is loaded like `libcuda.so.1`, and exports and forwards every function of any driver. For a
//! GPU with capped memory it changes:
//!
//! - `memory`: total is the sum of the shares' caps, used is what their processes hold, and the rest
//!   is free; BAR1 memory and protected memory are no larger;
//! - `processes`: lists have only the shares' processes, with the size of each;
//! - `utilization`: percentages are of the shares' cores.
//!
//! It reads the pages at each call and caches nothing. `users` finds the GPU of a handle, from whichever
//! function the program got it, and the processes of its shares. `table` puts the lists into NVIDIA's
//! private table, from which nvidia-smi gets them.
//!
//! `nvmlInit` refuses, with one line on stderr, if the pages are missing or invalid. For a visible
//! GPU without a page it succeeds, so that `nvidia-smi` can be used to find the problem: only
//! queries about the share's values are refused; CUDA refuses the whole GPU.
// A debug build unwinds, which needs std; it is never loaded.
#![cfg_attr(panic = "abort", no_std)]

mod abi;
mod buffer;
mod driver;
mod memory;
mod processes;
mod table;
mod users;
mod utilization;

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::container_shares;

use crate::abi::{
    AccountingStatsV2, Device, DynamicPstates, Enumeration, GpmSupport, Memory, MemoryV2,
    ProcessDetails, ProcessV1, ProcessV2, Return, Sample, Utilization, UtilizationInfos, Value,
};
use crate::driver::{DRIVER, address, index, missing, typed, unavailable};
use crate::processes::Kind;

macro_rules! hooks {
    ($(fn $name:ident($($argument:ident: $type:ty),*) |$driver:ident| $body:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> Return {
                let real = typed::<unsafe extern "C" fn($($type),*) -> Return>(index::$name);
                // SAFETY: the arguments are the caller's, who owes the real function what it owes
                // this one: valid pointers, where nvml.h does not allow null.
                let $driver = || unsafe { real($($argument),*) };
                $body
            }
        )*
    };
}

hooks! {
    fn nvmlDeviceGetAccountingPids(device: Device, count: *mut c_uint, pids: *mut c_uint)
        // SAFETY: the caller owes valid pointers.
        |driver| unsafe { processes::accounting_pids(index::nvmlDeviceGetAccountingPids, device, (count, pids), driver) };
    fn nvmlDeviceGetAccountingStats(device: Device, pid: c_uint, stats: *mut c_void)
        |driver| processes::accounting_stats(device, pid, driver);
    fn nvmlDeviceGetAccountingStats_v2(device: Device, stats: *mut AccountingStatsV2)
        // SAFETY: as above.
        |driver| unsafe { processes::accounting_stats_v2(device, stats, driver) };
    fn nvmlDeviceGetBAR1MemoryInfo(device: Device, memory: *mut Memory) |driver| memory::answer(device, driver, |share| {
        // SAFETY: the driver has just written to it.
        share.bound(unsafe { &mut *memory });
    });
    fn nvmlDeviceGetComputeRunningProcesses(device: Device, count: *mut c_uint, to: *mut ProcessV1)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetComputeRunningProcesses, Kind::Compute, device, (count, to), driver) };
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: Device, count: *mut c_uint, to: *mut ProcessV2)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetComputeRunningProcesses_v2, Kind::Compute, device, (count, to), driver) };
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Device, count: *mut c_uint, to: *mut ProcessV2)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetComputeRunningProcesses_v3, Kind::Compute, device, (count, to), driver) };
    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(device: Device, memory: *mut Memory)
        |driver| memory::answer(device, driver, |share| {
            // SAFETY: the driver has just written to it.
            share.bound(unsafe { &mut *memory });
        });
    fn nvmlDeviceGetDynamicPstatesInfo(device: Device, to: *mut DynamicPstates)
        |driver| utilization::dynamic(device, to, driver);
    fn nvmlDeviceGetGraphicsRunningProcesses(device: Device, count: *mut c_uint, to: *mut ProcessV1)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetGraphicsRunningProcesses, Kind::Other, device, (count, to), driver) };
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: Device, count: *mut c_uint, to: *mut ProcessV2)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetGraphicsRunningProcesses_v2, Kind::Other, device, (count, to), driver) };
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: Device, count: *mut c_uint, to: *mut ProcessV2)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetGraphicsRunningProcesses_v3, Kind::Other, device, (count, to), driver) };
    fn nvmlDeviceGetMPSComputeRunningProcesses(device: Device, count: *mut c_uint, to: *mut ProcessV1)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetMPSComputeRunningProcesses, Kind::Other, device, (count, to), driver) };
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Device, count: *mut c_uint, to: *mut ProcessV2)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetMPSComputeRunningProcesses_v2, Kind::Other, device, (count, to), driver) };
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Device, count: *mut c_uint, to: *mut ProcessV2)
        // SAFETY: as above.
        |driver| unsafe { processes::list(index::nvmlDeviceGetMPSComputeRunningProcesses_v3, Kind::Other, device, (count, to), driver) };
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut Memory) |driver| memory::answer(device, driver, |share| {
        // SAFETY: the driver has just written to it.
        let memory = unsafe { &mut *memory };
        (memory.total, memory.free, memory.used) = (share.total, share.free(), share.used);
    });
    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryV2) |driver| memory::answer(device, driver, |share| {
        // SAFETY: the driver has just written to it, and accepted its version.
        let memory = unsafe { &mut *memory };
        (memory.total, memory.free, memory.used) = (share.total, share.free(), share.used);
        // The driver's reserve does not belong to the share.
        memory.reserved = 0;
    });
    fn nvmlDeviceGetProcessUtilization(device: Device, to: *mut Sample, count: *mut c_uint, since: c_ulonglong)
        // SAFETY: as above.
        |driver| unsafe { utilization::processes(device, (to, count), since, driver) };
    fn nvmlDeviceGetProcessesUtilizationInfo(device: Device, to: *mut UtilizationInfos)
        // SAFETY: as above.
        |driver| unsafe { utilization::infos(index::nvmlDeviceGetProcessesUtilizationInfo, device, to, driver) };
    fn nvmlDeviceGetRunningProcessDetailList(device: Device, list: *mut ProcessDetails)
        // SAFETY: as above.
        |driver| unsafe { processes::details(index::nvmlDeviceGetRunningProcessDetailList, device, list, driver) };
    fn nvmlDeviceGetSamples(device: Device, what: Enumeration, since: c_ulonglong, kind: *mut Enumeration, count: *mut c_uint, to: *mut Value)
        |driver| utilization::samples(device, what, (kind, count, to), driver);
    fn nvmlDeviceGetUtilizationRates(device: Device, to: *mut Utilization)
        |driver| utilization::rates(device, to, driver);
    fn nvmlGpmMigSampleGet(device: Device, instance: c_uint, sample: *mut c_void)
        |driver| utilization::gpm_sample(device, driver);
    fn nvmlGpmQueryDeviceSupport(device: Device, to: *mut GpmSupport)
        |driver| utilization::gpm_support(device, to, driver);
    fn nvmlGpmSampleGet(device: Device, sample: *mut c_void) |driver| utilization::gpm_sample(device, driver);
    fn nvmlInit() |driver| initialise(driver);
    fn nvmlInitWithFlags(flags: c_uint) |driver| initialise(driver);
    fn nvmlInit_v2() |driver| initialise(driver);
    fn nvmlInternalGetExportTable(to: *mut *const c_void, name: *const table::Name)
        // SAFETY: as above.
        |driver| unsafe { table::get(to, name, driver) };
}

fn initialise(driver: impl FnOnce() -> Return) -> Return {
    if !DRIVER.open() {
        return Return::LIBRARY_NOT_FOUND;
    }
    match container_shares::each(&mut |_| Ok(())) {
        Ok(()) => driver(),
        Err(Refused) => Return::NO_PERMISSION,
    }
}

/// The only function without a return code: without a driver it has its own texts.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let real = address(index::nvmlErrorString);
    if real == unavailable as *mut c_void || real == missing as *mut c_void {
        return match result {
            Return::NO_PERMISSION => c"Insufficient Permissions",
            _ => c"NVML Shared Library Not Found",
        }
        .as_ptr();
    }
    // SAFETY: the driver's function of this name, with its type in nvml.h.
    let real =
        unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(c_int) -> *const c_char>(real) };
    real(result.0.cast_signed())
}

#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    tranche_shim_runtime::sys::abort()
}
