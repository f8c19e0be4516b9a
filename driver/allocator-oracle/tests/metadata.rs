//! Kubernetes' own package for programs in containers reads the files about the containers' devices.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use tranche_allocator_oracle::Scheduler;
use tranche_api::Quantity;
use tranche_api::gpu_node::{Gpu, Inventory, MigMode};
use tranche_driver::claim::Allocation;
use tranche_driver::metadata::{container_path, file, requests};
use tranche_driver::preparation::plan;

fn gpu() -> Gpu {
    Gpu {
        uuid: "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d".into(),
        minor: 0,
        index: None,
        product_name: "NVIDIA H100 80GB HBM3".into(),
        brand: "Nvidia".into(),
        architecture: "Hopper".into(),
        cuda_compute_capability: "9.0".into(),
        pci_bus_id: "0000:1b:00.0".into(),
        pcie_root: None,
        numa_node: None,
        memory: Quantity::from_bytes(80 << 30),
        reserved_memory: Quantity::from_bytes(1 << 29),
        context_memory: None,
        multiprocessors: None,
        mig_capable: false,
        mig_mode: MigMode::default(),
        vfio: None,
        vgpu: None,
        mig_instances: Vec::new(),
    }
}

/// A claim of two requests, one of them by a subrequest.
fn claim(annotations: &Value) -> ResourceClaim {
    let share = |request: &str, id: u8| {
        json!({
            "request": request, "driver": "gpu.tranche.dev", "pool": "node-a/gpu", "device": "gpu-4d8c1f9e-capped",
            "shareID": format!("5a1f3a5c-7a80-4d6f-8f2e-11111111111{id}"),
            "consumedCapacity": {"memory": "20Gi", "cores": "25"},
        })
    };
    serde_json::from_value(json!({
        "metadata": {"name": "train", "namespace": "team-a", "uid": "0f4a3c1e-6f55-4b6a-9a3d-2d7f8f0b1c2d", "annotations": annotations},
        "spec": {},
        "status": {"allocation": {"devices": {"results": [share("one", 1), share("other/small", 2), share("one", 3)]}}},
    }))
    .unwrap()
}

#[test]
fn kubernetes_reads_our_files_where_it_searches_for_them() {
    let mut scheduler = Scheduler::start().unwrap_or_else(|error| panic!("{error}"));
    let inventory = Inventory::new("580.65.06".into(), "13.0".into(), vec![gpu()]);
    for (annotations, name) in [
        (json!({}), ""),
        (
            json!({"resource.kubernetes.io/pod-claim-name": "gpu"}),
            "gpu",
        ),
    ] {
        let allocation = Allocation::from_claim(&claim(&annotations), "node-a/gpu").unwrap();
        let plan = plan(&allocation, &inventory, []).unwrap();
        assert_eq!(requests(&plan), ["one", "other"]);
        for (request, full, devices) in [("one", "one", 2), ("other", "other/small", 1)] {
            let content = String::from_utf8(file(&plan, request)).unwrap();
            let read = scheduler
                .read_metadata(&content, "gpu.tranche.dev", "train", name, request)
                .unwrap();
            assert_eq!(read.path, container_path(&plan, request));
            let object = read.object;
            assert_eq!(object["metadata"]["uid"], allocation.uid);
            assert_eq!(object["requests"][0]["name"], full);
            let found = object["requests"][0]["devices"].as_array().unwrap();
            assert_eq!(found.len(), devices);
            let attributes = &found[0]["attributes"];
            assert_eq!(attributes["memory"]["int"], 20_u64 << 30);
            assert_eq!(
                attributes["resource.kubernetes.io/pciBusID"]["string"],
                "0000:1b:00.0"
            );
        }
    }
    let refused = scheduler.read_metadata("{}", "gpu.tranche.dev", "train", "", "one");
    assert!(refused.is_err(), "{refused:?}");
}
