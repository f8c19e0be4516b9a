//! The use of a node's GPUs now and over the last hour.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::history::{History, percent};
use crate::model::{Gpu, Node, Tenant};
use crate::output::span;
use crate::top::size;
use crate::usage::{NodeGpu, Part, Usage, Used};

/// The GPUs of a node and their allocated parts.
#[derive(Clone, Debug, Default)]
pub(super) struct Holders {
    /// The GPUs, each with its memory in bytes.
    gpus: Vec<(NodeGpu, u64)>,
    /// The parts that claims have.
    parts: Vec<Part>,
}

/// The current use of a node's GPUs, where it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeUse {
    /// By the GPU's UUID.
    pub gpus: BTreeMap<String, UsedView>,
    /// By part: see [`key`].
    pub claims: BTreeMap<String, UsedView>,
}

/// The last hour of a node's GPUs by UUID, where it has a reading.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct NodeHour(BTreeMap<String, GpuHour>);

/// The last hour of a GPU, by minute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuHour {
    /// Percent of the memory.
    pub memory: Vec<Option<u8>>,
    /// Percent of the GPU's time.
    pub time: Vec<Option<u8>>,
}

/// Use at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsedView {
    /// Bytes, for people.
    pub memory: String,
    /// Percent of the GPU's time.
    pub time: Option<u8>,
    /// Time since its last kernel, for people; at least a minute.
    pub idle: Option<String>,
    /// The highest memory use that was measured, for people, where that is more than now.
    pub most: Option<String>,
}

/// The key by which the page finds the use of a part.
pub(super) fn key(part: &Part) -> String {
    let Part {
        node: _,
        claim,
        device,
        share,
    } = part;
    match share {
        Some(share) => format!("{claim}/{device}/{share}"),
        None => format!("{claim}/{device}"),
    }
}

impl Holders {
    pub(super) fn new(node: &Node) -> Self {
        let id = |gpu: &Gpu| NodeGpu::new(&node.name, &gpu.uuid);
        let gpus = node.gpus.iter().map(|gpu| (id(gpu), gpu.memory));
        let tenants = node.gpus.iter().flat_map(Gpu::tenants);
        Self {
            gpus: gpus.collect(),
            parts: tenants.map(Tenant::part).collect(),
        }
    }
}

impl NodeUse {
    pub(super) fn new(holders: &Holders, usage: &Usage) -> Self {
        let gpus = holders.gpus.iter().filter_map(|(gpu, _)| {
            let used = usage.gpus.get(gpu)?;
            Some((gpu.uuid.clone(), UsedView::new(used)))
        });
        let claims = holders.parts.iter().filter_map(|part| {
            let used = usage.parts.get(part)?;
            Some((key(part), UsedView::new(&used.all)))
        });
        Self {
            gpus: gpus.collect(),
            claims: claims.collect(),
        }
    }
}

impl NodeHour {
    pub(super) fn new(holders: &Holders, history: &History) -> Self {
        let gpus = holders.gpus.iter().filter_map(|(gpu, memory)| {
            let lines = history.of(gpu)?;
            let of_gpu = GpuHour {
                memory: lines.memory.iter().map(|it| part(*it, *memory)).collect(),
                time: lines.time,
            };
            Some((gpu.uuid.clone(), of_gpu))
        });
        Self(gpus.collect())
    }
}

impl UsedView {
    fn new(used: &Used) -> Self {
        Self {
            memory: size(used.memory),
            time: used.time.map(percent),
            most: used
                .peak
                .filter(|peak| peak.bytes > used.memory)
                .map(|peak| size(peak.bytes)),
            // Whole minutes, because seconds would change the record with each reading.
            idle: used
                .idle_seconds
                .filter(|seconds| *seconds >= 60)
                .map(|seconds| span(seconds / 60 * 60)),
        }
    }
}

fn part(used: Option<u64>, memory: u64) -> Option<u8> {
    let hundredfold = u128::from(used?) * 100;
    let percent = hundredfold.checked_div(memory.into())?;
    Some(u8::try_from(percent).unwrap_or(100).min(100))
}
