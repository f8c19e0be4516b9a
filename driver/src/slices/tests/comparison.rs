use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use serde_json::{Value, json};
use tranche_api::names::DRIVER;

use super::{all_tiers, inventory, planned, policy};
use crate::slices::{Digest, PlannedSlice, dropped, same};
use crate::testing::gpu;

/// Whether two specs are the same. Their digests, which ignore the pool, must agree.
fn same_twice(one: &ResourceSliceSpec, other: &ResourceSliceSpec) -> bool {
    let same_but_for_pool = {
        let mut other = other.clone();
        other.pool = one.pool.clone();
        same(one, &other)
    };
    assert_eq!(Digest::of(one) == Digest::of(other), same_but_for_pool);
    same(one, other)
}

#[test]
fn slices_that_mean_the_same_are_the_same() {
    let plan = planned(&inventory(vec![gpu(0)]), &[all_tiers()]);
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
        assert!(same_twice(&spec, &change(pointer, value)), "{pointer}");
    }
    for (pointer, value) in [
        ("/devices/0/capacity/memory/value", json!("82744180735")),
        ("/devices/0/attributes/isolation/string", json!("exclusive")),
        // Attributes are words, not amounts.
        ("/devices/0/attributes/productName/string", json!("1000m")),
        ("/devices/0/allowMultipleAllocations", Value::Null),
        ("/devices/0/name", json!("gpu-00000001-capped")),
        ("/pool/generation", json!(2)),
        ("/nodeName", json!("node-b")),
        ("/devices/0/bindsToNode", json!(true)),
    ] {
        assert!(!same_twice(&spec, &change(pointer, value)), "{pointer}");
    }
    // Not even those of an attribute with such a name.
    let named = |value: &str| change("/devices/0/attributes/capacity", json!({"string": value}));
    assert!(!same_twice(&named("1"), &named("1000m")));
    let counters = |value: &str| {
        let mut spec = plan.spec(&plan.slices[0], 1);
        let sets = spec.shared_counters.as_mut().unwrap();
        sets[0].counters.get_mut("gpu").unwrap().value.0 = value.to_owned();
        spec
    };
    assert!(same_twice(&counters("1"), &counters("1000m")));
    assert!(!same_twice(&counters("1"), &counters("2")));
    let mut swapped = spec.clone();
    swapped.devices.as_mut().unwrap().swap(0, 1);
    assert!(!same_twice(&spec, &swapped));
    let mut fewer = spec.clone();
    fewer.devices.as_mut().unwrap().pop();
    assert!(!same_twice(&spec, &fewer) && !same_twice(&fewer, &spec));
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
            "devices": [{"name": "gpu-00000000", "taints": [taint]}],
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
    // The digest ignores the time.
    assert_eq!(Digest::of(&none), Digest::of(&one));
    assert_eq!(Digest::of(&one), Digest::of(&other));
    assert_eq!(dropped(&one, &none), []);
}

#[test]
fn dropped_fields_name_their_gate() {
    let plan = planned(
        &inventory(vec![gpu(0)]),
        &[policy("p", &json!({"tiers": ["capped"]}))],
    );
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
    assert_eq!(lost.len(), 6);
    assert!(
        lost.iter()
            .all(|line| line.ends_with("DRAConsumableCapacity")),
        "{lost:?}"
    );
    assert_eq!(
        without(devices, &["nodeName"]),
        ["the API server dropped spec.nodeName"]
    );
    // A different value in a field is a difference, not a loss.
    let spec = plan.spec(devices, 1);
    let mut other = spec.clone();
    other.node_name = Some("node-b".to_owned());
    assert_eq!(dropped(&spec, &other), []);
}
