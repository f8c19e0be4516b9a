//! A scripted cluster: an API server on loopback that lists and watches nodes with GPUs, claims on them, and their use. The driver's
//! own planner makes the slices. `bench/ui/ui.py` measures `kubectl tranche` with it and takes pictures of `kubectl tranche ui`.
//!
//! usage: scripted-cluster NODES GPUS CHANGES
//!
//! It prints its address. CHANGES is the number of claims that come or go in a second.
//!
//! ```text
//!  tenants  the tenants of each GPU, their parts and what they do
//!  objects  tenants ─► claims; nodes ─► GpuNodes and slices
//!  usage    tenants and the time ─► the objects of usage.gpu.tranche.dev
//!  serve    lists in pages, and watches
//! ```
#![allow(
    clippy::unwrap_used,
    reason = "a measurement that cannot be set up fails"
)]

mod objects;
mod serve;
mod tenants;
mod usage;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tranche_api::Tier;

use objects::{Planner, pending, waiting};
use tenants::{GpuPosition, Tenant};

/// The served objects. Objects that do not change are kept as JSON, because making them takes longer than reading them.
struct Cluster {
    nodes: usize,
    gpus: usize,
    began: Instant,
    gpu_nodes: Vec<String>,
    slices: Vec<String>,
    /// Pods, each with its namespace.
    pods: Vec<(String, String)>,
    /// Claims that do not change, each with its namespace.
    claims: Vec<(String, String)>,
    /// The GPUs that now have a claim that comes and goes.
    bursts: Mutex<BTreeSet<GpuPosition>>,
    events: broadcast::Sender<Bytes>,
}

#[tokio::main]
async fn main() {
    let mut numbers = std::env::args().skip(1).map(|it| it.parse().unwrap());
    let mut number = |otherwise: usize| numbers.next().unwrap_or(otherwise);
    let (nodes, gpus, changes) = (number(6), number(8), number(0));
    let cluster = Arc::new(Cluster::new(nodes, gpus));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("http://{}", listener.local_addr().unwrap());
    if changes > 0 {
        tokio::spawn(come_and_go(cluster.clone(), changes));
    }
    let app = Router::new().fallback(serve::answer).with_state(cluster);
    axum::serve(listener, app).await.unwrap();
}

impl Cluster {
    fn new(nodes: usize, gpus: usize) -> Self {
        let mut cluster = Self {
            nodes,
            gpus,
            began: Instant::now(),
            gpu_nodes: Vec::new(),
            slices: Vec::new(),
            pods: Vec::new(),
            claims: Vec::new(),
            bursts: Mutex::default(),
            events: broadcast::channel(1024).0,
        };
        let planner = Planner::default();
        for node in 0..nodes {
            let (gpu_node, slices) = planner.node(node, gpus);
            cluster.gpu_nodes.push(gpu_node);
            cluster.slices.extend(slices);
        }
        let held = cluster.places().flat_map(tenants::of);
        let claim = |it: Tenant| (it.namespace.to_owned(), objects::claim(&it).to_string());
        cluster.claims = held.map(claim).collect();
        for (namespace, name, tier, minutes) in [
            ("research", "finetune-llama", Tier::Exclusive, 47),
            ("vision", "labeling", Tier::Capped, 3),
        ] {
            let claim = waiting(namespace, name, tier).to_string();
            let pod = pending(namespace, name, minutes).to_string();
            cluster.claims.push((namespace.to_owned(), claim));
            cluster.pods.push((namespace.to_owned(), pod));
        }
        cluster
    }

    fn places(&self) -> impl Iterator<Item = GpuPosition> + use<> {
        let gpus = self.gpus;
        (0..self.nodes).flat_map(move |node| (0..gpus).map(move |gpu| GpuPosition { node, gpu }))
    }

    /// The current tenants of a GPU.
    fn tenants(&self, place: GpuPosition) -> Vec<Tenant> {
        if self.bursts.lock().unwrap().contains(&place) {
            return vec![tenants::burst(place)];
        }
        tenants::of(place)
    }
}

/// Makes claims come and go on free GPUs, with `changes` changes a second.
async fn come_and_go(cluster: Arc<Cluster>, changes: usize) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::try_from(changes).unwrap());
    let is_free = |place: &GpuPosition| tenants::of(*place).is_empty();
    let free: Vec<GpuPosition> = cluster.places().filter(is_free).collect();
    for nth in 0.. {
        ticks.tick().await;
        // An odd step removes the claim of the even step before it.
        let place = free[(nth / 2) % free.len()];
        let kind = if usize::is_multiple_of(nth, 2) {
            cluster.bursts.lock().unwrap().insert(place);
            "ADDED"
        } else {
            cluster.bursts.lock().unwrap().remove(&place);
            "DELETED"
        };
        let claim = objects::claim(&tenants::burst(place));
        let line = format!("{}\n", json!({"type": kind, "object": claim}));
        // Nobody may be watching.
        let _ = cluster.events.send(line.into());
    }
}
