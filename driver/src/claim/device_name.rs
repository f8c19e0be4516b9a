//! The names of our devices.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tranche_api::Tier;

/// A device's name in our slices: `gpu-<minor>`, or `gpu-<minor>-<tier>` where it is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceName {
    minor: u32,
    tier: Tier,
}

/// A name that is none of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceNameError {
    /// Another driver's, or a typing error.
    #[error("{0:?} is no device name: ours are gpu-<minor> and gpu-<minor>-<tier>")]
    Unknown(String),
    /// The tier comes later.
    #[error("{name:?} is of the tier {tier}, which this version does not serve")]
    Unserved {
        /// The name.
        name: String,
        /// The tier in it.
        tier: Tier,
    },
}

impl DeviceName {
    /// The name under which the GPU `minor` is offered in `tier`.
    ///
    /// `None` for a tier that this version does not serve.
    #[must_use]
    pub const fn new(minor: u32, tier: Tier) -> Option<Self> {
        if tier.is_served() {
            Some(Self { minor, tier })
        } else {
            None
        }
    }

    /// The N of `/dev/nvidiaN`.
    #[must_use]
    pub const fn minor(self) -> u32 {
        self.minor
    }

    /// The tier in which the GPU is offered under this name.
    #[must_use]
    pub const fn tier(self) -> Tier {
        self.tier
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tier {
            Tier::Exclusive => write!(f, "gpu-{}", self.minor),
            tier => write!(f, "gpu-{}-{tier}", self.minor),
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
        let unknown = || DeviceNameError::Unknown(text.to_owned());
        let rest = text.strip_prefix("gpu-").ok_or_else(unknown)?;
        let (minor, tier) = match rest.split_once('-') {
            Some((minor, word)) => {
                let tier = word.parse::<Tier>().map_err(|_| unknown())?;
                if tier == Tier::Exclusive {
                    return Err(unknown());
                }
                (minor, tier)
            }
            None => (rest, Tier::Exclusive),
        };
        let minor: u32 = minor
            .parse()
            .ok()
            // One spelling per device: no sign, no leading zero.
            .filter(|number: &u32| number.to_string() == minor)
            .ok_or_else(unknown)?;
        Self::new(minor, tier).ok_or_else(|| DeviceNameError::Unserved {
            name: text.to_owned(),
            tier,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
            "gpu-0-Capped",
            "gpu-0-exclusive",
            "gpu-0-capped-",
            "gpu-4294967296",
            "mig-0",
            "gpu-0-mig-1g10gb-19-0",
        ] {
            assert_eq!(
                text.parse::<DeviceName>(),
                Err(DeviceNameError::Unknown(text.to_owned()))
            );
        }
    }

    #[test]
    fn tiers_that_come_later_are_named() {
        assert_eq!(
            "gpu-0-concurrent"
                .parse::<DeviceName>()
                .unwrap_err()
                .to_string(),
            r#""gpu-0-concurrent" is of the tier concurrent, which this version does not serve"#
        );
    }

    proptest! {
        #[test]
        fn every_name_is_read_back(minor: u32, tier in prop::sample::select(Tier::SERVED.to_vec())) {
            let name = DeviceName::new(minor, tier).unwrap();
            prop_assert_eq!(name.to_string().parse(), Ok(name));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".*", tail in "gpu-[0-9a-z-]{0,20}") {
            let _ = text.parse::<DeviceName>();
            if let Ok(name) = tail.parse::<DeviceName>() {
                prop_assert_eq!(name.to_string(), tail);
            }
        }
    }
}
