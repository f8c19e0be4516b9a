//! A policy that offers less than before, while claims still hold the rest.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{CounterSet, Device};
use proptest::prelude::*;
use serde_json::json;
use tranche_api::gpu_node::Inventory;
use tranche_api::names::taint;
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::tier::Tier;

use super::{devices, inventory, planned, replanned};
use crate::claim::DeviceName;
use crate::mig::{Geometry, Placement, tables};
use crate::slices::{Content, SlicePlan};
use crate::testing::{gpu, policy};

/// Two H100 that MIG can divide.
fn two_h100() -> Inventory {
    let mut inventory = inventory(vec![gpu(0), gpu(1)]);
    let uuids = [gpu(0).uuid, gpu(1).uuid];
    inventory.mig_geometries = vec![tables::h100(&uuids.each_ref().map(|it| &**it))];
    inventory
}

fn offering(tiers: &[Tier], profiles: &[String], shared: &[String]) -> [SharingPolicy; 1] {
    [policy(
        "p",
        &json!({
            "tiers": tiers,
            "capped": {"onPartitions": shared},
            "partition": {"profiles": profiles},
        }),
    )]
}

fn is_open(device: &Device) -> bool {
    let mut taints = device.taints.iter().flatten();
    !taints.any(|it| it.key == taint::WITHDRAWN)
}

fn counter_sets(plan: &SlicePlan) -> BTreeMap<String, CounterSet> {
    let contents = plan.slices.iter().map(|slice| &slice.content);
    let sets = contents
        .filter_map(|content| match content {
            Content::Counters(sets) => Some(sets),
            Content::Devices(_) => None,
        })
        .flatten();
    sets.map(|set| (set.name.clone(), set.clone())).collect()
}

/// Whether the counters let a claim get `device` while another one holds `held`, as the scheduler adds them up.
fn fits_beside(held: &Device, device: &Device, sets: &BTreeMap<String, CounterSet>) -> bool {
    let consumed = |device: &Device| device.consumes_counters.clone().unwrap().remove(0);
    let (held, new) = (consumed(held), consumed(device));
    if held.counter_set != new.counter_set {
        return true;
    }
    let value = |counter: &k8s_openapi::api::resource::v1::Counter| -> u64 {
        let quantity = tranche_api::Quantity::try_from(&counter.value).unwrap();
        quantity.to_count().unwrap()
    };
    let whole = &sets[&held.counter_set].counters;
    new.counters.iter().all(|(name, amount)| {
        let taken = held.counters.get(name).map_or(0, value);
        taken + value(amount) <= whole.get(name).map_or(0, value)
    })
}

fn placement(device: &Device) -> Option<Placement> {
    device.name.parse::<DeviceName>().unwrap().placement()
}

/// Whether a GPU can serve both at once.
fn can_be_both(geometry: &Geometry, first: &Device, second: &Device) -> bool {
    let (Some(first), Some(second)) = (placement(first), placement(second)) else {
        return false;
    };
    let slices = |placement: Placement| {
        let partition = geometry.partition(placement);
        partition.unwrap().slices
    };
    let left = geometry.whole.less(slices(first)).unwrap();
    left.less(slices(second)).is_some()
}

fn all_profiles() -> Vec<String> {
    let profiles = tables::h100(&[]).profiles;
    profiles.into_iter().map(|it| it.name).collect()
}

fn any_subset<T: Clone + std::fmt::Debug + 'static>(of: Vec<T>) -> impl Strategy<Value = Vec<T>> {
    let most = of.len();
    prop::sample::subsequence(of, 0..=most)
}

proptest! {
    #[test]
    fn an_allocated_device_stays_and_no_overlapping_one_is_offered(
        which in any::<prop::sample::Index>(),
        tiers in any_subset(Tier::ALL.to_vec()),
        profiles in any_subset(all_profiles()),
        shared in any_subset(all_profiles()),
    ) {
        prop_assume!(!tiers.is_empty());
        let node = two_h100();
        let geometry = Geometry::read(&node.mig_geometries[0]).unwrap();
        let before = planned(&node, &offering(&Tier::ALL, &[], &all_profiles()));
        let before_devices = devices(&before);
        let held = which.get(&before_devices).clone();

        let shrunk = offering(&tiers, &profiles, &shared);
        let offered = planned(&node, &shrunk);
        let after = replanned(&node, &shrunk, &[], std::slice::from_ref(&held));

        // It is published once, with everything that it takes, and closed unless it is still offered.
        let published = devices(&after);
        let kept: Vec<_> = published.iter().filter(|it| it.name == held.name).collect();
        prop_assert_eq!(kept.len(), 1);
        prop_assert_eq!(&kept[0].consumes_counters, &held.consumes_counters);
        let offered_names: BTreeSet<String> = devices(&offered).into_iter().map(|it| it.name).collect();
        prop_assert_eq!(is_open(kept[0]), offered_names.contains(&held.name));

        // Nothing else is new.
        let open: BTreeSet<String> = published.iter().filter(|it| is_open(it)).map(|it| it.name.clone()).collect();
        prop_assert_eq!(&open, &offered_names);

        // What is offered on its GPU fits beside it exactly if the GPU can serve both.
        let sets = counter_sets(&after);
        let set = &held.consumes_counters.as_ref().unwrap()[0].counter_set;
        prop_assert_eq!(&sets[set], &counter_sets(&before)[set]);
        let of_gpu = |it: &&Device| it.consumes_counters.as_ref().unwrap()[0].counter_set == *set;
        for device in published.iter().filter(of_gpu).filter(|it| it.name != held.name) {
            prop_assert_eq!(
                fits_beside(&held, device, &sets),
                can_be_both(&geometry, &held, device),
                "{} beside {}", device.name, held.name
            );
        }

        // After its release the plan is as if nobody had held it.
        prop_assert_eq!(replanned(&node, &shrunk, &[], &[]), offered);
    }
}

#[test]
fn an_allocated_partition_of_a_removed_profile_takes_its_slices() {
    let node = two_h100();
    let partitions = [Tier::Partition];
    let before = devices(&planned(&node, &offering(&partitions, &[], &[])));
    let is_held = |it: &Device| it.name == "gpu-00000000-mig-3g40gb-0";
    let held = before.into_iter().find(is_held).unwrap();
    for (tiers, fitting) in [
        // Memory slices 4 to 6 of seven: those of the other half.
        (
            &partitions[..],
            vec![
                "gpu-00000000-mig-1g10gb-4",
                "gpu-00000000-mig-1g10gb-5",
                "gpu-00000000-mig-1g10gb-6",
            ],
        ),
        (&[Tier::Capped, Tier::Exclusive], vec![]),
    ] {
        let policies = offering(tiers, &["1g.10gb".to_owned()], &[]);
        let after = replanned(&node, &policies, &[], std::slice::from_ref(&held));
        let sets = counter_sets(&after);
        let published = devices(&after);
        let kept = published.iter().find(|it| is_held(it)).unwrap();
        let mut free: Vec<_> = published
            .iter()
            .filter(|it| is_open(it) && it.name.starts_with("gpu-00000000"))
            .filter(|it| fits_beside(kept, it, &sets))
            .map(|it| &*it.name)
            .collect();
        free.sort_unstable();
        assert_eq!(free, fitting, "{tiers:?}");
        assert_eq!(kept.taints.as_ref().unwrap()[0].key, taint::WITHDRAWN);
    }
}
