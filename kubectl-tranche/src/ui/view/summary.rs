//! The cluster in a few numbers.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tranche_api::Tier;

use super::gpu::GpuSums;
use crate::model::{Node, Room};
use crate::money::Money;

/// What a node adds to the sums.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSums {
    gpus: u64,
    free_gpus: u64,
    closed_gpus: u64,
    by_tier: BTreeMap<Tier, u64>,
    held: Money,
    free: Money,
    stranded: Money,
    cost: Money,
    free_cost: Money,
    stranded_cost: Money,
    closed: Money,
    closed_cost: Money,
    unpriced: BTreeSet<String>,
    defaults: u64,
    namespaces: BTreeMap<String, Namespace>,
}

/// What a namespace has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Namespace {
    devices: u64,
    parts: Money,
    cost: Money,
}

/// The cluster in a few numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Nodes with GPUs.
    pub nodes: u64,
    pub gpus: u64,
    /// GPUs that are offered and have no claims.
    pub free_gpus: u64,
    /// GPUs that are not offered and have no claims.
    pub closed_gpus: u64,
    /// GPUs by the tier that they serve.
    pub tiers: BTreeMap<Tier, u64>,
    /// What is allocated, in GPUs.
    pub held: f64,
    /// What is free and can be allocated, in GPUs.
    pub free: f64,
    /// What is free but cannot be allocated, in GPUs.
    pub stranded: f64,
    /// What is not offered, or has unknown holders, in GPUs.
    pub closed: f64,
    /// The price of all GPUs for an hour.
    pub cost: String,
    /// The part of what is allocated.
    pub held_cost: String,
    /// The part of what is free.
    pub free_cost: String,
    /// The part of what is stranded.
    pub stranded_cost: String,
    /// The part of what is not offered or not known.
    pub closed_cost: String,
    /// Products without a price.
    pub unpriced: Vec<String>,
    /// GPUs with a price of this release instead of an administrator's.
    pub default_prices: u64,
    /// What namespaces have, the most expensive first.
    pub namespaces: Vec<NamespaceView>,
}

/// What a namespace has.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceView {
    pub namespace: String,
    /// Devices and shares.
    pub devices: u64,
    /// How much that is, in GPUs.
    pub gpus: f64,
    /// What it costs for an hour.
    pub cost: String,
}

impl NodeSums {
    /// The sums of a node from the sums of its GPUs, in their order.
    #[must_use]
    pub fn new(node: &Node, sums: &[GpuSums]) -> Self {
        let mut node_sums = Self::default();
        for (gpu, sums) in node.gpus.iter().zip(sums) {
            node_sums.gpus += 1;
            match (gpu.tier, &gpu.room) {
                (Some(tier), _) => *node_sums.by_tier.entry(tier).or_default() += 1,
                (None, Room::All) => node_sums.free_gpus += 1,
                (None, _) => node_sums.closed_gpus += 1,
            }
            node_sums.free = node_sums.free + sums.parts.free;
            node_sums.stranded = node_sums.stranded + sums.parts.stranded;
            node_sums.closed = node_sums.closed + sums.parts.closed;
            node_sums.closed_cost = node_sums.closed_cost + sums.cost.closed;
            node_sums.free_cost = node_sums.free_cost + sums.cost.free;
            node_sums.stranded_cost = node_sums.stranded_cost + sums.cost.stranded;
            match sums.price {
                Some(price) => node_sums.cost = node_sums.cost + price,
                None => {
                    node_sums.unpriced.insert(gpu.product.clone());
                }
            }
            node_sums.defaults += u64::from(sums.is_default);
            for (nth, tenant) in gpu.tenants().enumerate() {
                let of = |parts: &[Money]| parts.get(nth).copied().unwrap_or_default();
                let part = of(&sums.parts.tenants);
                node_sums.held = node_sums.held + part;
                let namespace = node_sums
                    .namespaces
                    .entry(tenant.namespace.clone())
                    .or_default();
                namespace.devices += 1;
                namespace.parts = namespace.parts + part;
                namespace.cost = namespace.cost + of(&sums.cost.tenants);
            }
        }
        node_sums
    }
}

impl Summary {
    #[must_use]
    pub fn new<'a>(nodes: impl Iterator<Item = &'a NodeSums>) -> Self {
        let mut all = NodeSums::default();
        let mut number = 0;
        for node in nodes {
            number += 1;
            all.gpus += node.gpus;
            all.free_gpus += node.free_gpus;
            all.closed_gpus += node.closed_gpus;
            for (tier, gpus) in &node.by_tier {
                *all.by_tier.entry(*tier).or_default() += gpus;
            }
            all.held = all.held + node.held;
            all.free = all.free + node.free;
            all.stranded = all.stranded + node.stranded;
            all.cost = all.cost + node.cost;
            all.closed = all.closed + node.closed;
            all.closed_cost = all.closed_cost + node.closed_cost;
            all.free_cost = all.free_cost + node.free_cost;
            all.stranded_cost = all.stranded_cost + node.stranded_cost;
            all.unpriced.extend(node.unpriced.iter().cloned());
            all.defaults += node.defaults;
            for (name, of_node) in &node.namespaces {
                let sum = all.namespaces.entry(name.clone()).or_default();
                sum.devices += of_node.devices;
                sum.parts = sum.parts + of_node.parts;
                sum.cost = sum.cost + of_node.cost;
            }
        }
        let mut sorted: Vec<_> = all.namespaces.into_iter().collect();
        sorted.sort_by(|(a, of_a), (b, of_b)| {
            (of_b.cost, of_b.parts, a).cmp(&(of_a.cost, of_a.parts, b))
        });
        let namespaces = sorted.into_iter().map(|(namespace, sum)| NamespaceView {
            namespace,
            devices: sum.devices,
            gpus: gpus(sum.parts),
            cost: sum.cost.to_string(),
        });
        Self {
            nodes: number,
            gpus: all.gpus,
            free_gpus: all.free_gpus,
            closed_gpus: all.closed_gpus,
            tiers: all.by_tier,
            held: gpus(all.held),
            free: gpus(all.free),
            stranded: gpus(all.stranded),
            closed: gpus(all.closed),
            cost: all.cost.to_string(),
            held_cost: all
                .cost
                .less(all.free_cost + all.stranded_cost + all.closed_cost)
                .to_string(),
            free_cost: all.free_cost.to_string(),
            stranded_cost: all.stranded_cost.to_string(),
            closed_cost: all.closed_cost.to_string(),
            unpriced: all.unpriced.into_iter().collect(),
            default_prices: all.defaults,
            namespaces: namespaces.collect(),
        }
    }
}

/// GPUs, to hundredths: a GPU is a million.
fn gpus(parts: Money) -> f64 {
    (parts.dollars() * 100.0).round() / 100.0
}
