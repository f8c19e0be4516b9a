//! What happens to the devices of a GPU that has a fault.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::MOST_SECONDS;
use crate::gpu_node::TaintEffect;

/// The names of faults, without those of Xids (`Xid79`).
pub const FAULTS: [&str; 6] = [
    "GpuLost",
    "RebootRequired",
    "ResetRequired",
    "DrainRequired",
    "RowRemapFailure",
    "RowRemapPending",
];

/// What happens to the devices of a GPU that has a fault. A fault always keeps new claims away, until the driver asks for
/// no recovery action and a check of the GPU has passed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct HealthPolicy {
    /// What happens to the pods of a GPU that no longer works, in addition. `NoSchedule` (default): nothing. `NoExecute`:
    /// after `graceSeconds`, Kubernetes deletes the pods whose claims do not tolerate the taint
    /// `gpu.tranche.dev/unhealthy`.
    pub effect: TaintEffect,
    /// The number of seconds between a fault and the effect `NoExecute`, 0 to 2592000 (30 days), default 300.
    #[schemars(range(min = 0, max = 2_592_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<u32>,
    /// The effects of single faults, instead of those that Tranche has for them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["fault"],
    ))]
    pub faults: Vec<FaultRule>,
}

/// The effect of one fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultRule {
    /// The fault: `GpuLost`, `RebootRequired`, `ResetRequired`, `DrainRequired`, `RowRemapFailure`, `RowRemapPending`, or an Xid, for example
    /// `Xid74`.
    #[schemars(schema_with = "fault_schema")]
    pub fault: String,
    /// Its effect. `Ignore`: it is only counted. `NoSchedule`: no new claim gets the GPU. `NoExecute`: after
    /// `graceSeconds`, the GPU's pods are deleted, too.
    pub effect: FaultEffect,
}

/// The effect of a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FaultEffect {
    /// The fault is only counted.
    Ignore,
    /// No new claim gets the GPU, and after a grace period its pods are deleted.
    NoExecute,
    /// No new claim gets the GPU. A value that this release does not know has the same effect.
    #[default]
    #[serde(other)]
    NoSchedule,
}

impl HealthPolicy {
    /// The default of `graceSeconds`.
    pub const GRACE_SECONDS: u32 = 300;
    /// The maximum of `graceSeconds`.
    pub const MOST_GRACE_SECONDS: u32 = MOST_SECONDS;
}

fn fault_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "pattern": format!("^({}|Xid[1-9][0-9]{{0,3}})$", FAULTS.join("|")),
    })
}
