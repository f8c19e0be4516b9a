//! Applies the scheduler's rules for shared devices and counters to our slices: the node can
//! prepare everything that the scheduler allocates.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, Device};
use proptest::prelude::*;
use serde_json::json;
use tranche_api::names::{DRIVER, capacity, pool};
use tranche_api::quantity::Quantity;
use tranche_api::tier::Tier;

use super::{devices, inventory, planned, policy};
use crate::claim::DeviceName;
use crate::preparation::{self, PreparationPlan};
use crate::testing::{NODE, allocation, gpu};

/// One claim: a tier, and sizes where it names them.
#[derive(Clone, Debug)]
struct Request {
    tier: Tier,
    mib: Option<u64>,
    cores: Option<u64>,
    /// Whether another claim is released before this one is allocated.
    release: Option<prop::sample::Index>,
}

/// What claims hold of a device, by capacity.
type Consumed = BTreeMap<String, Quantity>;

fn charge(device: &Device, request: &Request) -> Option<Consumed> {
    let asked = |name: &str| match name {
        capacity::MEMORY => request.mib.map(|mib| Quantity::from_bytes(mib << 20)),
        capacity::CORES => request.cores.map(Quantity::from_count),
        _ => None,
    };
    let capacities = device.capacity.as_ref().unwrap();
    let named = [
        (capacity::MEMORY, request.mib),
        (capacity::CORES, request.cores),
    ];
    if named
        .iter()
        .any(|(name, asked)| asked.is_some() && !capacities.contains_key(*name))
    {
        return None;
    }
    capacities
        .iter()
        .map(|(name, capacity)| {
            let value = Quantity::try_from(&capacity.value).unwrap();
            let policy = capacity.request_policy.as_ref();
            let charged = round(policy, value, asked(name))?;
            Some((name.clone(), charged))
        })
        .collect()
}

fn round(
    policy: Option<&CapacityRequestPolicy>,
    value: Quantity,
    asked: Option<Quantity>,
) -> Option<Quantity> {
    let Some(policy) = policy else {
        return (asked.unwrap_or(value) <= value).then_some(value);
    };
    let Some(asked) = asked else {
        return policy
            .default
            .as_ref()
            .map(|default| Quantity::try_from(default).unwrap());
    };
    let range = policy.valid_range.as_ref()?;
    let min = Quantity::try_from(&range.min).unwrap();
    let step = Quantity::try_from(range.step.as_ref().unwrap()).unwrap();
    let max = Quantity::try_from(range.max.as_ref().unwrap()).unwrap();
    let mut rounded = min;
    if asked > min {
        let (over, step) = (asked.checked_sub(min).unwrap(), step.to_count().unwrap());
        let steps = over.to_count().unwrap().div_ceil(step);
        rounded = min.checked_add(Quantity::from_bytes(steps * step)).unwrap();
    }
    (rounded <= max).then_some(rounded)
}

/// The first device that fits, in the order of the slices, and what it is charged.
fn allocate<'a>(
    devices: &'a [Device],
    held: &BTreeMap<usize, (String, Consumed)>,
    request: &Request,
) -> Option<(&'a Device, Consumed)> {
    devices.iter().find_map(|device| {
        let name: DeviceName = device.name.parse().unwrap();
        if name.tier() != request.tier {
            return None;
        }
        let charge = charge(device, request)?;
        let others = held.values().filter(|(other, _)| *other != device.name);
        let set = |device: &Device| {
            device.consumes_counters.as_ref().unwrap()[0]
                .counter_set
                .clone()
        };
        let counters_taken = others.clone().any(|(other, _)| {
            let other = devices.iter().find(|device| device.name == *other);
            other.map(set) == Some(set(device))
        });
        if counters_taken {
            return None;
        }
        let sharers: Vec<_> = held
            .values()
            .filter(|(other, _)| *other == device.name)
            .collect();
        if device.allow_multiple_allocations != Some(true) {
            return sharers.is_empty().then_some((device, charge));
        }
        let fits = charge.iter().all(|(capacity, charged)| {
            let sum = sharers.iter().fold(*charged, |sum, (_, consumed)| {
                sum.checked_add(consumed[capacity]).unwrap()
            });
            sum <= Quantity::try_from(&device.capacity.as_ref().unwrap()[capacity].value).unwrap()
        });
        fits.then_some((device, charge))
    })
}

fn any_request() -> impl Strategy<Value = Request> {
    (
        prop::sample::select(Tier::SERVED.to_vec()),
        prop::option::of(0..90_000_u64),
        prop::option::of(0..110_u64),
        prop::option::weighted(0.3, any::<prop::sample::Index>()),
    )
        .prop_map(|(tier, mib, cores, release)| Request {
            tier,
            mib,
            cores,
            release,
        })
}

proptest! {
    #[test]
    fn what_the_scheduler_hands_out_can_be_prepared(
        requests in prop::collection::vec(any_request(), 1..40),
        step in prop::sample::select(vec!["1", "1Mi", "1000000", "1.5Gi"]),
        max_sharers in 1..20_u32,
    ) {
        let inventory = inventory(vec![gpu(0), gpu(1), gpu(2)]);
        let spec = json!({
            "tiers": Tier::SERVED,
            "capped": {"memoryStep": step, "maxSharers": max_sharers, "expectedSharers": 0},
        });
        let slices = planned(&inventory, &[policy("p", &spec)]);
        let devices = devices(&slices);
        let mut held = BTreeMap::new();
        let mut prepared: BTreeMap<usize, PreparationPlan> = BTreeMap::new();
        for (index, request) in requests.iter().enumerate() {
            if let Some(release) = &request.release && !held.is_empty() {
                let gone = *held.keys().nth(release.index(held.len())).unwrap();
                held.remove(&gone);
                prepared.remove(&gone);
            }
            let Some((device, charge)) = allocate(&devices, &held, request) else {
                continue;
            };
            let mut result = json!({
                "request": "gpu", "driver": DRIVER, "pool": pool(NODE), "device": device.name,
            });
            if device.allow_multiple_allocations == Some(true) {
                result["shareID"] = json!(format!("share-{index}"));
                result["consumedCapacity"] = json!(charge);
            }
            let allocation = allocation(&index.to_string(), &[result]);
            let plan = preparation::plan(&allocation, &inventory, prepared.values());
            prop_assert!(plan.is_ok(), "{}", plan.unwrap_err());
            prepared.insert(index, plan.unwrap());
            held.insert(index, (device.name.clone(), charge));
        }
    }
}
