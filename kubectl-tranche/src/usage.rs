//! How much of the GPUs is used now: pure, from the objects of `usage.gpu.tranche.dev`.
//!
//! The node measures the numbers with NVML; they never come from a library in a tenant's process. Where no API serves them,
//! commands show `-`, and one line says why.

pub mod reading;

use std::collections::BTreeMap;

use serde::Serialize;
use tranche_api::names::node_of;
use tranche_api::usage::Peak;

use reading::{ClaimReading, GpuReading, GroupReading, NodeReading, ShareReading};

/// Use at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Used {
    /// Bytes of GPU memory now.
    pub memory: u64,
    /// Percent of the device's time over the last seconds, 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
    /// Seconds since the last kernel; not known for a GPU as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u64>,
    /// The highest memory use that was measured; not known for a GPU as a whole, nor for one pod of several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<Peak>,
}

/// A GPU of a node. A node's report about another node's GPU does not count for that GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeGpu {
    pub node: String,
    pub uuid: String,
}

impl NodeGpu {
    /// The node's GPU with this UUID.
    #[must_use]
    pub fn new(node: &str, uuid: &str) -> Self {
        Self {
            node: node.to_owned(),
            uuid: uuid.to_owned(),
        }
    }
}

/// A claim's part of a device. A claim may have several parts of one device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    pub node: String,
    pub claim: String,
    pub device: String,
    /// The share, where claims share the device.
    pub share: Option<String>,
}

/// The use of a part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartUsed {
    /// The use by all processes.
    pub all: Used,
    /// The use by the processes of each pod, where several pods have the claim.
    pub pods: BTreeMap<String, Used>,
}

/// The use of all GPUs, by GPU and by claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// By GPU.
    pub gpus: BTreeMap<NodeGpu, Used>,
    /// By part.
    pub parts: BTreeMap<Part, PartUsed>,
    /// One line that says why it is not the use of all.
    pub partial: Option<String>,
    /// Objects whose use is not known.
    pub missing: Missing,
}

/// Objects whose use is not known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Missing {
    nodes: Unknown,
    gpus: Unknown,
    claims: Unknown,
}

/// The use, or why it is not known: one line.
pub type UsageResult = Result<Usage, String>;

/// Lines that say what is missing of the use.
#[must_use]
pub fn notes(known: &UsageResult) -> Vec<String> {
    match known {
        Ok(usage) => usage.notes(),
        Err(line) => vec![line.clone()],
    }
}

impl Usage {
    /// Adds a node's report.
    pub fn add_node(&mut self, object: &NodeReading) {
        let name = object.metadata.name.clone().unwrap_or_default();
        let Some(gpus) = &object.gpus else {
            let problem = object.problem.as_deref();
            self.missing
                .nodes
                .add(&name, problem.unwrap_or("the node said nothing"));
            return;
        };
        for gpu in gpus {
            match &gpu.problem {
                None => self.gpu(&name, gpu),
                // Its shares have zeros that do not come from NVML.
                Some(problem) => {
                    let gpu = format!("{} of {name}", gpu.uuid);
                    self.missing.gpus.add(&gpu, problem);
                }
            }
        }
    }

    /// Adds a claim's report.
    pub fn add_claim(&mut self, object: &ClaimReading) {
        for device in &object.devices {
            self.part(device);
        }
        if let Some(problem) = &object.problem {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            let meta = &object.metadata;
            let name = format!("{}/{}", text(&meta.namespace), text(&meta.name));
            self.missing.claims.add(&name, problem);
        }
    }

    fn notes(&self) -> Vec<String> {
        let lines = [
            self.partial.clone(),
            self.missing.nodes.line("nodes"),
            self.missing.gpus.line("GPUs"),
            self.missing.claims.line("claims"),
        ];
        lines.into_iter().flatten().collect()
    }

    fn gpu(&mut self, node: &str, gpu: &GpuReading) {
        if let Some(memory) = gpu.memory {
            let used = Used {
                memory: memory.used,
                time: gpu.utilization.percent(),
                ..Used::default()
            };
            self.gpus.insert(NodeGpu::new(node, &gpu.uuid), used);
        }
        for share in gpu.all_shares() {
            self.part(share);
        }
    }

    fn part(&mut self, share: &ShareReading) {
        let part = Part {
            node: node_of(&share.pool).to_owned(),
            claim: share.claim.uid.clone(),
            device: share.device.clone(),
            share: share.share_id.clone(),
        };
        let mut used = PartUsed {
            all: Used {
                memory: share.memory.used,
                time: share.utilization.percent(),
                idle_seconds: share.idle_seconds,
                peak: share.memory.peak,
            },
            pods: BTreeMap::new(),
        };
        for group in &share.groups {
            if let Some(pod) = &group.pod {
                used.pods.entry(pod.clone()).or_default().add(group);
            }
        }
        if used.pods.len() < 2 {
            used.pods.clear();
        }
        self.parts.insert(part, used);
    }
}

impl Used {
    /// Adds a container of the same pod.
    fn add(&mut self, group: &GroupReading) {
        self.memory = self.memory.saturating_add(group.used);
        if let Some(time) = group.utilization.percent() {
            self.time = Some(self.time.unwrap_or_default() + time);
        }
    }
}

/// Objects of a kind whose use is not known.
#[derive(Clone, Debug, Default, PartialEq)]
struct Unknown {
    /// The first, with its reason.
    first: Option<(String, String)>,
    more: usize,
}

impl Unknown {
    fn add(&mut self, name: &str, problem: &str) {
        if self.first.is_some() {
            self.more += 1;
            return;
        }
        // Terminals show these texts of nodes.
        let printable = |it: char| if it.is_control() { ' ' } else { it };
        let problem = problem.chars().map(printable).collect();
        self.first = Some((name.to_owned(), problem));
    }

    /// One line for all of them.
    fn line(&self, kind: &str) -> Option<String> {
        let (name, problem) = self.first.as_ref()?;
        let more = match self.more {
            0 => String::new(),
            more => format!(" and {more} more {kind}"),
        };
        Some(format!("usage of {name}{more} is not shown: {problem}"))
    }
}

#[cfg(test)]
mod tests;
