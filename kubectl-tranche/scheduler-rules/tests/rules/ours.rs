//! ResourceSlices as we plan them for a node with GPUs of one model, and claims for them.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::DeviceClass;
use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_allocator_oracle::{chart_classes, geometry};
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::sharing_policy::SharingPolicy;
use tranche_driver::slices::{self, NodeInput};
use tranche_simulator_machine::mig::{Model, ModelName};

use crate::claims::{Ask, Claim, Pod};

const CLASSES: [&str; 9] = [
    "capped.gpu.tranche.dev",
    "capped.gpu.tranche.dev",
    "capped.gpu.tranche.dev",
    "concurrent.gpu.tranche.dev",
    "timeshared.gpu.tranche.dev",
    "exclusive.gpu.tranche.dev",
    "partition.gpu.tranche.dev",
    "hard.gpu.tranche.dev",
    "any.gpu.tranche.dev",
];
const SELECTORS: [&str; 4] = [
    "device.attributes['gpu.tranche.dev'].isolationLevel >= 3",
    "device.attributes['gpu.tranche.dev'].productName.startsWith('NVIDIA H100')",
    "device.attributes['gpu.tranche.dev'].?profile.orValue('') == '1g.10gb'",
    "device.capacity['gpu.tranche.dev'].memory.compareTo(quantity('40Gi')) >= 0",
];

pub fn classes() -> Vec<DeviceClass> {
    chart_classes().unwrap()
}

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn gpu(slot: usize) -> Gpu {
    object(json!({
        "uuid": format!("GPU-{slot:08x}-0000-4000-8000-{slot:012x}"),
        "minor": slot,
        "productName": "NVIDIA H100 80GB HBM3",
        "brand": "Nvidia",
        "architecture": "Hopper",
        "cudaComputeCapability": "9.0",
        "pciBusID": format!("0000:{:02x}:00.0", slot + 1),
        "memory": "81559Mi",
        "reservedMemory": "600Mi",
        "migCapable": true,
    }))
}

/// The slices of a node with a random number of GPUs and a random policy.
pub fn any_slices() -> impl Strategy<Value = Vec<Value>> {
    let policy = (
        // The policy keeps memory free for the contexts of 4.
        4..=16_u32,
        prop::sample::select(vec!["1Mi", "256Mi", "1Gi"]),
        any::<bool>(),
    );
    (
        prop::sample::select(vec![1_usize, 2, 8]),
        policy,
        1..1000_i64,
    )
        .prop_map(|(gpus, (sharers, step, on_partitions), generation)| {
            let gpus: Vec<Gpu> = (0..gpus).map(gpu).collect();
            let uuids: Vec<String> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            let mut inventory = Inventory::new("580.65.06".to_owned(), "13.0".to_owned(), gpus);
            inventory.mig_geometries = vec![geometry::of(Model::of(ModelName::H100), &uuids)];
            let shared = if on_partitions {
                vec!["3g.40gb"]
            } else {
                Vec::new()
            };
            let policy: SharingPolicy = object(json!({
                "apiVersion": "gpu.tranche.dev/v1alpha1",
                "kind": "SharingPolicy",
                "metadata": {"name": "default"},
                "spec": {
                    "tiers": ["exclusive", "partition", "capped", "concurrent", "timeshared"],
                    "capped": {
                        "maxSharers": sharers, "memoryStep": step, "onPartitions": shared,
                    },
                },
            }));
            let plan = slices::plan(&NodeInput {
                name: "node-a",
                uid: "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d",
                labels: &BTreeMap::new(),
                inventory: &inventory,
                withheld: &[],
                health: &[],
                policies: &[policy],
                retained: &[],
            })
            .unwrap();
            let slices = plan.slices.iter();
            slices
                .map(|slice| serde_json::to_value(plan.object(slice, generation)).unwrap())
                .collect()
        })
}

fn any_ask() -> impl Strategy<Value = Ask> {
    let amount = |amounts: &[&'static str]| {
        prop::option::weighted(0.6, prop::sample::select(amounts.to_vec()))
    };
    (
        prop::sample::select(CLASSES.to_vec()),
        prop::option::weighted(0.3, prop::sample::select(SELECTORS.to_vec())),
        prop_oneof![20 => Just(1_u32), 3 => 2..=3_u32, 1 => Just(0)],
        amount(&["1Gi", "5Gi", "9Gi", "10000M", "30Gi", "79Gi"]),
        amount(&["1", "10", "25", "60"]),
    )
        .prop_map(|(class, selector, count, memory, cores)| {
            // Whole GPUs and timeshared shares have no capacity of that name that a claim may request.
            let sized = !class.starts_with("timeshared");
            Ask {
                class,
                selectors: selector.into_iter().collect(),
                count,
                memory: memory.filter(|_| sized),
                cores: cores.filter(|_| sized),
                toleration: None,
                admin: false,
            }
        })
}

/// The claims of a pod.
pub fn any_pod() -> impl Strategy<Value = Pod> {
    let request = prop_oneof![
        5 => prop::collection::vec(any_ask(), 1),
        1 => prop::collection::vec(any_ask(), 2..=3),
    ];
    let constraint = prop::sample::select(vec!["matchAttribute", "distinctAttribute"])
        .prop_map(|kind| (kind, "gpu.tranche.dev/uuid", true));
    let claim = prop_oneof![
        4 => prop::collection::vec(request.clone(), 1).prop_map(|it| (it, Vec::new())).boxed(),
        1 => (prop::collection::vec(request, 2), prop::collection::vec(constraint, 0..=1)).boxed(),
    ]
    .prop_map(|(requests, constraints)| Claim {
        requests,
        constraints,
    });
    prop_oneof![5 => prop::collection::vec(claim.clone(), 1), 1 => prop::collection::vec(claim, 2)]
        .prop_map(Pod)
}
