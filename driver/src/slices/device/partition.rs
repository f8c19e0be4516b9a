//! The partitions of a GPU.
//!
//! All that MIG could make of the GPU are offered at the same time: each consumes its slices of the GPU's counters, so
//! that an allocation takes those away that overlap with it. Instances that an administrator made are offered as they
//! are; nothing that overlaps with one of them is offered. The policy may name the profiles that are offered.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity};
use tranche_api::gpu_node::Gpu;
use tranche_api::mig::MigInstance;
use tranche_api::names::{attribute, capacity};
use tranche_api::quantity::Quantity;
use tranche_api::tier::Tier;

use super::{ALL_CORES, Counters, OfferError, Parent, exact_text, isolation, plain, text};
use crate::claim::DeviceName;
use crate::mig::{Geometry, Partition, Profile};

/// The partitions under which a GPU is offered, in the order in which the scheduler is to try them. `common` are the
/// attributes of the GPU; `profiles` are those that the policy offers, all where there are none.
pub(super) fn of_gpu(
    parent: &Parent<'_>,
    profiles: &BTreeSet<Profile>,
    common: &BTreeMap<String, DeviceAttribute>,
) -> Result<Vec<Device>, OfferError> {
    if !parent.gpu.mig_capable {
        // A policy for many models names the tier for those that have it.
        return Ok(Vec::new());
    }
    let geometry = match parent.geometry {
        Ok(Some(geometry)) => geometry,
        Ok(None) => return Err(OfferError::NotDivided),
        Err(error) => return Err(OfferError::Geometry(error.clone())),
    };
    let is_offered = |profile| profiles.is_empty() || profiles.contains(&profile);
    let mut partitions = geometry.partitions.iter();
    if !partitions.any(|partition| is_offered(partition.profile)) {
        return Err(OfferError::no_profile(profiles, geometry));
    }
    let gpu = parent.gpu;
    if !gpu.mig_mode.current && !is_switched_without_reset(gpu) {
        return Err(OfferError::ModeOff {
            uuid: gpu.uuid.clone(),
            architecture: gpu.architecture.clone(),
        });
    }
    let existing = existing(gpu, geometry)?;
    let mut devices = Vec::new();
    let partitions = geometry.partitions.iter();
    for partition in partitions.filter(|it| is_offered(it.profile)) {
        let instance = existing
            .iter()
            .find(|(taken, _)| taken.slices.memory & partition.slices.memory != 0);
        let uuid = match instance {
            None => None,
            Some((taken, instance)) if *taken == partition => match &instance.uuid {
                Some(uuid) => Some(uuid.as_str()),
                // Without a compute instance of its own it is nothing that a claim can have.
                None => continue,
            },
            Some(_) => continue,
        };
        devices.push(device(parent, geometry, partition, common, uuid)?);
    }
    Ok(devices)
}

/// Whether MIG mode can be switched without a reset of the GPU: on all architectures after Ampere. (NVIDIA's MIG User
/// Guide, "Enable MIG Mode".)
fn is_switched_without_reset(gpu: &Gpu) -> bool {
    gpu.architecture != "Ampere"
}

/// The instances that Tranche did not make, each with the partition that it is.
fn existing<'a>(
    gpu: &'a Gpu,
    geometry: &'a Geometry,
) -> Result<Vec<(&'a Partition, &'a MigInstance)>, OfferError> {
    let one = |instance: &'a MigInstance| {
        let profile = instance.profile.parse().map_err(Into::into);
        let profile = profile.map_err(OfferError::Geometry)?;
        let start = u8::try_from(instance.start).unwrap_or(u8::MAX);
        let partition = geometry.partition(profile, start);
        let partition = partition.ok_or_else(|| OfferError::Instance {
            profile: instance.profile.clone(),
            start: instance.start,
        })?;
        Ok((partition, instance))
    };
    gpu.mig_instances.iter().map(one).collect()
}

/// `uuid` is the MIG device's, where an administrator made it.
fn device(
    parent: &Parent<'_>,
    geometry: &Geometry,
    partition: &Partition,
    common: &BTreeMap<String, DeviceAttribute>,
    uuid: Option<&str>,
) -> Result<Device, OfferError> {
    let name = DeviceName::Partition {
        gpu: parent.prefix,
        profile: partition.profile,
        start: partition.start,
    };
    let mut attributes = common.clone();
    // The attribute `uuid` is never missing, because a selector that names a missing attribute is an error for the pod. Before
    // the partition is made it is the GPU's.
    let own = [
        (attribute::TYPE, text("mig")),
        (attribute::PROFILE, text(&partition.profile.to_string())),
        (
            attribute::PARENT_UUID,
            exact_text("uuid", &parent.gpu.uuid)?,
        ),
    ];
    attributes.extend(own.map(|(name, value)| (name.to_owned(), value)));
    if let Some(uuid) = uuid {
        let value = exact_text("migInstances.uuid", uuid)?;
        attributes.insert(attribute::UUID.to_owned(), value);
    }
    attributes.extend(isolation(Tier::Partition));
    let counters = Counters::of_slices(parent.uuid, &partition.slices);
    Ok(Device {
        name: name.to_string(),
        attributes: Some(attributes),
        capacity: Some(capacities(geometry, partition)),
        consumes_counters: Some(vec![counters.consumption()]),
        ..Device::default()
    })
}

/// All of a partition belongs to its claim, so the capacities have no request policy: a claim gets the first partition
/// that has at least what it asks for.
fn capacities(geometry: &Geometry, partition: &Partition) -> BTreeMap<String, DeviceCapacity> {
    let slices = partition.slices;
    let cores = ALL_CORES * u64::from(slices.compute) / u64::from(geometry.whole.compute.max(1));
    let [copy, decoders, encoders, jpeg, ofa] = slices.engines;
    let counts = [
        (capacity::MULTIPROCESSORS, partition.multiprocessors),
        (capacity::COPY_ENGINES, copy),
        (capacity::DECODERS, decoders),
        (capacity::ENCODERS, encoders),
        (capacity::JPEG_ENGINES, jpeg),
        (capacity::OFA_ENGINES, ofa),
    ];
    let counts = counts.map(|(name, count)| (name, Quantity::from_count(count.into())));
    [
        (capacity::MEMORY, Quantity::from_bytes(partition.memory)),
        (capacity::CORES, Quantity::from_count(cores)),
    ]
    .into_iter()
    .chain(counts)
    .map(|(name, value)| (name.to_owned(), plain(value)))
    .collect()
}

#[cfg(test)]
mod tests;
