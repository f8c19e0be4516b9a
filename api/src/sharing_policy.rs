//! `SharingPolicy`: what the cluster's admin offers of the hardware.
//!
//! Cluster-scoped. Of the policies that match a GPU, the one with the highest `priority` holds;
//! among equals the first by name. A GPU that no policy matches is offered as exclusive only.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;
use crate::tier::Tier;

/// Which GPUs, and what is offered of them.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpu.tranche.dev",
    version = "v1alpha1",
    kind = "SharingPolicy",
    plural = "sharingpolicies",
    shortname = "sp",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SharingPolicySpec {
    /// Of the policies that match a GPU, the highest holds.
    #[serde(default)]
    pub priority: i32,
    /// The nodes it speaks of; all where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,
    /// The products it speaks of (`productName`, exactly); all where empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<String>,
    /// The tiers offered.
    pub tiers: Vec<Tier>,
    /// How GPUs are shared in the tier `capped`.
    #[serde(default)]
    pub capped: CappedPolicy,
    /// How GPUs are shared in the tier `timeshared`.
    #[serde(default)]
    pub timeshared: TimesharedPolicy,
}

/// Limits of the tier `capped`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CappedPolicy {
    /// The most shares of one GPU, 1-128.
    #[schemars(range(min = 1, max = 128))]
    pub max_sharers: u32,
    /// Sharers for whose CUDA contexts memory is kept free, 0-128.
    #[schemars(range(min = 0, max = 128))]
    pub expected_sharers: u32,
    /// Memory kept free for one sharer's CUDA context, bytes.
    pub context_memory: Quantity,
    /// Granularity and minimum of a share's memory, bytes.
    pub memory_step: Quantity,
    /// Memory of a share that names none; an equal part for `maxSharers` where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_memory: Option<Quantity>,
    /// Cores (percent) of a share that names none; an equal part for `maxSharers` where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_cores: Option<u32>,
}

/// Limits of the tier `timeshared`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TimesharedPolicy {
    /// The most shares of one GPU, 1-128.
    #[schemars(range(min = 1, max = 128))]
    pub max_sharers: u32,
}

impl Default for CappedPolicy {
    fn default() -> Self {
        Self {
            max_sharers: 16,
            expected_sharers: 4,
            context_memory: Quantity::from_bytes(512 << 20),
            memory_step: Quantity::from_bytes(1 << 20),
            default_memory: None,
            default_cores: None,
        }
    }
}

impl Default for TimesharedPolicy {
    fn default() -> Self {
        Self { max_sharers: 8 }
    }
}
