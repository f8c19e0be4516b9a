//! The profiles of MIG partitions. Partitions cannot be made.

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

/// NVML's numbers for the kinds of profiles.
const KINDS: [u32; 7] = [
    NVML_GPU_INSTANCE_PROFILE_1_SLICE,
    NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1,
    NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2,
    NVML_GPU_INSTANCE_PROFILE_2_SLICE,
    NVML_GPU_INSTANCE_PROFILE_3_SLICE,
    NVML_GPU_INSTANCE_PROFILE_4_SLICE,
    NVML_GPU_INSTANCE_PROFILE_7_SLICE,
];

/// The GPU instance profiles of a model, as `nvidia-smi mig -lgip` lists them, in the order of [`KINDS`].
struct Profiles {
    /// Id, slices, instances, multiprocessors, copy engines, decoders, JPEG and OFA engines.
    engines: [[u32; 8]; 7],
    memory_mib: [u64; 7],
}

/// A100-SXM4, from NVIDIA's MIG User Guide.
const A100: [[u32; 8]; 7] = [
    [19, 1, 7, 14, 1, 0, 0, 0],
    [20, 1, 1, 14, 1, 1, 1, 1],
    [15, 1, 4, 14, 1, 1, 0, 0],
    [14, 2, 3, 28, 2, 1, 0, 0],
    [9, 3, 2, 42, 3, 2, 0, 0],
    [5, 4, 1, 56, 4, 2, 0, 0],
    [0, 7, 1, 98, 7, 5, 1, 1],
];
static A100_40: Profiles = Profiles {
    engines: A100,
    memory_mib: [4864, 4864, 9984, 9984, 20_096, 20_096, 40_448],
};
static A100_80: Profiles = Profiles {
    engines: A100,
    memory_mib: [9728, 9728, 19_968, 19_968, 40_192, 40_192, 80_896],
};

/// H100 80GB HBM3, from NVIDIA's MIG User Guide.
static H100_80: Profiles = Profiles {
    engines: [
        [19, 1, 7, 16, 1, 1, 1, 0],
        [20, 1, 1, 16, 1, 1, 1, 1],
        [15, 1, 4, 26, 1, 1, 1, 0],
        [14, 2, 3, 32, 2, 2, 2, 0],
        [9, 3, 2, 60, 3, 3, 3, 0],
        [5, 4, 1, 64, 4, 4, 4, 0],
        [0, 7, 1, 132, 8, 7, 7, 1],
    ],
    memory_mib: [9984, 9984, 20_096, 20_096, 40_448, 40_448, 81_152],
};

/// The profiles of a model; `None` for one that has no MIG modes or whose profiles are not known here.
fn profiles_of(gpu: &GpuState) -> Option<&'static Profiles> {
    if gpu.mig_capable == 0 {
        return None;
    }
    match (gpu.compute_capability, gpu.memory_total >> 30) {
        ([8, 0], 0..=40) => Some(&A100_40),
        ([8, 0], _) => Some(&A100_80),
        ([9, 0], 0..=80) => Some(&H100_80),
        _ => None,
    }
}

export! {
    // As NVIDIA's, it answers in both MIG modes.
    fn nvmlDeviceGetGpuInstanceProfileInfo(
        of: nvmlDevice_t,
        profile: u32,
        to: *mut nvmlGpuInstanceProfileInfo_t,
    ) {
        let profiles = profiles_of(device(of)?.state).ok_or(Code::NOT_SUPPORTED)?;
        let row = KINDS.iter().position(|kind| *kind == profile).ok_or(Code::NOT_SUPPORTED)?;
        let [id, slices, instances, multiprocessors, copy_engines, decoders, jpeg, ofa] = profiles.engines[row];
        put(to, nvmlGpuInstanceProfileInfo_t {
            id,
            isP2pSupported: 0,
            sliceCount: slices,
            instanceCount: instances,
            multiprocessorCount: multiprocessors,
            copyEngineCount: copy_engines,
            decoderCount: decoders,
            encoderCount: 0,
            jpegCount: jpeg,
            ofaCount: ofa,
            memorySizeMB: profiles.memory_mib[row],
        })
    }
}
