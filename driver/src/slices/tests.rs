mod allocator;
mod limits;

use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::names::{attribute, capacity};
use tranche_api::tier::Tier;

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
            (WITHDRAWN_TAINT, "NoSchedule")
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
fn slices_that_mean_the_same_are_the_same() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]).unwrap();
    let spec = plan.spec(&plan.slices[1], 1);
    let change = |pointer: &str, value: Value| {
        let mut tree = serde_json::to_value(&spec).unwrap();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        tree.pointer_mut(parent)
            .unwrap_or_else(|| panic!("{parent}"))[field] = value;
        serde_json::from_value::<ResourceSliceSpec>(tree).unwrap()
    };
    for (pointer, value) in [
        ("/devices/0/capacity/memory/value", json!("82744180736")),
        (
            "/devices/0/capacity/cores/requestPolicy/default",
            json!("6000m"),
        ),
        (
            "/devices/0/consumesCounters/0/counters/gpu/value",
            json!("1000m"),
        ),
        ("/devices/0/taints", json!([])),
        ("/sharedCounters", json!([])),
    ] {
        assert!(same(&spec, &change(pointer, value)), "{pointer}");
    }
    for (pointer, value) in [
        ("/devices/0/capacity/memory/value", json!("82744180735")),
        ("/devices/0/attributes/isolation/string", json!("exclusive")),
        // Attributes are words, not amounts.
        ("/devices/0/attributes/productName/string", json!("1000m")),
        ("/devices/0/allowMultipleAllocations", Value::Null),
        ("/devices/0/name", json!("gpu-1-capped")),
        ("/pool/generation", json!(2)),
        ("/nodeName", json!("node-b")),
        ("/devices/0/bindsToNode", json!(true)),
    ] {
        assert!(!same(&spec, &change(pointer, value)), "{pointer}");
    }
    let mut swapped = spec.clone();
    swapped.devices.as_mut().unwrap().swap(0, 1);
    assert!(!same(&spec, &swapped));
    let mut fewer = spec.clone();
    fewer.devices.as_mut().unwrap().pop();
    assert!(!same(&spec, &fewer) && !same(&fewer, &spec));
}

#[test]
fn the_time_of_a_taint_is_the_servers() {
    let spec = |time: Option<&str>| -> ResourceSliceSpec {
        let mut taint = json!({"key": "k", "effect": "NoSchedule"});
        if let Some(time) = time {
            taint["timeAdded"] = json!(time);
        }
        serde_json::from_value(json!({
            "driver": DRIVER,
            "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "taints": [taint]}],
        }))
        .unwrap()
    };
    let (none, one, other) = (
        spec(None),
        spec(Some("2026-11-21T09:00:00Z")),
        spec(Some("2026-11-21T10:00:00Z")),
    );
    assert!(same(&none, &one) && same(&one, &none));
    assert!(!same(&one, &other));
    assert_eq!(dropped(&one, &none), []);
}

#[test]
fn dropped_fields_name_their_gate() {
    let plan = planned(
        &inventory(vec![gpu(0)]),
        &[policy("p", &json!({"tiers": ["capped"]}))],
    );
    let plan = plan.unwrap();
    let without = |slice: &PlannedSlice, fields: &[&str]| {
        fn strip(value: &mut Value, fields: &[&str]) {
            match value {
                Value::Object(map) => {
                    map.retain(|name, _| !fields.contains(&name.as_str()));
                    map.values_mut().for_each(|value| strip(value, fields));
                }
                Value::Array(list) => list.iter_mut().for_each(|value| strip(value, fields)),
                _ => {}
            }
        }
        let spec = plan.spec(slice, 1);
        let mut tree = serde_json::to_value(&spec).unwrap();
        strip(&mut tree, fields);
        let stored: ResourceSliceSpec = serde_json::from_value(tree).unwrap();
        dropped(&spec, &stored)
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    let (counters, devices) = (&plan.slices[0], &plan.slices[1]);
    assert_eq!(without(devices, &[]), Vec::<String>::new());
    assert_eq!(
        without(counters, &["sharedCounters"]),
        [
            "the API server dropped spec.sharedCounters: turn on its feature gate DRAPartitionableDevices"
        ]
    );
    assert_eq!(
        without(devices, &["consumesCounters"]),
        [
            "the API server dropped spec.devices[0].consumesCounters: turn on its feature gate DRAPartitionableDevices"
        ]
    );
    let lost = without(devices, &["allowMultipleAllocations", "requestPolicy"]);
    assert_eq!(lost.len(), 4);
    assert!(
        lost.iter()
            .all(|line| line.ends_with("DRAConsumableCapacity")),
        "{lost:?}"
    );
    assert_eq!(
        without(devices, &["nodeName"]),
        ["the API server dropped spec.nodeName"]
    );
    // Something else in a field is a difference, not a loss.
    let spec = plan.spec(devices, 1);
    let mut other = spec.clone();
    other.node_name = Some("node-b".to_owned());
    assert_eq!(dropped(&spec, &other), []);
}

fn any_gpus() -> impl Strategy<Value = Vec<Gpu>> {
    let one = (0..200_u32, 16..200_u64, 0..2_u64, 0..3_u8, 0..1_u64 << 20).prop_map(
        |(minor, gib, reserved, product, odd)| {
            let mut gpu = gpu(minor);
            gpu.product_name = format!("Product {product}");
            gpu.memory = Quantity::from_bytes((gib << 30) + odd);
            gpu.reserved_memory = Quantity::from_bytes(reserved << 29);
            gpu
        },
    );
    // Mostly the sizes of real nodes, sometimes more than several counter slices hold.
    let count = prop_oneof![8 => 0..=8_usize, 1 => 9..=64_usize];
    count
        .prop_flat_map(move |count| prop::collection::vec(one.clone(), count))
        .prop_map(|mut gpus| {
            let mut seen = BTreeSet::new();
            gpus.retain(|gpu| seen.insert(gpu.minor));
            gpus
        })
}

fn any_policy() -> impl Strategy<Value = SharingPolicy> {
    (
        prop::sample::subsequence(Tier::SERVED.to_vec(), 1..=3),
        prop::option::of(0..3_u8),
        0..3_i32,
        (1..=128_u32, 0..=16_u32, 0..1024_u64),
        prop_oneof![Just(1_u64), 1..5000_u64, (10..31_u32).prop_map(|bits| 1 << bits)],
        (prop::option::of(1..4_u64), prop::option::of(1..=100_u32), 1..=128_u32),
    )
        .prop_map(|(tiers, product, priority, (most, expected, context), step, (steps, cores, time))| {
            policy(
                "p",
                &json!({
                    "tiers": tiers,
                    "products": product.map(|product| format!("Product {product}")).into_iter().collect::<Vec<_>>(),
                    "priority": priority,
                    "capped": {
                        "maxSharers": most,
                        "expectedSharers": expected.min(most),
                        "contextMemory": format!("{context}Mi"),
                        "memoryStep": step,
                        "defaultMemory": steps.map(|steps| steps * step),
                        "defaultCores": cores,
                    },
                    "timeshared": {"maxSharers": time},
                }),
            )
        })
}

fn any_policies() -> impl Strategy<Value = Vec<SharingPolicy>> {
    prop::collection::vec(any_policy(), 0..4).prop_map(|mut policies| {
        for (index, policy) in policies.iter_mut().enumerate() {
            policy.metadata.name = Some(format!("p{index}"));
        }
        policies
    })
}

proptest! {
    #[test]
    fn every_plan_is_within_the_apis_limits(gpus in any_gpus(), policies in any_policies()) {
        // Where a policy's contexts leave nothing of a small GPU, that is what the error says.
        match planned(&inventory(gpus), &policies) {
            Ok(plan) => limits::check(&objects(&plan)),
            Err(error) => {
                let nothing = matches!(error, PlanError::NothingToShare { .. });
                prop_assert!(nothing, "{}", error);
            }
        }
    }

    #[test]
    fn shares_never_reach_into_reserve_or_contexts(gpus in any_gpus(), policy in any_policy()) {
        let policies = [SharingPolicy { spec: tranche_api::SharingPolicySpec { products: vec![], ..policy.spec }, ..policy }];
        let inventory = inventory(gpus);
        if let Ok(plan) = planned(&inventory, &policies) {
            let terms = policy::terms(&policies, &BTreeMap::new(), &gpu(0)).unwrap().capped;
            let contexts = terms.context_memory * u64::from(terms.expected_sharers);
            for device in devices(&plan).iter().filter(|device| device.name.ends_with("capped")) {
                let minor = device.name.parse::<DeviceName>().unwrap().minor();
                let gpu = inventory.gpus.iter().find(|gpu| gpu.minor == minor).unwrap();
                let memory = &device.capacity.as_ref().unwrap()[capacity::MEMORY];
                let usable = Quantity::try_from(&memory.value).unwrap().to_count().unwrap();
                let (total, reserved) = (gpu.memory.to_count().unwrap(), gpu.reserved_memory.to_count().unwrap());
                prop_assert!(usable + reserved + contexts <= total);
                // And no more than one step is lost to rounding.
                prop_assert!(usable + reserved + contexts + terms.memory_step > total);
            }
        }
    }

    #[test]
    fn the_order_of_what_comes_in_does_not_matter(
        (gpus, shuffled) in any_gpus().prop_flat_map(|gpus| (Just(gpus.clone()), Just(gpus).prop_shuffle())),
        policies in any_policies(),
    ) {
        let ordered = planned(&inventory(gpus), &policies);
        let mut unordered = inventory(vec![]);
        unordered.gpus = shuffled;
        let reversed: Vec<_> = policies.iter().rev().cloned().collect();
        prop_assert_eq!(planned(&unordered, &reversed), ordered);
    }

    #[test]
    fn a_gpu_that_is_lost_changes_no_other(gpus in any_gpus(), lost in any::<prop::sample::Index>()) {
        prop_assume!(!gpus.is_empty());
        let policies = [all_tiers()];
        let before = planned(&inventory(gpus.clone()), &policies).unwrap();
        let mut left = gpus;
        let minor = left.remove(lost.index(left.len())).minor;
        let after = planned(&inventory(left), &policies).unwrap();
        let own = format!("{:05}-", FIRST_GPU_SLICE + minor);
        let others = |plan: &SlicePlan| -> Vec<PlannedSlice> {
            plan.slices
                .iter()
                .filter(|slice| matches!(slice.content, Content::Devices(_)))
                .filter(|slice| !slice.name.starts_with(&own))
                .cloned()
                .collect()
        };
        prop_assert_eq!(others(&before), others(&after));
    }
}
