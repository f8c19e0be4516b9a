//! What is free of a GPU, and which part of that is stranded.

use std::collections::BTreeSet;

use serde::Serialize;
use tranche_api::gpu_node::{Gpu as Described, Inventory};
use tranche_driver::claim::DeviceName;
use tranche_driver::mig::{Geometry, Placement, Profile, Slices};
use tranche_driver::stranded::{self, Shares, SlicesLeft};

use k8s_openapi::api::resource::v1::Device;

use super::claims::ClaimDevice;
use super::devices::{for_shares, least_share};

/// What is free of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Room {
    /// No claim has any of it, and it is offered.
    All,
    /// Claims have all of it: one claim, or several without sizes.
    Nothing,
    /// Places without sizes.
    Places {
        /// Places that are free.
        free: u64,
        whole: u64,
    },
    /// Shares with sizes.
    Shares(SharesRoom),
    /// MIG slices.
    Slices(SlicesRoom),
    /// No claim has any of it, and it is not offered.
    NotOffered,
    /// The objects that were read do not tell.
    Unknown,
}

/// What is free of a device that claims share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SharesRoom {
    /// Memory for all shares together, bytes.
    pub memory: u64,
    /// The part that no share has.
    pub free_memory: u64,
    /// The free part that no further share can get.
    pub stranded_memory: u64,
    /// Cores for all shares together, percent.
    pub cores: u64,
    /// The part that no share has.
    pub free_cores: u64,
    /// The free part that no further share can get.
    pub stranded_cores: u64,
    /// Places for shares.
    pub places: u64,
    /// Places that are free.
    pub free_places: u64,
}

/// What is free of a GPU in partitions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicesRoom {
    /// Compute slices of the GPU.
    pub compute: u32,
    /// Compute slices that are free.
    pub free_compute: u32,
    /// Free slices that no further partition can get.
    pub stranded_compute: u32,
    /// Memory slices of the GPU.
    pub memory: u32,
    /// Memory slices that are free.
    pub free_memory: u32,
    /// Free slices that no further partition can get.
    pub stranded_memory: u32,
    /// The offered profiles for which one more partition fits, smallest first.
    pub fits: Vec<String>,
}

impl SharesRoom {
    /// What the allocated shares leave of a device; `None` for a device without sizes.
    pub(super) fn of<'a>(
        device: &Device,
        held: impl Iterator<Item = &'a ClaimDevice>,
    ) -> Option<Self> {
        let whole = for_shares(device)?;
        let held = held.fold(Shares::default(), |sum, share| Shares {
            memory: sum.memory.saturating_add(share.memory.unwrap_or_default()),
            cores: sum.cores.saturating_add(share.cores.unwrap_or_default()),
            sharers: sum.sharers + 1,
        });
        let left = stranded::of_shares(whole, held, least_share(device));
        Some(Self {
            memory: whole.memory,
            free_memory: left.free.memory,
            stranded_memory: left.stranded_memory,
            cores: whole.cores,
            free_cores: left.free.cores,
            stranded_cores: left.stranded_cores,
            places: whole.sharers,
            free_places: left.free.sharers,
        })
    }
}

impl SlicesRoom {
    /// What partitions leave of a GPU; `None` where its node does not say how MIG divides it, or where that contradicts the claims.
    pub(super) fn of(
        inventory: &Inventory,
        gpu: &Described,
        offered: &[(DeviceName, &Device)],
        held: &BTreeSet<Placement>,
    ) -> Option<Self> {
        let geometry = Geometry::read(inventory.mig_geometry(gpu)?).ok()?;
        // A partition that an administrator made stays, whether or not a claim has it.
        let made = gpu.mig_instances.iter().filter_map(Placement::of);
        let taken: BTreeSet<Placement> = held.iter().copied().chain(made).collect();
        let profiles: BTreeSet<Profile> = offered
            .iter()
            .filter_map(|(name, _)| name.placement().map(|placement| placement.profile))
            .collect();
        let left = stranded::of_partitions(&geometry, &profiles, &taken).ok()?;
        let free = stranded::free_beside(&geometry, &taken).ok()?;
        Some(Self::new(left, fits(&geometry, &profiles, free)))
    }

    fn new(left: SlicesLeft, fits: Vec<String>) -> Self {
        Self {
            compute: left.whole.compute,
            free_compute: left.free.compute,
            stranded_compute: left.stranded.compute,
            memory: left.whole.memory,
            free_memory: left.free.memory,
            stranded_memory: left.stranded.memory,
            fits,
        }
    }
}

/// The offered profiles for which one more partition fits, in the order of `offered`.
fn fits(geometry: &Geometry, offered: &BTreeSet<Profile>, free: Slices) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for partition in &geometry.partitions {
        let name = partition.profile.to_string();
        let is_offered = offered.is_empty() || offered.contains(&partition.profile);
        if is_offered && free.less(partition.slices).is_some() && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}
