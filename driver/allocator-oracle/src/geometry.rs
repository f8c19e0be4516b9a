//! MIG's geometry of the simulated models, as NVML reports it of real GPUs.

use tranche_api::Quantity;
use tranche_api::mig::{MigEngines, MigGeometry, MigProfile};
use tranche_simulator_machine::mig::{GpuProfile, Model};

/// The geometry of GPUs of a model.
#[must_use]
pub fn of(model: &Model, gpus: &[String]) -> MigGeometry {
    let profile = |it: &GpuProfile| MigProfile {
        name: it.name.to_owned(),
        id: it.id,
        compute_slices: it.slices,
        memory_slices: it.size,
        placements: it.starts.to_vec(),
        memory: Quantity::from_bytes(it.memory_mib << 20),
        multiprocessors: it.multiprocessors,
        instances: it.instances,
        engines: MigEngines {
            copy: it.engines.copy,
            decoders: it.engines.decoders,
            encoders: it.engines.encoders,
            jpeg: it.engines.jpeg,
            ofa: it.engines.optical_flow,
        },
    };
    MigGeometry {
        gpus: gpus.to_vec(),
        profiles: model.profiles.iter().map(profile).collect(),
    }
}
