//! What must be done on the node so that a claim's containers get what was claimed.
//!
//! A plan is a list of steps, each idempotent and each with an inverse. The kubelet-plugin journals
//! the plan before the first step and then executes it; undoing runs the inverses backwards.

use serde::{Deserialize, Serialize};
use tranche_api::Tier;
use tranche_api::share_config::ComputeMode;

use crate::claim::Allocation;

/// What to do for one claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreparationPlan {
    /// The claim as it was allocated.
    pub allocation: Allocation,
    /// One entry per allocated device, in the claim's order.
    pub devices: Vec<PreparedDevice>,
    /// The steps, in the order of execution.
    pub steps: Vec<Step>,
}

/// One device as its containers will find it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreparedDevice {
    /// Unique in the claim and stable: names its page folder and its CDI device.
    pub key: String,
    /// The request with its subrequest stripped, as the kubelet asks for it.
    pub request: String,
    /// Pool, as in the slice.
    pub pool: String,
    /// Device, as in the slice.
    pub device: String,
    /// As in the allocation.
    pub share_id: Option<String>,
    /// The tier it is prepared for.
    pub tier: Tier,
    /// The physical GPU.
    pub gpu_uuid: String,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// `dddd:bb:dd.f`.
    pub pci_bus_id: String,
    /// The enforced limits.
    pub cap: Cap,
    /// Qualified CDI ids, the claim's own first.
    pub cdi_ids: Vec<String>,
}

/// The enforced upper limit of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind", deny_unknown_fields)]
pub enum Cap {
    /// Nothing is capped: the whole GPU, or a tier that caps nothing.
    None,
    /// The shim keeps these.
    #[serde(rename_all = "camelCase")]
    Share {
        /// Bytes.
        memory: u64,
        /// Percent of SM time, 1-100.
        cores: u32,
        /// Whether idle neighbours' time may be used.
        mode: ComputeMode,
    },
}

/// One side effect, idempotent, with an inverse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "step", deny_unknown_fields)]
pub enum Step {
    /// Write the read-only page that tells a container its limits. Inverse: remove it.
    #[serde(rename_all = "camelCase")]
    WriteCapPage {
        /// The device's key.
        key: String,
        /// The physical GPU.
        gpu_uuid: String,
        /// The limits.
        cap: Cap,
    },
    /// Create the account page, unless it is there already: running containers count in it.
    /// Inverse: remove it.
    #[serde(rename_all = "camelCase")]
    CreateAccountPage {
        /// The device's key.
        key: String,
    },
    /// Write the claim's CDI spec. Inverse: remove it.
    WriteCdiSpec,
}
