//! What claims hold of each GPU, and which other devices conflict with it.

use std::collections::BTreeMap;

use tranche_api::{Quantity, Tier};

use super::{Cap, PreparationPlan, PreparedDevice};
use crate::gpu_state::Place;
use crate::mig::Geometry;

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
        /// In which tier.
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
        /// In which tier.
        tier: Tier,
    },
    /// The shares' memory together exceeds the GPU's.
    #[error(
        "GPU {uuid}: the shares' memory would add up to {} of {}; held by {}",
        Quantity::from_bytes(*sum), Quantity::from_bytes(*available), holders.join(", ")
    )]
    Memory {
        /// The GPU.
        uuid: String,
        /// Bytes, with the new share.
        sum: u64,
        /// Bytes: total less what the driver reserves.
        available: u64,
        /// Who holds shares, `namespace/name`.
        holders: Vec<String>,
    },
    /// The shares' cores together exceed the GPU's.
    #[error("GPU {uuid}: the shares' cores would add up to {sum} of 100 percent; held by {}", holders.join(", "))]
    Cores {
        /// The GPU.
        uuid: String,
        /// Percent, with the new share.
        sum: u64,
        /// Who holds shares, `namespace/name`.
        holders: Vec<String>,
    },
    /// The partition takes slices or engines that others have.
    #[error(
        "GPU {uuid}: other claims' partitions leave no room for {} at memory slice {}; held by {}",
        place.profile, place.start, holders.join(", ")
    )]
    Slices {
        /// The GPU.
        uuid: String,
        /// The partition.
        place: Place,
        /// Who holds partitions, `namespace/name`.
        holders: Vec<String>,
    },
}

impl Conflict {
    /// The claims that hold the requested GPU, `namespace/name`.
    #[must_use]
    pub fn holders(&self) -> &[String] {
        match self {
            Self::Exclusive { holder, .. } | Self::OtherTier { holder, .. } => {
                std::slice::from_ref(holder)
            }
            Self::Memory { holders, .. }
            | Self::Cores { holders, .. }
            | Self::Slices { holders, .. } => holders,
        }
    }
}

/// What is held, by GPU UUID.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    gpus: BTreeMap<String, Held>,
}

#[derive(Debug)]
struct Held {
    tier: Tier,
    holders: Vec<String>,
    memory: u64,
    cores: u64,
    places: Vec<Place>,
}

/// All of a GPU.
#[derive(Debug)]
pub(super) struct Whole<'a> {
    /// Bytes that all shares can have together.
    pub(super) memory: u64,
    /// How MIG divides it; for a partition.
    pub(super) geometry: Option<&'a Geometry>,
}

impl Holdings {
    /// The sum of what the plans hold. They were checked when they were made.
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

    /// Adds a device if it does not conflict with what is held of its GPU.
    pub(super) fn add(
        &mut self,
        device: &PreparedDevice,
        holder: &str,
        whole: &Whole<'_>,
    ) -> Result<(), Conflict> {
        if device.admin_access {
            return Ok(());
        }
        let nothing = Held {
            tier: device.tier,
            holders: Vec::new(),
            memory: 0,
            cores: 0,
            places: Vec::new(),
        };
        let held = self.gpus.get(&device.gpu_uuid);
        held.unwrap_or(&nothing).goes_with(device, whole)?;
        self.record(device, holder);
        Ok(())
    }

    fn record(&mut self, device: &PreparedDevice, holder: &str) {
        let held = self
            .gpus
            .entry(device.gpu_uuid.clone())
            .or_insert_with(|| Held {
                tier: device.tier,
                holders: Vec::new(),
                memory: 0,
                cores: 0,
                places: Vec::new(),
            });
        let (memory, cores) = size(device);
        held.memory = held.memory.saturating_add(memory);
        held.cores += cores;
        held.places
            .extend(device.partition.as_ref().map(|it| it.place));
        if !held.holders.iter().any(|known| known == holder) {
            held.holders.push(holder.to_owned());
        }
    }
}

fn size(device: &PreparedDevice) -> (u64, u64) {
    match device.cap {
        Cap::None {} => (0, 0),
        Cap::Share { memory, cores, .. } => (memory, u64::from(cores)),
    }
}

impl Held {
    fn goes_with(&self, device: &PreparedDevice, whole: &Whole<'_>) -> Result<(), Conflict> {
        let uuid = device.gpu_uuid.clone();
        let tier = self.tier;
        let is_divided = tier == Tier::Partition && device.tier == Tier::Partition;
        if let Some(holder) = self.holders.first().cloned()
            && !is_divided
        {
            if !device.tier.is_shared() || !tier.is_shared() {
                return Err(Conflict::Exclusive { uuid, holder, tier });
            }
            if device.tier != tier {
                return Err(Conflict::OtherTier { uuid, holder, tier });
            }
        }
        if let Some(partition) = &device.partition
            && !self.leaves_room(partition.place, whole.geometry)
        {
            return Err(Conflict::Slices {
                uuid,
                place: partition.place,
                holders: self.holders.clone(),
            });
        }
        let (memory, cores) = size(device);
        let sum = self.memory.saturating_add(memory);
        if sum > whole.memory {
            return Err(Conflict::Memory {
                uuid,
                sum,
                available: whole.memory,
                holders: self.holders.clone(),
            });
        }
        let sum = self.cores + cores;
        if sum > 100 {
            return Err(Conflict::Cores {
                uuid,
                sum,
                holders: self.holders.clone(),
            });
        }
        Ok(())
    }

    /// Whether the GPU has `place` beside all that are held.
    fn leaves_room(&self, place: Place, geometry: Option<&Geometry>) -> bool {
        let Some(geometry) = geometry else {
            return false;
        };
        let places = self.places.iter().chain([&place]);
        let left = places.copied().try_fold(geometry.whole, |left, place| {
            left.less(geometry.partition(place.profile, place.start)?.slices)
        });
        left.is_some()
    }
}
