mod allocator;
mod comparison;
mod limits;
mod properties;

use serde_json::{Value, json};
use tranche_api::names::{attribute, capacity, taint};

use super::*;
use crate::testing::{NODE, gpu, inventory};

const NODE_UID: &str = "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d";
/// The slices of a node with two GPUs under a plain policy, as the API server would be given them.
const GOLDEN: &str = include_str!("../../testdata/slices-two-h100.json");

pub(super) fn policy(name: &str, spec: &Value) -> SharingPolicy {
    serde_json::from_value(json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1",
        "kind": "SharingPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }))
    .expect("a policy")
}

fn all_tiers() -> SharingPolicy {
    policy(
        "default",
        &json!({"tiers": ["exclusive", "capped", "timeshared"]}),
    )
}

fn input<'a>(
    inventory: &'a Inventory,
    policies: &'a [SharingPolicy],
    labels: &'a BTreeMap<String, String>,
) -> NodeInput<'a> {
    NodeInput {
        name: NODE,
        uid: NODE_UID,
        labels,
        inventory,
        policies,
        epoch: 3,
        retained: &[],
    }
}

fn planned(inventory: &Inventory, policies: &[SharingPolicy]) -> Result<SlicePlan, PlanError> {
    plan(&input(inventory, policies, &BTreeMap::new()))
}

pub(super) fn objects(plan: &SlicePlan) -> Vec<ResourceSlice> {
    plan.slices
        .iter()
        .map(|slice| plan.object(slice, 7))
        .collect()
}

fn devices(plan: &SlicePlan) -> Vec<Device> {
    plan.slices
        .iter()
        .filter_map(|slice| match &slice.content {
            Content::Devices(devices) => Some(devices.clone()),
            Content::Counters(_) => None,
        })
        .flatten()
        .collect()
}

fn names(plan: &SlicePlan) -> Vec<String> {
    devices(plan)
        .into_iter()
        .map(|device| device.name)
        .collect()
}

fn refusal(inventory: &Inventory, spec: &Value) -> String {
    planned(inventory, &[policy("p", spec)])
        .expect_err("refused")
        .to_string()
}

#[test]
fn two_gpus_under_a_plain_policy() {
    let plan = planned(&inventory(vec![gpu(0), gpu(1)]), &[all_tiers()]).unwrap();
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    assert_eq!(serde_json::to_value(objects(&plan)).unwrap(), golden);
}

#[test]
fn shared_devices_come_before_the_exclusive_one_and_lower_gpus_before_higher() {
    let plan = planned(&inventory(vec![gpu(10), gpu(2)]), &[all_tiers()]).unwrap();
    assert_eq!(
        names(&plan),
        [
            "gpu-2-capped",
            "gpu-2-timeshared",
            "gpu-2",
            "gpu-10-capped",
            "gpu-10-timeshared",
            "gpu-10"
        ]
    );
    let slices: Vec<_> = plan.slices.iter().map(|slice| &*slice.name).collect();
    assert!(slices.is_sorted(), "{slices:?}");
}

#[test]
fn counters_are_split_by_eights() {
    let plan = planned(&inventory((0..64).map(gpu).collect()), &[all_tiers()]).unwrap();
    limits::check(&objects(&plan));
    let counters: Vec<usize> = plan
        .slices
        .iter()
        .filter_map(|slice| match &slice.content {
            Content::Counters(sets) => Some(sets.len()),
            Content::Devices(_) => None,
        })
        .collect();
    assert_eq!(counters, [8; 8]);
    assert_eq!(plan.slices.len(), 8 + 64);
}

#[test]
fn a_node_whose_name_cannot_name_a_pool_is_refused() {
    let (inventory, labels) = (inventory(vec![gpu(0)]), BTreeMap::new());
    let long = "a".repeat(250);
    for name in ["", "Node", "a/b", &long] {
        let refused = plan(&NodeInput {
            name,
            ..input(&inventory, &[], &labels)
        });
        assert!(matches!(refused, Err(PlanError::NodeName(_))), "{name:?}");
    }
}

#[test]
fn a_node_without_gpus_has_no_slices() {
    assert_eq!(
        planned(&inventory(vec![]), &[all_tiers()]).unwrap().slices,
        []
    );
}

#[test]
fn policies_hold_gpu_by_gpu() {
    let mut small = gpu(1);
    small.product_name = "NVIDIA L4".to_owned();
    let policies = [
        policy("default", &json!({"tiers": ["exclusive"]})),
        policy(
            "l4",
            &json!({"priority": 1, "products": ["NVIDIA L4"], "tiers": ["capped"]}),
        ),
    ];
    let plan = planned(&inventory(vec![gpu(0), small]), &policies).unwrap();
    assert_eq!(names(&plan), ["gpu-0", "gpu-1-capped"]);
}

fn capacities(device: &Device) -> Value {
    serde_json::to_value(&device.capacity).unwrap()
}

#[test]
fn shares_get_what_reserve_and_contexts_leave() {
    let spec = json!({
        "tiers": ["capped"],
        "capped": {"maxSharers": 7, "expectedSharers": 3, "contextMemory": "300Mi", "memoryStep": "256Mi"},
    });
    let plan = planned(&inventory(vec![gpu(0)]), &[policy("p", &spec)]).unwrap();
    // 81559 - 600 - 3 * 300 = 80059 MiB, which is 312 whole steps; a seventh of it is 44 steps.
    assert_eq!(
        capacities(&devices(&plan)[0]),
        json!({
            "memory": {
                "value": "78Gi",
                "requestPolicy": {
                    "default": "11Gi",
                    "validRange": {"min": "256Mi", "max": "78Gi", "step": "256Mi"},
                },
            },
            "cores": {
                "value": "100",
                "requestPolicy": {"default": "14", "validRange": {"min": "1", "max": "100", "step": "1"}},
            },
            "contextMemory": {"value": "2100Mi", "requestPolicy": {"default": "300Mi", "validValues": ["300Mi"]}},
            "sharers": {"value": "7", "requestPolicy": {"default": "1", "validValues": ["1"]}},
        })
    );
}

#[test]
fn defaults_come_from_the_policy_where_it_names_them() {
    let spec = json!({
        "tiers": ["capped"],
        "capped": {"maxSharers": 128, "defaultMemory": "2Gi", "defaultCores": 5},
    });
    let plan = planned(&inventory(vec![gpu(0)]), &[policy("p", &spec)]).unwrap();
    let found = capacities(&devices(&plan)[0]);
    assert_eq!(found["memory"]["requestPolicy"]["default"], "2Gi");
    assert_eq!(found["cores"]["requestPolicy"]["default"], "5");
    let spec = json!({"tiers": ["capped"], "capped": {"maxSharers": 128}});
    let plan = planned(&inventory(vec![gpu(0)]), &[policy("p", &spec)]).unwrap();
    assert_eq!(
        capacities(&devices(&plan)[0])["cores"]["requestPolicy"]["default"],
        "1"
    );
}

#[test]
fn what_nothing_keeps_is_not_offered_by_size() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]).unwrap();
    let found: Vec<Value> = devices(&plan).iter().map(capacities).collect();
    assert_eq!(
        found[1],
        json!({"sharers": {"value": "8", "requestPolicy": {"default": "1", "validValues": ["1"]}}})
    );
    assert_eq!(
        found[2],
        json!({"memory": {"value": "81559Mi"}, "cores": {"value": "100"}})
    );
}

#[test]
fn devices_carry_the_whole_vocabulary_and_nothing_else() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]).unwrap();
    let known = |entries: &[tranche_api::names::Entry]| -> BTreeSet<String> {
        entries.iter().map(|entry| entry.name.to_owned()).collect()
    };
    let mut seen = BTreeSet::new();
    for device in devices(&plan) {
        let attributes: BTreeSet<String> = device.attributes.unwrap().into_keys().collect();
        assert_eq!(attributes, known(attribute::ALL));
        seen.extend(device.capacity.unwrap().into_keys());
    }
    assert_eq!(seen, known(capacity::ALL));
}

#[test]
fn versions_are_semantic_and_long_names_cut() {
    let mut strange = gpu(0);
    strange.product_name = "é".repeat(40);
    strange.cuda_compute_capability = "12.0a".to_owned();
    strange.pcie_root = None;
    strange.numa_node = None;
    let mut inventory = inventory(vec![strange]);
    inventory.driver_version = "580.65.06.1".to_owned();
    inventory.cuda_driver_version = "13".to_owned();
    let plan = planned(&inventory, &[]).unwrap();
    let attributes = devices(&plan)[0].attributes.clone().unwrap();
    let version = |name: &str| attributes[name].version.clone().unwrap();
    assert_eq!(version(attribute::DRIVER_VERSION), "580.65.6");
    assert_eq!(version(attribute::CUDA_DRIVER_VERSION), "13.0.0");
    assert_eq!(version(attribute::CUDA_COMPUTE_CAPABILITY), "12.0.0");
    assert_eq!(
        attributes[attribute::PRODUCT_NAME].string,
        Some("é".repeat(32))
    );
    assert!(!attributes.contains_key(attribute::PCIE_ROOT));
    assert!(!attributes.contains_key(attribute::NUMA_NODE));
}

#[test]
fn what_cannot_be_planned_is_refused_by_node_gpu_and_field() {
    let uuid = gpu(0).uuid;
    let at = |problem: &str| format!("node node-a, GPU {uuid}: {problem}");
    let of = |change: fn(&mut Gpu)| {
        let mut gpu = gpu(0);
        change(&mut gpu);
        inventory(vec![gpu])
    };
    let exclusive = json!({"tiers": ["exclusive"]});
    for (inventory, spec, expected) in [
        (
            inventory(vec![gpu(0), gpu(0)]),
            &exclusive,
            "node node-a: two GPUs have the minor number 0".to_owned(),
        ),
        (
            inventory(vec![gpu(0), Gpu { minor: 1, ..gpu(0) }]),
            &exclusive,
            format!("node node-a: two GPUs have the UUID {uuid}"),
        ),
        (
            of(|gpu| gpu.minor = 1000),
            &exclusive,
            at("the minor number 1000 must be below 1000"),
        ),
        (
            of(|gpu| gpu.memory = "1500m".parse().unwrap()),
            &exclusive,
            at("memory 1500m is not a whole number"),
        ),
        (
            of(|gpu| gpu.reserved_memory = "-1".parse().unwrap()),
            &exclusive,
            at("reservedMemory -1 is negative"),
        ),
        (
            of(|gpu| gpu.cuda_compute_capability = "unknown".to_owned()),
            &exclusive,
            at(
                r#"cudaComputeCapability "unknown" is no version: it must begin with numbers and dots"#,
            ),
        ),
        (
            of(|gpu| gpu.pci_bus_id = "x".repeat(65)),
            &exclusive,
            at(&format!(
                r#"pciBusID "{}" is longer than 64 bytes"#,
                "x".repeat(65)
            )),
        ),
        (
            inventory(vec![gpu(0)]),
            &json!({"tiers": ["capped", "partition"]}),
            at(
                "SharingPolicy p: spec.tiers names partition, which this version does not serve: use timeshared, capped, exclusive",
            ),
        ),
        (
            inventory(vec![gpu(0)]),
            &json!({"tiers": ["capped"], "capped": {"memoryStep": "64Gi"}}),
            at(
                "of 81559Mi in total, 600Mi reserved by the driver and 2Gi for CUDA contexts leave 64Gi, less than two steps of 64Gi: lower contextMemory, expectedSharers or memoryStep in the SharingPolicy, or do not offer the tier capped for this GPU",
            ),
        ),
        (
            inventory(vec![gpu(0)]),
            &json!({"tiers": ["capped"], "capped": {"defaultMemory": "79Gi"}}),
            at("defaultMemory 79Gi of the SharingPolicy is more than the usable 78911Mi"),
        ),
    ] {
        assert_eq!(refusal(&inventory, spec), expected);
    }
}

#[test]
fn the_node_is_owner_and_the_epoch_is_on_every_slice() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]).unwrap();
    for object in objects(&plan) {
        let owner = &object.metadata.owner_references.unwrap()[0];
        assert_eq!(
            (&*owner.kind, &*owner.name, &*owner.uid),
            ("Node", NODE, NODE_UID)
        );
        assert_eq!(object.metadata.annotations.unwrap()[EPOCH_ANNOTATION], "3");
    }
}

#[test]
fn a_held_device_stays_with_a_taint() {
    let before = planned(&inventory(vec![gpu(0), gpu(1)]), &[all_tiers()]).unwrap();
    let held: Vec<Device> = devices(&before)
        .into_iter()
        .filter(|device| ["gpu-0-capped", "gpu-1"].contains(&&*device.name))
        .collect();
    let foreign = Device {
        name: "mig-0".to_owned(),
        ..Device::default()
    };
    // The policy offers no shares any more, and GPU 1 is gone.
    let (inventory, labels) = (inventory(vec![gpu(0)]), BTreeMap::new());
    let policies = [policy("p", &json!({"tiers": ["exclusive"]}))];
    let retained = [held.clone(), vec![foreign]].concat();
    let after = plan(&NodeInput {
        retained: &retained,
        ..input(&inventory, &policies, &labels)
    })
    .unwrap();
    limits::check(&objects(&after));
    assert_eq!(names(&after), ["gpu-0", "gpu-0-capped", "gpu-1"]);
    for (device, before) in devices(&after)[1..].iter().zip(&held) {
        let taint = &device.taints.as_ref().unwrap()[0];
        assert_eq!(
            (&*taint.key, &*taint.effect),
            (taint::WITHDRAWN, "NoSchedule")
        );
        assert_eq!(device.capacity, before.capacity);
        assert_eq!(device.consumes_counters, before.consumes_counters);
    }
    // What is offered again loses the taint.
    let again = plan(&NodeInput {
        retained: &devices(&after),
        ..input(&inventory, &[all_tiers()], &labels)
    })
    .unwrap();
    let tainted: Vec<_> = devices(&again)
        .into_iter()
        .filter(|d| d.taints.is_some())
        .collect();
    assert_eq!(tainted.len(), 1);
    assert_eq!(tainted[0].name, "gpu-1");
}

#[test]
fn a_driver_that_nobody_tested_closes_the_tier_that_it_may_escape() {
    let mut newer = inventory(vec![gpu(0)]);
    newer.unknown_functions = vec!["cuAskTheFuture".to_owned()];
    let allow = policy(
        "p",
        &json!({"tiers": ["exclusive", "capped"], "capped": {"untestedDriver": "Allow"}}),
    );
    for (inventory, policies, untested, closed) in [
        (inventory(vec![gpu(0)]), [all_tiers()], false, &[][..]),
        (newer.clone(), [all_tiers()], true, &["gpu-0-capped"]),
        (newer, [allow], true, &[]),
    ] {
        let plan = planned(&inventory, &policies).unwrap();
        limits::check(&objects(&plan));
        let mut tainted = Vec::new();
        for device in devices(&plan) {
            let attributes = device.attributes.unwrap();
            assert_eq!(attributes[attribute::UNTESTED_DRIVER].bool, Some(untested));
            for taint in device.taints.into_iter().flatten() {
                assert_eq!(
                    (&*taint.key, &*taint.effect),
                    (taint::UNTESTED_DRIVER, "NoSchedule")
                );
                tainted.push(device.name.clone());
            }
        }
        assert_eq!(tainted, closed);
    }
}
