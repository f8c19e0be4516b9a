//! Priorities of capped shares: whose launches come first on a GPU or partition, and its load page.
//!
//! The load page belongs to the GPU or partition and not to one claim, so it is no step of a claim's plan: it exists
//! while a share of the GPU has a priority.

use serde::{Deserialize, Serialize};
use tranche_api::share_config::ComputePriority;
use tranche_api::sharing_policy::LOW_PRIORITY_FLOOR;

use super::{Cap, PreparationPlan, PreparedDevice, steps};

/// Whose launches come first on a GPU or partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Priority {
    /// It neither waits for other shares' work nor lets them wait.
    #[default]
    Normal,
    /// While it has work, shares with low priority launch no more than their floor.
    High,
    /// It waits while shares with high priority have work.
    Low {
        /// Percent of its cores that it keeps meanwhile, 0 to 100.
        floor: u8,
    },
}

impl Priority {
    /// What a claim asks for, with the default floor.
    pub(super) fn asked(priority: ComputePriority) -> Self {
        match priority {
            ComputePriority::High => Self::High,
            ComputePriority::Normal => Self::Normal,
            ComputePriority::Low => Self::Low {
                floor: percent(LOW_PRIORITY_FLOOR),
            },
        }
    }

    /// Whether it is normal.
    #[must_use]
    pub const fn is_normal(&self) -> bool {
        matches!(self, Self::Normal)
    }
}

/// A number that should be a percentage, at most 100.
fn percent(number: u32) -> u8 {
    u8::try_from(number.min(100)).unwrap_or(100)
}

impl Cap {
    /// Whose launches come first.
    #[must_use]
    pub const fn priority(self) -> Priority {
        match self {
            Self::None {} => Priority::Normal,
            Self::Share { priority, .. } => priority,
        }
    }
}

impl PreparedDevice {
    /// The UUID of the GPU or MIG device whose load page its containers have; `None` without a priority, and before the
    /// MIG device is known.
    #[must_use]
    pub fn load_page(&self) -> Option<&str> {
        let is_known = self.partition.as_ref().is_none_or(|it| it.mig.is_some());
        (!self.cap.priority().is_normal() && is_known).then(|| self.uuid())
    }

    /// Whether it has, or will have, the load page of another device, which has one.
    #[must_use]
    pub fn shares_load_page(&self, other: &Self) -> bool {
        let placement = |device: &Self| device.partition.as_ref().map(|it| it.placement);
        !self.cap.priority().is_normal()
            && self.gpu_uuid == other.gpu_uuid
            && placement(self) == placement(other)
    }
}

impl PreparationPlan {
    /// The plan with the floors that the policies set for its shares of low priority, in percent of their cores, by GPU.
    #[must_use]
    pub fn with_floors(mut self, of_gpu: impl Fn(&str) -> u32) -> Self {
        for device in &mut self.devices {
            if let Cap::Share {
                priority: Priority::Low { floor },
                ..
            } = &mut device.cap
            {
                *floor = percent(of_gpu(&device.gpu_uuid));
            }
        }
        // The cap pages repeat it.
        self.steps = steps(&self.devices);
        self
    }
}
