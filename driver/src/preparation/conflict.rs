//! What claims hold of each GPU, and which other devices conflict with it.

use std::collections::BTreeMap;

use tranche_api::{Quantity, Tier};

use super::{Cap, PreparationPlan, PreparedDevice};

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
}

impl Conflict {
    /// The claims that hold the requested GPU, `namespace/name`.
    #[must_use]
    pub fn holders(&self) -> &[String] {
        match self {
            Self::Exclusive { holder, .. } | Self::OtherTier { holder, .. } => {
                std::slice::from_ref(holder)
            }
            Self::Memory { holders, .. } | Self::Cores { holders, .. } => holders,
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

    /// Adds a device if it does not conflict with what is held of its GPU; all shares of the GPU
    /// can have `available` bytes together.
    pub(super) fn add(
        &mut self,
        device: &PreparedDevice,
        holder: &str,
        available: u64,
    ) -> Result<(), Conflict> {
        if device.admin_access {
            return Ok(());
        }
        if let Some(held) = self.gpus.get(&device.gpu_uuid) {
            held.goes_with(device, available)?;
        }
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
            });
        let (memory, cores) = size(device);
        held.memory = held.memory.saturating_add(memory);
        held.cores += cores;
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
    fn goes_with(&self, device: &PreparedDevice, available: u64) -> Result<(), Conflict> {
        let uuid = device.gpu_uuid.clone();
        let holder = self.holders.first().cloned().unwrap_or_default();
        let tier = self.tier;
        if !device.tier.is_shared() || !tier.is_shared() {
            return Err(Conflict::Exclusive { uuid, holder, tier });
        }
        if device.tier != tier {
            return Err(Conflict::OtherTier { uuid, holder, tier });
        }
        let (memory, cores) = size(device);
        let sum = self.memory.saturating_add(memory);
        if sum > available {
            return Err(Conflict::Memory {
                uuid,
                sum,
                available,
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
}
