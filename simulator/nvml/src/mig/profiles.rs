//! GPU instance profiles and compute instance profiles.

use std::ffi::c_char;

use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX, NVML_GPU_INSTANCE_PROFILE_CAPS_GFX,
    nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlComputeInstanceProfileInfo_v3_t, nvmlDevice_t,
    nvmlGpuInstance_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t,
    nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
};
use tranche_simulator_machine::mig::{ComputeProfile, GpuProfile};

use super::instances::{gpu_instance, number};
use super::{active_model, model, profile_with_id};
use crate::code::Code;
use crate::export::{characters, export, get, put, put_list};
use crate::memory::struct_version;
use crate::state::device;

const GPU_V2: u32 = struct_version(size_of::<nvmlGpuInstanceProfileInfo_v2_t>(), 2);
const GPU_V3: u32 = struct_version(size_of::<nvmlGpuInstanceProfileInfo_v3_t>(), 3);
const COMPUTE_V2: u32 = struct_version(size_of::<nvmlComputeInstanceProfileInfo_v2_t>(), 2);
const COMPUTE_V3: u32 = struct_version(size_of::<nvmlComputeInstanceProfileInfo_v3_t>(), 3);
/// Engine profiles: there is one, `NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED`.
const SHARED_ENGINES: u32 = 0;

fn name<const N: usize>(profile: &str) -> [c_char; N] {
    characters(&format!("MIG {profile}"))
}

/// Fills a struct of GPU instance profiles, whose versions have these fields and some additional ones.
macro_rules! gpu_info {
    ($of:ident as $info:ident { $($own:tt)* }) => {
        $info {
            id: $of.id,
            sliceCount: $of.slices,
            instanceCount: $of.instances,
            multiprocessorCount: $of.multiprocessors,
            copyEngineCount: $of.engines.copy,
            decoderCount: $of.engines.decoders,
            encoderCount: $of.engines.encoders,
            jpegCount: $of.engines.jpeg,
            ofaCount: $of.engines.optical_flow,
            memorySizeMB: $of.memory_mib,
            $($own)*
        }
    };
}

fn gpu_v1(of: &GpuProfile) -> nvmlGpuInstanceProfileInfo_t {
    gpu_info!(of as nvmlGpuInstanceProfileInfo_t { isP2pSupported: 0 })
}

fn gpu_v2(of: &GpuProfile) -> nvmlGpuInstanceProfileInfo_v2_t {
    gpu_info!(of as nvmlGpuInstanceProfileInfo_v2_t {
        version: GPU_V2,
        isP2pSupported: 0,
        name: name(of.name),
    })
}

fn gpu_v3(of: &GpuProfile) -> nvmlGpuInstanceProfileInfo_v3_t {
    let capabilities = if of.has_graphics() {
        NVML_GPU_INSTANCE_PROFILE_CAPS_GFX
    } else {
        0
    };
    gpu_info!(of as nvmlGpuInstanceProfileInfo_v3_t {
        version: GPU_V3,
        name: name(of.name),
        capabilities,
    })
}

/// The same for compute instance profiles, of a GPU instance's profile.
macro_rules! compute_info {
    ($it:ident, $of:ident as $info:ident { $($own:tt)* }) => {
        $info {
            id: $it.kind,
            sliceCount: $it.slices,
            instanceCount: $it.instances,
            multiprocessorCount: $it.multiprocessors,
            sharedCopyEngineCount: $of.engines.copy,
            sharedDecoderCount: $of.engines.decoders,
            sharedEncoderCount: $of.engines.encoders,
            sharedJpegCount: $of.engines.jpeg,
            sharedOfaCount: $of.engines.optical_flow,
            $($own)*
        }
    };
}

fn compute_v1(of: &GpuProfile, it: &ComputeProfile) -> nvmlComputeInstanceProfileInfo_t {
    compute_info!(it, of as nvmlComputeInstanceProfileInfo_t {})
}

fn compute_v2(of: &GpuProfile, it: &ComputeProfile) -> nvmlComputeInstanceProfileInfo_v2_t {
    compute_info!(it, of as nvmlComputeInstanceProfileInfo_v2_t {
        version: COMPUTE_V2,
        name: name(&it.name(of)),
    })
}

fn compute_v3(of: &GpuProfile, it: &ComputeProfile) -> nvmlComputeInstanceProfileInfo_v3_t {
    let capabilities = if of.has_graphics() {
        NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX
    } else {
        0
    };
    compute_info!(it, of as nvmlComputeInstanceProfileInfo_v3_t {
        version: COMPUTE_V3,
        name: name(&it.name(of)),
        capabilities,
    })
}

/// A GPU's profile with NVML's number `kind`. Like NVIDIA's function, it answers in both MIG modes.
fn gpu_profile(of: nvmlDevice_t, kind: u32) -> Result<&'static GpuProfile, Code> {
    model(device(of)?)?.profile(kind).ok_or(Code::NOT_SUPPORTED)
}

/// The GPU instance's profile, and its compute instance profile with NVML's number `kind`.
fn compute_profile(
    of: nvmlGpuInstance_t,
    kind: u32,
    engines: u32,
) -> Result<(&'static GpuProfile, ComputeProfile), Code> {
    let (device, instance) = gpu_instance(of)?;
    if engines != SHARED_ENGINES {
        return Err(Code::NOT_SUPPORTED);
    }
    let profiles = model(device)?.compute_profiles(instance.profile);
    let found = profiles.into_iter().find(|it| it.kind == kind);
    Ok((instance.profile, found.ok_or(Code::NOT_SUPPORTED)?))
}

fn gpu_placements(of: nvmlDevice_t, id: u32) -> Result<Vec<nvmlGpuInstancePlacement_t>, Code> {
    let profile = profile_with_id(model(device(of)?)?, id)?;
    let mut starts = profile.starts.to_vec();
    starts.sort_unstable();
    let size = profile.size;
    Ok(starts
        .into_iter()
        .map(|start| nvmlGpuInstancePlacement_t { start, size })
        .collect())
}

/// Writes placements; a null list asks for their number (nvml.h).
///
/// # Safety
/// `count` is null or valid; `to` is null or valid for `*count` entries.
unsafe fn put_placements<T: Copy>(count: *mut u32, to: *mut T, list: &[T]) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    unsafe {
        if to.is_null() {
            return put(count, number(list.len()));
        }
        put_list(count, to, list)
    }
}

export! {
    fn nvmlDeviceGetGpuInstanceProfileInfo(of: nvmlDevice_t, kind: u32, to: *mut nvmlGpuInstanceProfileInfo_t) {
        put(to, gpu_v1(gpu_profile(of, kind)?))
    }
    fn nvmlDeviceGetGpuInstanceProfileInfoV(of: nvmlDevice_t, kind: u32, to: *mut nvmlGpuInstanceProfileInfo_v2_t) {
        let profile = gpu_profile(of, kind)?;
        match get(to.cast::<u32>())? {
            GPU_V2 => put(to, gpu_v2(profile)),
            GPU_V3 => put(to.cast(), gpu_v3(profile)),
            _ => Err(Code::ARGUMENT_VERSION_MISMATCH),
        }
    }
    fn nvmlDeviceGetGpuInstancePossiblePlacements(of: nvmlDevice_t, id: u32, to: *mut nvmlGpuInstancePlacement_t, count: *mut u32) {
        put_placements(count, to, &gpu_placements(of, id)?)
    }
    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(of: nvmlDevice_t, id: u32, to: *mut nvmlGpuInstancePlacement_t, count: *mut u32) {
        put_placements(count, to, &gpu_placements(of, id)?)
    }
    fn nvmlDeviceGetGpuInstanceRemainingCapacity(of: nvmlDevice_t, id: u32, count: *mut u32) {
        let device = device(of)?;
        let profile = profile_with_id(active_model(device)?, id)?;
        put(count, device.state.remaining(profile))
    }
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(of: nvmlGpuInstance_t, kind: u32, engines: u32, to: *mut nvmlComputeInstanceProfileInfo_t) {
        let (profile, compute) = compute_profile(of, kind, engines)?;
        put(to, compute_v1(profile, &compute))
    }
    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(of: nvmlGpuInstance_t, kind: u32, engines: u32, to: *mut nvmlComputeInstanceProfileInfo_v2_t) {
        let (profile, compute) = compute_profile(of, kind, engines)?;
        match get(to.cast::<u32>())? {
            COMPUTE_V2 => put(to, compute_v2(profile, &compute)),
            COMPUTE_V3 => put(to.cast(), compute_v3(profile, &compute)),
            _ => Err(Code::ARGUMENT_VERSION_MISMATCH),
        }
    }
    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(of: nvmlGpuInstance_t, id: u32, to: *mut nvmlComputeInstancePlacement_t, count: *mut u32) {
        let (_, compute) = compute_profile(of, id, SHARED_ENGINES)?;
        let size = compute.slices;
        let placements: Vec<_> = compute
            .starts()
            .map(|start| nvmlComputeInstancePlacement_t { start, size })
            .collect();
        put_placements(count, to, &placements)
    }
    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(of: nvmlGpuInstance_t, id: u32, count: *mut u32) {
        let (_, compute) = compute_profile(of, id, SHARED_ENGINES)?;
        let (device, instance) = gpu_instance(of)?;
        let free = device.state.free_compute_placements(instance, &compute);
        put(count, u32::try_from(free.len()).unwrap_or(0))
    }
}
