//! What happens to claims whose programs hold memory of a GPU and run no kernel.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The minimum of `afterSeconds`. With a smaller value, a program that reads a file between two kernels would be idle.
pub const LEAST_AFTER_SECONDS: u32 = 10;
/// The maximum of `afterSeconds` and `graceSeconds`: 30 days.
pub const MOST_SECONDS: u32 = 30 * 24 * 3600;

/// Which claims are idle, and what happens to them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct IdlePolicy {
    /// A label selector for the namespaces in which claims are checked. An empty selector (`{}`) means all namespaces.
    /// If it is absent, no claims are checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    /// The number of seconds without a kernel after which a claim is idle if its programs hold memory, 10 to 2592000
    /// (30 days). An idle claim is reported by the condition `Idle` in its status and by an event on its pods.
    #[schemars(range(min = 10, max = 2_592_000))]
    pub after_seconds: u32,
    /// What happens to an idle claim. `Report` (default): it is only reported. `Evict`: its pods are also evicted,
    /// `graceSeconds` later, in the same way as `kubectl drain` evicts pods; a PodDisruptionBudget may prevent the
    /// eviction. A claim is neither reported nor evicted if it or one of its pods has the annotation
    /// `gpu.tranche.dev/idle: keep`.
    #[serde(default)]
    pub action: IdleAction,
    /// The number of seconds between the report of an idle claim and the eviction of its pods, 0 to 2592000 (30 days),
    /// default 600. If the claim runs a kernel in this time, its pods are not evicted.
    #[schemars(range(min = 0, max = 2_592_000))]
    #[serde(default = "default_grace_seconds")]
    pub grace_seconds: u32,
}

/// What happens to an idle claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IdleAction {
    /// Its pods are evicted.
    Evict,
    /// It is only reported. A value that this release does not know has the same effect.
    #[default]
    #[serde(other)]
    Report,
}

const fn default_grace_seconds() -> u32 {
    600
}
