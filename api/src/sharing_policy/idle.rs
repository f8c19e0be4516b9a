//! What happens to claims whose programs hold memory of a GPU and run no kernel.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The least of `afterSeconds`: below, a program that reads a file between two kernels would be idle.
pub const LEAST_AFTER_SECONDS: u32 = 10;
/// The most of `afterSeconds` and of `graceSeconds`: 30 days.
pub const MOST_SECONDS: u32 = 30 * 24 * 3600;

/// Which claims are idle, and what happens to them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct IdlePolicy {
    /// The namespaces in which claims are looked at, by their labels: all where it is empty (`{}`), none where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    /// After so many seconds without a kernel a claim whose programs hold memory is idle, 10 to 2592000 (30 days). It is then named,
    /// by the condition `Idle` in its status and by an event on its pods.
    #[schemars(range(min = 10, max = 2_592_000))]
    pub after_seconds: u32,
    /// What happens then: `Report`, nothing more; `Evict`, its pods are evicted `graceSeconds` later, as `kubectl drain` evicts: a
    /// PodDisruptionBudget may forbid it. Neither a claim nor a pod with the annotation `gpu.tranche.dev/idle: keep` is evicted or
    /// named.
    #[serde(default)]
    pub action: IdleAction,
    /// For so many seconds a claim was named before its pods are evicted, 0 to 2592000 (30 days). A kernel in this time ends it.
    #[schemars(range(min = 0, max = 2_592_000))]
    #[serde(default = "default_grace_seconds")]
    pub grace_seconds: u32,
}

/// What happens to an idle claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IdleAction {
    /// Its pods are evicted.
    Evict,
    /// It is named. A word that this release does not know means this too.
    #[default]
    #[serde(other)]
    Report,
}

const fn default_grace_seconds() -> u32 {
    600
}
