//! An allocated ResourceClaim, as far as it concerns this node and this driver.

use serde::{Deserialize, Serialize};
use tranche_api::{Quantity, ShareConfig, Tier};

/// What one claim was given on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Allocation {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// The results for our driver and this node's pool, in the claim's order.
    pub devices: Vec<AllocatedDevice>,
}

/// One allocation result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AllocatedDevice {
    /// The request it answers: `main` or `main/sub`.
    pub request: String,
    /// Pool, as in the slice.
    pub pool: String,
    /// Device, as in the slice.
    pub device: DeviceName,
    /// Set for a device that several claims share.
    pub share_id: Option<String>,
    /// What the scheduler charged, in bytes.
    pub memory: Option<Quantity>,
    /// What the scheduler charged, in percent.
    pub cores: Option<u32>,
    /// Admin access: looks at a device that others may hold.
    pub admin_access: bool,
    /// The parameters in force: class first, then claim, later ones win.
    pub config: ShareConfig,
}

/// A device's name in our slices: `gpu-<minor>` or `gpu-<minor>-<tier>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceName {
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// The tier in which the GPU is offered under this name.
    pub tier: Tier,
}
