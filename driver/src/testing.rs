//! GPUs, nodes and claims for tests.

pub(crate) mod mutation;
pub(crate) mod schema;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use tranche_api::gpu_node::{Gpu, Inventory, MigMode};
use tranche_api::names::{DRIVER, pool};
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::SharingPolicy;

use crate::claim::Allocation;

/// A policy with this spec.
pub(crate) fn policy(name: &str, spec: &Value) -> SharingPolicy {
    serde_json::from_value(json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1",
        "kind": "SharingPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }))
    .expect("a policy")
}

pub(crate) const NODE: &str = "node-a";
pub(crate) const UID: &str = "0f4a3c1e-6f55-4b6a-9a3d-2d7f8f0b1c2d";

/// The H100 `gpu-<minor in 8 digits>` with 80 GiB, of which the driver reserves 600 MiB.
pub(crate) fn gpu(minor: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{minor:08x}-0000-0000-0000-{minor:012x}"),
        minor,
        index: Some(minor),
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        cuda_compute_capability: "9.0".to_owned(),
        pci_bus_id: format!("0000:{minor:02x}:00.0"),
        pcie_root: Some(format!("pci0000:{minor:02x}")),
        numa_node: Some(minor % 2),
        memory: Quantity::from_bytes(81_559 << 20),
        reserved_memory: Quantity::from_bytes(600 << 20),
        multiprocessors: Some(132),
        context_memory: None,
        mig_capable: true,
        mig_mode: MigMode::default(),
        vfio: None,
        vgpu: None,
        mig_instances: Vec::new(),
    }
}

pub(crate) fn inventory(gpus: Vec<Gpu>) -> Inventory {
    Inventory::new("535.261.03".to_owned(), "12.2".to_owned(), gpus)
}

/// A result for a share of the capped device of GPU 0.
pub(crate) fn capped(memory: &str, cores: &str) -> Value {
    json!({
        "request": "gpu",
        "driver": DRIVER,
        "pool": pool(NODE),
        "device": "gpu-00000000-capped",
        "shareID": "5a1f3a5c-7a80-4d6f-8f2e-111111111111",
        "consumedCapacity": {"memory": memory, "cores": cores, "sharers": "1", "contextMemory": "512Mi"},
    })
}

/// A result for a device that is not capped.
pub(crate) fn plain(device: &str) -> Value {
    json!({"request": "gpu", "driver": DRIVER, "pool": pool(NODE), "device": device})
}

/// The same result with some fields set, or removed by null.
pub(crate) fn with(mut result: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().expect("fields") {
        result[name] = value.clone();
    }
    result
}

pub(crate) fn claim(results: &[Value], config: &[Value]) -> ResourceClaim {
    serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "team-a", "name": "train", "uid": UID},
        "spec": {"devices": {}},
        "status": {"allocation": {"devices": {"results": results, "config": config}}},
    }))
    .expect("a claim")
}

/// A config entry with our parameters.
pub(crate) fn config(source: &str, requests: &[&str], compute: &Value) -> Value {
    json!({
        "source": source,
        "requests": requests,
        "opaque": {
            "driver": DRIVER,
            "parameters": {
                "apiVersion": "gpu.tranche.dev/v1alpha1",
                "kind": "ShareConfig",
                "compute": compute,
            },
        },
    })
}

/// What a claim of this name was allocated.
pub(crate) fn allocation(name: &str, results: &[Value]) -> Allocation {
    let mut allocation = Allocation::from_claim(&claim(results, &[]), &pool(NODE)).expect("good");
    allocation.uid = format!("uid-of-{name}");
    allocation.name = name.to_owned();
    allocation
}
