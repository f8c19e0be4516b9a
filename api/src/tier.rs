//! The six isolation tiers: how a device is isolated from its neighbours, and what it may promise.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::DRIVER;

/// How a device is isolated from its neighbours. A DeviceClass selects a tier; a GPU serves one tier at a time.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The driver's time-slicing, without a cap on memory or compute.
    Timeshared,
    /// One MPS daemon per GPU, with limits for each client.
    Concurrent,
    /// The shim: a software cap on memory and compute that fails closed.
    Capped,
    /// A MIG instance.
    Partition,
    /// The whole GPU for one claim.
    Exclusive,
    /// The whole GPU for a virtual machine, by VFIO.
    Passthrough,
}

/// What isolates a share from its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// The hardware.
    Hardware,
    /// Software on the node.
    Software,
    /// Nothing.
    None,
}

impl Isolation {
    /// The attribute's value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Software => "software",
            Self::None => "none",
        }
    }
}

impl Tier {
    /// All tiers, weakest first. This is the only list: the schemas, the chart's classes and the plan of slices are
    /// generated from it, and all other lists are tested against it.
    pub const ALL: [Self; 6] = [
        Self::Timeshared,
        Self::Concurrent,
        Self::Capped,
        Self::Partition,
        Self::Exclusive,
        Self::Passthrough,
    ];

    /// Whether several claims can hold one device of the tier at a time.
    #[must_use]
    pub const fn is_shared(self) -> bool {
        match self {
            Self::Timeshared | Self::Concurrent | Self::Capped => true,
            Self::Partition | Self::Exclusive | Self::Passthrough => false,
        }
    }

    /// Whether the shim limits a share's memory.
    #[must_use]
    pub const fn has_shim(self) -> bool {
        matches!(self, Self::Concurrent | Self::Capped)
    }

    /// The attribute `isolation`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Timeshared => "timeshared",
            Self::Concurrent => "concurrent",
            Self::Capped => "capped",
            Self::Partition => "partition",
            Self::Exclusive => "exclusive",
            Self::Passthrough => "passthrough",
        }
    }

    /// The attribute `isolationLevel`, 1 to 6.
    #[must_use]
    pub const fn level(self) -> u8 {
        match self {
            Self::Timeshared => 1,
            Self::Concurrent => 2,
            Self::Capped => 3,
            Self::Partition => 4,
            Self::Exclusive => 5,
            Self::Passthrough => 6,
        }
    }

    /// The mechanism, for the reference page.
    #[must_use]
    pub const fn mechanism(self) -> &'static str {
        match self {
            Self::Timeshared => "the driver's time-slicing",
            Self::Concurrent => "MPS, and the shim's cap on the claim's sum",
            Self::Capped => "the shim",
            Self::Partition => "MIG",
            Self::Exclusive => "the whole GPU, one claim",
            Self::Passthrough => "the whole GPU to a virtual machine (VFIO)",
        }
    }

    /// The DeviceClass that selects this tier.
    #[must_use]
    pub fn class_name(self) -> String {
        format!("{}.{DRIVER}", self.as_str())
    }

    /// What limits the neighbours' use of memory.
    #[must_use]
    pub const fn memory_isolation(self) -> Isolation {
        match self {
            Self::Timeshared => Isolation::None,
            Self::Concurrent | Self::Capped => Isolation::Software,
            Self::Partition | Self::Exclusive | Self::Passthrough => Isolation::Hardware,
        }
    }

    /// What limits the neighbours' use of compute.
    #[must_use]
    pub const fn compute_isolation(self) -> Isolation {
        self.memory_isolation()
    }

    /// What isolates from a neighbour's fault. `software` means separate processes on a shared GPU.
    #[must_use]
    pub const fn fault_isolation(self) -> Isolation {
        match self {
            Self::Timeshared | Self::Capped => Isolation::Software,
            Self::Concurrent => Isolation::None,
            Self::Partition | Self::Exclusive | Self::Passthrough => Isolation::Hardware,
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Text that is not the name of a tier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown tier {0:?}: use one of passthrough, exclusive, partition, capped, concurrent, timeshared"
)]
pub struct UnknownTier(String);

impl FromStr for Tier {
    type Err = UnknownTier;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|tier| tier.as_str() == s)
            .ok_or_else(|| UnknownTier(s.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tier_is_read_back_from_its_name() {
        for tier in Tier::ALL {
            assert_eq!(tier.as_str().parse::<Tier>(), Ok(tier));
        }
    }

    #[test]
    fn levels_rank_the_tiers_as_their_order_does() {
        assert!(
            Tier::ALL
                .windows(2)
                .all(|w| w[0].level() < w[1].level() && w[0] < w[1])
        );
    }
}
