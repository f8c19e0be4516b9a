//! What nodes answered, as API objects and as the rows of `kubectl get`. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::TypeMeta;
use serde_json::{Value, json};
use tranche_api::names::{DRIVER, own_node};
use tranche_api::usage::{GpuUsage, Measure, NodeUsage, ShareUsage, Utilization};
use tranche_api::usage_api::{
    API_VERSION, ClaimUsage, DeviceUsage, NodeUsageObject, PartitionName,
};

const MIB: u64 = 1 << 20;

/// A resource of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    NodeUsages,
    /// Claims of a namespace.
    ClaimUsages,
}

impl Resource {
    pub const ALL: [Self; 2] = [Self::NodeUsages, Self::ClaimUsages];

    /// The plural, as in paths and rights.
    #[must_use]
    pub const fn plural(self) -> &'static str {
        match self {
            Self::NodeUsages => "nodeusages",
            Self::ClaimUsages => "claimusages",
        }
    }

    #[must_use]
    pub const fn singular(self) -> &'static str {
        match self {
            Self::NodeUsages => "nodeusage",
            Self::ClaimUsages => "claimusage",
        }
    }

    /// The kind of an object.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::NodeUsages => "NodeUsage",
            Self::ClaimUsages => "ClaimUsage",
        }
    }

    /// Whether its objects are in namespaces.
    #[must_use]
    pub const fn is_namespaced(self) -> bool {
        matches!(self, Self::ClaimUsages)
    }

    /// The columns of its table: name, type, meaning; those with the priority 1 are shown by `-o wide`.
    #[must_use]
    pub fn columns(self) -> Value {
        let columns: &[(&str, &str, u8, &str)] = match self {
            Self::NodeUsages => &[
                ("Name", "string", 0, "The node."),
                ("Driver", "string", 1, "The NVIDIA driver's version."),
                ("GPUs", "integer", 0, "GPUs of the node."),
                (
                    "Claims",
                    "integer",
                    0,
                    "Claims that hold devices of the node.",
                ),
                ("Memory-Used", "string", 0, "Memory in use, of all GPUs."),
                ("Memory", "string", 0, "Memory of all GPUs."),
                (
                    "GPU",
                    "string",
                    0,
                    "Time in which a kernel ran, averaged over the GPUs that report it.",
                ),
                (
                    "Problem",
                    "string",
                    0,
                    "Why the usage, or a part of it, is not known.",
                ),
            ],
            Self::ClaimUsages => &[
                ("Name", "string", 0, "The claim."),
                ("Node", "string", 0, "The node of its devices."),
                ("Tier", "string", 0, "How the devices are isolated."),
                (
                    "Device",
                    "string",
                    1,
                    "The devices, as in the ResourceSlice.",
                ),
                ("UUID", "string", 1, "The GPUs or MIG instances."),
                (
                    "Memory-Used",
                    "string",
                    0,
                    "Memory that its processes hold.",
                ),
                (
                    "Memory",
                    "string",
                    0,
                    "Memory that its programs may hold; empty where nothing limits it.",
                ),
                (
                    "Reserved",
                    "string",
                    1,
                    "Memory beside it for CUDA contexts.",
                ),
                (
                    "GPU",
                    "string",
                    0,
                    "Time of the devices in which its kernels ran.",
                ),
                (
                    "Processes",
                    "integer",
                    0,
                    "Processes that have memory on the devices.",
                ),
                ("Idle", "string", 0, "Time since a kernel was last seen."),
                (
                    "Problem",
                    "string",
                    0,
                    "Why the usage, or a part of it, is not known.",
                ),
            ],
        };
        let column = |(name, kind, priority, meaning): &(&str, &str, u8, &str)| {
            let format = if *name == "Name" { "name" } else { "" };
            json!({"name": name, "type": kind, "format": format, "priority": priority, "description": meaning})
        };
        columns.iter().map(column).collect()
    }

    /// `apiVersion` and `kind` of an object.
    #[must_use]
    pub fn types(self) -> TypeMeta {
        TypeMeta {
            api_version: API_VERSION.to_owned(),
            kind: self.kind().to_owned(),
        }
    }
}

/// An object with what its row shows.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    Node(Box<NodeUsageObject>),
    Claim(Box<ClaimUsage>),
}

/// A ResourceClaim that has devices of ours.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Claim {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub labels: Option<BTreeMap<String, String>>,
    /// The nodes from which it has devices.
    pub nodes: BTreeSet<String>,
}

impl Claim {
    /// `None` for a claim without devices of ours.
    #[must_use]
    pub fn new(claim: ResourceClaim) -> Option<Self> {
        let devices = claim.status?.allocation?.devices?;
        let nodes: BTreeSet<String> = devices
            .results
            .into_iter()
            .flatten()
            .filter(|result| result.driver == DRIVER)
            .filter_map(|result| Some(own_node(&result.pool)?.to_owned()))
            .collect();
        (!nodes.is_empty()).then(|| Self {
            namespace: claim.metadata.namespace.unwrap_or_default(),
            name: claim.metadata.name.unwrap_or_default(),
            uid: claim.metadata.uid.unwrap_or_default(),
            labels: claim.metadata.labels,
            nodes,
        })
    }

    /// Its object, with its devices and the reasons why some are missing.
    #[must_use]
    pub fn object(self, devices: Vec<DeviceUsage>, problems: BTreeSet<String>) -> Object {
        let problem: Vec<String> = problems.into_iter().collect();
        Object::Claim(Box::new(ClaimUsage {
            types: Some(Resource::ClaimUsages.types()),
            metadata: ObjectMeta {
                name: Some(self.name),
                namespace: Some(self.namespace),
                labels: self.labels,
                ..ObjectMeta::default()
            },
            claim_uid: self.uid,
            nodes: self.nodes,
            devices,
            problem: (!problem.is_empty()).then(|| problem.join("; ")),
        }))
    }
}

#[must_use]
pub fn node_object(name: &str, answer: Result<NodeUsage, String>) -> Object {
    let (usage, problem) = match answer {
        Ok(usage) => (Some(usage), None),
        Err(problem) => (None, Some(problem)),
    };
    Object::Node(Box::new(NodeUsageObject {
        types: Some(Resource::NodeUsages.types()),
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        usage,
        problem,
    }))
}

/// What a claim uses of a device, or why that is not known; with the claim's UID.
pub type DeviceOfClaim = (String, Result<DeviceUsage, String>);

/// The devices on a node of the claims with these UIDs; other claims are left out.
#[must_use]
pub fn devices_of(usage: NodeUsage, uids: &BTreeSet<String>) -> Vec<DeviceOfClaim> {
    let mut found = Vec::new();
    let unix_millis = usage.unix_millis;
    for gpu in usage.gpus {
        let (gpu_uuid, product_name) = (gpu.uuid, gpu.product_name);
        let problem = gpu.problem.map(|it| format!("{gpu_uuid}: {it}"));
        let mut add = |mut share: ShareUsage, partition: Option<PartitionName>| {
            if !uids.contains(&share.claim.uid) {
                return;
            }
            let uid = share.claim.uid.clone();
            // The node lists the shares of a GPU that does not answer with zeros, which were not read.
            if let Some(problem) = &problem {
                return found.push((uid, Err(problem.clone())));
            }
            share.memory.free = None;
            let device = DeviceUsage {
                unix_millis,
                gpu_uuid: gpu_uuid.clone(),
                product_name: product_name.clone(),
                partition,
                share,
            };
            found.push((uid, Ok(device)));
        };
        for share in gpu.shares {
            add(share, None);
        }
        for partition in gpu.partitions {
            let name = PartitionName {
                uuid: partition.uuid,
                profile: partition.profile,
            };
            for share in partition.shares {
                add(share, Some(name.clone()));
            }
        }
    }
    found
}

impl Object {
    #[must_use]
    pub fn json(&self) -> Value {
        let json = match self {
            Self::Node(node) => serde_json::to_value(node),
            Self::Claim(claim) => serde_json::to_value(claim),
        };
        // It cannot fail: all keys are strings.
        json.unwrap_or_default()
    }

    #[must_use]
    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Node(node) => &node.metadata,
            Self::Claim(claim) => &claim.metadata,
        }
    }

    /// The cells of its row, in the order of [`Resource::columns`].
    #[must_use]
    pub fn cells(&self) -> Vec<Value> {
        match self {
            Self::Node(node) => node_cells(node),
            Self::Claim(claim) => claim_cells(claim),
        }
    }
}

fn node_cells(node: &NodeUsageObject) -> Vec<Value> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let Some(usage) = &node.usage else {
        let problem = node.problem.as_deref().unwrap_or_default();
        return vec![
            json!(name),
            json!(""),
            Value::Null,
            Value::Null,
            json!(""),
            json!(""),
            json!(""),
            json!(problem),
        ];
    };
    let memory = || usage.gpus.iter().filter_map(|gpu| gpu.memory);
    let shares = usage.gpus.iter().flat_map(GpuUsage::all_shares);
    let claims: BTreeSet<&str> = shares.map(|share| share.claim.uid.as_str()).collect();
    let busy: Vec<u64> = usage
        .gpus
        .iter()
        .filter_map(|gpu| gpu.utilization.get(Measure::Gpu))
        .map(u64::from)
        .collect();
    let average = total(busy.iter().copied()).checked_div(busy.len() as u64);
    let problems = usage.gpus.iter().filter_map(|gpu| {
        let problem = gpu.problem.as_deref()?;
        Some(format!("{}: {problem}", gpu.uuid))
    });
    vec![
        json!(name),
        json!(usage.driver_version.as_deref().unwrap_or_default()),
        json!(usage.gpus.len()),
        json!(claims.len()),
        json!(mebibytes(total(memory().map(|it| it.used)))),
        json!(mebibytes(total(memory().map(|it| it.total)))),
        json!(average.map_or(String::new(), percent)),
        json!(problems.collect::<Vec<_>>().join("; ")),
    ]
}

fn claim_cells(claim: &ClaimUsage) -> Vec<Value> {
    let devices = &claim.devices;
    let shares = || devices.iter().map(|device| &device.share);
    let joined = |values: BTreeSet<&str>| values.into_iter().collect::<Vec<_>>().join(",");
    let uuid = |device: &DeviceUsage| match &device.partition {
        Some(partition) => partition.uuid.clone(),
        None => device.gpu_uuid.clone(),
    };
    let known = !devices.is_empty();
    let memory = |bytes: u64| {
        if known {
            mebibytes(bytes)
        } else {
            String::new()
        }
    };
    // A claim has no limit if one of its devices has no limit.
    let limits: Option<Vec<u64>> = shares().map(|share| share.memory.allocated).collect();
    let allocated = limits.map(|all| total(all.into_iter()));
    let idle = shares().filter_map(|share| share.idle_seconds).min();
    vec![
        json!(claim.metadata.name),
        json!(joined(claim.nodes.iter().map(String::as_str).collect())),
        json!(joined(shares().map(|share| share.tier.as_str()).collect())),
        json!(joined(
            shares().map(|share| share.device.as_str()).collect()
        )),
        json!(devices.iter().map(uuid).collect::<Vec<_>>().join(",")),
        json!(memory(total(shares().map(|share| share.memory.used)))),
        json!(allocated.map_or(String::new(), memory)),
        json!(memory(total(shares().map(|share| share.memory.reserved)))),
        json!(busy(shares().map(|share| &share.utilization))),
        if known {
            json!(total(shares().map(|share| share.processes.into())))
        } else {
            Value::Null
        },
        json!(idle.map_or(String::new(), duration)),
        json!(claim.problem.as_deref().unwrap_or_default()),
    ]
}

/// Bytes as `20480Mi`, rounded up, so that only 0 is shown as 0.
fn mebibytes(bytes: u64) -> String {
    format!("{}Mi", bytes.div_ceil(MIB))
}

/// Hundredths of a percent as `25%`.
fn percent(hundredths: u64) -> String {
    format!("{}%", hundredths.saturating_add(50) / 100)
}

/// The sum, without an overflow: the numbers come from nodes, and a node may be wrong.
fn total(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}

/// One value for each device: percentages of different GPUs do not add up.
fn busy<'a>(utilizations: impl Iterator<Item = &'a Utilization>) -> String {
    let percentages: Vec<_> = utilizations
        .filter_map(|it| it.get(Measure::Gpu))
        .map(u64::from)
        .map(percent)
        .collect();
    percentages.join(",")
}

/// The two largest units, as kubectl prints ages: `45s`, `12m3s`, `3h20m`, `2d4h`.
fn duration(seconds: u64) -> String {
    let units = [(86_400, 'd'), (3_600, 'h'), (60, 'm'), (1, 's')];
    let first = units
        .iter()
        .position(|(unit, _)| seconds >= *unit)
        .unwrap_or(3);
    let mut text = String::new();
    let mut rest = seconds;
    for (unit, letter) in units.iter().skip(first).take(2) {
        if rest >= *unit || text.is_empty() {
            // Writing to a String cannot fail.
            let _ = write!(text, "{}{letter}", rest / unit);
        }
        rest %= unit;
    }
    text
}

#[cfg(test)]
mod tests;
