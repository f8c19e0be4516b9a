//! `ShareConfig`: the opaque parameters of a claim or a DeviceClass, for what capacities cannot say.
//!
//! ```yaml
//! apiVersion: gpu.tranche.dev/v1alpha1
//! kind: ShareConfig
//! compute: {mode: workConserving}
//! ```
//!
//! Decoding is strict and total: unknown fields, wrong kinds and wrong types are refused with the
//! field's path, in admission and again in Prepare, since the API server passes opaque
//! parameters through unread.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Parameters of the devices of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareConfig {
    /// How the share's compute limit is kept.
    #[serde(default)]
    pub compute: Compute,
}

/// How a share's compute limit is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compute {
    /// Whether idle neighbours' time may be used.
    #[serde(default)]
    pub mode: ComputeMode,
}

/// Whether a share may use its idle neighbours' time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum ComputeMode {
    /// Never more than `cores`, even on an idle GPU.
    #[default]
    Strict,
    /// More than `cores` while the GPU is idle; `cores` is the floor under contention.
    WorkConserving,
}
