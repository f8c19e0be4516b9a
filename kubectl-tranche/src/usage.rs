//! How much of the GPUs is used now: an optional input of the model.
//!
//! The numbers are the node's, from NVML, never what a tenant's library says. Where nobody serves them, commands show `-` and
//! one line that says why.

use std::collections::BTreeMap;

use serde::Serialize;

/// Use at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Used {
    /// Bytes of GPU memory now.
    pub memory: u64,
    /// The most bytes that were used at a time since the holder got it, where somebody keeps it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_memory: Option<u64>,
    /// Percent of the GPU's time over the last seconds, 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
    /// Seconds since the last kernel, where somebody keeps it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u64>,
}

/// The use of all GPUs, by GPU and by claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// By the GPU's UUID.
    pub gpus: BTreeMap<String, Used>,
    /// By the claim's UID and the device's name: a claim may have several.
    pub claims: BTreeMap<(String, String), Used>,
}

/// The use, or why it is not known: one line.
pub type Known = Result<Usage, String>;

/// The line where the cluster does not serve the use of GPUs.
pub const NOT_SERVED: &str =
    "usage is not shown: the cluster does not serve usage.gpu.tranche.dev/v1alpha1";
