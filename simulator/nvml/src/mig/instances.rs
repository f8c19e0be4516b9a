//! GPU instances and compute instances.

use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t, nvmlDevice_t,
    nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
};
use tranche_simulator_machine::partitions::{ComputeInstanceView, GpuInstanceView};
use tranche_simulator_machine::wire::Request;

use super::{active_model, change, profile_with_id};
use crate::code::Code;
use crate::export::{export, get, put};
use crate::handles::{Kind, Target, handle_of, target_of};
use crate::state::{Device, device, device_at, find_compute_instance, handle, mig_handle};

pub fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// The handle of a GPU instance.
fn gpu_handle(gpu: usize, it: GpuInstanceView) -> nvmlGpuInstance_t {
    handle_of(Target {
        kind: Kind::GpuInstance,
        gpu,
        instance: it.id as usize,
        compute: 0,
        serial: it.serial,
    })
    .cast()
}

/// The handle of a compute instance.
fn compute_handle(gpu: usize, it: ComputeInstanceView) -> nvmlComputeInstance_t {
    handle_of(Target {
        kind: Kind::ComputeInstance,
        gpu,
        instance: it.gpu_instance.id as usize,
        compute: it.id as usize,
        serial: it.serial,
    })
    .cast()
}

/// The GPU instance of a handle.
pub fn gpu_instance(of: nvmlGpuInstance_t) -> Result<(Device, GpuInstanceView), Code> {
    let target = target_of(of.cast(), Kind::GpuInstance).ok_or(Code::INVALID_ARGUMENT)?;
    let device = device_at(target.gpu)?;
    let found = device
        .state
        .gpu_instance(target.instance)
        .filter(|it| it.serial == target.serial)
        .ok_or(Code::INVALID_ARGUMENT)?;
    Ok((device, found))
}

/// The compute instance of a handle.
fn compute_instance(of: nvmlComputeInstance_t) -> Result<(Device, ComputeInstanceView), Code> {
    let target = target_of(of.cast(), Kind::ComputeInstance).ok_or(Code::INVALID_ARGUMENT)?;
    find_compute_instance(target)
}

fn create_gpu_instance(
    of: nvmlDevice_t,
    id: u32,
    start: Option<u32>,
) -> Result<nvmlGpuInstance_t, Code> {
    let device = device(of)?;
    let profile = profile_with_id(active_model(device)?, id)?;
    let made = change(Request::CreateGpuInstance {
        gpu: number(device.gpu),
        kind: profile.kind,
        start,
    })?;
    let found = device.state.gpu_instance(made as usize);
    Ok(gpu_handle(device.gpu, found.ok_or(Code::UNKNOWN)?))
}

fn create_compute_instance(
    of: nvmlGpuInstance_t,
    id: u32,
    start: Option<u32>,
) -> Result<nvmlComputeInstance_t, Code> {
    let (device, instance) = gpu_instance(of)?;
    let made = change(Request::CreateComputeInstance {
        gpu: number(device.gpu),
        instance: instance.id,
        kind: id,
        start,
    })?;
    let found = device.state.compute_instance(instance, made as usize);
    Ok(compute_handle(device.gpu, found.ok_or(Code::UNKNOWN)?))
}

/// Writes a list with room for every instance of its profile (nvml.h).
///
/// # Safety
/// `count` is null or valid; `to` is null or valid for every entry of `list`.
unsafe fn put_all<T>(count: *mut u32, to: *mut T, list: Vec<T>) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    unsafe { put(count, number(list.len())) }?;
    for (index, entry) in list.into_iter().enumerate() {
        if to.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: as above.
        unsafe { put(to.wrapping_add(index), entry) }?;
    }
    Ok(())
}

/// Since version 2, `device` is the MIG device, whose UUID NVIDIA's DRA driver reads (`ciInfo.Device.GetUUID()`).
fn info(of: nvmlComputeInstance_t, version: u32) -> Result<nvmlComputeInstanceInfo_t, Code> {
    let (device, it) = compute_instance(of)?;
    Ok(nvmlComputeInstanceInfo_t {
        device: match version {
            1 => handle(device.gpu),
            _ => mig_handle(device.gpu, it),
        },
        gpuInstance: gpu_handle(device.gpu, it.gpu_instance),
        id: it.id,
        profileId: it.profile.kind,
        placement: nvmlComputeInstancePlacement_t {
            start: it.start,
            size: it.profile.slices,
        },
    })
}

export! {
    fn nvmlDeviceCreateGpuInstance(of: nvmlDevice_t, id: u32, to: *mut nvmlGpuInstance_t) {
        put(to, std::ptr::null_mut())?;
        put(to, create_gpu_instance(of, id, None)?)
    }
    fn nvmlDeviceCreateGpuInstanceWithPlacement(of: nvmlDevice_t, id: u32, place: *const nvmlGpuInstancePlacement_t, to: *mut nvmlGpuInstance_t) {
        put(to, std::ptr::null_mut())?;
        let start = get(place)?.start;
        put(to, create_gpu_instance(of, id, Some(start))?)
    }
    fn nvmlGpuInstanceDestroy(of: nvmlGpuInstance_t) {
        let (device, it) = gpu_instance(of)?;
        change(Request::DestroyGpuInstance { gpu: number(device.gpu), instance: it.id }).map(drop)
    }
    fn nvmlDeviceGetGpuInstances(of: nvmlDevice_t, id: u32, to: *mut nvmlGpuInstance_t, count: *mut u32) {
        let device = device(of)?;
        let profile = profile_with_id(active_model(device)?, id)?;
        let all = device.state.gpu_instances().into_iter();
        let found = all.filter(|it| it.profile.kind == profile.kind);
        put_all(count, to, found.map(|it| gpu_handle(device.gpu, it)).collect())
    }
    fn nvmlDeviceGetGpuInstanceById(of: nvmlDevice_t, id: u32, to: *mut nvmlGpuInstance_t) {
        let device = device(of)?;
        active_model(device)?;
        let found = device.state.gpu_instance(id as usize).ok_or(Code::NOT_FOUND)?;
        put(to, gpu_handle(device.gpu, found))
    }
    fn nvmlGpuInstanceGetInfo(of: nvmlGpuInstance_t, to: *mut nvmlGpuInstanceInfo_t) {
        let (device, it) = gpu_instance(of)?;
        put(to, nvmlGpuInstanceInfo_t {
            device: handle(device.gpu),
            id: it.id,
            profileId: it.profile.id,
            placement: nvmlGpuInstancePlacement_t { start: it.start, size: it.profile.size },
        })
    }
    fn nvmlGpuInstanceCreateComputeInstance(of: nvmlGpuInstance_t, id: u32, to: *mut nvmlComputeInstance_t) {
        put(to, std::ptr::null_mut())?;
        put(to, create_compute_instance(of, id, None)?)
    }
    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(of: nvmlGpuInstance_t, id: u32, place: *const nvmlComputeInstancePlacement_t, to: *mut nvmlComputeInstance_t) {
        put(to, std::ptr::null_mut())?;
        let start = get(place)?.start;
        put(to, create_compute_instance(of, id, Some(start))?)
    }
    fn nvmlComputeInstanceDestroy(of: nvmlComputeInstance_t) {
        let (device, it) = compute_instance(of)?;
        change(Request::DestroyComputeInstance {
            gpu: number(device.gpu),
            instance: it.gpu_instance.id,
            compute: it.id,
        })
        .map(drop)
    }
    fn nvmlGpuInstanceGetComputeInstances(of: nvmlGpuInstance_t, id: u32, to: *mut nvmlComputeInstance_t, count: *mut u32) {
        let (device, instance) = gpu_instance(of)?;
        let all = device.state.compute_instances(instance).into_iter();
        let found = all.filter(|it| it.profile.kind == id);
        put_all(count, to, found.map(|it| compute_handle(device.gpu, it)).collect())
    }
    fn nvmlGpuInstanceGetComputeInstanceById(of: nvmlGpuInstance_t, id: u32, to: *mut nvmlComputeInstance_t) {
        let (device, instance) = gpu_instance(of)?;
        let found = device.state.compute_instance(instance, id as usize);
        put(to, compute_handle(device.gpu, found.ok_or(Code::NOT_FOUND)?))
    }
    fn nvmlComputeInstanceGetInfo(of: nvmlComputeInstance_t, to: *mut nvmlComputeInstanceInfo_t) {
        put(to, info(of, 1)?)
    }
    fn nvmlComputeInstanceGetInfo_v2(of: nvmlComputeInstance_t, to: *mut nvmlComputeInstanceInfo_t) {
        put(to, info(of, 2)?)
    }
}
