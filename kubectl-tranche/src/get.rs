//! `get`: which claim and which pod has which GPU, and which pods a GPU has.

use serde::Serialize;

use crate::args::Kind;
use crate::model::{Claim, ClaimDevice, Gpu, Model, Node, State, Tenant, short};
use crate::output::{Block, Table, Tone, View, bytes, or_dash};
use crate::snapshot::Scope;

/// What to show.
#[derive(Clone, Debug)]
pub struct Question {
    /// What to list.
    pub kind: Kind,
    /// One of them.
    pub name: Option<String>,
    pub scope: Scope,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listing {
    /// How the rows are grouped.
    #[serde(skip)]
    pub kind: Option<Kind>,
    /// A row for each device of each claim, or each claim that has none.
    pub items: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// The claim's namespace; empty for a free GPU.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The claim's name; empty for a free GPU.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub claim: String,
    /// The pods for which it is reserved; one pod in a list of pods.
    pub pods: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// The classes that the claim requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// What it has; `None` for a claim that waits.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub device: Option<ClaimDevice>,
    /// The GPU and its node, for a free GPU.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub free: Option<Free>,
}

/// A GPU without claims.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Free {
    #[serde(rename = "gpuUUID")]
    pub gpu_uuid: String,
    pub node: String,
    /// Why no claim can get it: the reason of its GpuNode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<String>,
}

/// No object has the given name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// A claim or pod.
    #[error(
        "no {kind} {name} has or waits for a GPU {place}: check the name and --namespace, or list all with --all-namespaces"
    )]
    InNamespace {
        /// `claim` or `pod`.
        kind: &'static str,
        name: String,
        /// Where it was searched, in words.
        place: String,
    },
    #[error("no GPU or device is called {0}: list them with `kubectl tranche get gpus`")]
    Gpu(String),
    #[error("Tranche knows no GPUs of a node {0}: list the nodes with `kubectl tranche get nodes`")]
    Node(String),
}

pub fn answer(model: &Model, question: &Question) -> Result<Listing, NotFound> {
    let Question { kind, name, scope } = question;
    let items = match kind {
        Kind::Claims => claims(model, name.as_deref(), scope),
        Kind::Pods => pods(model, name.as_deref(), scope),
        Kind::Gpus | Kind::Nodes => gpus(model, name.as_deref()),
    };
    match name {
        Some(name) if items.is_empty() => Err(not_found(*kind, name, scope)),
        _ => Ok(Listing {
            kind: Some(*kind),
            items,
        }),
    }
}

fn not_found(kind: Kind, name: &str, scope: &Scope) -> NotFound {
    let kind = match kind {
        Kind::Claims => "claim",
        Kind::Pods => "pod",
        Kind::Gpus => return NotFound::Gpu(name.to_owned()),
        Kind::Nodes => return NotFound::Node(name.to_owned()),
    };
    NotFound::InNamespace {
        kind,
        name: name.to_owned(),
        place: match scope {
            Scope::All => "in any namespace".to_owned(),
            Scope::Namespace(namespace) => format!("in namespace {namespace}"),
        },
    }
}

fn claims(model: &Model, name: Option<&str>, scope: &Scope) -> Vec<Row> {
    let claims = model.claims.iter();
    claims
        .filter(|claim| scope.has(&claim.namespace))
        .filter(|claim| name.is_none_or(|name| claim.name == name))
        .flat_map(|claim| rows(claim, &claim.pods))
        .collect()
}

fn pods(model: &Model, name: Option<&str>, scope: &Scope) -> Vec<Row> {
    let claims = model.claims.iter();
    let mut rows: Vec<Row> = claims
        .filter(|claim| scope.has(&claim.namespace))
        .flat_map(|claim| {
            let pods = claim.pods.iter();
            pods.filter(|pod| name.is_none_or(|name| *pod == name))
                .flat_map(|pod| rows(claim, std::slice::from_ref(pod)))
        })
        .collect();
    rows.sort_by(|a, b| (&a.namespace, &a.pods, &a.claim).cmp(&(&b.namespace, &b.pods, &b.claim)));
    rows
}

/// A row for each device of a claim; one for a claim that waits.
fn rows(claim: &Claim, pods: &[String]) -> Vec<Row> {
    let row = |device: Option<&ClaimDevice>| Row {
        namespace: claim.namespace.clone(),
        claim: claim.name.clone(),
        pods: pods.to_vec(),
        state: Some(claim.state),
        classes: claim.wants.iter().map(|want| want.class.clone()).collect(),
        device: device.cloned(),
        free: None,
    };
    if claim.devices.is_empty() {
        return vec![row(None)];
    }
    claim
        .devices
        .iter()
        .map(|device| row(Some(device)))
        .collect()
}

fn gpus(model: &Model, name: Option<&str>) -> Vec<Row> {
    let named: Vec<(&Node, &Gpu)> = model.gpus().collect();
    named
        .into_iter()
        .flat_map(|(node, gpu)| of_gpu(node, gpu, name))
        .collect()
}

fn of_gpu(node: &Node, gpu: &Gpu, name: Option<&str>) -> Vec<Row> {
    let is_gpu = name.is_none_or(|name| is_prefix(name, &gpu.uuid));
    let is_named = |tenant: &&Tenant| {
        let is_mig = |name| {
            let uuid = tenant.device.mig_uuid.as_deref();
            uuid.is_some_and(|uuid| is_prefix(name, uuid))
        };
        is_gpu || name.is_some_and(|name| tenant.device.device == name || is_mig(name))
    };
    let tenants = gpu.held.iter().flat_map(|held| &held.tenants);
    let rows: Vec<Row> = tenants
        .filter(is_named)
        .map(|tenant| Row {
            namespace: tenant.namespace.clone(),
            claim: tenant.claim.clone(),
            pods: tenant.pods.clone(),
            state: None,
            classes: Vec::new(),
            device: Some(tenant.device.clone()),
            free: None,
        })
        .collect();
    if !rows.is_empty() || !is_gpu {
        return rows;
    }
    vec![Row {
        namespace: String::new(),
        claim: String::new(),
        pods: Vec::new(),
        state: None,
        classes: Vec::new(),
        device: None,
        free: Some(Free {
            gpu_uuid: gpu.uuid.clone(),
            node: node.name.clone(),
            withheld: gpu.withheld_whole().map(str::to_owned),
        }),
    }]
}

/// Whether a name is the beginning of a UUID: at least the kind and one digit, so that `GPU-` does not match every GPU.
fn is_prefix(name: &str, uuid: &str) -> bool {
    name.len() > "GPU-".len() && uuid.starts_with(name)
}

impl View for Listing {
    fn blocks(&self, is_wide: bool) -> Vec<Block> {
        if self.items.is_empty() {
            let what = match self.kind {
                Some(Kind::Gpus) => "GPUs",
                Some(Kind::Pods) => "pods with GPUs",
                _ => "claims of GPUs",
            };
            return vec![Block::plain(format!("there are no {what} here"))];
        }
        let mut header = match self.kind {
            Some(Kind::Gpus) => vec![
                "NODE",
                "GPU",
                "TIER",
                "MEMORY",
                "CORES",
                "NAMESPACE",
                "CLAIM",
                "PODS",
            ],
            Some(Kind::Pods) => vec![
                "NAMESPACE",
                "POD",
                "CLAIM",
                "STATE",
                "TIER",
                "MEMORY",
                "CORES",
                "NODE",
                "GPU",
            ],
            _ => vec![
                "NAMESPACE",
                "CLAIM",
                "STATE",
                "TIER",
                "MEMORY",
                "CORES",
                "NODE",
                "GPU",
                "PODS",
            ],
        };
        if is_wide {
            header.extend(["PRIORITY", "DEVICE", "MIG", "PCI", "SHARE"]);
        }
        let mut table = Table::new(&header);
        for row in &self.items {
            let tone = match (row.state, &row.device) {
                (Some(State::Waiting), _) => Tone::Warning,
                (_, None) => Tone::Faint,
                _ => Tone::Plain,
            };
            let cells = header.iter().map(|column| row.cell(column, is_wide));
            table.row(tone, cells.collect());
        }
        vec![Block::Table(table)]
    }
}

impl Row {
    fn cell(&self, column: &str, is_wide: bool) -> String {
        let device = self.device.as_ref();
        let uuid = |uuid: &str| {
            if is_wide {
                uuid.to_owned()
            } else {
                short(uuid).to_owned()
            }
        };
        match column {
            "NAMESPACE" => self.namespace.clone(),
            "CLAIM" => self.claim.clone(),
            "POD" | "PODS" => self.pods.join(","),
            "STATE" => or_dash(self.state.map(State::as_str)),
            "TIER" => device.map_or_else(|| self.without_device(), ClaimDevice::kind),
            "MEMORY" => or_dash(device.and_then(|it| it.memory).map(bytes)),
            "CORES" => or_dash(device.and_then(|it| it.cores)),
            "NODE" => or_dash(
                device
                    .map(|it| it.node.as_str())
                    .or(self.free.as_ref().map(|it| it.node.as_str())),
            ),
            "GPU" => or_dash(
                device
                    .and_then(|it| it.gpu_uuid.as_deref())
                    .or(self.free.as_ref().map(|it| it.gpu_uuid.as_str()))
                    .map(uuid),
            ),
            "PRIORITY" => or_dash(device.and_then(|it| it.priority.as_deref())),
            "DEVICE" => or_dash(device.map(|it| it.device.as_str())),
            "MIG" => or_dash(device.and_then(|it| it.mig_uuid.as_deref())),
            "PCI" => or_dash(device.and_then(|it| it.pci_bus_id.as_deref())),
            "SHARE" => or_dash(device.and_then(|it| it.share_id.as_deref())),
            _ => String::new(),
        }
    }

    /// The classes of a claim that waits; `free` for a GPU.
    fn without_device(&self) -> String {
        match &self.free {
            Some(free) => match &free.withheld {
                Some(reason) => format!("not offered ({reason})"),
                None => "free".to_owned(),
            },
            None => self.classes.join(","),
        }
    }
}

#[cfg(test)]
mod tests;
