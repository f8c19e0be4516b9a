//! Where a partition is on its GPU.

use std::fmt;

use serde::{Deserialize, Serialize};
use tranche_api::mig::MigInstance;

use super::Profile;

/// A profile at a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// The first memory slice.
    pub start: u8,
    /// The profile.
    pub profile: Profile,
}

impl Placement {
    /// The placement of an instance of the inventory; `None` if its profile has an unknown name.
    #[must_use]
    pub fn of(instance: &MigInstance) -> Option<Self> {
        Some(Self {
            start: u8::try_from(instance.start).ok()?,
            profile: instance.profile.parse().ok()?,
        })
    }
}

/// `3g.40gb at memory slice 4`.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at memory slice {}", self.profile, self.start)
    }
}
