//! `ShareConfig`: the opaque parameters of a claim or a DeviceClass, for settings that are not
//! capacities.
//!
//! ```yaml
//! apiVersion: gpu.tranche.dev/v1alpha1
//! kind: ShareConfig
//! compute: {mode: workConserving, priority: high}
//! ```
//!
//! ```text
//!  parameters of the class ─► decode ─► Parameters ─┐
//!  parameters of the claim ─► decode ─► Parameters ─┴─ overlaid_by ─► resolve ─► ShareConfig
//! ```
//!
//! Decoding is strict: unknown fields, wrong kinds and wrong types are refused with the field's path, in admission and
//! again in Prepare, because the API server does not validate opaque parameters. Several parameters for one request are
//! merged field by field; a field that the later one leaves out keeps the earlier value. The class comes before the
//! claim, so the claim's author decides every field that the claim sets.

mod decode;

use serde::{Deserialize, Serialize};

pub use decode::DecodeError;
use decode::Object;

use crate::names::API_VERSION;

/// The kind of the parameters.
pub const KIND: &str = "ShareConfig";

/// The fields of the parameters.
pub const FIELDS: [&str; 3] = ["apiVersion", "kind", "compute"];
/// The fields of `compute`.
pub const COMPUTE_FIELDS: [&str; 2] = ["mode", "priority"];

/// The effective parameters of one device, with every field set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareConfig {
    /// How the share's compute limit is enforced.
    pub compute: Compute,
}

/// How a share's compute limit is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Compute {
    /// Whether the share may use the time of idle neighbours.
    pub mode: ComputeMode,
    /// Whose launches come first on the GPU.
    #[serde(default, skip_serializing_if = "ComputePriority::is_normal")]
    pub priority: ComputePriority,
}

/// Whether a share may use the time of idle neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ComputeMode {
    /// The share never gets more than `cores`, even on an idle GPU.
    #[default]
    Strict,
    /// The share gets more than `cores` while the GPU is idle, and at least `cores` under contention.
    WorkConserving,
}

impl ComputeMode {
    /// All modes, by their names in the parameters.
    pub const WORDS: [(&'static str, Self); 2] = [
        ("strict", Self::Strict),
        ("workConserving", Self::WorkConserving),
    ];
}

/// Whose launches come first on a GPU or partition. It has an effect in the tier `capped` only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ComputePriority {
    /// While the share has work, shares with low priority launch only what fits into the gaps, down to a floor that the
    /// SharingPolicy sets.
    High,
    /// The share neither waits for other shares' work nor lets them wait.
    #[default]
    Normal,
    /// The share waits while shares with high priority have work.
    Low,
}

impl ComputePriority {
    /// All priorities, by their names in the parameters.
    pub const WORDS: [(&'static str, Self); 3] = [
        ("high", Self::High),
        ("normal", Self::Normal),
        ("low", Self::Low),
    ];

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
    const fn is_normal(&self) -> bool {
        matches!(self, Self::Normal)
    }
}

/// The parameters of one author, with only the fields that are set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// `compute.mode`.
    pub compute_mode: Option<ComputeMode>,
    /// `compute.priority`.
    pub compute_priority: Option<ComputePriority>,
}

impl Parameters {
    /// Reads the parameters of one `opaque` entry. Any JSON gives either parameters or an error.
    pub fn decode(parameters: &serde_json::Value) -> Result<Self, DecodeError> {
        let object = Object::root(parameters)?;
        // The kind is checked first, so that the fields of another kind are not reported as unknown.
        object.constant("kind", KIND)?;
        object.constant("apiVersion", API_VERSION)?;
        let root = object.only(&FIELDS)?;
        let Some(compute) = root.object("compute", &COMPUTE_FIELDS)? else {
            return Ok(Self::default());
        };
        Ok(Self {
            compute_mode: compute.word("mode", &ComputeMode::WORDS)?,
            compute_priority: compute.word("priority", &ComputePriority::WORDS)?,
        })
    }

    /// These parameters, overwritten by the fields of `later`.
    #[must_use]
    pub fn overlaid_by(self, later: Self) -> Self {
        Self {
            compute_mode: later.compute_mode.or(self.compute_mode),
            compute_priority: later.compute_priority.or(self.compute_priority),
        }
    }

    /// Sets the missing fields to the defaults.
    #[must_use]
    pub fn resolve(self) -> ShareConfig {
        ShareConfig {
            compute: Compute {
                mode: self.compute_mode.unwrap_or_default(),
                priority: self.compute_priority.unwrap_or_default(),
            },
        }
    }
}

/// Whether a config entry that names `requests` applies to the allocation result of `request`.
///
/// An entry without names applies to every request. A result of a `firstAvailable` request is called `main/sub`; an
/// entry may name `main`, for all its subrequests, or `main/sub`.
#[must_use]
pub fn applies_to(requests: &[String], request: &str) -> bool {
    requests.is_empty()
        || requests.iter().any(|named| {
            request
                .strip_prefix(named.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
}

#[cfg(test)]
mod tests;
