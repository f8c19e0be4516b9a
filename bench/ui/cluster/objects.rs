//! The objects that the API server would store: GpuNodes and slices of nodes, claims of tenants, pods that wait.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::{GpuNode, GpuNodeSpec, SharingPolicy, Tier};
use tranche_driver::mig::tables;
use tranche_driver::slices::{Content, NodeInput, plan};

use crate::tenants::{GpuPosition, Part, Tenant};

pub const PRODUCT: &str = "NVIDIA H100 80GB HBM3";
pub const DRIVER_VERSION: &str = "580.95.05";
/// MiB of a GPU, and the MiB that the driver reserves.
pub const MEMORY: u64 = 81_559;
pub const RESERVED: u64 = 551;

/// The scheduler's message on a pod that fits nowhere.
const UNSCHEDULABLE: &str = "0/6 nodes are available: 6 cannot allocate all claims. still not schedulable, preemption: 0/6 nodes are \
                             available: 6 Preemption is not helpful for scheduling.";

/// Describes nodes.
pub struct Planner(SharingPolicy);

impl Default for Planner {
    fn default() -> Self {
        let policy = json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy", "metadata": {"name": "default"},
            "spec": {"tiers": ["exclusive", "partition", "capped", "concurrent", "timeshared"]},
        });
        Self(serde_json::from_value(policy).unwrap())
    }
}

impl Planner {
    /// A node's GpuNode and its slices.
    pub fn node(&self, node: usize, gpus: usize) -> (String, Vec<String>) {
        let places = (0..gpus).map(|gpu| GpuPosition { node, gpu });
        let described: Vec<Gpu> = places
            .clone()
            .map(|it| serde_json::from_value(gpu(it)).unwrap())
            .collect();
        let owned: Vec<String> = places.map(GpuPosition::uuid).collect();
        let uuids: Vec<&str> = owned.iter().map(String::as_str).collect();
        let mut inventory = Inventory::new(DRIVER_VERSION.into(), "13.0".into(), described);
        inventory.mig_geometries = vec![tables::h100(&uuids)];
        let name = GpuPosition { node, gpu: 0 }.node_name();
        let slices = self.slices(&name, gpus, &inventory);
        let mut object = json!(GpuNode::new(&name, GpuNodeSpec {}));
        object["metadata"]["uid"] = json!(name);
        object["metadata"]["resourceVersion"] = json!("1");
        object["status"] =
            json!({"inventory": inventory, "registration": {"epoch": 1, "pluginVersion": "0.1.0"}});
        (object.to_string(), slices)
    }

    fn slices(&self, name: &str, gpus: usize, inventory: &Inventory) -> Vec<String> {
        let planned = plan(&NodeInput {
            name,
            uid: name,
            labels: &BTreeMap::new(),
            inventory,
            withheld: &[],
            health: &[],
            policies: std::slice::from_ref(&self.0),
            retained: &[],
        })
        .unwrap();
        // The number of pages depends on it.
        assert_eq!(planned.slices.len(), gpus + 1, "slices of {name}");
        let slices = planned.slices.into_iter().map(|slice| {
            let mut spec = json!({
                "driver": "gpu.tranche.dev", "nodeName": name,
                "pool": {"name": planned.pool, "generation": 1, "resourceSliceCount": gpus + 1},
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
        slices.collect()
    }
}

pub fn pci_address(gpu: usize) -> String {
    format!("0000:{:02x}:00.0", 0x1b + gpu)
}

fn gpu(place: GpuPosition) -> Value {
    let GpuPosition { gpu, .. } = place;
    json!({
        "uuid": place.uuid(), "minor": gpu, "index": gpu, "productName": PRODUCT, "brand": "Nvidia",
        "architecture": "Hopper", "cudaComputeCapability": "9.0", "pciBusID": pci_address(gpu),
        "memory": format!("{MEMORY}Mi"), "reservedMemory": format!("{RESERVED}Mi"), "multiprocessors": 132, "migCapable": true,
    })
}

/// The claim of a tenant, prepared and reserved for its pod.
pub fn claim(tenant: &Tenant) -> Value {
    let (namespace, name) = (tenant.namespace, &tenant.name);
    let mut claim = request(namespace, name, tenant.tier(), asked(tenant.part));
    let mut result = json!({
        "driver": "gpu.tranche.dev", "pool": format!("{}/gpu", tenant.place.node_name()), "request": "gpu", "device": tenant.device(),
    });
    let mut status = json!({
        "driver": result["driver"], "pool": result["pool"], "device": result["device"],
        "conditions": [{"type": "Ready", "status": "True", "reason": "Prepared", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    });
    if let Some(share) = tenant.share_id() {
        let mut consumed = asked(tenant.part).unwrap_or(json!({}));
        consumed["sharers"] = json!("1");
        result["consumedCapacity"] = consumed;
        result["shareID"] = json!(share);
        status["shareID"] = json!(share);
    }
    if let Some(mig) = tenant.mig_uuid() {
        status["data"] = json!({"migUUID": mig});
    }
    claim["status"] = json!({
        "allocation": {"devices": {"results": [result]}}, "devices": [status],
        "reservedFor": [{"resource": "pods", "name": name, "uid": format!("pod-{name}")}],
    });
    claim
}

/// A claim without an allocation.
pub fn waiting(namespace: &str, name: &str, tier: Tier) -> Value {
    let asked = (tier == Tier::Capped).then(|| json!({"memory": "64Gi", "cores": "60"}));
    request(namespace, name, tier, asked)
}

fn asked(part: Part) -> Option<Value> {
    match part {
        Part::Share(_, gib, cores) => {
            Some(json!({"memory": format!("{gib}Gi"), "cores": cores.to_string()}))
        }
        _ => None,
    }
}

fn request(namespace: &str, name: &str, tier: Tier, asked: Option<Value>) -> Value {
    let mut exactly = json!({"deviceClassName": format!("{tier}.gpu.tranche.dev")});
    if let Some(asked) = asked {
        exactly["capacity"] = json!({"requests": asked});
    }
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{namespace}-{name}"), "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    })
}

/// A pod that has been waiting for some minutes.
pub fn pending(namespace: &str, name: &str, minutes: i64) -> Value {
    let since = jiff::Timestamp::now() - jiff::SignedDuration::from_mins(minutes);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "uid": name, "resourceVersion": "1", "creationTimestamp": since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()},
        "spec": {"containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": name}]},
        "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}]},
    })
}
