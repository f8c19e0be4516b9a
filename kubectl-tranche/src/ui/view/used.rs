//! What a node's GPUs use now and used over the last hour.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::history::History;
use crate::model::{Gpu, Node};
use crate::output::bytes;
use crate::usage::{Usage, Used};

/// The GPUs of a node and what is held of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Holders {
    /// UUIDs and bytes of memory.
    gpus: Vec<(String, u64)>,
    /// UIDs of claims, and names of their devices.
    claims: Vec<(String, String)>,
}

/// The use of a node's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeUse {
    /// By the GPU's UUID.
    pub gpus: BTreeMap<String, GpuUse>,
    /// By the claim's UID and its device's name, with a slash between them.
    pub claims: BTreeMap<String, UsedView>,
}

/// The use of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuUse {
    /// Now.
    pub now: Option<UsedView>,
    /// By minute over the last hour: percent of the memory.
    pub memory: Vec<Option<u8>>,
    /// By minute over the last hour: percent of the GPU's time.
    pub time: Vec<Option<u8>>,
}

/// Use at one time.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsedView {
    /// Bytes, for people.
    pub memory: String,
    /// Percent of the GPU's time.
    pub time: Option<u8>,
}

impl Holders {
    pub(super) fn new(node: &Node) -> Self {
        let gpus = node.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.memory));
        let tenants = node.gpus.iter().flat_map(Gpu::tenants);
        Self {
            gpus: gpus.collect(),
            claims: tenants
                .map(|tenant| (tenant.uid.clone(), tenant.device.device.clone()))
                .collect(),
        }
    }
}

impl NodeUse {
    pub(super) fn new(holders: &Holders, usage: &Usage, history: &History) -> Self {
        let gpus = holders.gpus.iter().map(|(uuid, memory)| {
            let lines = history.of(uuid).unwrap_or_default();
            let of_gpu = GpuUse {
                now: usage.gpus.get(uuid).map(UsedView::new),
                memory: lines.memory.iter().map(|it| part(*it, *memory)).collect(),
                time: lines.time.iter().map(|it| it.map(percent)).collect(),
            };
            (uuid.clone(), of_gpu)
        });
        let claims = holders.claims.iter().filter_map(|key| {
            let used = usage.claims.get(key)?;
            Some((format!("{}/{}", key.0, key.1), UsedView::new(used)))
        });
        Self {
            gpus: gpus.collect(),
            claims: claims.collect(),
        }
    }
}

impl UsedView {
    fn new(used: &Used) -> Self {
        Self {
            memory: bytes(used.memory),
            time: used.time.map(percent),
        }
    }
}

fn part(used: Option<u64>, memory: u64) -> Option<u8> {
    let hundredfold = u128::from(used?) * 100;
    let percent = hundredfold.checked_div(memory.into())?;
    Some(u8::try_from(percent).unwrap_or(100).min(100))
}

/// Whole percent: what the eye does not see is no change.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is between 0 and 100"
)]
fn percent(value: f64) -> u8 {
    value.clamp(0.0, 100.0).round() as u8
}
