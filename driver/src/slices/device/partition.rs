//! The partitions of a GPU.
//!
//! All partitions that MIG could create on the GPU are offered at the same time. Each consumes its slices of the GPU's
//! counters, so an allocation closes the partitions that overlap with it. Instances that an administrator created are
//! offered as they are; nothing that overlaps with one of them is offered. The policy may name the profiles that are
//! offered.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{
    Device, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption,
};
use tranche_api::gpu_node::Gpu;
use tranche_api::mig::MigInstance;
use tranche_api::names::{attribute, capacity};
use tranche_api::quantity::Quantity;
use tranche_api::tier::Tier;

use super::{ALL_CORES, Counters, OfferError, Parent, exact_text, isolation, plain, text};
use crate::claim::DeviceName;
use crate::mig::{Geometry, Partition, Placement, Profile};

/// The partitions under which a GPU is offered, in the order in which the scheduler tries them. `common` are the
/// attributes of the GPU; `profiles` are those that the policy offers, empty for all.
pub(super) fn of_gpu(
    parent: &Parent<'_>,
    profiles: &BTreeSet<Profile>,
    common: &BTreeMap<String, DeviceAttribute>,
) -> Result<Vec<Device>, OfferError> {
    let is_offered = |profile| profiles.is_empty() || profiles.contains(&profile);
    let Some(geometry) = geometry(parent)? else {
        return Ok(Vec::new());
    };
    let mut partitions = geometry.partitions.iter();
    if !partitions.any(|partition| is_offered(partition.profile)) {
        return Err(OfferError::no_profile(Tier::Partition, profiles, geometry));
    }
    let possible = possible(parent.gpu, geometry)?.into_iter();
    let offered = possible.filter(|it| is_offered(it.partition.profile));
    offered
        .map(|possible| device(parent, geometry, &possible, common))
        .collect()
}

/// How MIG divides the GPU; `None` if it cannot: a policy for many models may name what only some of them have.
pub(super) fn geometry<'a>(parent: &Parent<'a>) -> Result<Option<&'a Geometry>, OfferError> {
    if !parent.gpu.mig_capable {
        return Ok(None);
    }
    match parent.geometry {
        Ok(Some(geometry)) => Ok(Some(geometry)),
        Ok(None) => Err(OfferError::NotDivided),
        Err(error) => Err(OfferError::Geometry(error.clone())),
    }
}

/// A partition that exists or can be created.
#[derive(Clone, Copy, Debug)]
pub(super) struct Possible<'a> {
    pub(super) partition: &'a Partition,
    /// The MIG device's UUID, if an administrator created it.
    uuid: Option<&'a str>,
}

/// The instances that an administrator created, and what MIG can create beside them, in order.
pub(super) fn possible<'a>(
    gpu: &'a Gpu,
    geometry: &'a Geometry,
) -> Result<Vec<Possible<'a>>, OfferError> {
    if !gpu.mig_mode.current && !is_switched_without_reset(gpu) {
        return Err(OfferError::ModeOff {
            uuid: gpu.uuid.clone(),
            architecture: gpu.architecture.clone(),
        });
    }
    let existing = existing(gpu, geometry)?;
    let one = |partition: &'a Partition| {
        let instance = existing
            .iter()
            .find(|(taken, _)| taken.slices.memory & partition.slices.memory != 0);
        let uuid = match instance {
            None => None,
            // No claim can have it without a compute instance that has all of it.
            Some((taken, instance)) if *taken == partition => Some(instance.uuid.as_deref()?),
            Some(_) => return None,
        };
        Some(Possible { partition, uuid })
    };
    Ok(geometry.partitions.iter().filter_map(one).collect())
}

/// Whether MIG mode can be switched without a reset of the GPU: on all architectures after Ampere. (NVIDIA's MIG User
/// Guide, "Enable MIG Mode".)
fn is_switched_without_reset(gpu: &Gpu) -> bool {
    gpu.architecture != "Ampere"
}

/// The instances that Tranche did not create, each with its partition.
fn existing<'a>(
    gpu: &'a Gpu,
    geometry: &'a Geometry,
) -> Result<Vec<(&'a Partition, &'a MigInstance)>, OfferError> {
    let one = |instance: &'a MigInstance| {
        let profile = instance
            .profile
            .parse()
            .map_err(Into::into)
            .map_err(OfferError::Geometry)?;
        let start = u8::try_from(instance.start).unwrap_or(u8::MAX);
        let partition = geometry
            .partition(Placement { start, profile })
            .ok_or_else(|| OfferError::Instance {
                profile: instance.profile.clone(),
                start: instance.start,
            })?;
        Ok((partition, instance))
    };
    gpu.mig_instances.iter().map(one).collect()
}

fn device(
    parent: &Parent<'_>,
    geometry: &Geometry,
    possible: &Possible<'_>,
    common: &BTreeMap<String, DeviceAttribute>,
) -> Result<Device, OfferError> {
    let partition = possible.partition;
    let name = DeviceName::Partition {
        gpu: parent.prefix,
        profile: partition.profile,
        start: partition.start,
    };
    let mut attributes = possible.attributes(parent, common)?;
    attributes.extend(isolation(Tier::Partition));
    Ok(Device {
        name: name.to_string(),
        attributes: Some(attributes),
        capacity: Some(capacities(geometry, partition)),
        consumes_counters: Some(vec![possible.consumption(parent)]),
        ..Device::default()
    })
}

impl Possible<'_> {
    /// The GPU's attributes, and those of the partition.
    pub(super) fn attributes(
        &self,
        parent: &Parent<'_>,
        common: &BTreeMap<String, DeviceAttribute>,
    ) -> Result<BTreeMap<String, DeviceAttribute>, OfferError> {
        let mut attributes = common.clone();
        // The attribute `uuid` is never missing, because a selector that names a missing attribute is an error for the pod.
        // Before the partition is created it is the GPU's UUID.
        let own = [
            (attribute::TYPE, text("mig")),
            (
                attribute::PROFILE,
                text(&self.partition.profile.to_string()),
            ),
            (
                attribute::PARENT_UUID,
                exact_text("uuid", &parent.gpu.uuid)?,
            ),
        ];
        attributes.extend(own.map(|(name, value)| (name.to_owned(), value)));
        if let Some(uuid) = self.uuid {
            let value = exact_text("migInstances.uuid", uuid)?;
            attributes.insert(attribute::UUID.to_owned(), value);
        }
        Ok(attributes)
    }

    /// What the partition takes of the GPU's counters.
    pub(super) fn consumption(&self, parent: &Parent<'_>) -> DeviceCounterConsumption {
        Counters::of_slices(parent.uuid, &self.partition.slices).consumption()
    }
}

/// The whole partition belongs to its claim, so the capacities have no request policy: a claim gets the first partition
/// that has at least what it requests.
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
