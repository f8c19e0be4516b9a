//! A cluster for tests: the driver's own planner makes its slices, and an API server serves its objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tranche_api::gpu_node::{GpuNodeStatus, Inventory, Published, Registration};
use tranche_api::{GpuNode, SharingPolicy};
use tranche_driver::mig::tables;
use tranche_driver::slices::{Content, NodeInput, plan};

use crate::cluster::Cluster;
use crate::snapshot::{Scope, Snapshot};
use crate::usage::{NodeGpu, Part};

/// The objects, and other responses of the API server by path.
#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    pub(crate) gpu_nodes: Vec<GpuNode>,
    pub(crate) policies: Vec<SharingPolicy>,
    pub(crate) slices: Vec<ResourceSlice>,
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) prices: Option<BTreeMap<String, String>>,
    /// Status codes by path.
    pub(crate) refused: BTreeMap<String, u16>,
    /// Further objects by path.
    pub(crate) others: BTreeMap<String, Value>,
    /// The requested paths, with their queries.
    pub(crate) asked: Arc<Mutex<Vec<String>>>,
}

/// Has shares on the first GPU, partitions on the second, and one claim on the whole T4.
pub(crate) fn busy() -> World {
    let mut world = World::new();
    let (shared, divided) = ("gpu-a0000000-capped", "gpu-a0000001");
    world.claim(
        "team-a/notebook",
        &["notebook"],
        &[share("node-a", shared, "20Gi", "25")],
    );
    world.claim(
        "team-b/training",
        &["training"],
        &[share("node-a", shared, "40Gi", "50")],
    );
    world.claim(
        "team-a/left",
        &["left"],
        &[whole("node-a", &format!("{divided}-mig-3g40gb-0"))],
    );
    world.claim(
        "team-a/right",
        &["right"],
        &[whole("node-a", &format!("{divided}-mig-3g40gb-4"))],
    );
    world.claim("team-c/waits", &[], &[]);
    world.claim("team-c/card", &["card"], &[whole("node-b", "gpu-b0000000")]);
    world
}

/// The UUID of the nth GPU of a node whose UUIDs begin with `digit`.
pub(crate) fn uuid(digit: char, nth: u32) -> String {
    let first = format!("{digit}{nth:07x}");
    format!("GPU-{first}-0000-4000-8000-000000000000")
}

/// The nth GPU of the node whose UUIDs begin with `digit`.
pub(crate) fn gpu(digit: char, nth: u32) -> NodeGpu {
    NodeGpu::new(&format!("node-{digit}"), &uuid(digit, nth))
}

/// A claim's only share of a device of `node-a`, as [`share`] allocates it.
pub(crate) fn part(claim: &str, device: &str) -> Part {
    Part {
        node: "node-a".to_owned(),
        claim: claim.to_owned(),
        device: device.to_owned(),
        share: Some(SHARE.to_owned()),
    }
}

const SHARE: &str = "00000000-0000-4000-8000-000000000001";

impl World {
    /// Two nodes, `node-a` with two H100 and `node-b` with a T4, and a policy that offers all tiers.
    pub(crate) fn new() -> Self {
        let mut world = Self::default();
        world.policies.push(object(json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1",
            "kind": "SharingPolicy",
            "metadata": {"name": "default"},
            "spec": {"tiers": ["exclusive", "partition", "capped", "concurrent", "timeshared"]},
        })));
        world.classes.push(object(json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "capped.gpu.tranche.dev"},
            "spec": {"selectors": [{"cel": {"expression": "device.driver == \"gpu.tranche.dev\""}}]},
        })));
        let a: Vec<_> = (0..2).map(|nth| h100(&uuid('a', nth), nth)).collect();
        world.node("node-a", a);
        world.node("node-b", vec![t4(&uuid('b', 0), 0)]);
        for node in ["node-a", "node-b"] {
            world.pods.push(object(json!({
                "metadata": {
                    "namespace": "tranche-system", "name": format!("plugin-{node}"),
                    "labels": {"app.kubernetes.io/component": "node-plugin"},
                },
                "spec": {"containers": [], "nodeName": node},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            })));
        }
        world
    }

    /// Adds a node with its slices.
    pub(crate) fn node(&mut self, name: &str, gpus: Vec<Value>) {
        let gpus: Vec<tranche_api::gpu_node::Gpu> = gpus.into_iter().map(object).collect();
        let divided: Vec<&str> = gpus
            .iter()
            .filter(|gpu| gpu.mig_capable)
            .map(|gpu| gpu.uuid.as_str())
            .collect();
        let geometries = if divided.is_empty() {
            Vec::new()
        } else {
            vec![tables::h100(&divided)]
        };
        let mut inventory = Inventory::new("535.261.03".into(), "12.2".into(), gpus);
        inventory.mig_geometries = geometries;
        let labels = BTreeMap::new();
        let input = NodeInput {
            name,
            uid: name,
            labels: &labels,
            inventory: &inventory,
            withheld: &[],
            health: &[],
            policies: &self.policies,
            retained: &[],
        };
        let planned = plan(&input).unwrap();
        let count = planned.slices.len();
        for slice in planned.slices {
            let mut spec = json!({
                "driver": "gpu.tranche.dev",
                "nodeName": name,
                "pool": {"name": planned.pool, "generation": 1, "resourceSliceCount": count},
            });
            match slice.content {
                Content::Devices(devices) => spec["devices"] = json!(devices),
                Content::Counters(sets) => spec["sharedCounters"] = json!(sets),
            }
            let metadata = json!({"name": slice.name});
            self.slices.push(object(json!({
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": metadata,
                "spec": spec,
            })));
        }
        let mut node = GpuNode::new(name, tranche_api::GpuNodeSpec {});
        node.status = Some(GpuNodeStatus {
            inventory: Some(inventory),
            registration: Some(Registration {
                epoch: 1,
                plugin_version: "0.1.0".into(),
            }),
            published: Some(Published {
                withheld: planned.withheld,
                ..Published::default()
            }),
            ..GpuNodeStatus::default()
        });
        self.gpu_nodes.push(node);
    }

    /// Adds a claim with its allocation and the pods that use it.
    pub(crate) fn claim(&mut self, name: &str, pods: &[&str], results: &[Value]) {
        let (namespace, name) = name.split_once('/').unwrap();
        let mut claim = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{namespace}-{name}")},
            "spec": {"devices": {"requests": [{
                "name": "gpu",
                "exactly": {
                    "deviceClassName": "capped.gpu.tranche.dev",
                    "capacity": {"requests": {"memory": "20Gi", "cores": "25"}},
                },
            }]}},
        });
        if !results.is_empty() {
            let reserved = pods.iter().map(|pod| {
                json!({"resource": "pods", "name": pod, "uid": format!("uid-{namespace}-{pod}")})
            });
            claim["status"] = json!({
                "allocation": {"devices": {"results": results}},
                "reservedFor": reserved.collect::<Vec<_>>(),
            });
        }
        self.claims.push(object(claim));
    }

    /// A snapshot of all objects, without an API server.
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot {
            asked: BTreeSet::new(),
            gpu_nodes: self.gpu_nodes.clone(),
            policies: self.policies.clone(),
            slices: self.slices.clone(),
            claims: self.claims.clone(),
            classes: self.classes.clone(),
            pods: self.pods.clone(),
            nodes: Vec::new(),
            prices: self.prices.clone(),
            gaps: Vec::new(),
            scope: Scope::All,
        }
    }

    /// A cluster whose API server serves these objects, for a user whose context has the namespace `team-a`.
    pub(crate) fn cluster(&self) -> Cluster {
        let world = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let answer = world.answer(&request);
            async move { Ok::<_, std::io::Error>(answer) }
        });
        Cluster::new(Client::new(service, "team-a"), "team-a", "tranche-system")
    }

    fn answer(&self, request: &Request<Body>) -> Response<Body> {
        let path = request.uri().path();
        self.asked.lock().unwrap().push(request.uri().to_string());
        let (code, body) = match self.refused.get(path) {
            Some(code) => (*code, refusal(*code, path)),
            None => match self.objects(path) {
                Some(body) => (200, body),
                None => (404, refusal(404, path)),
            },
        };
        let body = Body::from(body.to_string().into_bytes());
        Response::builder().status(code).body(body).unwrap()
    }

    fn objects(&self, path: &str) -> Option<Value> {
        let list = |items: Value| Some(json!({"metadata": {}, "items": items}));
        let in_namespace = |prefix: &str, kind: &str| {
            let rest = path.strip_prefix(prefix)?.strip_prefix("/namespaces/")?;
            rest.strip_suffix(kind)?
                .strip_suffix('/')
                .map(str::to_owned)
        };
        let of = |namespace: String, objects: &[Value]| {
            let objects = objects.iter();
            let here: Vec<_> = objects
                .filter(|object| object["metadata"]["namespace"] == json!(namespace))
                .collect();
            list(json!(here))
        };
        if let Some(object) = self.others.get(path) {
            return Some(object.clone());
        }
        let claims: Vec<_> = self.claims.iter().map(|claim| json!(claim)).collect();
        let pods: Vec<_> = self.pods.iter().map(|pod| json!(pod)).collect();
        match path {
            "/apis/gpu.tranche.dev/v1alpha1/gpunodes" => list(json!(self.gpu_nodes)),
            "/apis/gpu.tranche.dev/v1alpha1/sharingpolicies" => list(json!(self.policies)),
            "/apis/resource.k8s.io/v1/resourceslices" => list(json!(self.slices)),
            "/apis/resource.k8s.io/v1/deviceclasses" => list(json!(self.classes)),
            "/apis/resource.k8s.io/v1/resourceclaims" => list(json!(claims)),
            "/api/v1/pods" => list(json!(pods)),
            "/api/v1/nodes" => list(json!([])),
            "/api/v1/namespaces/tranche-system/configmaps/tranche-prices" => {
                let data = self.prices.as_ref()?;
                Some(json!({"metadata": {"name": "tranche-prices"}, "data": data}))
            }
            _ => {
                if let Some(namespace) = in_namespace("/apis/resource.k8s.io/v1", "resourceclaims")
                {
                    return of(namespace, &claims);
                }
                of(in_namespace("/api/v1", "pods")?, &pods)
            }
        }
    }
}

fn refusal(code: u16, path: &str) -> Value {
    let reason = match code {
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        _ => "InternalError",
    };
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("{path} is refused\n"), "reason": reason, "code": code,
    })
}

/// An allocation result for a share of a GPU.
pub(crate) fn share(node: &str, device: &str, memory: &str, cores: &str) -> Value {
    json!({
        "driver": "gpu.tranche.dev",
        "pool": format!("{node}/gpu"),
        "request": "gpu",
        "device": device,
        "shareID": SHARE,
        "consumedCapacity": {"memory": memory, "cores": cores, "sharers": "1"},
    })
}

/// An allocation result for a whole device.
pub(crate) fn whole(node: &str, device: &str) -> Value {
    json!({
        "driver": "gpu.tranche.dev",
        "pool": format!("{node}/gpu"),
        "request": "gpu",
        "device": device,
    })
}

fn h100(uuid: &str, nth: u32) -> Value {
    json!({
        "uuid": uuid, "minor": nth, "index": nth, "productName": "NVIDIA H100 80GB HBM3", "brand": "Nvidia",
        "architecture": "Hopper", "cudaComputeCapability": "9.0", "pciBusID": format!("0000:{:02x}:00.0", 0x1b + nth),
        "memory": "81559Mi", "reservedMemory": "551Mi", "multiprocessors": 132, "migCapable": true,
    })
}

fn t4(uuid: &str, nth: u32) -> Value {
    json!({
        "uuid": uuid, "minor": nth, "index": nth, "productName": "Tesla T4", "brand": "Tesla",
        "architecture": "Turing", "cudaComputeCapability": "7.5", "pciBusID": format!("0000:{:02x}:00.0", 0x3b + nth),
        "memory": "15360Mi", "reservedMemory": "300Mi", "multiprocessors": 40,
    })
}

/// An object from JSON.
pub(crate) fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}
