//! Whether somebody serves a node's GPUs: pure, from the objects that should be there.
//!
//! A plugin that is gone cannot report that it is gone, and its GpuNode stays as it was. So this compares what the GpuNode says
//! with what exists: the Node, the plugin's pod, the ResourceSlices.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use tranche_api::GpuNode;
use tranche_api::names::{DRIVER, own_node};

/// The label with which an administrator keeps the plugin off a node.
pub(crate) const PLUGIN_LABEL: &str = "gpu.tranche.dev/node-plugin";
/// The labels by which the chart finds nodes with GPUs.
const GPU_LABELS: [&str; 2] = [
    "nvidia.com/gpu.present",
    "feature.node.kubernetes.io/pci-10de.present",
];

/// What exists; `None` where the caller may not read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Existing<'a> {
    pub(crate) nodes: Option<&'a [Node]>,
    pub(crate) slices: Option<&'a [ResourceSlice]>,
    /// The nodes with a pod of the plugin, and whether it is ready.
    pub(crate) plugins: Option<&'a BTreeMap<String, bool>>,
}

/// A reason why a node's GPUs cannot be used or given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) message: String,
    pub(crate) way_out: String,
    /// Whether somebody wanted it so and nobody is harmed.
    pub(crate) is_intended: bool,
}

fn fault(message: impl Into<String>, way_out: impl Into<String>) -> Fault {
    Fault {
        message: message.into(),
        way_out: way_out.into(),
        is_intended: false,
    }
}

/// The claims that hold devices of ours.
pub(crate) fn of_ours<'a>(
    claims: impl IntoIterator<Item = &'a ResourceClaim>,
) -> impl Iterator<Item = &'a ResourceClaim> {
    claims.into_iter().filter(|claim| {
        let allocation = claim.status.as_ref().and_then(|it| it.allocation.as_ref());
        let results = allocation.and_then(|it| it.devices.as_ref()?.results.as_ref());
        let mut results = results.into_iter().flatten();
        results.any(|result| result.driver == DRIVER)
    })
}

/// Whether the node has prepared all devices of ours that a claim has.
pub(crate) fn is_prepared(claim: &ResourceClaim) -> bool {
    let Some(status) = &claim.status else {
        return false;
    };
    let allocation = status.allocation.as_ref();
    let results = allocation.and_then(|it| it.devices.as_ref()?.results.as_ref());
    let mut ours = results
        .into_iter()
        .flatten()
        .filter(|result| result.driver == DRIVER);
    ours.all(|result| {
        let mut devices = status.devices.iter().flatten().filter(|it| {
            it.driver == DRIVER
                && (&it.pool, &it.device, &it.share_id)
                    == (&result.pool, &result.device, &result.share_id)
        });
        devices.any(|it| {
            let mut conditions = it.conditions.iter().flatten();
            conditions.any(|it| it.type_ == "Ready" && it.status == "True")
        })
    })
}

/// The claims that hold devices of ours, by node: `namespace/name`.
pub(crate) fn held(claims: &[ResourceClaim]) -> BTreeMap<&str, BTreeSet<String>> {
    let mut held: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for claim in claims {
        let allocation = claim.status.as_ref().and_then(|it| it.allocation.as_ref());
        let results = allocation.and_then(|it| it.devices.as_ref()?.results.as_ref());
        for result in results.into_iter().flatten() {
            if let Some(node) = own_node(&result.pool).filter(|_| result.driver == DRIVER) {
                let text = |text: &Option<String>| text.clone().unwrap_or_default();
                let (namespace, name) = (&claim.metadata.namespace, &claim.metadata.name);
                let name = format!("{}/{}", text(namespace), text(name));
                held.entry(node).or_default().insert(name);
            }
        }
    }
    held
}

/// `1 claim is held there: a/b`, or `3 claims are held there: a/b, …`.
pub(crate) fn held_there(claims: &BTreeSet<String>) -> String {
    const MOST: usize = 3;
    let mut names: Vec<&str> = claims.iter().take(MOST).map(String::as_str).collect();
    if claims.len() > MOST {
        names.push("…");
    }
    let names = names.join(", ");
    match claims.len() {
        1 => format!("1 claim is held there: {names}"),
        count => format!("{count} claims are held there: {names}"),
    }
}

/// Why nobody serves the GPUs of a node that has a GpuNode. `claims` are those that are held there.
pub(crate) fn faults(
    object: &GpuNode,
    existing: Existing<'_>,
    claims: Option<&BTreeSet<String>>,
) -> Vec<Fault> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let mut found = Vec::new();
    if let Some(nodes) = existing.nodes {
        let node = nodes
            .iter()
            .find(|it| it.metadata.name.as_deref() == Some(name));
        let Some(node) = node else {
            return vec![fault(
                "there is no Node of this name",
                format!(
                    "Kubernetes removes the GpuNode of a Node that was deleted; if it stays: kubectl delete gpunode {name}"
                ),
            )];
        };
        found.extend(not_ready(node));
    }
    let plugin = plugin(object, existing, claims);
    // Without a plugin, the kubelet removes the slices: one line says both.
    if plugin.is_none() {
        found.extend(slices(object, existing));
    }
    found.extend(plugin);
    found
}

fn not_ready(node: &Node) -> Option<Fault> {
    let conditions = node.status.as_ref()?.conditions.as_deref()?;
    let ready = conditions.iter().find(|it| it.type_ == "Ready")?;
    let name = node.metadata.name.as_deref().unwrap_or_default();
    (ready.status != "True").then(|| {
        let why = ready.message.as_deref().unwrap_or_default();
        fault(
            format!("the Node is not Ready: {why}"),
            format!("kubectl describe node {name}"),
        )
    })
}

fn plugin(
    object: &GpuNode,
    existing: Existing<'_>,
    claims: Option<&BTreeSet<String>>,
) -> Option<Fault> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    match existing.plugins?.get(name) {
        // The check of the chart's pods names one that is not ready.
        Some(_) => return None,
        None if existing.plugins?.is_empty() && claims.is_none() => return None,
        None => {}
    }
    let node = existing.nodes.unwrap_or_default().iter();
    let mut labels = node
        .filter(|it| it.metadata.name.as_deref() == Some(name))
        .filter_map(|it| it.metadata.labels.as_ref());
    let is_kept_off = labels
        .next()
        .is_some_and(|it| it.get(PLUGIN_LABEL).is_some_and(|value| value == "false"));
    let why = if is_kept_off {
        format!("the label {PLUGIN_LABEL}=false keeps the node plugin off")
    } else {
        "no pod of the node plugin is there".to_owned()
    };
    let back = if is_kept_off {
        format!("kubectl label node {name} {PLUGIN_LABEL}-")
    } else {
        "let the DaemonSet of the node plugin run there again (nodePlugin.affinity and nodePlugin.nodeSelector of the chart; or \
         install the chart again)"
            .to_owned()
    };
    Some(match claims {
        Some(claims) => fault(
            format!(
                "{why}, and {}; their pods can neither start nor end",
                held_there(claims)
            ),
            format!("{back}: the plugin then releases what has ended"),
        ),
        None => Fault {
            is_intended: is_kept_off,
            ..fault(
                format!("{why}: nobody serves its GPUs"),
                format!("{back}; or, if it is to stay so: kubectl delete gpunode {name}"),
            )
        },
    })
}

fn slices(object: &GpuNode, existing: Existing<'_>) -> Option<Fault> {
    let slices = existing.slices?;
    let status = object.status.as_ref()?;
    let published = status.published.as_ref()?;
    let name = object.metadata.name.as_deref();
    let of_node = slices
        .iter()
        .filter(|it| it.spec.driver == DRIVER && it.spec.node_name.as_deref() == name);
    let names: BTreeSet<&str> = of_node
        .filter_map(|it| it.metadata.name.as_deref())
        .collect();
    let expected = published.slices.len();
    let missing = published.slices.iter();
    let missing = missing.filter(|it| !names.contains(it.as_str())).count();
    let way_out = "the kubelet deletes the slices of a plugin that is not connected, and the controller writes them again: see that \
        both run, and their logs";
    if missing > 0 {
        return Some(fault(
            format!(
                "{missing} of its {expected} ResourceSlices do not exist, so that GPUs are not offered"
            ),
            way_out,
        ));
    }
    let gpus = status.inventory.as_ref().map_or(0, |it| it.gpus.len());
    let whole = published.withheld.iter().filter(|it| it.tiers.is_empty());
    let withheld: BTreeSet<&str> = whole.map(|it| it.gpu.as_str()).collect();
    (gpus > withheld.len() && names.is_empty()).then(|| {
        fault(
            format!("it has {gpus} GPUs and no ResourceSlice, so that none is offered"),
            way_out,
        )
    })
}

/// Whether the chart's default places a plugin on the node.
pub(crate) fn should_have_plugin(node: &Node) -> bool {
    let labels = node.metadata.labels.as_ref();
    let is = |key: &str, value: &str| {
        labels.is_some_and(|labels| labels.get(key).is_some_and(|it| it == value))
    };
    GPU_LABELS.iter().any(|label| is(label, "true")) && !is(PLUGIN_LABEL, "false")
}
