//! MIG devices: compute instances as NVML devices.

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlDeviceAttributes_t};

use tranche_simulator_machine::mig::Model;

use super::model;
use crate::code::Code;
use crate::export::{export, put};
use crate::state::{any_device, device, device_of_any, handle, mig_handle};

fn attributes(of: nvmlDevice_t) -> Result<nvmlDeviceAttributes_t, Code> {
    // nvml.h: for MIG devices only.
    let it = any_device(of)?.partition.ok_or(Code::NOT_SUPPORTED)?;
    let profile = it.gpu_instance.profile;
    Ok(nvmlDeviceAttributes_t {
        multiprocessorCount: it.profile.multiprocessors,
        sharedCopyEngineCount: profile.engines.copy,
        sharedDecoderCount: profile.engines.decoders,
        sharedEncoderCount: profile.engines.encoders,
        sharedJpegCount: profile.engines.jpeg,
        sharedOfaCount: profile.engines.optical_flow,
        gpuInstanceSliceCount: profile.slices,
        computeInstanceSliceCount: it.profile.slices,
        memorySizeMB: profile.memory_mib,
    })
}

export! {
    fn nvmlDeviceIsMigDeviceHandle(of: nvmlDevice_t, answer: *mut u32) {
        put(answer, u32::from(any_device(of)?.partition.is_some()))
    }
    fn nvmlDeviceGetMaxMigDeviceCount(of: nvmlDevice_t, count: *mut u32) {
        let model = device(of)?.state.model();
        put(count, model.map_or(0, Model::most_devices))
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(of: nvmlDevice_t, index: u32, to: *mut nvmlDevice_t) {
        let device = device(of)?;
        model(device)?;
        let devices = super::visible_devices(device)?;
        let found = devices.get(index as usize).ok_or(Code::NOT_FOUND)?;
        put(to, mig_handle(device.gpu, *found))
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(of: nvmlDevice_t, to: *mut nvmlDevice_t) {
        let it = any_device(of)?;
        it.partition.ok_or(Code::INVALID_ARGUMENT)?;
        put(to, handle(device_of_any(of)?.gpu))
    }
    fn nvmlDeviceGetGpuInstanceId(of: nvmlDevice_t, id: *mut u32) {
        let it = any_device(of)?.partition.ok_or(Code::NOT_SUPPORTED)?;
        put(id, it.gpu_instance.id)
    }
    fn nvmlDeviceGetComputeInstanceId(of: nvmlDevice_t, id: *mut u32) {
        let it = any_device(of)?.partition.ok_or(Code::NOT_SUPPORTED)?;
        put(id, it.id)
    }
    fn nvmlDeviceGetAttributes(of: nvmlDevice_t, to: *mut nvmlDeviceAttributes_t) { put(to, attributes(of)?) }
    fn nvmlDeviceGetAttributes_v2(of: nvmlDevice_t, to: *mut nvmlDeviceAttributes_t) { put(to, attributes(of)?) }
}
