//! Partitions of a GPU that several claims share.
//!
//! A partition is a device of its own in each tier in which it is shared, beside the device that gives all of it to one claim. All
//! of them consume the same counters, so the first allocation decides which of them the partition serves.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};
use tranche_api::tier::Tier;

use super::partition::{Possible, geometry, possible};
use super::{Memory, OfferError, Parent, isolation, sized, taints};
use crate::claim::{DeviceName, PartitionTier};
use crate::policy::Terms;

/// The shared partitions under which a GPU is offered, in the order in which the scheduler is to try them, and why others are not.
/// `common` are the attributes of the GPU.
pub(super) fn of_gpu(
    parent: &Parent<'_>,
    terms: &Terms,
    common: &BTreeMap<String, DeviceAttribute>,
) -> (Vec<Device>, Vec<(Tier, OfferError)>) {
    let (mut devices, mut refused) = (Vec::new(), Vec::new());
    let profiles = &terms.capped.on_partitions;
    if !terms.tiers.contains(&Tier::Capped) || profiles.is_empty() {
        return (devices, refused);
    }
    let partitions = geometry(parent).and_then(|geometry| match geometry {
        None => Ok(Vec::new()),
        Some(geometry) => {
            let mut all = geometry.partitions.iter();
            if !all.any(|it| profiles.contains(&it.profile)) {
                return Err(OfferError::no_profile(Tier::Capped, profiles, geometry));
            }
            possible(parent.gpu, geometry)
        }
    });
    let partitions = partitions.unwrap_or_else(|error| {
        refused.push((Tier::Capped, error));
        Vec::new()
    });
    let mut last = None;
    for possible in partitions {
        let profile = possible.partition.profile;
        if !profiles.contains(&profile) {
            continue;
        }
        match device(parent, &possible, terms, common) {
            Ok(device) => devices.push(device),
            // The placements of a profile come one after the other, and have all the same memory.
            Err(_) if last == Some(profile) => {}
            Err(error) => refused.push((
                Tier::Capped,
                OfferError::OnPartition {
                    profile,
                    error: Box::new(error),
                },
            )),
        }
        last = Some(profile);
    }
    (devices, refused)
}

fn device(
    parent: &Parent<'_>,
    possible: &Possible<'_>,
    terms: &Terms,
    common: &BTreeMap<String, DeviceAttribute>,
) -> Result<Device, OfferError> {
    let partition = possible.partition;
    let name = DeviceName::SharedPartition {
        gpu: parent.prefix,
        tier: PartitionTier::Capped,
        profile: partition.profile,
        start: partition.start,
    };
    let memory = Memory {
        total: partition.memory,
        reserved: partition.memory - partition.available_memory(),
    };
    let capacity = sized(&terms.capped, terms.capped.max_sharers, &memory)?.into_iter();
    let capacity = capacity.map(|(name, value)| (name.to_owned(), value));
    let mut attributes = possible.attributes(parent, common)?;
    // What divides those that share it: the partition's border is hardware, and no claim of this tier is told apart by it.
    attributes.extend(isolation(Tier::Capped));
    Ok(Device {
        name: name.to_string(),
        attributes: Some(attributes),
        capacity: Some(capacity.collect()),
        allow_multiple_allocations: Some(true),
        consumes_counters: Some(vec![possible.consumption(parent)]),
        taints: taints(parent.inventory, Tier::Capped, terms),
        ..Device::default()
    })
}

#[cfg(test)]
mod tests;
