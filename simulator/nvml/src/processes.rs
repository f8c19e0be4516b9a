//! Which processes use a GPU, and how much of it.
//!
//! Pids are the host's, also in containers, as with the real driver: a tool
//! there cannot find them in its own /proc and leaves them out.

use std::sync::atomic::Ordering;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessDetail_v1_t, nvmlProcessDetailList_v1_t, nvmlProcessInfo_v1_t,
    nvmlProcessInfo_v2_t, nvmlProcessUtilizationSample_t,
};

use crate::code::Code;
use crate::export::{export, get, put, put_list};
use crate::memory::struct_version;
use crate::state::{Device, device};

/// "Not in a partition", where a process list says in which.
pub const NO_INSTANCE: u32 = u32::MAX;
const DETAIL_LIST_V1: u32 = struct_version(size_of::<nvmlProcessDetailList_v1_t>(), 1);

/// One process on one GPU.
#[derive(Debug, Clone, Copy)]
pub struct Process {
    pub pid: u32,
    /// Bytes, the context's included.
    pub memory: u64,
    /// Percent of the last sampling period, and when it was: microseconds since 1970.
    pub utilization: u32,
    pub sampled: u64,
}

/// The processes that have a context on `device`, by pid.
pub fn processes(device: Device) -> Vec<Process> {
    let mut found: Vec<Process> = Vec::new();
    for slot in &device.shared.slots {
        let pid = slot.pid.load(Ordering::Acquire).cast_unsigned();
        let memory = slot.used[device.gpu].load(Ordering::Relaxed);
        if pid == 0 || memory == 0 {
            continue;
        }
        let utilization = slot.utilization[device.gpu].load(Ordering::Relaxed);
        // A process that loaded the library twice has two slots.
        if let Some(same) = found.iter_mut().find(|p| p.pid == pid) {
            same.memory += memory;
            same.utilization = (same.utilization + utilization).min(100);
        } else {
            let sampled = slot.sampled.load(Ordering::Relaxed);
            found.push(Process {
                pid,
                memory,
                utilization,
                sampled,
            });
        }
    }
    found.sort_by_key(|process| process.pid);
    found
}

fn list_v1(of: nvmlDevice_t) -> Result<Vec<nvmlProcessInfo_v1_t>, Code> {
    let list = processes(device(of)?);
    Ok(list
        .iter()
        .map(|p| nvmlProcessInfo_v1_t {
            pid: p.pid,
            usedGpuMemory: p.memory,
        })
        .collect())
}

fn list_v2(of: nvmlDevice_t) -> Result<Vec<nvmlProcessInfo_v2_t>, Code> {
    let list = processes(device(of)?);
    Ok(list
        .iter()
        .map(|p| nvmlProcessInfo_v2_t {
            pid: p.pid,
            usedGpuMemory: p.memory,
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        })
        .collect())
}

export! {
    fn nvmlDeviceGetComputeRunningProcesses(of: nvmlDevice_t, count: *mut u32, to: *mut nvmlProcessInfo_v1_t) {
        put_list(count, to, &list_v1(of)?)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(of: nvmlDevice_t, count: *mut u32, to: *mut nvmlProcessInfo_v2_t) {
        put_list(count, to, &list_v2(of)?)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(of: nvmlDevice_t, count: *mut u32, to: *mut nvmlProcessInfo_v2_t) {
        put_list(count, to, &list_v2(of)?)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses(of: nvmlDevice_t, count: *mut u32, _to: *mut nvmlProcessInfo_v1_t) {
        device(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(of: nvmlDevice_t, count: *mut u32, _to: *mut nvmlProcessInfo_v2_t) {
        device(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(of: nvmlDevice_t, count: *mut u32, _to: *mut nvmlProcessInfo_v2_t) {
        device(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses(of: nvmlDevice_t, count: *mut u32, _to: *mut nvmlProcessInfo_v1_t) {
        device(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(of: nvmlDevice_t, count: *mut u32, _to: *mut nvmlProcessInfo_v2_t) {
        device(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(of: nvmlDevice_t, count: *mut u32, _to: *mut nvmlProcessInfo_v2_t) {
        device(of)?;
        put(count, 0)
    }
    fn nvmlDeviceGetRunningProcessDetailList(of: nvmlDevice_t, list: *mut nvmlProcessDetailList_v1_t) {
        let device = device(of)?;
        let asked = get(list)?;
        if asked.version != DETAIL_LIST_V1 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        // Mode 0 is compute; nothing here runs graphics or MPS.
        let found = if asked.mode == 0 { processes(device) } else { Vec::new() };
        let details: Vec<nvmlProcessDetail_v1_t> = found
            .iter()
            .map(|p| nvmlProcessDetail_v1_t {
                pid: p.pid,
                usedGpuMemory: p.memory,
                gpuInstanceId: NO_INSTANCE,
                computeInstanceId: NO_INSTANCE,
                usedGpuCcProtectedMemory: 0,
            })
            .collect();
        put_list(&raw mut (*list).numProcArrayEntries, asked.procArray, &details)
    }
    fn nvmlDeviceGetProcessUtilization(of: nvmlDevice_t, to: *mut nvmlProcessUtilizationSample_t, count: *mut u32, since: u64) {
        let samples: Vec<nvmlProcessUtilizationSample_t> = processes(device(of)?)
            .iter()
            .filter(|p| p.sampled > since)
            .map(|p| nvmlProcessUtilizationSample_t {
                pid: p.pid,
                timeStamp: p.sampled,
                smUtil: p.utilization,
                memUtil: p.utilization / 2,
                encUtil: 0,
                decUtil: 0,
            })
            .collect();
        if samples.is_empty() {
            put(count, 0)?;
            return Err(Code::NOT_FOUND);
        }
        put_list(count, to, &samples)
    }
    fn nvmlDeviceGetAccountingMode(of: nvmlDevice_t, mode: *mut u32) {
        device(of)?;
        put(mode, 0)
    }
    fn nvmlDeviceGetAccountingBufferSize(of: nvmlDevice_t, size: *mut u32) {
        device(of)?;
        put(size, 4000)
    }
}
