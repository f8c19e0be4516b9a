//! What claims hold of each GPU, and which other devices conflict with it.

use std::collections::BTreeMap;

use tranche_api::{Quantity, Tier};

use super::{Cap, PreparationPlan, PreparedDevice};
use crate::mig::{Geometry, Placement};

/// Why a device conflicts with what is already held. Admin access never conflicts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// One of the two devices is exclusive.
    #[error(
        "GPU {uuid} is held by claim {holder} in the tier {tier}, and an exclusive device cannot be shared: wait until that claim is released"
    )]
    Exclusive {
        /// The GPU.
        uuid: String,
        /// The claim that holds it, `namespace/name`.
        holder: String,
        /// The tier.
        tier: Tier,
    },
    /// One GPU serves one tier at a time.
    #[error(
        "GPU {uuid} is held by claim {holder} in the tier {tier}: wait until that claim is released"
    )]
    OtherTier {
        /// The GPU.
        uuid: String,
        /// The claim that holds it, `namespace/name`.
        holder: String,
        /// The tier.
        tier: Tier,
    },
    /// The parts of the shares' memory that must be on the GPU together exceed the memory of the GPU, or of the
    /// partition.
    #[error(
        "{}GPU {uuid}: the shares' memory would add up to {} of {}; held by {}",
        of.map(partition_of).unwrap_or_default(),
        Quantity::from_bytes(*sum), Quantity::from_bytes(*available), holders.join(", ")
    )]
    Memory {
        /// The partition of which they are shares.
        of: Option<Placement>,
        /// The GPU.
        uuid: String,
        /// Bytes, with the new share.
        sum: u64,
        /// Bytes: total less what the driver reserves.
        available: u64,
        /// Who holds shares, `namespace/name`.
        holders: Vec<String>,
    },
    /// The shares' cores together exceed the GPU's, or the partition's.
    #[error(
        "{}GPU {uuid}: the shares' cores would add up to {sum} of 100 percent; held by {}",
        of.map(partition_of).unwrap_or_default(), holders.join(", ")
    )]
    Cores {
        /// The partition of which they are shares.
        of: Option<Placement>,
        /// The GPU.
        uuid: String,
        /// Percent, with the new share.
        sum: u64,
        /// Who holds shares, `namespace/name`.
        holders: Vec<String>,
    },
    /// Another claim has the whole partition, or shares of it in another tier.
    #[error(
        "{}GPU {uuid} is held by claim {holder} in the tier {tier}: wait until that claim is released",
        partition_of(*placement)
    )]
    SamePartition {
        /// The GPU.
        uuid: String,
        /// The partition.
        placement: Placement,
        /// The claim that holds it, `namespace/name`.
        holder: String,
        /// The tier.
        tier: Tier,
    },
    /// The partition needs slices or engines that others have.
    #[error(
        "GPU {uuid}: other claims' partitions leave no room for {placement}; held by {}",
        holders.join(", ")
    )]
    Slices {
        /// The GPU.
        uuid: String,
        /// The partition.
        placement: Placement,
        /// Who holds partitions, `namespace/name`.
        holders: Vec<String>,
    },
}

impl Conflict {
    /// The claims that hold the requested GPU, `namespace/name`.
    #[must_use]
    pub fn holders(&self) -> &[String] {
        match self {
            Self::Exclusive { holder, .. }
            | Self::OtherTier { holder, .. }
            | Self::SamePartition { holder, .. } => std::slice::from_ref(holder),
            Self::Memory { holders, .. }
            | Self::Cores { holders, .. }
            | Self::Slices { holders, .. } => holders,
        }
    }
}

/// The text that names a partition before its GPU.
pub(super) fn partition_of(placement: Placement) -> String {
    format!("{placement} of ")
}

/// What is held, by GPU UUID.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    gpus: BTreeMap<String, GpuHoldings>,
}

/// What is held of a GPU.
#[derive(Debug)]
struct GpuHoldings {
    /// The tier that the GPU itself serves.
    tier: Tier,
    holders: Vec<String>,
    shares: Shares,
    placements: BTreeMap<Placement, PartitionHoldings>,
}

/// What is held of a partition.
#[derive(Debug)]
struct PartitionHoldings {
    /// The tier in which claims hold it.
    tier: Tier,
    holders: Vec<String>,
    shares: Shares,
}

/// The sum of shares.
#[derive(Debug, Default)]
struct Shares {
    /// Bytes that must lie on the GPU.
    memory: u64,
    /// Percent.
    cores: u64,
}

/// What a device has in total.
#[derive(Debug)]
pub(super) struct Total<'a> {
    /// Bytes that all shares of the device can have together: the GPU's, or its partition's.
    pub(super) memory: u64,
    /// How MIG divides it; for a partition.
    pub(super) geometry: Option<&'a Geometry>,
}

impl Holdings {
    /// The sum of what the plans hold. They were checked when they were created.
    pub(super) fn of<'a>(plans: impl Iterator<Item = &'a PreparationPlan>) -> Self {
        let mut holdings = Self::default();
        for plan in plans {
            let holder = format!("{}/{}", plan.allocation.namespace, plan.allocation.name);
            for device in plan.devices.iter().filter(|device| !device.admin_access) {
                holdings.record(device, &holder);
            }
        }
        holdings
    }

    /// Adds a device if it does not conflict with what is held on its GPU.
    pub(super) fn add(
        &mut self,
        device: &PreparedDevice,
        holder: &str,
        total: &Total<'_>,
    ) -> Result<(), Conflict> {
        if device.admin_access {
            return Ok(());
        }
        let nothing = GpuHoldings::none(device);
        let held = self.gpus.get(&device.gpu_uuid);
        held.unwrap_or(&nothing).goes_with(device, total)?;
        self.record(device, holder);
        Ok(())
    }

    fn record(&mut self, device: &PreparedDevice, holder: &str) {
        let held = self
            .gpus
            .entry(device.gpu_uuid.clone())
            .or_insert_with(|| GpuHoldings::none(device));
        note(&mut held.holders, holder);
        let Some(partition) = &device.partition else {
            held.shares.add(device);
            return;
        };
        let placement = held
            .placements
            .entry(partition.placement)
            .or_insert_with(|| PartitionHoldings {
                tier: device.tier,
                holders: Vec::new(),
                shares: Shares::default(),
            });
        note(&mut placement.holders, holder);
        placement.shares.add(device);
    }
}

fn note(holders: &mut Vec<String>, holder: &str) {
    if !holders.iter().any(|known| known == holder) {
        holders.push(holder.to_owned());
    }
}

fn size(device: &PreparedDevice) -> (u64, u64) {
    match device.cap {
        Cap::None {} => (0, 0),
        Cap::Share { cores, .. } => (device.cap.on_gpu(), u64::from(cores)),
    }
}

impl Shares {
    fn add(&mut self, device: &PreparedDevice) {
        let (memory, cores) = size(device);
        self.memory = self.memory.saturating_add(memory);
        self.cores += cores;
    }

    /// Refuses a share for which the held shares leave no room.
    fn leave_room(
        &self,
        device: &PreparedDevice,
        available: u64,
        holders: &[String],
    ) -> Result<(), Conflict> {
        let (uuid, holders) = (device.gpu_uuid.clone(), holders.to_vec());
        let of = device.partition.as_ref().map(|it| it.placement);
        let (memory, cores) = size(device);
        let sum = self.memory.saturating_add(memory);
        if sum > available {
            return Err(Conflict::Memory {
                of,
                uuid,
                sum,
                available,
                holders,
            });
        }
        let sum = self.cores + cores;
        if sum > 100 {
            return Err(Conflict::Cores {
                of,
                uuid,
                sum,
                holders,
            });
        }
        Ok(())
    }
}

impl GpuHoldings {
    /// The empty state of a GPU that is about to serve a device.
    fn none(device: &PreparedDevice) -> Self {
        Self {
            tier: device.gpu_tier(),
            holders: Vec::new(),
            shares: Shares::default(),
            placements: BTreeMap::new(),
        }
    }

    fn goes_with(&self, device: &PreparedDevice, total: &Total<'_>) -> Result<(), Conflict> {
        let (tier, wanted) = (self.tier, device.gpu_tier());
        let is_divided = tier == Tier::Partition && wanted == Tier::Partition;
        if let Some(holder) = self.holders.first().cloned()
            && !is_divided
        {
            let uuid = device.gpu_uuid.clone();
            if !wanted.is_shared() || !tier.is_shared() {
                return Err(Conflict::Exclusive { uuid, holder, tier });
            }
            if wanted != tier {
                return Err(Conflict::OtherTier { uuid, holder, tier });
            }
        }
        match &device.partition {
            Some(partition) => self.placement_goes_with(device, partition.placement, total),
            None => self.shares.leave_room(device, total.memory, &self.holders),
        }
    }

    fn placement_goes_with(
        &self,
        device: &PreparedDevice,
        placement: Placement,
        total: &Total<'_>,
    ) -> Result<(), Conflict> {
        let uuid = device.gpu_uuid.clone();
        let Some(held) = self.placements.get(&placement) else {
            if !self.leaves_room(placement, total.geometry) {
                let holders = self.holders.clone();
                return Err(Conflict::Slices {
                    uuid,
                    placement,
                    holders,
                });
            }
            return Shares::default().leave_room(device, total.memory, &[]);
        };
        if held.tier != device.tier || !held.tier.is_shared() {
            return Err(Conflict::SamePartition {
                uuid,
                placement,
                holder: held.holders.first().cloned().unwrap_or_default(),
                tier: held.tier,
            });
        }
        held.shares.leave_room(device, total.memory, &held.holders)
    }

    /// Whether the GPU has room for `place` beside everything that is held.
    fn leaves_room(&self, placement: Placement, geometry: Option<&Geometry>) -> bool {
        let Some(geometry) = geometry else {
            return false;
        };
        let mut placements = self.placements.keys().copied().chain([placement]);
        let left = placements.try_fold(geometry.whole, |left, placement| {
            left.less(geometry.partition(placement)?.slices)
        });
        left.is_some()
    }
}
