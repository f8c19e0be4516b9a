//! The names of our devices.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tranche_api::Tier;

use crate::gpu::UuidPrefix;
use crate::mig::{Placement, Profile};
use crate::oversubscription::Oversubscription;

/// A device's name in our slices: a DNS label.
///
/// ```text
///  gpu-4d8c1f9e                  the whole GPU, exclusive
///  gpu-4d8c1f9e-capped           the whole GPU in another tier
///  gpu-4d8c1f9e-capped-200       the whole GPU in capped shares, with twice its memory
///  gpu-4d8c1f9e-mig-1g10gb-0     a partition: a MIG profile and the memory slice where it begins
///  gpu-4d8c1f9e-capped-3g40gb-4  a partition in capped shares
///  gpu-4d8c1f9e-mps-3g40gb-4     a partition in concurrent shares: its tier's name would be too long
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceName {
    /// A whole GPU in a tier.
    Gpu {
        /// The first digits of its UUID.
        gpu: UuidPrefix,
        /// How it is offered.
        tier: WholeGpuTier,
    },
    /// A whole GPU in capped shares that have more memory together than the GPU.
    Oversubscribed {
        /// The first digits of its UUID.
        gpu: UuidPrefix,
        /// How much more.
        over: Oversubscription,
    },
    /// A MIG instance, existing or possible.
    Partition {
        /// The first digits of the GPU's UUID.
        gpu: UuidPrefix,
        /// Its profile.
        profile: Profile,
        /// The first of its memory slices.
        start: u8,
    },
    /// A MIG instance, existing or possible, that several claims share.
    SharedPartition {
        /// The first digits of the GPU's UUID.
        gpu: UuidPrefix,
        /// How it is shared.
        tier: PartitionTier,
        /// Its profile.
        profile: Profile,
        /// The first of its memory slices.
        start: u8,
    },
}

/// A tier that takes a GPU as a whole: every tier but [`Tier::Partition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WholeGpuTier {
    /// [`Tier::Timeshared`].
    Timeshared,
    /// [`Tier::Concurrent`].
    Concurrent,
    /// [`Tier::Capped`].
    Capped,
    /// [`Tier::Exclusive`].
    Exclusive,
    /// [`Tier::Passthrough`].
    Passthrough,
}

/// A tier in which several claims share a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PartitionTier {
    /// [`Tier::Capped`].
    Capped,
    /// [`Tier::Concurrent`].
    Concurrent,
}

/// A name that is not one of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a device name: ours are gpu-<first digits of the UUID>, gpu-<…>-<tier>, gpu-<…>-capped-<percent>, gpu-<…>-mig-<profile>-<start> and gpu-<…>-<tier>-<profile>-<start>"
)]
pub struct DeviceNameError(String);

impl WholeGpuTier {
    /// `None` for [`Tier::Partition`].
    #[must_use]
    pub const fn new(tier: Tier) -> Option<Self> {
        match tier {
            Tier::Timeshared => Some(Self::Timeshared),
            Tier::Concurrent => Some(Self::Concurrent),
            Tier::Capped => Some(Self::Capped),
            Tier::Exclusive => Some(Self::Exclusive),
            Tier::Passthrough => Some(Self::Passthrough),
            Tier::Partition => None,
        }
    }

    /// The tier.
    #[must_use]
    pub const fn tier(self) -> Tier {
        match self {
            Self::Timeshared => Tier::Timeshared,
            Self::Concurrent => Tier::Concurrent,
            Self::Capped => Tier::Capped,
            Self::Exclusive => Tier::Exclusive,
            Self::Passthrough => Tier::Passthrough,
        }
    }
}

impl PartitionTier {
    const ALL: [Self; 2] = [Self::Capped, Self::Concurrent];

    /// Its word in the names of devices. It is short, so that the longest name of a partition is a DNS label.
    const fn label(self) -> &'static str {
        match self {
            Self::Capped => "capped",
            Self::Concurrent => "mps",
        }
    }

    fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.label() == label)
    }

    /// The tier.
    #[must_use]
    pub const fn tier(self) -> Tier {
        match self {
            Self::Capped => Tier::Capped,
            Self::Concurrent => Tier::Concurrent,
        }
    }
}

impl DeviceName {
    /// The tier in which a claim gets the device of this name.
    #[must_use]
    pub const fn tier(self) -> Tier {
        match self {
            Self::Gpu { tier, .. } => tier.tier(),
            Self::Oversubscribed { .. } => Tier::Capped,
            Self::Partition { .. } => Tier::Partition,
            Self::SharedPartition { tier, .. } => tier.tier(),
        }
    }

    /// The tier that the GPU itself serves while a claim holds the device: [`Tier::Partition`] also if claims share a
    /// partition.
    #[must_use]
    pub const fn gpu_tier(self) -> Tier {
        match self.placement() {
            Some(_) => Tier::Partition,
            None => self.tier(),
        }
    }

    /// The partition that the device is, or is shares of.
    #[must_use]
    pub const fn placement(self) -> Option<Placement> {
        match self {
            Self::Partition { profile, start, .. }
            | Self::SharedPartition { profile, start, .. } => Some(Placement { start, profile }),
            Self::Gpu { .. } | Self::Oversubscribed { .. } => None,
        }
    }

    /// How much more memory the device's shares have together than the GPU; `None` where they have no more.
    #[must_use]
    pub const fn oversubscription(self) -> Option<Oversubscription> {
        match self {
            Self::Oversubscribed { over, .. } => Some(over),
            _ => None,
        }
    }
}

impl fmt::Display for WholeGpuTier {
    /// The part of the device's name after the GPU.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => Ok(()),
            shown => write!(f, "-{}", shown.tier()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu { gpu, tier } => write!(f, "gpu-{gpu}{tier}"),
            Self::Oversubscribed { gpu, over } => {
                write!(f, "gpu-{gpu}{}-{}", WholeGpuTier::Capped, over.percent())
            }
            Self::Partition {
                gpu,
                profile,
                start,
            } => write!(f, "gpu-{gpu}-mig-{}-{start}", profile.label()),
            Self::SharedPartition {
                gpu,
                tier,
                profile,
                start,
            } => write!(f, "gpu-{gpu}-{}-{}-{start}", tier.label(), profile.label()),
        }
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for DeviceName {
    type Error = DeviceNameError;

    fn try_from(text: String) -> Result<Self, DeviceNameError> {
        text.parse()
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    fn from_str(text: &str) -> Result<Self, DeviceNameError> {
        read(text)
            // One spelling per device: no sign, no leading zero, no `-exclusive`.
            .filter(|name| name.to_string() == text)
            .ok_or_else(|| DeviceNameError(text.to_owned()))
    }
}

fn read(text: &str) -> Option<DeviceName> {
    let rest = text.strip_prefix("gpu-")?;
    let (gpu, kind) = match rest.split_once('-') {
        Some((gpu, kind)) => (gpu, Some(kind)),
        None => (rest, None),
    };
    let gpu = UuidPrefix::parse(gpu)?;
    if let Some((kind, what)) = kind.and_then(|kind| kind.split_once('-')) {
        let Some((profile, start)) = what.rsplit_once('-') else {
            let is_capped = kind == Tier::Capped.as_str();
            let over = Oversubscription::new(what.parse().ok()?).filter(|_| is_capped)?;
            return Some(DeviceName::Oversubscribed { gpu, over });
        };
        let profile = Profile::from_label(profile)?;
        let start = start.parse().ok()?;
        if kind == "mig" {
            return Some(DeviceName::Partition {
                gpu,
                profile,
                start,
            });
        }
        return Some(DeviceName::SharedPartition {
            gpu,
            tier: PartitionTier::from_label(kind)?,
            profile,
            start,
        });
    }
    let tier = kind.map_or(Some(Tier::Exclusive), |word| word.parse().ok())?;
    let tier = WholeGpuTier::new(tier)?;
    Some(DeviceName::Gpu { gpu, tier })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mig::any_profile;

    #[test]
    fn names_say_what_they_mean() {
        let gpu = UuidPrefix::parse("4d8c1f9e").unwrap();
        let tier = |tier| WholeGpuTier::new(tier).unwrap();
        for (text, name) in [
            (
                "gpu-4d8c1f9e",
                DeviceName::Gpu {
                    gpu,
                    tier: tier(Tier::Exclusive),
                },
            ),
            (
                "gpu-4d8c1f9e-capped",
                DeviceName::Gpu {
                    gpu,
                    tier: tier(Tier::Capped),
                },
            ),
            (
                "gpu-4d8c1f9e-capped-250",
                DeviceName::Oversubscribed {
                    gpu,
                    over: Oversubscription::new(250).unwrap(),
                },
            ),
            (
                "gpu-4d8c1f9e-mig-1g10gb-me-6",
                DeviceName::Partition {
                    gpu,
                    profile: "1g.10gb+me".parse().unwrap(),
                    start: 6,
                },
            ),
            (
                "gpu-4d8c1f9e-capped-1g10gb-me-6",
                DeviceName::SharedPartition {
                    gpu,
                    tier: PartitionTier::Capped,
                    profile: "1g.10gb+me".parse().unwrap(),
                    start: 6,
                },
            ),
            (
                "gpu-4d8c1f9e-mps-3g40gb-4",
                DeviceName::SharedPartition {
                    gpu,
                    tier: PartitionTier::Concurrent,
                    profile: "3g.40gb".parse().unwrap(),
                    start: 4,
                },
            ),
        ] {
            assert_eq!(text.parse(), Ok(name));
            assert_eq!(name.to_string(), text);
        }
    }

    #[test]
    fn names_of_others_are_refused() {
        for text in [
            "",
            "gpu",
            "gpu-",
            "gpu-x",
            "gpu-00",
            "gpu-+1",
            "gpu--1",
            "gpu-1-",
            "gpu-0",
            "gpu-10-timeshared",
            "gpu-4d8c1f9",
            "gpu-4D8C1F9E",
            "gpu-4d8c1f9e-Capped",
            "gpu-4d8c1f9e-exclusive",
            "gpu-4d8c1f9e-partition",
            "gpu-4d8c1f9e-capped-",
            "gpu-4d8c1f9e2b4a4f0e9c390f6c1a3c5b7d0",
            "gpu-4d8c1f9e-mig-1g10gb",
            "gpu-4d8c1f9e-mig-1g.10gb-0",
            "gpu-4d8c1f9e-mig-1g10gb-00",
            "gpu-4d8c1f9e-mig-1g10gb-256",
            "gpu-4d8c1f9e-mig-1g10gb-0-capped",
            "gpu-4d8c1f9e-capped-100",
            "gpu-4d8c1f9e-capped-0200",
            "gpu-4d8c1f9e-capped-401",
            "gpu-4d8c1f9e-concurrent-200",
            "gpu-0-capped-200",
            "gpu-4d8c1f9e-capped-1g10gb",
            "gpu-4d8c1f9e-capped-1g10gb-00",
            "gpu-4d8c1f9e-exclusive-1g10gb-0",
            "gpu-4d8c1f9e-timeshared-1g10gb-0",
            "gpu-4d8c1f9e-concurrent-1g10gb-0",
            "gpu-4d8c1f9e-mps",
            "gpu-0-capped-1g10gb-0",
            "mig-0",
            "gpu-0-mig-1g10gb-0",
            "gpu-0-mig-1g10gb-19-0",
        ] {
            let refused = text.parse::<DeviceName>();
            assert_eq!(refused, Err(DeviceNameError(text.to_owned())));
        }
    }

    fn any_name() -> impl Strategy<Value = DeviceName> {
        let gpu = "[0-9a-f]{8,32}".prop_map(|digits| UuidPrefix::parse(&digits).unwrap());
        let tiers: Vec<_> = Tier::ALL
            .into_iter()
            .filter_map(WholeGpuTier::new)
            .collect();
        let tier = prop::sample::select(tiers);
        prop_oneof![
            (gpu.clone(), tier).prop_map(|(gpu, tier)| DeviceName::Gpu { gpu, tier }),
            (gpu.clone(), 101..=400_u32).prop_map(|(gpu, percent)| {
                let over = Oversubscription::new(percent).unwrap();
                DeviceName::Oversubscribed { gpu, over }
            }),
            (gpu.clone(), any_profile(), any::<u8>()).prop_map(|(gpu, profile, start)| {
                DeviceName::Partition {
                    gpu,
                    profile,
                    start,
                }
            }),
            // At most 7 compute slices, 999 GB and 32 memory slices; the name must have room for each number.
            (gpu, any::<bool>(), any_profile(), 0..32_u8).prop_map(
                |(gpu, is_capped, mut profile, start)| {
                    profile.compute_slices = profile.compute_slices % 9 + 1;
                    profile.memory_gb = profile.memory_gb % 999 + 1;
                    DeviceName::SharedPartition {
                        gpu,
                        tier: if is_capped {
                            PartitionTier::Capped
                        } else {
                            PartitionTier::Concurrent
                        },
                        profile,
                        start,
                    }
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn every_name_is_read_back_and_is_a_dns_label(name in any_name()) {
            let text = name.to_string();
            prop_assert_eq!(text.parse(), Ok(name));
            // RFC 1123, as the API server validates names of devices.
            prop_assert!(text.len() <= 63, "{}", text);
            prop_assert!(text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
            prop_assert!(!text.ends_with('-'));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".*", tail in "gpu-([0-9a-f]{8,12}-)?(mig-[0-9]g[0-9]{1,3}gb)?[0-9a-z-]{0,20}") {
            let _ = text.parse::<DeviceName>();
            if let Ok(name) = tail.parse::<DeviceName>() {
                prop_assert_eq!(name.to_string(), tail);
            }
        }
    }
}
