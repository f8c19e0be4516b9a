//! A cluster that is described instead of run: an API server on loopback that lists and watches nodes with GPUs, whose slices are
//! those of the driver's own planner, and claims on them. `bench/ui/ui.py` measures `kubectl tranche ui` with it and takes
//! pictures of it.
//!
//! usage: scripted-cluster NODES GPUS CHANGES
//!
//! It prints its address. CHANGES is how many claims a second come and go.
#![allow(
    clippy::unwrap_used,
    reason = "a measurement that cannot be set up fails"
)]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tranche_api::gpu_node::Inventory;
use tranche_api::{GpuNode, GpuNodeSpec, SharingPolicy};
use tranche_driver::mig::tables;
use tranche_driver::slices::{Content, NodeInput, plan};

const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
const GPU_NODES: &str = "/apis/gpu.tranche.dev/v1alpha1/gpunodes";
const PODS: &str = "/api/v1/pods";
/// What the scheduler says of a pod that fits nowhere.
const UNSCHEDULABLE: &str = "0/6 nodes are available: 6 cannot allocate all claims. still not schedulable, preemption: 0/6 nodes are \
                             available: 6 Preemption is not helpful for scheduling.";

/// What is served, as JSON where it stays the same: to make it takes longer than to read it.
struct Cluster {
    nodes: usize,
    gpus: usize,
    gpu_nodes: Vec<String>,
    slices: Vec<String>,
    claims: Mutex<BTreeMap<String, Value>>,
    pods: Vec<String>,
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
    let app = Router::new().fallback(answer).with_state(cluster);
    axum::serve(listener, app).await.unwrap();
}

/// Claims that come and go on GPUs that are free: `changes` a second.
async fn come_and_go(cluster: Arc<Cluster>, changes: usize) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::try_from(changes).unwrap());
    let free: Vec<(usize, usize)> = (0..cluster.nodes)
        .flat_map(|node| (0..cluster.gpus).map(move |gpu| (node, gpu)))
        .filter(|(node, gpu)| Use::of(*node, *gpu) == Use::Free)
        .collect();
    for nth in 0.. {
        ticks.tick().await;
        // An odd step removes what the even one before it made.
        let (node, gpu) = free[(nth / 2) % free.len()];
        let device = format!("gpu-{}-capped", &uuid(node, gpu)[4..12]);
        let result = share(node, &device, "30Gi", "40");
        let claim = claim(
            "burst",
            &format!("job-{node}-{gpu}"),
            "capped",
            Some(&result),
        );
        let kind = if usize::is_multiple_of(nth, 2) {
            "ADDED"
        } else {
            "DELETED"
        };
        let key = format!("burst/job-{node}-{gpu}");
        {
            let mut claims = cluster.claims.lock().unwrap();
            match kind {
                "ADDED" => claims.insert(key, claim.clone()),
                _ => claims.remove(&key),
            };
        }
        let line = format!("{}\n", json!({"type": kind, "object": claim}));
        // Nobody may be watching.
        let _ = cluster.events.send(line.into());
    }
}

/// What is held of a GPU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Free,
    Whole,
    Shares,
    Servers,
    Partitions,
    Turns,
}

impl Use {
    fn of(node: usize, gpu: usize) -> Self {
        let pattern = [
            Self::Whole,
            Self::Shares,
            Self::Partitions,
            Self::Shares,
            Self::Free,
            Self::Servers,
            Self::Shares,
            Self::Whole,
            Self::Turns,
            Self::Partitions,
            Self::Shares,
        ];
        pattern[(node * 8 + gpu) % pattern.len()]
    }
}

impl Cluster {
    fn new(nodes: usize, gpus: usize) -> Self {
        let policy = json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy", "metadata": {"name": "default"},
            "spec": {"tiers": ["exclusive", "partition", "capped", "concurrent", "timeshared"]},
        });
        let mut claims = BTreeMap::new();
        for (node, gpu) in (0..nodes).flat_map(|node| (0..gpus).map(move |gpu| (node, gpu))) {
            for claim in held(node, gpu) {
                let metadata = &claim["metadata"];
                let key = format!(
                    "{}/{}",
                    metadata["namespace"].as_str().unwrap(),
                    metadata["name"].as_str().unwrap()
                );
                claims.insert(key, claim);
            }
        }
        let mut pods = Vec::new();
        for (namespace, name, tier, minutes) in [
            ("research", "finetune-llama", "exclusive", 47),
            ("vision", "labeling", "capped", 3),
        ] {
            claims.insert(
                format!("{namespace}/{name}"),
                claim(namespace, name, tier, None),
            );
            pods.push(pending(namespace, name, minutes).to_string());
        }
        let mut cluster = Self {
            nodes,
            gpus,
            gpu_nodes: Vec::new(),
            slices: Vec::new(),
            claims: Mutex::new(claims),
            pods,
            events: broadcast::channel(1024).0,
        };
        let policy = serde_json::from_value(policy).unwrap();
        for node in 0..nodes {
            cluster.add(node, &policy);
        }
        cluster
    }

    /// Adds a node's GpuNode and its slices.
    fn add(&mut self, node: usize, policy: &SharingPolicy) {
        let gpus: Vec<tranche_api::gpu_node::Gpu> = (0..self.gpus)
            .map(|gpu| serde_json::from_value(described(node, gpu)).unwrap())
            .collect();
        let uuids: Vec<String> = (0..self.gpus).map(|gpu| uuid(node, gpu)).collect();
        let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
        let mut inventory = Inventory::new("580.95.05".into(), "13.0".into(), gpus);
        inventory.mig_geometries = vec![tables::h100(&uuids)];
        let name = name(node);
        let labels = BTreeMap::new();
        let planned = plan(&NodeInput {
            name: &name,
            uid: &name,
            labels: &labels,
            inventory: &inventory,
            withheld: &[],
            policies: std::slice::from_ref(policy),
            retained: &[],
        });
        let planned = planned.unwrap();
        // Pages are counted by it.
        assert_eq!(planned.slices.len(), self.gpus + 1, "slices of {name}");
        let slices = planned.slices.into_iter().map(|slice| {
            let mut spec = json!({
                "driver": "gpu.tranche.dev", "nodeName": name,
                "pool": {"name": planned.pool, "generation": 1, "resourceSliceCount": self.gpus + 1},
            });
            match slice.content {
                Content::Devices(devices) => spec["devices"] = json!(devices),
                Content::Counters(sets) => spec["sharedCounters"] = json!(sets),
            }
            json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
                "metadata": {"name": slice.name, "uid": slice.name, "resourceVersion": "1"}, "spec": spec,
            })
            .to_string()
        });
        self.slices.extend(slices);
        let mut object = json!(GpuNode::new(&name, GpuNodeSpec {}));
        object["metadata"]["uid"] = json!(name);
        object["metadata"]["resourceVersion"] = json!("1");
        object["status"] =
            json!({"inventory": inventory, "registration": {"epoch": 1, "pluginVersion": "0.1.0"}});
        self.gpu_nodes.push(object.to_string());
    }
}

fn name(node: usize) -> String {
    format!("gpu-{:02}", node + 1)
}

fn uuid(node: usize, gpu: usize) -> String {
    // Eight digits that differ: a device's name has these alone.
    let number = u32::try_from(node * 64 + gpu).unwrap();
    let first = number.wrapping_mul(2_654_435_761).wrapping_add(0x1f3a_0000);
    format!("GPU-{first:08x}-5d2e-4c11-9b6a-{node:06x}{gpu:06x}")
}

fn described(node: usize, gpu: usize) -> Value {
    json!({
        "uuid": uuid(node, gpu), "minor": gpu, "index": gpu, "productName": "NVIDIA H100 80GB HBM3", "brand": "Nvidia",
        "architecture": "Hopper", "cudaComputeCapability": "9.0", "pciBusID": format!("0000:{:02x}:00.0", 0x1b + gpu),
        "memory": "81559Mi", "reservedMemory": "551Mi", "multiprocessors": 132, "migCapable": true, "migComputeSlices": 7,
    })
}

/// The claims on a GPU.
fn held(node: usize, gpu: usize) -> Vec<Value> {
    let short = uuid(node, gpu)[4..12].to_owned();
    let of = |namespace: &str, what: &str, tier: &str, result: Value| {
        claim(
            namespace,
            &format!("{what}-{}", node * 8 + gpu),
            tier,
            Some(&result),
        )
    };
    match Use::of(node, gpu) {
        Use::Free => Vec::new(),
        Use::Whole => vec![of(
            "research",
            "pretrain",
            "exclusive",
            whole(node, &format!("gpu-{short}")),
        )],
        Use::Shares => {
            let device = format!("gpu-{short}-capped");
            let share = |memory, cores| share(node, &device, memory, cores);
            let mut claims = vec![
                of("vision", "notebook", "capped", share("20Gi", "25")),
                of("speech", "train-asr", "capped", share("40Gi", "50")),
            ];
            if gpu.is_multiple_of(2) {
                claims.push(of("vision", "embed", "capped", share("8Gi", "25")));
            }
            claims
        }
        Use::Servers => {
            let device = format!("gpu-{short}-concurrent");
            let names = ["chat-a", "chat-b", "rerank"];
            names
                .map(|it| {
                    of(
                        "serving",
                        it,
                        "concurrent",
                        share(node, &device, "12Gi", "30"),
                    )
                })
                .into()
        }
        Use::Partitions => {
            let made = |profile: &str| whole(node, &format!("gpu-{short}-mig-{profile}"));
            vec![
                of("serving", "moderation", "partition", made("3g40gb-0")),
                of("regulated", "scoring", "partition", made("1g10gb-4")),
            ]
        }
        Use::Turns => {
            let device = format!("gpu-{short}-timeshared");
            let turn = || {
                let mut result = whole(node, &device);
                result["consumedCapacity"] = json!({"sharers": "1"});
                result
            };
            vec![
                of("demo", "workshop", "timeshared", turn()),
                of("demo", "playground", "timeshared", turn()),
            ]
        }
    }
}

fn whole(node: usize, device: &str) -> Value {
    json!({"driver": "gpu.tranche.dev", "pool": format!("{}/gpu", name(node)), "request": "gpu", "device": device})
}

fn share(node: usize, device: &str, memory: &str, cores: &str) -> Value {
    let mut result = whole(node, device);
    result["consumedCapacity"] = json!({"memory": memory, "cores": cores, "sharers": "1"});
    result
}

fn claim(namespace: &str, name: &str, tier: &str, result: Option<&Value>) -> Value {
    let mut exactly = json!({"deviceClassName": format!("{tier}.gpu.tranche.dev")});
    if tier == "capped" {
        exactly["capacity"] = json!({"requests": {"memory": "64Gi", "cores": "60"}});
    }
    let mut claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{namespace}-{name}"), "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    });
    if let Some(result) = result {
        let ready = json!([{"type": "Ready", "status": "True", "reason": "Prepared", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        let mut status = json!({"driver": result["driver"], "pool": result["pool"], "device": result["device"], "conditions": ready});
        if !result["shareID"].is_null() {
            status["shareID"] = result["shareID"].clone();
        }
        claim["status"] = json!({
            "allocation": {"devices": {"results": [result]}}, "devices": [status],
            "reservedFor": [{"resource": "pods", "name": name, "uid": format!("pod-{name}")}],
        });
    }
    claim
}

fn pending(namespace: &str, name: &str, minutes: i64) -> Value {
    let since = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(minutes);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "uid": name, "resourceVersion": "1", "creationTimestamp": since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": name}]},
        "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}]},
    })
}

/// Lists and watches, as an API server answers them.
async fn answer(State(cluster): State<Arc<Cluster>>, request: Request) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let of = |name: &str| {
        query
            .split('&')
            .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    };
    let path = request.uri().path();
    if of("watch").is_some() {
        return watch(&cluster, path);
    }
    let limit = of("limit")
        .and_then(|it| it.parse().ok())
        .unwrap_or(usize::MAX);
    let start: usize = of("continue").and_then(|it| it.parse().ok()).unwrap_or(0);
    let claims: Vec<String>;
    let all = match path {
        GPU_NODES => &cluster.gpu_nodes[..],
        SLICES => &cluster.slices,
        CLAIMS => {
            let held = cluster.claims.lock().unwrap();
            claims = held.values().map(Value::to_string).collect();
            &claims
        }
        PODS => &cluster.pods,
        CLASSES => &[],
        _ => {
            let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "not found", "reason": "NotFound", "code": 404});
            return (
                StatusCode::NOT_FOUND,
                [(header::CONTENT_TYPE, "application/json")],
                body.to_string(),
            )
                .into_response();
        }
    };
    let next = start.saturating_add(limit).min(all.len());
    let mut metadata = json!({"resourceVersion": "1"});
    if next < all.len() {
        metadata["continue"] = json!(next.to_string());
    }
    let items = all[start..next].join(",");
    let list =
        format!(r#"{{"kind":"List","apiVersion":"v1","metadata":{metadata},"items":[{items}]}}"#);
    ([(header::CONTENT_TYPE, "application/json")], list).into_response()
}

/// Claims change; everything else stays as it was listed.
fn watch(cluster: &Cluster, path: &str) -> Response {
    let body = if path == CLAIMS {
        let events = stream::unfold(cluster.events.subscribe(), |mut events| async {
            let line = events.recv().await.ok()?;
            Some((Ok::<_, Infallible>(line), events))
        });
        Body::from_stream(events)
    } else {
        Body::from_stream(stream::pending::<Result<Bytes, Infallible>>().boxed())
    };
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}
