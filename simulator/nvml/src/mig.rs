//! MIG: profiles, GPU instances, compute instances and MIG devices.
//!
//! - [`profiles`]: the instances that a GPU or a GPU instance can have.
//! - [`instances`]: the instances that exist; their creation and destruction by the daemon.
//! - [`devices`]: compute instances as NVML devices.

mod devices;
mod instances;
mod profiles;

use tranche_simulator_machine::attach;
use tranche_simulator_machine::mig::capability::Rights;
use tranche_simulator_machine::mig::{GpuProfile, Model};
use tranche_simulator_machine::partitions::ComputeInstanceView;
use tranche_simulator_machine::wire::{Reply, Request};

use crate::code::Code;
use crate::state::{Device, library};

/// The MIG devices of a GPU that this process can see, in NVML's order.
pub fn visible_devices(of: Device) -> Result<Vec<ComputeInstanceView>, Code> {
    let library = library()?;
    let rights = Rights::of_this_process(&library.root);
    let sees_all = rights.can_monitor();
    let mut devices = of.state.mig_devices();
    devices.retain(|it| sees_all || rights.can_use(of.state.minor, it.gpu_instance.id, it.id));
    Ok(devices)
}

/// The geometry of a GPU with MIG modes.
fn model(of: Device) -> Result<&'static Model, Code> {
    of.state.model().ok_or(Code::NOT_SUPPORTED)
}

/// The geometry of a GPU in MIG mode.
fn active_model(of: Device) -> Result<&'static Model, Code> {
    if of.state.is_partitioned() {
        model(of)
    } else {
        Err(Code::NOT_SUPPORTED)
    }
}

/// The GPU instance profile with the id `id`.
fn profile_with_id(model: &'static Model, id: u32) -> Result<&'static GpuProfile, Code> {
    let found = model.profiles.iter().find(|profile| profile.id == id);
    found.ok_or(Code::INVALID_ARGUMENT)
}

/// Lets the daemon change instances; returns the id of a new one.
fn change(request: Request) -> Result<u32, Code> {
    let library = library()?;
    if !Rights::of_this_process(&library.root).can_configure() {
        return Err(Code::NO_PERMISSION);
    }
    match attach::request(&library.root, request) {
        Ok(Reply::Granted { slot }) => Ok(slot),
        Ok(Reply::InUse) => Err(Code::IN_USE),
        Ok(Reply::InsufficientResources) => Err(Code::INSUFFICIENT_RESOURCES),
        Ok(Reply::NotFound) => Err(Code::NOT_FOUND),
        Ok(Reply::NotSupported) => Err(Code::NOT_SUPPORTED),
        Ok(Reply::Forbidden) => Err(Code::NO_PERMISSION),
        Ok(_) => Err(Code::INVALID_ARGUMENT),
        Err(_) => Err(Code::UNKNOWN),
    }
}
