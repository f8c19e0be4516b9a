mod boots;
mod comparison;
mod dcgm_exporter;
pub(super) mod limits;
mod oversubscribed;
mod properties;
mod shrunk;
mod vgpu;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use tranche_api::Quantity;
use tranche_api::gpu_node::{GpuVfio, TaintEffect};
use tranche_api::names::{attribute, capacity, taint};
use tranche_api::tier::Tier;
use tranche_api::withheld::reason;

use super::*;
use crate::mig::tables;
use crate::testing::{NODE, gpu, inventory, policy};

const NODE_UID: &str = "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d";
/// The slices of a node with two GPUs under a plain policy, as sent to the API server.
const GOLDEN: &str = include_str!("../../testdata/slices-two-h100.json");

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
        withheld: &[],
        health: &[],
        policies,
        retained: &[],
    }
}

fn planned(inventory: &Inventory, policies: &[SharingPolicy]) -> SlicePlan {
    plan(&input(inventory, policies, &BTreeMap::new())).unwrap()
}

/// The plan after these devices were published and the API server stored all of each.
fn replanned(
    inventory: &Inventory,
    policies: &[SharingPolicy],
    withheld: &[WithheldGpu],
    published: &[Device],
) -> SlicePlan {
    let plan = plan(&NodeInput {
        withheld,
        retained: &whole(published),
        ..input(inventory, policies, &BTreeMap::new())
    })
    .unwrap();
    limits::check(&objects(&plan));
    plan
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

/// Published devices that were read completely.
fn whole(devices: &[Device]) -> Vec<PublishedDevice> {
    devices
        .iter()
        .filter_map(|device| {
            Some(PublishedDevice {
                content: Some(device.clone()),
                ..PublishedDevice::identify(device)?
            })
        })
        .collect()
}

fn names(plan: &SlicePlan) -> Vec<String> {
    devices(plan)
        .into_iter()
        .map(|device| device.name)
        .collect()
}

#[test]
fn two_gpus_under_a_plain_policy() {
    let plan = planned(&inventory(vec![gpu(0), gpu(1)]), &[all_tiers()]);
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    assert_eq!(serde_json::to_value(objects(&plan)).unwrap(), golden);
}

#[test]
fn shared_devices_come_first_and_gpus_sort_by_pci_address() {
    let plan = planned(&inventory(vec![gpu(10), gpu(2)]), &[all_tiers()]);
    assert_eq!(
        names(&plan),
        [
            "gpu-00000002-capped",
            "gpu-00000002-timeshared",
            "gpu-00000002",
            "gpu-0000000a-capped",
            "gpu-0000000a-timeshared",
            "gpu-0000000a"
        ]
    );
    let slices: Vec<_> = plan.slices.iter().map(|slice| &*slice.name).collect();
    assert!(slices.is_sorted(), "{slices:?}");
}

#[test]
fn counters_are_split_by_eights() {
    let plan = planned(&inventory((0..64).map(gpu).collect()), &[all_tiers()]);
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
fn a_gpu_with_too_many_devices_for_a_slice_uses_the_next_too() {
    let mut inventory = inventory(vec![gpu(0), gpu(1)]);
    let uuids = [gpu(0).uuid, gpu(1).uuid];
    inventory.mig_geometries = vec![tables::h100(&uuids.each_ref().map(|it| &**it))];
    let geometry = Geometry::read(&inventory.mig_geometries[0]).unwrap();
    let mut profiles: Vec<_> = geometry.partitions.iter().map(|it| it.profile).collect();
    profiles.dedup();
    let profiles: Vec<_> = profiles.iter().map(ToString::to_string).collect();
    let policies = [policy(
        "p",
        &json!({
            "tiers": ["capped", "concurrent", "partition"],
            "capped": {"onPartitions": profiles, "maxSharers": 2, "expectedSharers": 0},
            "concurrent": {"onPartitions": profiles},
        }),
    )];
    let plan = planned(&inventory, &policies);
    assert_eq!(plan.withheld, []);
    limits::check(&objects(&plan));
    let sizes: Vec<usize> = plan
        .slices
        .iter()
        .filter_map(|slice| match &slice.content {
            Content::Devices(devices) => Some(devices.len()),
            Content::Counters(_) => None,
        })
        .collect();
    let each = 2 + 3 * geometry.partitions.len();
    assert_eq!(sizes, [64, each - 64, 64, each - 64]);
    let names: Vec<_> = plan.slices.iter().map(|slice| &*slice.name).collect();
    assert!(names.is_sorted(), "{names:?}");
}

#[test]
fn a_silent_mps_daemon_closes_concurrent_shares_of_its_gpu() {
    let mut inventory = inventory(vec![gpu(0)]);
    inventory.mig_geometries = vec![tables::h100(&[&gpu(0).uuid])];
    let policies = [policy(
        "p",
        &json!({
            "tiers": ["capped", "concurrent"],
            "capped": {"onPartitions": ["7g.80gb"]},
            "concurrent": {"onPartitions": ["7g.80gb"]},
        }),
    )];
    let left = |reason: &str| {
        let withheld = WithheldGpu {
            tiers: vec![Tier::Concurrent],
            ..WithheldGpu::whole(&gpu(0).uuid, reason, "why".to_owned())
        };
        let plan = replanned(&inventory, &policies, &[withheld], &[]);
        names(&plan).join(" ")
    };
    let daemon = left(reason::MPS_DAEMON);
    assert_eq!(daemon, "gpu-00000000-capped gpu-00000000-capped-7g80gb-0");
    let mode = left(reason::MIG_MODE);
    assert_eq!(mode, format!("{daemon} gpu-00000000-mps-7g80gb-0"));
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
        assert!(refused.is_err(), "{name:?}");
    }
}

#[test]
fn a_node_without_gpus_has_no_slices() {
    assert_eq!(planned(&inventory(vec![]), &[all_tiers()]).slices, []);
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
    let plan = planned(&inventory(vec![gpu(0), small]), &policies);
    assert_eq!(names(&plan), ["gpu-00000000", "gpu-00000001-capped"]);
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
    let plan = planned(&inventory(vec![gpu(0)]), &[policy("p", &spec)]);
    // 81559 - 600 - 3 * 300 = 80059 MiB, which is 312 whole steps; a seventh of it is 44 steps. Contexts have
    // room at the size that is assumed before a measurement, 7 * 512.
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
            "contextMemory": {"value": "3584Mi", "requestPolicy": {"default": "300Mi", "validValues": ["300Mi"]}},
            "sharers": {"value": "7", "requestPolicy": {"default": "1", "validValues": ["1"]}},
            "antiAffinity": {"value": "1", "requestPolicy": {"default": "0", "validValues": ["0", "1"]}},
        })
    );
}

#[test]
fn concurrent_shares_are_as_capped_ones_with_fewer_sharers() {
    let spec = |tier: &str| {
        json!({
            "tiers": [tier],
            "capped": {"maxSharers": 7, "expectedSharers": 3, "contextMemory": "300Mi", "memoryStep": "256Mi"},
            "concurrent": {"maxSharers": 5},
        })
    };
    let one = |tier: &str| {
        devices(&planned(
            &inventory(vec![gpu(0)]),
            &[policy("p", &spec(tier))],
        ))[0]
            .clone()
    };
    let (concurrent, capped) = (one("concurrent"), one("capped"));
    assert_eq!(concurrent.name, "gpu-00000000-concurrent");
    assert_eq!(concurrent.allow_multiple_allocations, Some(true));
    assert_eq!(concurrent.consumes_counters, capped.consumes_counters);
    let mut expected = capacities(&capped);
    expected["sharers"]["value"] = json!("5");
    expected["contextMemory"]["value"] = json!("2560Mi");
    // A fifth of 312 steps, rounded down.
    expected["memory"]["requestPolicy"]["default"] = json!("15872Mi");
    expected["cores"]["requestPolicy"]["default"] = json!("20");
    assert_eq!(capacities(&concurrent), expected);
}

/// MPS has no limits per client before Volta.
#[test]
fn a_gpu_older_than_volta_has_no_concurrent_shares() {
    let policies = [policy("p", &json!({"tiers": ["concurrent", "exclusive"]}))];
    for (capability, offered) in [("6.1", false), ("7.0", true), ("12.0", true)] {
        let mut old = gpu(0);
        old.cuda_compute_capability = capability.to_owned();
        let plan = planned(&inventory(vec![old]), &policies);
        let is_offered = names(&plan)
            .iter()
            .any(|name| name.ends_with("-concurrent"));
        assert_eq!(is_offered, offered, "{capability}");
        assert_eq!(plan.withheld.len(), usize::from(!offered));
        for entry in &plan.withheld {
            assert_eq!(
                (&*entry.reason, &entry.tiers[..]),
                ("NoMps", &[Tier::Concurrent][..])
            );
            assert!(entry.message.contains(capability), "{}", entry.message);
        }
    }
}

#[test]
fn cores_are_given_by_steps() {
    let cores = |capped: &Value| {
        let spec = json!({"tiers": ["capped"], "capped": capped});
        let plan = planned(&inventory(vec![gpu(0)]), &[policy("p", &spec)]);
        limits::check(&objects(&plan));
        capacities(&devices(&plan)[0])["cores"].clone()
    };
    let expected = |default: &str, step: &str| {
        json!({
            "value": "100",
            "requestPolicy": {"default": default, "validRange": {"min": step, "max": "100", "step": step}},
        })
    };
    for (capped, default, step) in [
        (json!({"coresStep": 10, "maxSharers": 7}), "10", "10"),
        (json!({"coresStep": 25, "maxSharers": 16}), "25", "25"),
        (json!({"coresStep": 20, "defaultCores": 60}), "60", "20"),
        (
            json!({"coresStep": 50, "maxSharers": 1, "expectedSharers": 1}),
            "100",
            "50",
        ),
    ] {
        assert_eq!(cores(&capped), expected(default, step), "{capped}");
    }
}

#[test]
fn a_change_of_any_field_keeps_every_device_under_its_name() {
    let tiers = json!(["exclusive", "capped", "timeshared"]);
    let spec = |rest: &Value| {
        let mut spec = json!({"tiers": tiers});
        spec.as_object_mut()
            .unwrap()
            .extend(rest.as_object().unwrap().clone());
        policy("p", &spec)
    };
    let (capped, timeshared) = ("gpu-00000000-capped", "gpu-00000000-timeshared");
    let before = planned(&inventory(vec![gpu(0)]), &[spec(&json!({}))]);
    let other = gpu(1).uuid;
    for (rest, withdrawn) in [
        (json!({"uuids": [other]}), &[capped, timeshared][..]),
        (json!({"indices": [1]}), &[capped, timeshared]),
        (json!({"products": ["NVIDIA L4"]}), &[capped, timeshared]),
        (json!({"uuids": [gpu(0).uuid], "indices": [0]}), &[]),
        (json!({"capped": {"coresStep": 50}}), &[]),
        (
            json!({"capped": {"coresStep": 20, "defaultCores": 40}}),
            &[],
        ),
        (
            json!({"capped": {"maxSharers": 1, "expectedSharers": 1, "memoryStep": "1Gi"}}),
            &[],
        ),
        (json!({"capped": {"defaultMemory": "500Gi"}}), &[capped]),
        (json!({"partition": {"profiles": ["1g.10gb"]}}), &[]),
        (
            json!({"timeshared": {"interval": "Long", "maxSharers": 1}}),
            &[],
        ),
        (
            json!({"uuids": ["no UUID"]}),
            &[capped, timeshared, "gpu-00000000"],
        ),
    ] {
        let after = replanned(
            &inventory(vec![gpu(0)]),
            &[spec(&rest)],
            &[],
            &devices(&before),
        );
        let is_closed = |device: &Device| {
            let mut taints = device.taints.iter().flatten();
            taints.any(|it| it.key == taint::WITHDRAWN)
        };
        let named = |devices: Vec<Device>| -> BTreeSet<String> {
            devices.into_iter().map(|device| device.name).collect()
        };
        assert_eq!(named(devices(&after)), named(devices(&before)), "{rest}");
        let mut closed = devices(&after);
        closed.retain(is_closed);
        let expected: BTreeSet<_> = withdrawn.iter().map(ToString::to_string).collect();
        assert_eq!(named(closed), expected, "{rest}");
        // Every device takes the whole GPU from the other tiers.
        for device in devices(&after) {
            let consumed = &device.consumes_counters.unwrap()[0];
            let whole = &devices(&before)[0].consumes_counters.clone().unwrap()[0];
            assert_eq!(consumed, whole, "{rest}");
        }
    }
}

#[test]
fn defaults_come_from_the_policy_where_it_names_them() {
    let spec = json!({
        "tiers": ["capped"],
        "capped": {"maxSharers": 128, "defaultMemory": "2Gi", "defaultCores": 5},
    });
    let plan = planned(&inventory(vec![gpu(0)]), &[policy("p", &spec)]);
    let found = capacities(&devices(&plan)[0]);
    assert_eq!(found["memory"]["requestPolicy"]["default"], "2Gi");
    assert_eq!(found["cores"]["requestPolicy"]["default"], "5");
    let spec = json!({"tiers": ["capped"], "capped": {"maxSharers": 128}});
    let plan = planned(&inventory(vec![gpu(0)]), &[policy("p", &spec)]);
    assert_eq!(
        capacities(&devices(&plan)[0])["cores"]["requestPolicy"]["default"],
        "1"
    );
}

#[test]
fn what_nothing_keeps_is_not_offered_by_size() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]);
    let found: Vec<Value> = devices(&plan).iter().map(capacities).collect();
    assert_eq!(
        found[1],
        json!({
            "sharers": {"value": "8", "requestPolicy": {"default": "1", "validValues": ["1"]}},
            "antiAffinity": {"value": "1", "requestPolicy": {"default": "0", "validValues": ["0", "1"]}},
        })
    );
    assert_eq!(
        found[2],
        json!({"memory": {"value": "81559Mi"}, "cores": {"value": "100"}})
    );
}

#[test]
fn devices_carry_the_whole_vocabulary_and_nothing_else() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]);
    let known = |entries: &[tranche_api::names::Entry]| -> BTreeSet<String> {
        entries.iter().map(|entry| entry.name.to_owned()).collect()
    };
    let with = |of_partitions: &[&str], seen: BTreeSet<String>| -> BTreeSet<String> {
        let of_partitions = of_partitions.iter().map(ToString::to_string);
        seen.into_iter().chain(of_partitions).collect()
    };
    let mut seen = BTreeSet::new();
    for device in devices(&plan) {
        let attributes = device.attributes.unwrap().into_keys().collect();
        let optional = [attribute::IOMMU_GROUP, attribute::MEMORY_OVERSUBSCRIPTION];
        let of_others = [&PARTITION_ATTRIBUTES[..], &optional].concat();
        let all = with(&of_others, attributes);
        assert_eq!(all, known(attribute::ALL));
        seen.extend(device.capacity.unwrap().into_keys());
    }
    assert_eq!(with(&PARTITION_CAPACITIES, seen), known(capacity::ALL));
}

#[test]
fn a_gpu_is_offered_to_virtual_machines_where_vfio_can_have_it() {
    let spec = json!({"tiers": ["exclusive", "passthrough"]});
    let offered = |vfio: Option<GpuVfio>| {
        let mut gpu = gpu(0);
        gpu.vfio = vfio;
        planned(&inventory(vec![gpu]), &[policy("p", &spec)])
    };
    let vfio = |obstacle: Option<&str>| {
        Some(GpuVfio {
            iommu_group: 17,
            obstacle: obstacle.map(str::to_owned),
        })
    };
    let group = |device: &Device| {
        let attributes = device.attributes.as_ref().unwrap();
        attributes.get(attribute::IOMMU_GROUP).and_then(|it| it.int)
    };
    let free = devices(&offered(vfio(None)));
    let shown: Vec<_> = free.iter().map(|it| (&*it.name, group(it))).collect();
    assert_eq!(
        shown,
        [
            ("gpu-00000000-passthrough", Some(17)),
            ("gpu-00000000", None)
        ]
    );
    // A claim takes the whole GPU, in every tier.
    assert_eq!(free[0].consumes_counters, free[1].consumes_counters);
    assert_eq!(capacities(&free[0]), capacities(&free[1]));

    for (vfio, why) in [
        (None, "no IOMMU group"),
        (vfio(Some("the group has a disk")), "the group has a disk"),
    ] {
        let plan = offered(vfio);
        let names: Vec<_> = devices(&plan).into_iter().map(|it| it.name).collect();
        assert_eq!(names, ["gpu-00000000"]);
        let [refused] = &plan.withheld[..] else {
            panic!("{:?}", plan.withheld)
        };
        assert_eq!(
            (&refused.tiers[..], &*refused.reason),
            (&[Tier::Passthrough][..], reason::NO_VFIO)
        );
        assert!(refused.message.contains(why), "{}", refused.message);
    }
}

/// Attributes that only partitions have.
pub(in crate::slices) const PARTITION_ATTRIBUTES: [&str; 2] =
    [attribute::PROFILE, attribute::PARENT_UUID];
pub(in crate::slices) const PARTITION_CAPACITIES: [&str; 6] = [
    capacity::MULTIPROCESSORS,
    capacity::COPY_ENGINES,
    capacity::DECODERS,
    capacity::ENCODERS,
    capacity::JPEG_ENGINES,
    capacity::OFA_ENGINES,
];

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
    let plan = planned(&inventory, &[]);
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

/// An unusual GPU, the spec of its policy, and the expected reasons.
type OddGpu = (fn(&mut Gpu), Value, WithheldGpu);

/// Everything in which one of two GPUs may be unusual: the description, the policy of its product, and the expected
/// reason.
fn odd_gpus() -> Vec<OddGpu> {
    let uuid = gpu(1).uuid;
    let all = json!({"tiers": ["exclusive", "capped", "timeshared"]});
    let described =
        |message: &str| WithheldGpu::whole(&uuid, reason::INVALID_DESCRIPTION, message.to_owned());
    let policy = |tiers: &[Tier], reason: &str, message: &str| WithheldGpu {
        tiers: tiers.to_vec(),
        policy: Some("odd".to_owned()),
        ..WithheldGpu::whole(&uuid, reason, message.to_owned())
    };
    vec![
        (
            |gpu| gpu.pci_bus_id = "0:1b:00.0".to_owned(),
            all.clone(),
            described(
                r#"pciBusID "0:1b:00.0" is not a PCI address: it must look like 0000:1b:00.0"#,
            ),
        ),
        (
            |gpu| gpu.memory = "1500m".parse().unwrap(),
            all.clone(),
            described("memory 1500m is not a whole number"),
        ),
        (
            |gpu| gpu.reserved_memory = "-1".parse().unwrap(),
            all.clone(),
            described("reservedMemory -1 is negative"),
        ),
        (
            |gpu| gpu.cuda_compute_capability = "unknown".to_owned(),
            all.clone(),
            described(
                r#"cudaComputeCapability "unknown" is not a version: it must begin with numbers and dots"#,
            ),
        ),
        (
            |gpu| gpu.pcie_root = Some("x".repeat(65)),
            all.clone(),
            described(&format!(
                r#"pcieRoot "{}" is longer than 64 bytes"#,
                "x".repeat(65)
            )),
        ),
        (
            |_| {},
            json!({"tiers": ["capped", "capped"]}),
            policy(
                &[],
                reason::INVALID_POLICY,
                "SharingPolicy odd: spec.tiers names capped twice",
            ),
        ),
        (
            |gpu| gpu.memory = Quantity::from_bytes(2 << 30),
            all,
            policy(
                &[Tier::Capped],
                reason::TOO_SMALL,
                "of 2Gi in total, 600Mi reserved by the driver and 2Gi for CUDA contexts leave 0, less than two steps of 1Mi: lower contextMemory, expectedSharers or memoryStep in the SharingPolicy, or do not offer the tiers capped and concurrent for this GPU",
            ),
        ),
        (
            |_| {},
            json!({"tiers": ["capped", "exclusive"], "capped": {"defaultMemory": "79Gi"}}),
            policy(
                &[Tier::Capped],
                reason::TOO_SMALL,
                "defaultMemory 79Gi of the SharingPolicy is more than the usable 78911Mi: lower it, or give this product a policy of its own",
            ),
        ),
    ]
}

#[test]
fn one_odd_gpu_costs_its_own_devices_only() {
    let alone = names(&planned(&inventory(vec![gpu(0)]), &[all_tiers()]));
    for (change, spec, expected) in odd_gpus() {
        let mut odd = gpu(1);
        odd.product_name = "Odd".to_owned();
        change(&mut odd);
        let tiers = spec["tiers"].as_array().unwrap().len();
        let refused = if expected.tiers.is_empty() {
            tiers
        } else {
            expected.tiers.len()
        };
        let mut spec = spec;
        spec["priority"] = json!(1);
        spec["products"] = json!(["Odd"]);
        let plan = planned(
            &inventory(vec![gpu(0), odd]),
            &[all_tiers(), policy("odd", &spec)],
        );
        limits::check(&objects(&plan));
        assert_eq!(plan.withheld, std::slice::from_ref(&expected));
        let all = names(&plan);
        let (own, others): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|name| name.starts_with("gpu-00000001"));
        assert_eq!(others, alone, "{expected:?}");
        assert_eq!(own.len(), tiers - refused, "{own:?} beside {expected:?}");
        assert!(
            !expected.tiers.contains(&Tier::Capped) || own.iter().all(|d| !d.contains("capped"))
        );
    }
}

#[test]
fn two_gpus_with_one_name_are_withheld_and_a_third_is_offered() {
    let uuid = gpu(1).uuid;
    let twin = Gpu {
        uuid: uuid.clone(),
        ..gpu(2)
    };
    let neighbour = Gpu {
        pci_bus_id: gpu(1).pci_bus_id,
        ..gpu(2)
    };
    for (second, field) in [
        (twin, format!("UUID {uuid}")),
        (neighbour, "PCI address 0000:01:00.0".to_owned()),
    ] {
        let first = gpu(1);
        let plan = planned(&inventory(vec![gpu(0), first, second]), &[]);
        assert_eq!(names(&plan), ["gpu-00000000"]);
        assert_eq!(plan.withheld.len(), 2);
        for entry in &plan.withheld {
            assert_eq!(entry.reason, reason::DUPLICATE);
            assert_eq!(
                entry.message,
                format!("the node describes two GPUs with the {field}: neither is offered")
            );
        }
    }
}

#[test]
fn a_withheld_gpu_is_not_offered_and_is_tainted_if_allocated() {
    let (inventory, policies) = (inventory(vec![gpu(0), gpu(1)]), [all_tiers()]);
    let before = devices(&planned(&inventory, &policies));
    let retained: Vec<_> = before
        .into_iter()
        .filter(|device| device.name == "gpu-00000001-capped")
        .collect();
    let lost = WithheldGpu::whole("index 2", reason::GPU_LOST, "lost".to_owned());
    let other = WithheldGpu::whole(&gpu(1).uuid, reason::OTHER_PROVIDER, "taken".to_owned());
    let withheld = [lost, other];
    let after = replanned(&inventory, &policies, &withheld, &retained);
    assert_eq!(
        names(&after),
        [
            "gpu-00000000-capped",
            "gpu-00000000-timeshared",
            "gpu-00000000",
            "gpu-00000001-capped"
        ]
    );
    assert_eq!(after.withheld, withheld);
    let held = devices(&after).pop().unwrap();
    assert_eq!(held.taints.unwrap()[0].key, taint::WITHDRAWN);
    assert_eq!(held.consumes_counters, retained[0].consumes_counters);
}

#[test]
fn the_node_is_the_owner_of_every_slice() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]);
    for object in objects(&plan) {
        let owner = &object.metadata.owner_references.unwrap()[0];
        assert_eq!(
            (&*owner.kind, &*owner.name, &*owner.uid),
            ("Node", NODE, NODE_UID)
        );
    }
}

#[test]
fn a_held_device_stays_with_a_taint() {
    let before = planned(&inventory(vec![gpu(0), gpu(1)]), &[all_tiers()]);
    let held: Vec<Device> = devices(&before)
        .into_iter()
        .filter(|device| ["gpu-00000000-capped", "gpu-00000001"].contains(&&*device.name))
        .collect();
    let foreign = Device {
        name: "mig-0".to_owned(),
        ..Device::default()
    };
    // The policy does not offer shares any more, and GPU 1 is gone.
    let inventory = inventory(vec![gpu(0)]);
    let policies = [policy("p", &json!({"tiers": ["exclusive"]}))];
    let retained = [held.clone(), vec![foreign]].concat();
    let after = replanned(&inventory, &policies, &[], &retained);
    assert_eq!(
        names(&after),
        ["gpu-00000000", "gpu-00000000-capped", "gpu-00000001"]
    );
    for (device, before) in devices(&after)[1..].iter().zip(&held) {
        let taint = &device.taints.as_ref().unwrap()[0];
        assert_eq!(
            (&*taint.key, &*taint.effect),
            (taint::WITHDRAWN, "NoSchedule")
        );
        assert_eq!(device.capacity, before.capacity);
        assert_eq!(device.consumes_counters, before.consumes_counters);
    }
    // A device that is offered again loses the taint.
    let again = replanned(&inventory, &[all_tiers()], &[], &devices(&after));
    let tainted: Vec<_> = devices(&again)
        .into_iter()
        .filter(|d| d.taints.is_some())
        .collect();
    assert_eq!(tainted.len(), 1);
    assert_eq!(tainted[0].name, "gpu-00000001");
}

#[test]
fn a_device_no_longer_offered_is_missing_until_fully_read() {
    let (all, labels) = (inventory(vec![gpu(0), gpu(1)]), BTreeMap::new());
    let before = devices(&planned(&all, &[all_tiers()]));
    let known: Vec<_> = before
        .iter()
        .filter_map(PublishedDevice::identify)
        .collect();
    let plan_for = |inventory: &Inventory, policies: &[SharingPolicy], retained: &[_]| {
        plan(&NodeInput {
            retained,
            ..input(inventory, policies, &labels)
        })
        .unwrap()
    };
    let lacking = |plan: &SlicePlan| -> Vec<String> {
        plan.lacking.iter().map(ToString::to_string).collect()
    };
    // As before, the identities are enough.
    let same = plan_for(&all, &[all_tiers()], &known);
    assert_eq!(same, planned(&all, &[all_tiers()]));

    let exclusive = [policy("p", &json!({"tiers": ["exclusive"]}))];
    let fewer = plan_for(&inventory(vec![gpu(0)]), &exclusive, &known);
    assert_eq!(
        lacking(&fewer),
        [
            "gpu-00000000-capped",
            "gpu-00000000-timeshared",
            "gpu-00000001-capped",
            "gpu-00000001-timeshared",
            "gpu-00000001"
        ]
    );
    let read = plan_for(&inventory(vec![gpu(0)]), &exclusive, &whole(&before));
    assert_eq!(lacking(&read), [""; 0]);
    assert_eq!(names(&read).len(), 6);
}

#[test]
fn an_untested_driver_closes_the_tier_that_it_may_escape() {
    let mut newer = inventory(vec![gpu(0)]);
    newer.unknown_functions = vec!["cuAskTheFuture".to_owned()];
    let allow = policy(
        "p",
        &json!({"tiers": ["exclusive", "capped"], "capped": {"untestedDriver": "Allow"}}),
    );
    for (inventory, policies, untested, closed) in [
        (inventory(vec![gpu(0)]), [all_tiers()], false, &[][..]),
        (newer.clone(), [all_tiers()], true, &["gpu-00000000-capped"]),
        (newer, [allow], true, &[]),
    ] {
        let plan = planned(&inventory, &policies);
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

/// What a node reports of a GPU with a fault.
fn faulty(uuid: &str, value: &str, effect: TaintEffect) -> GpuStatus {
    GpuStatus {
        uuid: uuid.to_owned(),
        conditions: Vec::new(),
        taint: Some(GpuTaint {
            value: value.to_owned(),
            effect,
            time_added: Time("2026-11-22T08:00:00Z".parse().unwrap()),
        }),
    }
}

#[test]
fn every_device_of_a_gpu_with_a_fault_is_tainted_and_no_other() {
    let inventory = inventory(vec![gpu(0), gpu(1)]);
    let (first, labels) = (inventory.gpus[0].uuid.clone(), BTreeMap::new());
    let policies = [all_tiers()];
    let of = |health: &[GpuStatus], withheld: &[WithheldGpu], retained: &[PublishedDevice]| {
        let plan = plan(&NodeInput {
            withheld,
            health,
            retained,
            ..input(&inventory, &policies, &labels)
        });
        devices(&plan.unwrap())
    };
    let effects = |devices: &[Device]| -> BTreeMap<String, Vec<(String, String)>> {
        let taints = |device: &Device| {
            let taints = device.taints.iter().flatten();
            let taints = taints.map(|taint| (taint.key.clone(), taint.effect.clone()));
            (device.name.clone(), taints.collect())
        };
        devices.iter().map(taints).collect()
    };
    let executes = [faulty(&first, "Xid79", TaintEffect::NoExecute)];
    let tainted = of(&executes, &[], &[]);
    let is_first = |name: &str| name.starts_with(&format!("gpu-{}", &first[4..12]));
    let unhealthy = (
        "gpu.tranche.dev/unhealthy".to_owned(),
        "NoExecute".to_owned(),
    );
    let mut count = 0;
    for (name, taints) in effects(&tainted) {
        assert_eq!(taints.contains(&unhealthy), is_first(&name), "{name}");
        count += usize::from(is_first(&name));
    }
    assert_eq!(count, 3, "all tiers of the first");
    let taint = tainted
        .iter()
        .find_map(|it| it.taints.as_ref()?.first())
        .unwrap();
    assert_eq!(taint.value.as_deref(), Some("Xid79"));
    assert!(taint.time_added.is_some());
    // What is no label's value must not make the API server refuse the slice.
    for value in ["a b", "é", &"x".repeat(64)] {
        let odd = of(&[faulty(&first, value, TaintEffect::NoSchedule)], &[], &[]);
        let taint = odd
            .iter()
            .find_map(|it| it.taints.as_ref()?.first())
            .unwrap();
        assert_eq!(taint.value, None, "{value}");
    }
    // A device that is no longer offered has both taints, so that a fault evicts its pods.
    let retained = whole(&tainted);
    let lost = [WithheldGpu::whole(&first, "GpuLost", String::new())];
    let withdrawn = effects(&of(&executes, &lost, &retained));
    let both = ["gpu.tranche.dev/withdrawn", "gpu.tranche.dev/unhealthy"];
    for (name, taints) in withdrawn.iter().filter(|(name, _)| is_first(name)) {
        let keys: Vec<&str> = taints.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, both, "{name}");
    }
    // Without a fault there is none.
    let fine = GpuStatus {
        taint: None,
        ..faulty(&first, "", TaintEffect::NoSchedule)
    };
    assert_eq!(of(&[fine], &[], &[]), of(&[], &[], &[]));
}
