//! The profiles of a GPU's partitions. No partition can be made.

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

/// NVML's numbers for the kinds of profiles, in the order of the tables below.
const KINDS: [u32; 7] = [
    NVML_GPU_INSTANCE_PROFILE_1_SLICE,
    NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1,
    NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2,
    NVML_GPU_INSTANCE_PROFILE_2_SLICE,
    NVML_GPU_INSTANCE_PROFILE_3_SLICE,
    NVML_GPU_INSTANCE_PROFILE_4_SLICE,
    NVML_GPU_INSTANCE_PROFILE_7_SLICE,
];

/// Profiles of `id, slices, instances, SMs, copy engines, decoders, JPEG, OFA`, and their memory in MiB.
const fn profiles(engines: [[u32; 8]; 7], memory_mib: [u64; 7]) -> [Profile; 7] {
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
    }; 7];
    let mut row = 0;
    while row < profiles.len() {
        let [
            id,
            slices,
            instances,
            multiprocessors,
            copy_engines,
            decoders,
            jpeg,
            ofa,
        ] = engines[row];
        profiles[row] = Profile {
            kind: KINDS[row],
            id,
            slices,
            instances,
            memory_mib: memory_mib[row],
            multiprocessors,
            copy_engines,
            decoders,
            jpeg,
            ofa,
        };
        row += 1;
    }
    profiles
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
static A100_40: [Profile; 7] = profiles(A100, [4864, 4864, 9984, 9984, 20_096, 20_096, 40_448]);
static A100_80: [Profile; 7] = profiles(A100, [9728, 9728, 19_968, 19_968, 40_192, 40_192, 80_896]);

/// H100 80GB HBM3, from NVIDIA's MIG User Guide.
static H100_80: [Profile; 7] = profiles(
    [
        [19, 1, 7, 16, 1, 1, 1, 0],
        [20, 1, 1, 16, 1, 1, 1, 1],
        [15, 1, 4, 26, 1, 1, 1, 0],
        [14, 2, 3, 32, 2, 2, 2, 0],
        [9, 3, 2, 60, 3, 3, 3, 0],
        [5, 4, 1, 64, 4, 4, 4, 0],
        [0, 7, 1, 132, 8, 7, 7, 1],
    ],
    [9984, 9984, 20_096, 20_096, 40_448, 40_448, 81_152],
);

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
