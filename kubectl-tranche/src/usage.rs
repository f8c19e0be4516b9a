//! How much of the GPUs is used now: pure, from the objects of `usage.gpu.tranche.dev`.
//!
//! The numbers are the node's, from NVML, never what a tenant's library says. Where nobody serves them, commands show `-` and
//! one line says why.

use std::collections::BTreeMap;

use serde::Serialize;
use tranche_api::usage::{GpuUsage, GroupUsage, Measure, ShareUsage, Utilization};
use tranche_api::usage_api::{ClaimUsage, NodeUsageObject};

use crate::snapshot::{Resource, Snapshot};

/// Use at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Used {
    /// Bytes of GPU memory now.
    pub memory: u64,
    /// Percent of the device's time over the last seconds, 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
    /// Seconds since the last kernel; not known of a GPU as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u64>,
}

/// A claim's part of a device. A claim may have several of one device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    /// The claim's UID.
    pub claim: String,
    /// The device's name.
    pub device: String,
    /// The share, where claims share the device.
    pub share: Option<String>,
}

/// What is used of a part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartUsed {
    /// By all processes.
    pub all: Used,
    /// By those of each pod that is known.
    pub pods: BTreeMap<String, Used>,
}

/// The use of all GPUs, by GPU and by claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// By the GPU's UUID.
    pub gpus: BTreeMap<String, Used>,
    /// By what claims hold.
    pub parts: BTreeMap<Part, PartUsed>,
    /// What is missing, a line for each kind of object.
    pub missing: Vec<String>,
}

/// The use, or why it is not known: one line.
pub type Known = Result<Usage, String>;

/// The use, as it was read; nothing where it was not asked for.
pub fn of(snapshot: &Snapshot) -> Known {
    let gap = snapshot.gap(Resource::NodeUsages);
    if let Some(gap) = gap.filter(|gap| !gap.is_partial) {
        return Err(gap.message.clone());
    }
    let mut usage = Usage::new(&snapshot.node_usages, &snapshot.claim_usages);
    usage
        .missing
        .splice(..0, gap.map(|gap| gap.message.clone()));
    Ok(usage)
}

/// What is missing of the use, a line for each.
#[must_use]
pub fn notes(known: &Known) -> &[String] {
    match known {
        Ok(usage) => &usage.missing,
        Err(line) => std::slice::from_ref(line),
    }
}

impl Usage {
    /// Of what nodes and claims say of themselves.
    #[must_use]
    pub fn new(nodes: &[NodeUsageObject], claims: &[ClaimUsage]) -> Self {
        let mut usage = Self::default();
        let (mut of_nodes, mut of_gpus, mut of_claims) = (Vec::new(), Vec::new(), Vec::new());
        for object in nodes {
            let name = object.metadata.name.clone().unwrap_or_default();
            if let Some(node) = &object.usage {
                for gpu in &node.gpus {
                    usage.gpu(gpu);
                    let problem = gpu.problem.clone();
                    of_gpus.extend(problem.map(|it| (format!("{} of {name}", gpu.uuid), it)));
                }
            } else {
                let problem = object.problem.clone();
                let problem = problem.unwrap_or_else(|| "the node said nothing".to_owned());
                of_nodes.push((name, problem));
            }
        }
        for claim in claims {
            for device in &claim.devices {
                usage.part(&device.share);
            }
            let meta = &claim.metadata;
            let part = |text: &Option<String>| text.clone().unwrap_or_default();
            let name = format!("{}/{}", part(&meta.namespace), part(&meta.name));
            of_claims.extend(claim.problem.clone().map(|problem| (name, problem)));
        }
        let lines = [
            missing("nodes", &of_nodes),
            missing("GPUs", &of_gpus),
            missing("claims", &of_claims),
        ];
        usage.missing = lines.into_iter().flatten().collect();
        usage
    }

    fn gpu(&mut self, gpu: &GpuUsage) {
        if let Some(memory) = gpu.memory {
            let used = Used {
                memory: memory.used,
                time: time(&gpu.utilization),
                idle_seconds: None,
            };
            self.gpus.insert(gpu.uuid.clone(), used);
        }
        let partitions = gpu.partitions.iter().flat_map(|it| &it.shares);
        for share in gpu.shares.iter().chain(partitions) {
            self.part(share);
        }
    }

    fn part(&mut self, share: &ShareUsage) {
        let part = Part {
            claim: share.claim.uid.clone(),
            device: share.device.clone(),
            share: share.share_id.clone(),
        };
        let mut used = PartUsed {
            all: Used {
                memory: share.memory.used,
                time: time(&share.utilization),
                idle_seconds: share.idle_seconds,
            },
            pods: BTreeMap::new(),
        };
        for group in &share.groups {
            if let Some(pod) = &group.pod {
                used.pods.entry(pod.clone()).or_default().add(group);
            }
        }
        self.parts.insert(part, used);
    }
}

impl Used {
    /// Takes in a container of the same pod.
    fn add(&mut self, group: &GroupUsage) {
        self.memory = self.memory.saturating_add(group.used);
        if let Some(time) = time(&group.utilization) {
            self.time = Some(self.time.unwrap_or_default() + time);
        }
    }
}

/// Percent of the time in which a kernel ran.
fn time(utilization: &Utilization) -> Option<f64> {
    let hundredths = utilization.get(Measure::Gpu)?;
    Some(f64::from(hundredths) / 100.0)
}

/// One line for all objects of a kind whose use is not known: the first with its reason, and how many more there are.
fn missing(kind: &str, problems: &[(String, String)]) -> Option<String> {
    let ((name, problem), others) = problems.split_first()?;
    let more = match others.len() {
        0 => String::new(),
        more => format!(" and {more} more {kind}"),
    };
    // What nodes say is shown in terminals.
    let printable = |it: char| if it.is_control() { ' ' } else { it };
    let problem: String = problem.chars().map(printable).collect();
    Some(format!("usage of {name}{more} is not shown: {problem}"))
}

#[cfg(test)]
mod tests;
