//! The processes that use a GPU, with their memory and utilization.
//!
//! As in the real driver (see its open kernel modules), lists have the processes of the caller's PID namespace only, with
//! their pids of that namespace. Samples of utilization have all processes; those of other namespaces have the host's
//! pids.

use std::sync::atomic::Ordering;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessDetail_v1_t, nvmlProcessDetailList_v1_t, nvmlProcessInfo_v1_t,
    nvmlProcessInfo_v2_t, nvmlProcessUtilizationSample_t,
};
use tranche_simulator_machine::identity::pid_namespace;
use tranche_simulator_machine::layout::ORPHANED;

use crate::code::Code;
use crate::export::{export, export_constants, get, put, put_list};
use crate::memory::struct_version;
use crate::state::{AnyDevice, Device, any_device, device, device_of_any};

/// The instance ids of a process outside of MIG partitions.
pub const NO_INSTANCE: u32 = u32::MAX;
const DETAIL_LIST_V1: u32 = struct_version(size_of::<nvmlProcessDetailList_v1_t>(), 1);

/// One process on one GPU.
#[derive(Debug, Clone, Copy)]
pub struct Process {
    pub pid: u32,
    /// The ids of its GPU instance and its compute instance.
    pub instances: [u32; 2],
    /// Whether it is in the caller's PID namespace.
    pub is_in_namespace: bool,
    /// Bytes, with those of its context.
    pub memory: u64,
    /// Percent of the last sampling period.
    pub utilization: u32,
    /// When that was sampled, in microseconds since 1970.
    pub sampled: u64,
}

/// The processes of the caller's PID namespace that have a context on a GPU or a MIG device, by pid.
pub fn processes(of: AnyDevice) -> Vec<Process> {
    let mut found = all_processes(of.device);
    if let Some(it) = of.partition {
        found.retain(|process| process.instances == [it.gpu_instance.id, it.id]);
    }
    found.retain(|process| process.is_in_namespace);
    found
}

/// All processes that have a context on `device`, by pid.
fn all_processes(device: Device) -> Vec<Process> {
    let own = pid_namespace("self");
    let is_host =
        own.is_none_or(|own| own == device.shared.header.namespace.load(Ordering::Relaxed));
    let mut found: Vec<Process> = Vec::new();
    for slot in &device.shared.slots {
        let pid = slot.pid.load(Ordering::Acquire);
        // Managed memory counts in the GPU's sum only.
        let managed = slot.managed[device.gpu].load(Ordering::Relaxed);
        let used = slot.used[device.gpu].load(Ordering::Relaxed);
        let memory = used.saturating_sub(managed);
        // An orphan's memory counts in the GPU's sum only.
        if pid == 0 || pid == ORPHANED || memory == 0 {
            continue;
        }
        let host_pid = pid.cast_unsigned();
        let is_inner = !is_host && own == Some(slot.namespace.load(Ordering::Relaxed));
        let is_in_namespace = is_host || is_inner;
        let pid = if is_inner {
            slot.inner_pid.load(Ordering::Relaxed).cast_unsigned()
        } else {
            host_pid
        };
        let id = |index: usize| u32::try_from(index).unwrap_or(NO_INSTANCE);
        let place = slot.partition_on(device.gpu);
        let instances = place.map_or([NO_INSTANCE; 2], |place| {
            [id(place.instance), id(place.compute)]
        });
        let utilization = slot.utilization[device.gpu].load(Ordering::Relaxed);
        // A process that loaded the library twice has two slots.
        if let Some(same) = found
            .iter_mut()
            .find(|p| (p.pid, p.is_in_namespace, p.instances) == (pid, is_in_namespace, instances))
        {
            same.memory += memory;
            same.utilization = (same.utilization + utilization).min(100);
        } else {
            let sampled = slot.sampled.load(Ordering::Relaxed);
            found.push(Process {
                pid,
                instances,
                is_in_namespace,
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
    let list = processes(any_device(of)?);
    Ok(list
        .iter()
        .map(|p| nvmlProcessInfo_v1_t {
            pid: p.pid,
            usedGpuMemory: p.memory,
        })
        .collect())
}

fn list_v2(of: nvmlDevice_t) -> Result<Vec<nvmlProcessInfo_v2_t>, Code> {
    let list = processes(any_device(of)?);
    Ok(list
        .iter()
        .map(|p| nvmlProcessInfo_v2_t {
            pid: p.pid,
            usedGpuMemory: p.memory,
            gpuInstanceId: p.instances[0],
            computeInstanceId: p.instances[1],
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
    fn nvmlDeviceGetRunningProcessDetailList(of: nvmlDevice_t, list: *mut nvmlProcessDetailList_v1_t) {
        let device = any_device(of)?;
        let asked = get(list)?;
        if asked.version != DETAIL_LIST_V1 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        // Mode 0 is compute; no process runs graphics or MPS.
        let found = if asked.mode == 0 { processes(device) } else { Vec::new() };
        let details: Vec<nvmlProcessDetail_v1_t> = found
            .iter()
            .map(|p| nvmlProcessDetail_v1_t {
                pid: p.pid,
                usedGpuMemory: p.memory,
                gpuInstanceId: p.instances[0],
                computeInstanceId: p.instances[1],
                usedGpuCcProtectedMemory: 0,
            })
            .collect();
        put_list(&raw mut (*list).numProcArrayEntries, asked.procArray, &details)
    }
    fn nvmlDeviceGetProcessUtilization(of: nvmlDevice_t, to: *mut nvmlProcessUtilizationSample_t, count: *mut u32, since: u64) {
        let device = device(of)?;
        // nvml.h: not supported on MIG-enabled GPUs.
        if device.state.is_partitioned() {
            return Err(Code::NOT_SUPPORTED);
        }
        let samples: Vec<nvmlProcessUtilizationSample_t> = all_processes(device)
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
}

/// Exports lists whose entries are never written: no process runs graphics or MPS.
macro_rules! export_empty_lists {
    ($($name:ident)+) => {
        export! {
            $(
                fn $name(of: nvmlDevice_t, count: *mut u32, _to: *mut nvmlProcessInfo_v2_t) {
                    device_of_any(of)?;
                    put(count, 0)
                }
            )+
        }
    };
}

export_empty_lists! {
    nvmlDeviceGetGraphicsRunningProcesses
    nvmlDeviceGetGraphicsRunningProcesses_v2
    nvmlDeviceGetGraphicsRunningProcesses_v3
    nvmlDeviceGetMPSComputeRunningProcesses
    nvmlDeviceGetMPSComputeRunningProcesses_v2
    nvmlDeviceGetMPSComputeRunningProcesses_v3
}

export_constants! {
    nvmlDeviceGetAccountingMode = 0;
    nvmlDeviceGetAccountingBufferSize = 4000;
}
