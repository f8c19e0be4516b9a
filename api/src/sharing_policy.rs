//! `SharingPolicy`: how the cluster's admin offers the hardware.
//!
//! Cluster-scoped. Of the policies that match a GPU, the one with the highest `priority` applies; among equals the
//! first by name. A GPU that no policy matches is offered as exclusive only.
//!
//! The schema lets the API server refuse an invalid policy. Its rules are written in CEL, where `quantity(string(…))`
//! reads an amount that may be an integer or a string, and where `1.5Gi` does not count as an integer although it is
//! one. The types here can hold everything that the schema accepts: one object that cannot be decoded would blind a
//! watch to all. The server prunes fields that the schema does not know, so the types need not refuse them.

mod idle;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;
use crate::tier::Tier;

pub use idle::{IdleAction, IdlePolicy, LEAST_AFTER_SECONDS, MOST_SECONDS};

/// Which GPUs, and what is offered of them.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpu.tranche.dev",
    version = "v1alpha1",
    kind = "SharingPolicy",
    plural = "sharingpolicies",
    shortname = "sp",
    derive = "PartialEq",
    doc = "What the cluster's admin offers of the GPUs that it matches.",
    printcolumn = r#"{"name": "Priority", "type": "integer", "jsonPath": ".spec.priority"}"#,
    printcolumn = r#"{"name": "Tiers", "type": "string", "jsonPath": ".spec.tiers"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct SharingPolicySpec {
    /// Of the policies that match a GPU, the highest holds; among equals the first by name.
    #[schemars(range(min = -1_000_000_000, max = 1_000_000_000))]
    #[serde(default)]
    pub priority: i32,
    /// The nodes it speaks of; all where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,
    /// The products it speaks of (`productName`, exactly); all where empty. Where several of `products`, `uuids` and
    /// `indices` are set, a GPU must be in each of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<String>,
    /// The GPUs it speaks of by UUID, as `nvidia-smi -L` prints them; all where empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "uuids_schema")]
    pub uuids: Vec<String>,
    /// The GPUs it speaks of by their number in `nvidia-smi`, on each node; all where empty. The number of a GPU may change
    /// with every boot: name GPUs by `uuids` where the same one must always be meant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "indices_schema")]
    pub indices: Vec<u32>,
    /// The tiers offered: at least one, each once.
    #[schemars(length(min = 1, max = 6), extend("x-kubernetes-list-type" = "set"))]
    pub tiers: Vec<Tier>,
    /// How GPUs are shared in the tier `capped`.
    #[serde(default)]
    pub capped: CappedPolicy,
    /// How GPUs are shared in the tier `concurrent`. Whatever is not said here is as in `capped`: the sizes of shares, the
    /// contexts, the driver's libraries, untested drivers and what a bypass costs.
    #[serde(default)]
    pub concurrent: ConcurrentPolicy,
    /// Which partitions GPUs are divided into in the tier `partition`.
    #[serde(default)]
    pub partition: PartitionPolicy,
    /// How GPUs are shared in the tier `timeshared`.
    #[serde(default)]
    pub timeshared: TimesharedPolicy,
    /// What happens to claims whose programs hold memory of the GPU and run no kernel; nothing where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdlePolicy>,
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
    /// The most shares of one GPU, 1-128.
    #[schemars(range(min = 1, max = 128))]
    pub max_sharers: u32,
    /// Sharers for whose CUDA contexts memory is kept free, 0 to `maxSharers`.
    #[schemars(range(min = 0, max = 128))]
    pub expected_sharers: u32,
    /// Memory kept free for one sharer's CUDA context, bytes. Where absent, the size that the node measured
    /// for its model of GPU and its driver (`contextMemory` in the GpuNode's inventory), and 512Mi until it
    /// measured one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_memory: Option<Quantity>,
    /// How much memory the shares of a GPU have together, in percent of what it has for them, 100-400. Above 100 what programs
    /// allocate is managed memory, which the driver moves to the host when the GPU is full and back when it is used: such
    /// shares are slow where they use much at a time, need as much memory of the host, and are offered by the class
    /// `oversubscribed.gpu.tranche.dev` alone. What cannot move (contexts, modules, arrays, pools, `cuMemCreate`) is limited to
    /// the share's part of the GPU itself. Not for partitions and concurrent shares, which stay as they are; the GPU must be of the
    /// Pascal generation or later.
    #[schemars(range(min = 100, max = 400))]
    pub memory_oversubscription: u32,
    /// Granularity and minimum of a share's memory, bytes.
    #[schemars(extend("nullable" = false))]
    pub memory_step: Quantity,
    /// Memory of a share that names none, a multiple of `memoryStep`; an equal part for
    /// `maxSharers` where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_memory: Option<Quantity>,
    /// Granularity and minimum of a share's cores, percent: 1, 2, 4, 5, 10, 20, 25 or 50.
    #[schemars(range(min = 1, max = 50))]
    pub cores_step: u32,
    /// Cores (percent) of a share that names none, a multiple of `coresStep`; an equal part for
    /// `maxSharers` where absent.
    #[schemars(range(min = 1, max = 100))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_cores: Option<u32>,
    /// What happens to the tier where the driver has functions that Tranche does not know:
    /// `Taint` closes it to new claims that do not tolerate
    /// `gpu.tranche.dev/untested-driver`, `Allow` only tells by the attribute `untestedDriver`.
    pub untested_driver: UntestedDriver,
    /// What the node does with a process that holds memory of the GPU which its share's account does
    /// not have: `Report` names it by a metric, an event on its pod and a log line, `Kill` ends it
    /// (SIGKILL) as well.
    pub on_bypass: OnBypass,
    /// Which of the driver's libraries containers get, as `NVIDIA_DRIVER_CAPABILITIES` names them; `opencl`
    /// is a name of its own here. Always `compute` and `utility`, which the cap holds; memory that is
    /// allocated through any other library is not counted.
    #[schemars(schema_with = "driver_capabilities_schema")]
    pub driver_capabilities: Vec<String>,
    /// The MIG profiles of which partitions are offered in shares, too, as `nvidia-smi mig -lgip` names them; none where empty.
    /// Each partition of such a profile is a device that several claims of the tier `capped` share; its shares are as those
    /// of a GPU, with percent of the partition's time. The first share makes the partition, the last one removes it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "profiles_schema")]
    pub on_partitions: Vec<String>,
}

/// The names in `driverCapabilities`.
pub const DRIVER_CAPABILITIES: [&str; 7] = [
    "compute", "utility", "video", "graphics", "display", "ngx", "opencl",
];

/// What every capped share has of the driver.
pub const CAPPED_CAPABILITIES: [&str; 2] = ["compute", "utility"];

/// What happens to a tier that a driver's unknown functions may escape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UntestedDriver {
    /// Closed to new claims that do not tolerate it.
    #[default]
    Taint,
    /// Open.
    Allow,
}

/// What the node does with a process that goes around its share's cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnBypass {
    /// Names it and ends it.
    Kill,
    /// Names it. A word that this release does not know means this too.
    #[default]
    #[serde(other)]
    Report,
}

/// The partitions of the tier `partition`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PartitionPolicy {
    /// The MIG profiles that are offered, as `nvidia-smi mig -lgip` names them; all that the GPU has where empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "profiles_schema")]
    pub profiles: Vec<String>,
}

/// Limits of the tier `concurrent`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ConcurrentPolicy {
    /// The most shares of one GPU, 1-48. An MPS server has at most 48 clients (60 from driver 580 on), and each process of a
    /// share is one: leave room where shares run several.
    #[schemars(range(min = 1, max = 48))]
    pub max_sharers: u32,
    /// The MIG profiles of which partitions are offered in concurrent shares, too, as `nvidia-smi mig -lgip` names them; none where
    /// empty. Each partition of such a profile has an MPS daemon of its own while it has shares, which are as those of a GPU, with
    /// percent of the partition's multiprocessors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "profiles_schema")]
    pub on_partitions: Vec<String>,
}

/// Limits of the tier `timeshared`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TimesharedPolicy {
    /// The most shares of one GPU, 1-128.
    #[schemars(range(min = 1, max = 128))]
    pub max_sharers: u32,
    /// How long a process has the GPU before the driver gives it to the next one, as
    /// `nvidia-smi compute-policy --set-timeslice` names it: set while the GPU has timeshared shares. `Default` leaves the GPU
    /// as it is; others need a GPU of the Volta generation or later. A claim keeps what held when it was prepared, and on a
    /// GPU with several the one that was set first stays as long as its claims do. Not a protection: a program can still
    /// take all of the GPU's memory, and with more processes it has more of its time.
    pub interval: Interval,
}

/// A length of the driver's time slices. Ordered from short to long, the driver's own last.
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
    /// The driver's own. A word that this release does not know means this too.
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

/// A rule for the API server: the condition, and the message and the field if it fails.
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
            default_memory: None,
            cores_step: 1,
            default_cores: None,
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
