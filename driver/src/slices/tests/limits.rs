//! The requirements of the API server and the scheduler for a pool (resource.k8s.io/v1, Kubernetes 1.37), written again
//! independently of the planner.

use std::collections::{BTreeMap, BTreeSet};

use crate::claim::DeviceName;
use k8s_openapi::api::resource::v1::{
    Counter, Device, DeviceAttribute, DeviceCapacity, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Wire;
use tranche_api::quantity::Quantity;

/// Checks all slices of one pool.
pub(super) fn check(slices: &[ResourceSlice]) {
    let mut names = BTreeSet::new();
    let mut devices = BTreeSet::new();
    let mut sets: BTreeMap<String, BTreeMap<String, Quantity>> = BTreeMap::new();
    for slice in slices {
        let name = slice.metadata.name.as_deref().expect("a name");
        assert!(subdomain(name) && names.insert(name), "{name}");
        let spec = &slice.spec;
        assert!(subdomain(&spec.driver) && spec.driver.len() <= 63);
        let pool = &spec.pool;
        assert!(
            pool.name.len() <= 253 && pool.name.split('/').all(subdomain),
            "{}",
            pool.name
        );
        assert_eq!(pool.name, slices[0].spec.pool.name);
        assert_eq!(
            usize::try_from(pool.resource_slice_count).unwrap(),
            slices.len()
        );
        assert!(spec.node_name.is_some() && spec.node_selector.is_none());
        assert!(spec.all_nodes.is_none() && spec.per_device_node_selection.is_none());
        let counters = spec.shared_counters.as_deref().unwrap_or_default();
        let own = spec.devices.as_deref().unwrap_or_default();
        assert!(
            counters.is_empty() != own.is_empty(),
            "{name} holds one of both"
        );
        assert!(counters.len() <= 8);
        for set in counters {
            assert!(label(&set.name) && !set.counters.is_empty() && set.counters.len() <= 32);
            let values = set.counters.iter().map(|(name, counter)| {
                assert!(label(name));
                (name.clone(), amount(&counter.value))
            });
            assert!(sets.insert(set.name.clone(), values.collect()).is_none());
        }
        let narrow = own
            .iter()
            .any(|device| device.taints.is_some() || device.consumes_counters.is_some());
        assert!(own.len() <= if narrow { 64 } else { 128 });
        for device in own {
            assert!(
                label(&device.name) && devices.insert(device.name.clone()),
                "{}",
                device.name
            );
            check_device(device);
        }
    }
    for slice in slices {
        for device in slice.spec.devices.iter().flatten() {
            check_counters(device, &sets);
        }
    }
}

pub(in crate::slices) fn check_device(device: &Device) {
    let attributes = device.attributes.as_ref().unwrap();
    let capacity = device.capacity.as_ref().unwrap();
    assert!(attributes.len() + capacity.len() <= 32 && attributes.len() <= 48);
    for (name, attribute) in attributes {
        assert!(qualified(name), "{name}");
        check_attribute(attribute);
    }
    let shared = device.allow_multiple_allocations == Some(true);
    for (name, capacity) in capacity {
        assert!(qualified(name), "{name}");
        check_capacity(capacity, shared);
    }
    for taint in device.taints.iter().flatten() {
        assert!(["None", "NoSchedule", "NoExecute"].contains(&&*taint.effect));
    }
    assert!(
        device
            .taints
            .as_ref()
            .is_none_or(|taints| taints.len() <= 16)
    );
}

fn check_attribute(attribute: &DeviceAttribute) {
    let DeviceAttribute {
        bool,
        int,
        string,
        version,
        bools,
        ints,
        strings,
        versions,
    } = attribute;
    let values = [
        bool.is_some(),
        int.is_some(),
        string.is_some(),
        version.is_some(),
    ];
    assert_eq!(values.iter().filter(|set| **set).count(), 1);
    assert!(bools.is_none() && ints.is_none() && strings.is_none() && versions.is_none());
    assert!(string.as_ref().is_none_or(|string| string.len() <= 64));
    if let Some(version) = version {
        assert!(version.len() <= 64);
        let numbers: Vec<&str> = version.split('.').collect();
        assert_eq!(numbers.len(), 3, "{version}");
        for number in numbers {
            assert_eq!(number.parse::<u64>().unwrap().to_string(), number);
        }
    }
}

fn check_capacity(capacity: &DeviceCapacity, shared: bool) {
    let value = amount(&capacity.value);
    let Some(policy) = &capacity.request_policy else {
        assert!(
            !shared,
            "without a default one claim that names no size takes everything"
        );
        return;
    };
    assert!(shared, "only shared devices have request policies");
    let default = amount(policy.default.as_ref().expect("a default"));
    assert!(policy.valid_range.is_some() != policy.valid_values.is_some());
    if let Some(values) = &policy.valid_values {
        let values: Vec<Quantity> = values.iter().map(amount).collect();
        assert!(values.len() <= 10 && values.contains(&default));
        assert!(values.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(values.iter().all(|option| *option <= value));
    }
    if let Some(range) = &policy.valid_range {
        let min = amount(&range.min);
        let max = amount(range.max.as_ref().expect("a maximum"));
        let step = amount(range.step.as_ref().expect("a step"));
        assert!(Quantity::ZERO <= min && min <= max && max <= value);
        assert!(min <= default && default <= max);
        assert!(min.checked_add(step).unwrap() <= value);
        let off = |amount: Quantity| {
            amount.checked_sub(min).unwrap().to_count().unwrap() % step.to_count().unwrap()
        };
        assert_eq!((off(default), off(max)), (0, 0));
        // The documentation counts steps from zero, the code from the minimum: both must agree.
        assert_eq!(min.to_count().unwrap() % step.to_count().unwrap(), 0);
    }
}

fn check_counters(device: &Device, sets: &BTreeMap<String, BTreeMap<String, Quantity>>) {
    let consumed = device.consumes_counters.as_deref().unwrap_or_default();
    assert!(!consumed.is_empty() && consumed.len() <= 2);
    let unique: BTreeSet<_> = consumed.iter().map(|entry| &entry.counter_set).collect();
    assert_eq!(unique.len(), consumed.len());
    for entry in consumed {
        let set = &sets[&entry.counter_set];
        assert!(entry.counters.len() <= 32);
        for (name, counter) in &entry.counters {
            assert!(amount(&counter.value) <= set[name]);
        }
        let is_whole = |(name, counter): (&String, &Counter)| amount(&counter.value) == set[name];
        let takes_all = entry.counters.len() == set.len() && entry.counters.iter().all(is_whole);
        // A partition, shared or not, takes its part. Every other device takes the whole GPU, so that no two of them
        // can be allocated together.
        let name: DeviceName = device.name.parse().unwrap();
        assert!(takes_all || name.placement().is_some(), "{name}");
    }
}

fn amount(wire: &Wire) -> Quantity {
    Quantity::try_from(wire).expect("a quantity")
}

fn label(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !name.is_empty()
        && name.len() <= 63
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn subdomain(name: &str) -> bool {
    name.len() <= 253
        && name.split('.').all(|part| {
            // Parts of a subdomain may be longer than a label.
            part.as_bytes().chunks(63).all(|chunk| {
                chunk
                    .iter()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
            }) && !part.is_empty()
                && !part.starts_with('-')
                && !part.ends_with('-')
        })
}

fn qualified(name: &str) -> bool {
    let (domain, id) = name.split_once('/').unwrap_or(("a", name));
    subdomain(domain)
        && domain.len() <= 63
        && id.len() <= 32
        && id.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}
