//! Settings: MIG mode, compute mode, persistence mode and others.

use std::ffi::c_char;
use std::sync::atomic::Ordering;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use tranche_simulator_machine::attach;
use tranche_simulator_machine::description::{Architecture, Virtualization};
use tranche_simulator_machine::wire::{Reply, Request, Setting};

use crate::code::Code;
use crate::export::{export, export_constants, put, put_text};
use crate::state::{Device, device, library};

pub fn set(of: nvmlDevice_t, setting: Setting, value: u32) -> Result<(), Code> {
    let device = device(of)?;
    let gpu = u32::try_from(device.gpu).unwrap_or(u32::MAX);
    let request = Request::Set {
        gpu,
        setting,
        value,
    };
    match attach::request(&library()?.root, request) {
        Ok(Reply::Granted { .. }) => Ok(()),
        Ok(Reply::Forbidden) => Err(Code::NO_PERMISSION),
        Ok(_) => Err(Code::INVALID_ARGUMENT),
        Err(_) => Err(Code::UNKNOWN),
    }
}

/// The GPU, if it has MIG modes.
fn mig_capable(of: nvmlDevice_t) -> Result<Device, Code> {
    let device = device(of)?;
    if device.state.model().is_none() {
        return Err(Code::NOT_SUPPORTED);
    }
    Ok(device)
}

export! {
    fn nvmlDeviceGetMigMode(of: nvmlDevice_t, current: *mut u32, pending: *mut u32) {
        let state = mig_capable(of)?.state;
        put(current, state.mig_mode.load(Ordering::Relaxed))?;
        put(pending, state.mig_pending.load(Ordering::Relaxed))
    }
    // Changes the mode at once if nothing uses the GPU; otherwise the change is pending.
    fn nvmlDeviceSetMigMode(of: nvmlDevice_t, mode: u32, activation: *mut u32) {
        let state = mig_capable(of)?.state;
        set(of, Setting::MigMode, mode)?;
        let is_active = state.mig_mode.load(Ordering::Relaxed) == mode;
        put(activation, match () {
            () if is_active => 0,
            // nvml.h: if the driver cannot reset the GPU, as in a virtual machine.
            () if state.mig_needs_reset != 0 => Code::RESET_REQUIRED.0,
            () => Code::IN_USE.0,
        })
    }
    fn nvmlDeviceGetPersistenceMode(of: nvmlDevice_t, mode: *mut u32) {
        put(mode, device(of)?.state.persistence.load(Ordering::Relaxed))
    }
    fn nvmlDeviceSetPersistenceMode(of: nvmlDevice_t, mode: u32) {
        set(of, Setting::Persistence, mode)
    }
    fn nvmlDeviceGetComputeMode(of: nvmlDevice_t, mode: *mut u32) {
        put(mode, device(of)?.state.compute_mode.load(Ordering::Relaxed))
    }
    fn nvmlDeviceSetComputeMode(of: nvmlDevice_t, mode: u32) {
        set(of, Setting::ComputeMode, mode)
    }
    fn nvmlDeviceGetVirtualizationMode(of: nvmlDevice_t, mode: *mut u32) {
        put(mode, device(of)?.state.virtualization)
    }
    // GPUs have virtual functions since Ampere.
    fn nvmlDeviceGetHostVgpuMode(of: nvmlDevice_t, mode: *mut u32) {
        let state = device(of)?.state;
        if state.virtualization != Virtualization::HostVgpu as u32 {
            return Err(Code::NOT_SUPPORTED);
        }
        put(mode, u32::from(state.architecture >= Architecture::Ampere as u32))
    }
    fn nvmlDeviceGetGspFirmwareMode(of: nvmlDevice_t, enabled: *mut u32, default: *mut u32) {
        device(of)?;
        put(enabled, 1)?;
        put(default, 1)
    }
    fn nvmlDeviceGetGspFirmwareVersion(of: nvmlDevice_t, version: *mut c_char) {
        let device = device(of)?;
        // The caller's buffer has NVML_GSP_FIRMWARE_VERSION_BUF_SIZE bytes.
        put_text(version, 64, device.shared.header.driver_version.as_str())
    }
    fn nvmlDeviceGetAPIRestriction(of: nvmlDevice_t, _api: u32, restricted: *mut u32) {
        device(of)?;
        put(restricted, 1)
    }
}

export_constants! {
    nvmlDeviceGetDisplayMode = 0;
    nvmlDeviceGetDisplayActive = 0;
}
