//! `top`: how much of nodes, GPUs and pods is allocated and used.

use std::collections::BTreeMap;

use serde::Serialize;
use tranche_api::Tier;

use crate::args::TopKind;
use crate::model::{Amounts, Gpu, Model, Node, Room, Tenant, short};
use crate::output::{Block, Table, Tone, View, bytes, or_dash, span};
use crate::snapshot::Scope;
use crate::usage::Used;

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum TopReport {
    /// A row for each node.
    Nodes { nodes: Vec<NodeRow> },
    /// A row for each GPU.
    Gpus { gpus: Vec<GpuRow> },
    /// A row for each device of each pod.
    Pods { pods: Vec<PodRow> },
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRow {
    pub node: String,
    pub gpus: usize,
    /// GPUs that are offered and have no claims.
    pub free: usize,
    /// Claims on its GPUs.
    pub claims: usize,
    /// How much of all its GPUs is allocated.
    #[serde(flatten)]
    pub amounts: Amounts,
    /// The use of all its GPUs, where it is known for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
    /// What is wrong with it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRow {
    pub node: String,
    pub uuid: String,
    /// Its number in `nvidia-smi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    pub product: String,
    /// The tier that it serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// Claims on it.
    pub claims: usize,
    /// Claims that only observe it (admin access).
    #[serde(skip_serializing_if = "is_zero")]
    pub observers: usize,
    /// Why none of it is offered: the reason of its GpuNode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<String>,
    /// How much of it is allocated.
    #[serde(flatten)]
    pub amounts: Amounts,
    /// What is free.
    pub room: Room,
    /// What is used of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRow {
    /// The pod; empty for a claim that no pod uses.
    pub pod: String,
    #[serde(rename = "gpuUUID")]
    pub gpu_uuid: String,
    /// The claim, what it has, and the pod's use.
    #[serde(flatten)]
    pub tenant: Tenant,
}

#[must_use]
pub fn answer(model: &Model, kind: TopKind, scope: &Scope) -> TopReport {
    match kind {
        TopKind::Nodes => TopReport::Nodes {
            nodes: model.nodes.iter().map(node).collect(),
        },
        TopKind::Gpus => TopReport::Gpus {
            gpus: model.gpus().map(|(node, it)| gpu(node, it)).collect(),
        },
        TopKind::Pods => TopReport::Pods {
            pods: pods(model, scope),
        },
    }
}

fn node(node: &Node) -> NodeRow {
    let used: Option<Vec<Used>> = node.gpus.iter().map(|gpu| gpu.used).collect();
    NodeRow {
        node: node.name.clone(),
        gpus: node.gpus.len(),
        free: node.gpus.iter().filter(|it| it.room == Room::All).count(),
        claims: node.gpus.iter().map(|it| it.tenants().count()).sum(),
        amounts: node.gpus.iter().map(Gpu::amounts).sum(),
        used: used.and_then(|used| together(&used)),
        problems: node.problems.clone(),
    }
}

/// The sum of memory and the average of time.
fn together(used: &[Used]) -> Option<Used> {
    let count = u32::try_from(used.len()).ok().filter(|count| *count > 0)?;
    let times: Option<Vec<f64>> = used.iter().map(|it| it.time).collect();
    Some(Used {
        memory: used.iter().map(|it| it.memory).fold(0, u64::saturating_add),
        time: times.map(|times| times.iter().sum::<f64>() / f64::from(count)),
        ..Used::default()
    })
}

fn gpu(node: &Node, gpu: &Gpu) -> GpuRow {
    GpuRow {
        node: node.name.clone(),
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        product: gpu.product.clone(),
        tier: gpu.tier,
        claims: gpu.tenants().count(),
        observers: gpu.observers().count(),
        withheld: gpu.withheld_whole().map(str::to_owned),
        amounts: gpu.amounts(),
        room: gpu.room.clone(),
        used: gpu.used,
    }
}

fn pods(model: &Model, scope: &Scope) -> Vec<PodRow> {
    let tenants = model.gpus().flat_map(|(_, gpu)| {
        let tenants = gpu.held.iter().flat_map(|held| &held.tenants);
        tenants.map(move |tenant| (gpu, tenant))
    });
    let mut rows: Vec<PodRow> = tenants
        .filter(|(_, tenant)| scope.has(&tenant.namespace))
        .flat_map(|(gpu, tenant)| {
            let row = |pod: String| PodRow {
                gpu_uuid: gpu.uuid.clone(),
                tenant: Tenant {
                    used: tenant.used_by(&pod),
                    used_by_pod: BTreeMap::new(),
                    ..tenant.clone()
                },
                pod,
            };
            if tenant.pods.is_empty() {
                vec![row(String::new())]
            } else {
                tenant.pods.iter().cloned().map(row).collect()
            }
        })
        .collect();
    let key = |row: &PodRow| {
        let tenant = &row.tenant;
        (
            tenant.namespace.clone(),
            row.pod.clone(),
            tenant.claim.clone(),
        )
    };
    rows.sort_by_cached_key(key);
    rows
}

impl View for TopReport {
    fn blocks(&self, is_wide: bool) -> Vec<Block> {
        let table = match self {
            Self::Nodes { nodes } => node_table(nodes),
            Self::Gpus { gpus } => gpu_table(gpus, is_wide),
            Self::Pods { pods } => pod_table(pods, is_wide),
        };
        if table.is_empty() {
            let what = match self {
                Self::Pods { .. } => "pods with GPUs",
                _ => "GPUs that Tranche knows",
            };
            return vec![Block::plain(format!("there are no {what} here"))];
        }
        let mut blocks = vec![Block::Table(table)];
        if let Self::Nodes { nodes } = self {
            let problems = nodes.iter().flat_map(|node| {
                let problems = node.problems.iter();
                problems.map(|problem| format!("{}: {problem}", node.node))
            });
            blocks.extend(problems.map(|line| Block::Line(Tone::Warning, line)));
        }
        blocks
    }
}

fn node_table(nodes: &[NodeRow]) -> Table {
    let mut table = Table::new(&[
        "NODE",
        "GPUS",
        "FREE",
        "CLAIMS",
        "MEMORY",
        "ALLOCATED",
        "STRANDED",
        "CORES",
        "USED",
        "TIME",
    ]);
    for row in nodes {
        let amounts = &row.amounts;
        let tone = if row.problems.is_empty() {
            Tone::Plain
        } else {
            Tone::Warning
        };
        let cells = vec![
            row.node.clone(),
            row.gpus.to_string(),
            row.free.to_string(),
            row.claims.to_string(),
            size(amounts.memory),
            of(amounts.allocated_memory, amounts.memory),
            size(amounts.stranded_memory),
            of_cores(amounts),
            or_dash(row.used.map(|used| size(used.memory))),
            time(row.used),
        ];
        table.row(tone, cells);
    }
    table
}

fn gpu_table(gpus: &[GpuRow], is_wide: bool) -> Table {
    let mut header = vec![
        "NODE",
        "GPU",
        "PRODUCT",
        "TIER",
        "CLAIMS",
        "MEMORY",
        "ALLOCATED",
        "FREE",
        "STRANDED",
        "USED",
        "TIME",
    ];
    if is_wide {
        header.insert(2, "INDEX");
    }
    let mut table = Table::new(&header);
    for row in gpus {
        let amounts = &row.amounts;
        let is_stranded = amounts.stranded_memory > 0 || amounts.stranded_cores > 0;
        let tone = match (&row.room, is_stranded) {
            _ if row.withheld.is_some() => Tone::Warning,
            (Room::All, _) => Tone::Good,
            (Room::NotOffered, _) | (_, true) => Tone::Warning,
            _ => Tone::Plain,
        };
        let uuid = if is_wide { &row.uuid } else { short(&row.uuid) };
        let mut cells = vec![
            row.node.clone(),
            uuid.to_owned(),
            row.product.clone(),
            or_dash(row.tier),
            match row.observers {
                0 => row.claims.to_string(),
                observers => format!("{}, {observers} admin", row.claims),
            },
            size(amounts.memory),
            of(amounts.allocated_memory, amounts.memory),
            match &row.withheld {
                Some(reason) => format!("not offered ({reason})"),
                None => free(&row.room),
            },
            stranded(&row.room),
            or_dash(row.used.map(|used| size(used.memory))),
            time(row.used),
        ];
        if is_wide {
            cells.insert(2, or_dash(row.index));
        }
        table.row(tone, cells);
    }
    table
}

fn pod_table(pods: &[PodRow], is_wide: bool) -> Table {
    let mut header = vec![
        "NAMESPACE",
        "POD",
        "CLAIM",
        "TIER",
        "NODE",
        "GPU",
        "MEMORY",
        "CONTEXT",
        "CORES",
        "USED",
        "TIME",
    ];
    if is_wide {
        header.extend(["IDLE", "DEVICE"]);
    }
    let mut table = Table::new(&header);
    for PodRow {
        pod,
        gpu_uuid,
        tenant,
    } in pods
    {
        let device = &tenant.device;
        let uuid = if is_wide { gpu_uuid } else { short(gpu_uuid) };
        let mut cells = vec![
            tenant.namespace.clone(),
            pod.clone(),
            tenant.claim.clone(),
            device.kind(),
            device.node.clone(),
            uuid.to_owned(),
            or_dash(device.memory.map(bytes)),
            or_dash(device.context_memory.map(size)),
            or_dash(device.cores.map(|cores| format!("{cores}%"))),
            or_dash(tenant.used.map(|used| size(used.memory))),
            time(tenant.used),
        ];
        if is_wide {
            let idle = tenant.used.and_then(|it| it.idle_seconds);
            cells.push(or_dash(idle.map(span)));
            cells.push(device.device.clone());
        }
        table.row(Tone::Plain, cells);
    }
    table
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
const fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Bytes for columns: at most one decimal.
pub(crate) fn size(bytes: u64) -> String {
    const GI: u64 = 1 << 30;
    const MI: u64 = 1 << 20;
    if bytes == 0 {
        return "0".to_owned();
    }
    if bytes < GI {
        return format!("{}Mi", bytes.div_ceil(MI));
    }
    let tenths = (u128::from(bytes) * 10 + u128::from(GI / 2)) / u128::from(GI);
    match tenths % 10 {
        0 => format!("{}Gi", tenths / 10),
        decimal => format!("{}.{decimal}Gi", tenths / 10),
    }
}

fn of(part: u64, whole: u64) -> String {
    let percent = u128::from(part) * 100 / u128::from(whole.max(1));
    format!("{} ({percent}%)", size(part))
}

fn of_cores(amounts: &Amounts) -> String {
    let percent = amounts.allocated_cores * 100 / amounts.cores.max(1);
    format!("{percent}%")
}

fn time(used: Option<Used>) -> String {
    or_dash(used.and_then(|used| used.time).map(percent))
}

fn percent(time: f64) -> String {
    format!("{time:.0}%")
}

/// What is used, in a few words: `3Gi`, and the part of the time where it is known.
pub(crate) fn use_of(used: Used) -> String {
    match used.time {
        Some(time) => format!("{} {}", size(used.memory), percent(time)),
        None => size(used.memory),
    }
}

/// What is free of a GPU, in a few words.
pub(crate) fn free(room: &Room) -> String {
    match room {
        Room::All => "all".to_owned(),
        Room::Nothing => "nothing".to_owned(),
        Room::NotOffered => "not offered".to_owned(),
        Room::Unknown => "unknown".to_owned(),
        Room::Places { free, .. } => format!("{free} places"),
        Room::Shares(room) => format!(
            "{} {}% {} places",
            size(room.free_memory),
            room.free_cores,
            room.free_places
        ),
        Room::Slices(room) => match room.fits.last() {
            Some(largest) => format!("up to {largest}"),
            None => "nothing fits".to_owned(),
        },
    }
}

/// The free room of a GPU that no claim can get.
fn stranded(room: &Room) -> String {
    let parts = match room {
        Room::Shares(room) => [
            (room.stranded_memory > 0).then(|| size(room.stranded_memory)),
            (room.stranded_cores > 0).then(|| format!("{}%", room.stranded_cores)),
        ],
        Room::Slices(room) => [
            (room.stranded_compute > 0)
                .then(|| format!("{}/{} compute", room.stranded_compute, room.compute)),
            (room.stranded_memory > 0)
                .then(|| format!("{}/{} memory", room.stranded_memory, room.memory)),
        ],
        _ => [None, None],
    };
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
