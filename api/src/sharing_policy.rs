//! `SharingPolicy`: how the cluster's administrator offers the GPUs.
//!
//! A SharingPolicy is cluster-scoped. If several policies match a GPU, the one with the highest `priority` applies;
//! among equals, the first by name. A GPU that no policy matches is offered only in the tier `exclusive`.
//!
//! The schema lets the API server refuse an invalid policy. Its rules are written in CEL, where `quantity(string(…))`
//! reads an amount that may be an integer or a string, and where `1.5Gi` does not count as an integer although it is
//! one. The types here can hold everything that the schema accepts, because one object that cannot be decoded would
//! make a watch fail for all objects. The server prunes fields that the schema does not know, so the types need not
//! refuse them.

mod health;
mod idle;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;
use crate::tier::Tier;

pub use health::{FAULTS, FaultEffect, FaultRule, HealthPolicy};
pub use idle::{IdleAction, IdlePolicy, LEAST_AFTER_SECONDS, MOST_SECONDS};

/// The GPUs to which the policy applies, and how they are offered.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpu.tranche.dev",
    version = "v1alpha1",
    kind = "SharingPolicy",
    plural = "sharingpolicies",
    shortname = "sp",
    derive = "PartialEq",
    doc = "How the GPUs that the policy matches are offered.",
    printcolumn = r#"{"name": "Priority", "type": "integer", "jsonPath": ".spec.priority"}"#,
    printcolumn = r#"{"name": "Tiers", "type": "string", "jsonPath": ".spec.tiers"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct SharingPolicySpec {
    /// The policy's priority, -1000000000 to 1000000000, default 0. If several policies match a GPU, the one with the
    /// highest priority applies; among equals, the first by name.
    #[schemars(range(min = -1_000_000_000, max = 1_000_000_000))]
    #[serde(default)]
    pub priority: i32,
    /// A label selector for the nodes to which the policy applies. If it is absent, the policy applies to all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,
    /// The products to which the policy applies, by their exact `productName`. An empty list means all products. If
    /// several of `products`, `uuids` and `indices` are set, a GPU must be in each of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<String>,
    /// The UUIDs of the GPUs to which the policy applies, as `nvidia-smi -L` prints them. An empty list means all GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "uuids_schema")]
    pub uuids: Vec<String>,
    /// The numbers in `nvidia-smi` of the GPUs to which the policy applies, on each node. An empty list means all GPUs.
    /// The number of a GPU may change with every boot: use `uuids` if the policy must always apply to the same GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "indices_schema")]
    pub indices: Vec<u32>,
    /// The tiers in which the GPUs are offered: at least one, each at most once.
    #[schemars(length(min = 1, max = 6), extend("x-kubernetes-list-type" = "set"))]
    pub tiers: Vec<Tier>,
    /// How GPUs are shared in the tier `capped`.
    #[serde(default)]
    pub capped: CappedPolicy,
    /// How GPUs are shared in the tier `concurrent`. All other settings of the tier are those of `capped`: the sizes of
    /// shares, the memory for CUDA contexts, `driverCapabilities`, `untestedDriver` and `onBypass`.
    #[serde(default)]
    pub concurrent: ConcurrentPolicy,
    /// The partitions into which GPUs are divided in the tier `partition`.
    #[serde(default)]
    pub partition: PartitionPolicy,
    /// How GPUs are shared in the tier `timeshared`.
    #[serde(default)]
    pub timeshared: TimesharedPolicy,
    /// What happens to claims whose programs hold memory of the GPU and run no kernel. If it is absent, nothing
    /// happens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdlePolicy>,
    /// What happens to the devices of a GPU that has a fault.
    #[serde(default)]
    pub health: HealthPolicy,
}

/// Limits of the tier `capped`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = [
    rule(
        ".expectedSharers",
        "self.expectedSharers <= self.maxSharers",
        "must be at most maxSharers",
    ),
    rule(
        ".contextMemory",
        "!has(self.contextMemory) \
         || (quantity(string(self.contextMemory)).isInteger() && quantity(string(self.contextMemory)).asInteger() >= 0)",
        "must be a whole number of bytes, 0 or more, written without a decimal point",
    ),
    rule(
        ".unaccountedMemory",
        "quantity(string(self.unaccountedMemory)).isInteger() \
         && quantity(string(self.unaccountedMemory)).asInteger() >= 67108864",
        "must be a whole number of bytes, at least 64Mi, written without a decimal point",
    ),
    rule(
        ".memoryStep",
        "quantity(string(self.memoryStep)).isInteger() && quantity(string(self.memoryStep)).asInteger() > 0",
        "must be a whole number of bytes, 1 or more, written without a decimal point",
    ),
    rule(
        ".defaultMemory",
        // If memoryStep is wrong, its own rule reports it.
        "!has(self.defaultMemory) \
         || !quantity(string(self.memoryStep)).isInteger() \
         || quantity(string(self.memoryStep)).asInteger() <= 0 \
         || (quantity(string(self.defaultMemory)).isInteger() \
         && quantity(string(self.defaultMemory)).asInteger() > 0 \
         && quantity(string(self.defaultMemory)).asInteger() % quantity(string(self.memoryStep)).asInteger() == 0)",
        "must be a multiple of memoryStep, above 0, written without a decimal point",
    ),
    rule(
        ".coresStep",
        "self.coresStep > 0 && 100 % self.coresStep == 0",
        "must divide 100: 1, 2, 4, 5, 10, 20, 25 or 50",
    ),
    rule(
        ".defaultCores",
        // If coresStep is wrong, its own rule reports it.
        "!has(self.defaultCores) || self.coresStep <= 0 || self.defaultCores % self.coresStep == 0",
        "must be a multiple of coresStep",
    ),
]))]
pub struct CappedPolicy {
    /// The maximum number of shares of one GPU, 1-128.
    #[schemars(range(min = 1, max = 128))]
    pub max_sharers: u32,
    /// The number of sharers for whose CUDA contexts memory is kept free, 0 to `maxSharers`.
    #[schemars(range(min = 0, max = 128))]
    pub expected_sharers: u32,
    /// The memory that is kept free for one sharer's CUDA context, in bytes. The default is the size that the node has
    /// measured for this GPU model and driver (`contextMemory` in the GpuNode's inventory), or 512Mi until it has
    /// measured one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_memory: Option<Quantity>,
    /// The memory of all shares of a GPU together, in percent of the memory that the GPU has for shares, 100-400. If it
    /// is above 100, the memory that programs allocate is managed memory: the driver moves it to the host when the GPU
    /// is full, and back when it is used. Such shares are slow if they use much of their memory at a time, need host
    /// memory for the memory that is moved, and are offered only by the DeviceClass `oversubscribed.gpu.tranche.dev`.
    /// Memory that cannot be moved (contexts, modules, arrays, memory pools, `cuMemCreate`) is limited to the share's
    /// part of the GPU's own memory. Partitions and concurrent shares are not oversubscribed. The GPU must be of the
    /// Pascal generation or later.
    #[schemars(range(min = 100, max = 400))]
    pub memory_oversubscription: u32,
    /// The granularity and minimum of a share's memory, in bytes.
    #[schemars(extend("nullable" = false))]
    pub memory_step: Quantity,
    /// The memory of a share whose claim requests no memory, in bytes, a multiple of `memoryStep`. The default is an
    /// equal part for each of the `maxSharers` sharers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_memory: Option<Quantity>,
    /// The granularity and minimum of a share's cores, in percent: 1, 2, 4, 5, 10, 20, 25 or 50.
    #[schemars(range(min = 1, max = 50))]
    pub cores_step: u32,
    /// The cores of a share whose claim requests no cores, in percent, a multiple of `coresStep`. The default is an
    /// equal part for each of the `maxSharers` sharers.
    #[schemars(range(min = 1, max = 100))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_cores: Option<u32>,
    /// What a share with `compute.priority: low` keeps while shares of its GPU with `compute.priority: high` have work, in
    /// percent of the share's own cores, 0-100.
    #[schemars(range(min = 0, max = 100))]
    pub low_priority_floor: u32,
    /// What happens to the tier if the driver has functions that Tranche does not know. `Taint`: new claims get a share
    /// only if they tolerate `gpu.tranche.dev/untested-driver`. `Allow`: the tier stays open, and only the attribute
    /// `untestedDriver` shows it.
    pub untested_driver: UntestedDriver,
    /// What the node does with a process that holds memory of the GPU that is not in its share's account. `Report`: the
    /// node reports the process by a metric, an event on its pod and a log line. `Kill`: the node also ends the process
    /// (SIGKILL), but only once it has measured a CUDA context of this GPU model under this driver (`contextMemory` in
    /// the GpuNode's inventory); until then it reports.
    pub on_bypass: OnBypass,
    /// The memory that a process may hold beyond its share's account, in bytes, at least 64Mi: the driver takes it
    /// for its own code and buffers, for profilers and for `printf`. A process that holds more of it bypasses the cap.
    #[schemars(extend("nullable" = false))]
    pub unaccounted_memory: Quantity,
    /// The driver's libraries that containers get, as `NVIDIA_DRIVER_CAPABILITIES` names them; `opencl` has its own
    /// name here. The list must contain `compute` and `utility`, to whose libraries the cap applies. Memory that is
    /// allocated through any other library is not counted.
    #[schemars(schema_with = "driver_capabilities_schema")]
    pub driver_capabilities: Vec<String>,
    /// The MIG profiles whose partitions are also offered in capped shares, as `nvidia-smi mig -lgip` names them. An
    /// empty list means none. Each partition of such a profile is a device that several claims of the tier `capped`
    /// share. Its shares are like those of a GPU; their cores are percent of the partition's time. The partition is
    /// created for the first share and removed after the last one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "profiles_schema")]
    pub on_partitions: Vec<String>,
}

/// The default of `unaccountedMemory`, in bytes.
pub const UNACCOUNTED: u64 = 256 << 20;

/// The default of `lowPriorityFloor`, in percent of a share's cores.
pub const LOW_PRIORITY_FLOOR: u32 = 10;

/// The valid names in `driverCapabilities`.
pub const DRIVER_CAPABILITIES: [&str; 7] = [
    "compute", "utility", "video", "graphics", "display", "ngx", "opencl",
];

/// The names in `driverCapabilities` that every capped share has.
pub const CAPPED_CAPABILITIES: [&str; 2] = ["compute", "utility"];

/// What happens to a tier whose cap the driver's unknown functions may bypass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UntestedDriver {
    /// The tier is closed to new claims that do not tolerate the taint.
    #[default]
    Taint,
    /// The tier stays open.
    Allow,
}

/// What the node does with a process that bypasses its share's cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnBypass {
    /// The node reports the process and ends it.
    Kill,
    /// The node reports the process. A value that this release does not know has the same effect.
    #[default]
    #[serde(other)]
    Report,
}

/// The partitions of the tier `partition`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PartitionPolicy {
    /// The MIG profiles that are offered, as `nvidia-smi mig -lgip` names them. An empty list means all profiles of the
    /// GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "profiles_schema")]
    pub profiles: Vec<String>,
}

/// Limits of the tier `concurrent`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ConcurrentPolicy {
    /// The maximum number of shares of one GPU, 1-48. An MPS server has at most 48 clients (60 from driver 580 on), and
    /// each process of a share is a client: set a lower number if shares run several processes.
    #[schemars(range(min = 1, max = 48))]
    pub max_sharers: u32,
    /// The MIG profiles whose partitions are also offered in concurrent shares, as `nvidia-smi mig -lgip` names them.
    /// An empty list means none. Each partition of such a profile has its own MPS daemon while it has shares. Its
    /// shares are like those of a GPU; their cores are percent of the partition's multiprocessors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "profiles_schema")]
    pub on_partitions: Vec<String>,
}

/// Limits of the tier `timeshared`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TimesharedPolicy {
    /// The maximum number of shares of one GPU, 1-128.
    #[schemars(range(min = 1, max = 128))]
    pub max_sharers: u32,
    /// The length of the driver's time slices: how long a process has the GPU before the driver gives it to the next
    /// one. The names are those of `nvidia-smi compute-policy --set-timeslice`. The length is set while the GPU has
    /// timeshared shares. `Default` does not change the GPU; the other values need a GPU of the Volta generation or
    /// later. A claim keeps the value that applied when it was prepared. If the claims of a GPU have different values,
    /// the value that was set first stays until its last claim is released. The time slices protect no share: a program
    /// can still take all of the GPU's memory, and a program with more processes gets more of the GPU's time.
    pub interval: Interval,
}

/// A length of the driver's time slices. The order is from short to long, with the driver's default last.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum Interval {
    /// Short.
    Short,
    /// Medium.
    Medium,
    /// Long.
    Long,
    /// The driver's default. A value that this release does not know has the same effect.
    #[default]
    #[serde(other)]
    Default,
}

fn uuids_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {
            "type": "string",
            "pattern": "^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        },
        "x-kubernetes-list-type": "set",
    })
}

fn indices_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": u32::MAX},
        "x-kubernetes-list-type": "set",
    })
}

fn profiles_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {
            "type": "string",
            "pattern": r"^[1-9][0-9]?g\.[1-9][0-9]{0,3}gb(\+me|\+gfx|\+me\.all|-me)?$",
        },
        "x-kubernetes-list-type": "set",
    })
}

fn driver_capabilities_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": CAPPED_CAPABILITIES.len(),
        "maxItems": DRIVER_CAPABILITIES.len(),
        "items": {"type": "string", "enum": DRIVER_CAPABILITIES},
        "x-kubernetes-list-type": "set",
        "x-kubernetes-validations": [rule(
            "",
            "'compute' in self && 'utility' in self",
            "must name compute and utility: a capped share always has both",
        )],
    })
}

/// A rule for the API server: the condition, and the message and field for the error if the condition is false.
fn rule(field: &str, rule: &str, message: &str) -> serde_json::Value {
    let mut rule = serde_json::json!({"rule": rule, "message": message});
    if !field.is_empty() {
        rule["fieldPath"] = field.into();
    }
    rule
}

impl Default for CappedPolicy {
    fn default() -> Self {
        Self {
            max_sharers: 16,
            expected_sharers: 4,
            context_memory: None,
            memory_oversubscription: 100,
            memory_step: Quantity::from_bytes(1 << 20),
            unaccounted_memory: Quantity::from_bytes(UNACCOUNTED),
            default_memory: None,
            cores_step: 1,
            default_cores: None,
            low_priority_floor: LOW_PRIORITY_FLOOR,
            untested_driver: UntestedDriver::Taint,
            on_bypass: OnBypass::Report,
            driver_capabilities: CAPPED_CAPABILITIES.map(str::to_owned).into(),
            on_partitions: Vec::new(),
        }
    }
}

impl Default for ConcurrentPolicy {
    fn default() -> Self {
        Self {
            max_sharers: 16,
            on_partitions: Vec::new(),
        }
    }
}

impl Default for TimesharedPolicy {
    fn default() -> Self {
        Self {
            max_sharers: 8,
            interval: Interval::Default,
        }
    }
}
