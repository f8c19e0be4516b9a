//! How MIG divides a GPU, the GPU instances that exist, and the changes of both.

use nvml_wrapper::{Device, Nvml};
use tranche_api::Quantity;
use tranche_api::mig::{MigEngines, MigInstance, MigProfile};
use tranche_driver::gpu_state::{self, Change};
use tranche_driver::mig::Placement;
use tranche_nvml::{Error, Instance, Mig, Profile, Reason};

use super::{ChangeError, NvmlError};

/// The profiles and the instances of a GPU that can be partitioned. If the driver does not describe them, the lists are
/// empty, and the GPU is offered as a whole.
pub(super) fn describe<'a>(
    nvml: &'a Nvml,
    device: &Device<'a>,
    uuid: &str,
) -> Result<(Vec<MigProfile>, Vec<MigInstance>), NvmlError> {
    let (profiles, instances) = match read(&Mig::of(nvml, device)) {
        Ok(read) => read,
        Err(error) if error.reason == Reason::GpuLost => return Err(failed(error, uuid)),
        Err(_) => Default::default(),
    };
    let described = profiles.iter().filter_map(profile).collect();
    let instances = instances.iter().filter_map(|it| instance(it, &profiles));
    Ok((described, instances.collect()))
}

/// The GPU instances of a GPU in MIG mode. An instance with an unknown profile is an error, because it is not known
/// what it takes of the GPU.
pub(super) fn instances<'a>(
    nvml: &'a Nvml,
    device: &Device<'a>,
    uuid: &str,
) -> Result<Vec<gpu_state::Instance>, NvmlError> {
    let (profiles, instances) =
        read(&Mig::of(nvml, device)).map_err(|error| failed(error, uuid))?;
    let actual = |it: &Instance| {
        let place = place(it, &profiles).ok_or_else(|| NvmlError::Call {
            call: "nvmlGpuInstanceGetInfo",
            object: format!("{uuid}, GPU instance {}", it.id),
            reason: format!(
                "its profile has the id {}, and no profile of that id that this release knows is reported: remove the \
                 instance (`nvidia-smi mig -dci -gi {id}`, `nvidia-smi mig -dgi -gi {id}`)",
                it.profile,
                id = it.id
            ),
        })?;
        let compute = it.compute.iter().map(|it| gpu_state::ComputeInstance {
            id: it.id,
            uuid: it.uuid.clone(),
            slices: it.slices,
        });
        Ok(gpu_state::Instance {
            id: it.id,
            placement: place,
            compute: compute.collect(),
        })
    };
    instances.iter().map(actual).collect()
}

fn place(instance: &Instance, profiles: &[Profile]) -> Option<Placement> {
    let profile = profiles.iter().find(|it| it.id == instance.profile)?;
    Some(Placement {
        start: u8::try_from(instance.placement.start).ok()?,
        profile: profile.name.parse().ok()?,
    })
}

/// Carries out a change.
pub(super) fn change<'a>(
    nvml: &'a Nvml,
    device: &Device<'a>,
    uuid: &str,
    change: &Change,
) -> Result<(), ChangeError> {
    let mig = Mig::of(nvml, device);
    let of_instance = |id: u32| format!("{uuid}, GPU instance {id}");
    let (done, object) = match *change {
        Change::SwitchMigMode { on } => (mig.switch(on), uuid.to_owned()),
        Change::CreateInstance(place) => {
            let (profile, placement) = find(&mig, uuid, place)?;
            let object = format!("{uuid}, {place}");
            (mig.create_instance(profile, placement).map(drop), object)
        }
        Change::CreateComputeInstance { instance } => (
            mig.create_compute_instance(instance).map(drop),
            of_instance(instance),
        ),
        Change::DestroyComputeInstance { instance, compute } => (
            removed(mig.destroy_compute_instance(instance, compute)),
            format!("{}, compute instance {compute}", of_instance(instance)),
        ),
        Change::DestroyInstance { instance } => (
            removed(mig.destroy_instance(instance)),
            of_instance(instance),
        ),
    };
    done.map_err(|error| {
        let call = error.call;
        match error.reason {
            Reason::InUse => ChangeError::InUse { call, object },
            Reason::InsufficientResources => ChangeError::InsufficientResources { call, object },
            Reason::ResetRequired => ChangeError::NeedsReset { call, object },
            _ => failed(error, &object).into(),
        }
    })
}

/// The id of the profile, and the placement, as the driver reports them.
fn find(
    mig: &Mig<'_>,
    uuid: &str,
    place: Placement,
) -> Result<(u32, tranche_nvml::Placement), NvmlError> {
    let profiles = mig.profiles().map_err(|error| failed(error, uuid))?;
    let is_it = |profile: &&Profile| profile.name.parse() == Ok(place.profile);
    let found = profiles.iter().find(is_it).and_then(|profile| {
        let mut placements = profile.placements.iter();
        let placement = placements.find(|it| it.start == u32::from(place.start))?;
        Some((profile.id, *placement))
    });
    found.ok_or_else(|| NvmlError::Call {
        call: "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        object: uuid.to_owned(),
        reason: format!("the driver reports no {place}"),
    })
}

/// Somebody else may have removed it.
fn removed(result: Result<(), Error>) -> Result<(), Error> {
    match result {
        Err(error) if error.reason == Reason::NotFound => Ok(()),
        result => result,
    }
}

fn read(mig: &Mig<'_>) -> Result<(Vec<Profile>, Vec<Instance>), Error> {
    let profiles = mig.profiles()?;
    let instances = mig.instances(&profiles)?;
    Ok((profiles, instances))
}

fn failed(error: Error, object: &str) -> NvmlError {
    let object = object.to_owned();
    let call = error.call;
    match error.reason {
        Reason::GpuLost => NvmlError::GpuLost { call, object },
        Reason::NotSupported => NvmlError::NotSupported { call, object },
        reason => NvmlError::Call {
            call,
            object,
            reason: reason.to_string(),
        },
    }
}

/// `None` for a profile that has no placement.
fn profile(profile: &Profile) -> Option<MigProfile> {
    let [copy, decoders, encoders, jpeg, ofa] = profile.engines;
    let memory_slices = profile.placements.first()?.size;
    let mut placements: Vec<u32> = profile.placements.iter().map(|it| it.start).collect();
    placements.sort_unstable();
    Some(MigProfile {
        name: profile.name.clone(),
        id: profile.id,
        compute_slices: profile.compute_slices,
        memory_slices,
        placements,
        memory: Quantity::from_bytes(profile.memory_mib.saturating_mul(1 << 20)),
        multiprocessors: profile.multiprocessors,
        instances: profile.instances,
        engines: MigEngines {
            copy,
            decoders,
            encoders,
            jpeg,
            ofa,
        },
    })
}

fn instance(instance: &Instance, profiles: &[Profile]) -> Option<MigInstance> {
    let profile = profiles.iter().find(|it| it.id == instance.profile)?;
    let whole = match &instance.compute[..] {
        [only] if only.slices == profile.compute_slices => Some(only.uuid.clone()),
        _ => None,
    };
    Some(MigInstance {
        profile: profile.name.clone(),
        start: instance.placement.start,
        id: instance.id,
        uuid: whole,
    })
}
