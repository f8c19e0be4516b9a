//! Partitions of a GPU that several claims share.
//!
//! A partition is a device of its own in each tier in which it is shared, beside the exclusive device. All of these
//! devices consume the same counters, so the first allocation decides which tier the partition serves.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

use super::partition::{Possible, geometry, possible};
use super::{Memory, OfferError, Parent, isolation, sized, taints};
use crate::claim::{DeviceName, PartitionTier};
use crate::mig::Profile;
use crate::policy::Terms;

/// The tiers, in the order in which the scheduler tries them.
const ORDER: [PartitionTier; 2] = [PartitionTier::Capped, PartitionTier::Concurrent];

/// How partitions are shared in a tier.
#[derive(Clone, Copy)]
struct Sharing<'a> {
    tier: PartitionTier,
    /// Those that are shared.
    profiles: &'a BTreeSet<Profile>,
    /// The most claims.
    sharers: u32,
}

impl<'a> Sharing<'a> {
    /// `None` if no partition is shared in the tier.
    fn of(tier: PartitionTier, terms: &'a Terms) -> Option<Self> {
        let (profiles, sharers) = match tier {
            PartitionTier::Capped => (&terms.capped.on_partitions, terms.capped.max_sharers),
            PartitionTier::Concurrent => {
                (&terms.concurrent_on_partitions, terms.concurrent_sharers)
            }
        };
        let is_offered = terms.tiers.contains(&tier.tier()) && !profiles.is_empty();
        is_offered.then_some(Self {
            tier,
            profiles,
            sharers,
        })
    }
}

/// The shared partitions under which a GPU is offered, in the order in which the scheduler tries them, and why others
/// are not. `common` are the attributes of the GPU.
pub(super) fn of_gpu(
    parent: &Parent<'_>,
    terms: &Terms,
    common: &BTreeMap<String, DeviceAttribute>,
) -> (Vec<Device>, Vec<(PartitionTier, OfferError)>) {
    let (mut devices, mut refused) = (Vec::new(), Vec::new());
    for tier in ORDER {
        if let Some(sharing) = Sharing::of(tier, terms) {
            let (offered, errors) = in_tier(sharing, parent, terms, common);
            devices.extend(offered);
            refused.extend(errors.into_iter().map(|error| (tier, error)));
        }
    }
    (devices, refused)
}

fn in_tier(
    sharing: Sharing<'_>,
    parent: &Parent<'_>,
    terms: &Terms,
    common: &BTreeMap<String, DeviceAttribute>,
) -> (Vec<Device>, Vec<OfferError>) {
    let Sharing { tier, profiles, .. } = sharing;
    let (mut devices, mut refused) = (Vec::new(), Vec::new());
    let partitions = geometry(parent).and_then(|geometry| match geometry {
        None => Ok(Vec::new()),
        Some(geometry) => {
            let mut all = geometry.partitions.iter();
            if !all.any(|it| profiles.contains(&it.profile)) {
                return Err(OfferError::no_profile(tier.tier(), profiles, geometry));
            }
            possible(parent.gpu, geometry)
        }
    });
    let partitions = partitions.unwrap_or_else(|error| {
        refused.push(error);
        Vec::new()
    });
    let mut last = None;
    for possible in partitions {
        let profile = possible.partition.profile;
        if !profiles.contains(&profile) {
            continue;
        }
        match device(sharing, parent, &possible, terms, common) {
            Ok(device) => devices.push(device),
            // The placements of a profile are adjacent in the list and all have the same memory.
            Err(_) if last == Some(profile) => {}
            Err(error) => refused.push(OfferError::OnPartition {
                profile,
                error: Box::new(error),
            }),
        }
        last = Some(profile);
    }
    (devices, refused)
}

fn device(
    sharing: Sharing<'_>,
    parent: &Parent<'_>,
    possible: &Possible<'_>,
    terms: &Terms,
    common: &BTreeMap<String, DeviceAttribute>,
) -> Result<Device, OfferError> {
    let partition = possible.partition;
    let name = DeviceName::SharedPartition {
        gpu: parent.prefix,
        tier: sharing.tier,
        profile: partition.profile,
        start: partition.start,
    };
    let memory = Memory {
        total: partition.memory,
        reserved: partition.memory - partition.available_memory(),
    };
    let capacity = sized(&terms.capped, sharing.sharers, None, &memory)?
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value));
    let tier = sharing.tier.tier();
    let mut attributes = possible.attributes(parent, common)?;
    // The isolation between the shares: hardware isolates the partition from others, but not its shares from each
    // other.
    attributes.extend(isolation(tier));
    Ok(Device {
        name: name.to_string(),
        attributes: Some(attributes),
        capacity: Some(capacity.collect()),
        allow_multiple_allocations: Some(true),
        consumes_counters: Some(vec![possible.consumption(parent)]),
        taints: taints(parent.inventory, tier, terms),
        ..Device::default()
    })
}

#[cfg(test)]
mod tests;
