//! How a GPU could be partitioned. MIG mode itself cannot be turned on here.

use nvml_wrapper_sys::bindings::{
    NVML_GPU_INSTANCE_PROFILE_1_SLICE, NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1,
    NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2, NVML_GPU_INSTANCE_PROFILE_2_SLICE,
    NVML_GPU_INSTANCE_PROFILE_3_SLICE, NVML_GPU_INSTANCE_PROFILE_4_SLICE,
    NVML_GPU_INSTANCE_PROFILE_7_SLICE, nvmlDevice_t, nvmlGpuInstanceProfileInfo_t,
};
use tranche_simulator_machine::layout::GpuState;

use crate::code::Code;
use crate::export::{export, put};
use crate::state::device;

/// A profile of GPU instances, as `nvidia-smi mig -lgip` lists it.
struct Profile {
    /// NVML's number for the kind of profile.
    kind: u32,
    id: u32,
    slices: u32,
    instances: u32,
    memory_mib: u64,
    multiprocessors: u32,
    copy_engines: u32,
    decoders: u32,
    jpeg: u32,
    ofa: u32,
}

/// Rows of `kind, id, slices, instances, MiB, SMs, copy engines, decoders, JPEG, OFA`.
const fn profiles<const N: usize>(rows: [(u32, [u32; 9]); N]) -> [Profile; N] {
    let mut profiles = [const {
        Profile {
            kind: 0,
            id: 0,
            slices: 0,
            instances: 0,
            memory_mib: 0,
            multiprocessors: 0,
            copy_engines: 0,
            decoders: 0,
            jpeg: 0,
            ofa: 0,
        }
    }; N];
    let mut row = 0;
    while row < N {
        let (kind, [id, slices, instances, memory, sms, ce, dec, jpeg, ofa]) = rows[row];
        profiles[row] = Profile {
            kind,
            id,
            slices,
            instances,
            memory_mib: memory as u64,
            multiprocessors: sms,
            copy_engines: ce,
            decoders: dec,
            jpeg,
            ofa,
        };
        row += 1;
    }
    profiles
}

/// A100-SXM4-40GB, from NVIDIA's MIG User Guide.
static A100_40: [Profile; 7] = profiles([
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE,
        [19, 1, 7, 4864, 14, 1, 0, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1,
        [20, 1, 1, 4864, 14, 1, 1, 1, 1],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2,
        [15, 1, 4, 9984, 14, 1, 1, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_2_SLICE,
        [14, 2, 3, 9984, 28, 2, 1, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_3_SLICE,
        [9, 3, 2, 20_096, 42, 3, 2, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_4_SLICE,
        [5, 4, 1, 20_096, 56, 4, 2, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_7_SLICE,
        [0, 7, 1, 40_448, 98, 7, 5, 1, 1],
    ),
]);

/// A100-SXM4-80GB, from NVIDIA's MIG User Guide.
static A100_80: [Profile; 7] = profiles([
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE,
        [19, 1, 7, 9728, 14, 1, 0, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1,
        [20, 1, 1, 9728, 14, 1, 1, 1, 1],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2,
        [15, 1, 4, 19_968, 14, 1, 1, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_2_SLICE,
        [14, 2, 3, 19_968, 28, 2, 1, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_3_SLICE,
        [9, 3, 2, 40_192, 42, 3, 2, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_4_SLICE,
        [5, 4, 1, 40_192, 56, 4, 2, 0, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_7_SLICE,
        [0, 7, 1, 80_896, 98, 7, 5, 1, 1],
    ),
]);

/// H100 80GB HBM3, from NVIDIA's MIG User Guide.
static H100_80: [Profile; 7] = profiles([
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE,
        [19, 1, 7, 9984, 16, 1, 1, 1, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1,
        [20, 1, 1, 9984, 16, 1, 1, 1, 1],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2,
        [15, 1, 4, 20_096, 26, 1, 1, 1, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_2_SLICE,
        [14, 2, 3, 20_096, 32, 2, 2, 2, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_3_SLICE,
        [9, 3, 2, 40_448, 60, 3, 3, 3, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_4_SLICE,
        [5, 4, 1, 40_448, 64, 4, 4, 4, 0],
    ),
    (
        NVML_GPU_INSTANCE_PROFILE_7_SLICE,
        [0, 7, 1, 81_152, 132, 8, 7, 7, 1],
    ),
]);

/// The profiles of a model; none of one that is not in NVIDIA's list here, or cannot be partitioned.
fn of(gpu: &GpuState) -> &'static [Profile] {
    if gpu.mig_capable == 0 {
        return &[];
    }
    match (gpu.compute_capability, gpu.memory_total >> 30) {
        ([8, 0], 0..=40) => &A100_40,
        ([8, 0], _) => &A100_80,
        ([9, 0], 0..=80) => &H100_80,
        _ => &[],
    }
}

export! {
    // Answers whether MIG mode is on or off, as NVIDIA's does.
    fn nvmlDeviceGetGpuInstanceProfileInfo(
        of_device: nvmlDevice_t,
        profile: u32,
        to: *mut nvmlGpuInstanceProfileInfo_t,
    ) {
        let profiles = of(device(of_device)?.state);
        let found = profiles.iter().find(|known| known.kind == profile);
        let known = found.ok_or(Code::NOT_SUPPORTED)?;
        put(to, nvmlGpuInstanceProfileInfo_t {
            id: known.id,
            isP2pSupported: 0,
            sliceCount: known.slices,
            instanceCount: known.instances,
            multiprocessorCount: known.multiprocessors,
            copyEngineCount: known.copy_engines,
            decoderCount: known.decoders,
            encoderCount: 0,
            jpegCount: known.jpeg,
            ofaCount: known.ofa,
            memorySizeMB: known.memory_mib,
        })
    }
}
