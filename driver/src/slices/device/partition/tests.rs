use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::CounterSet;
use proptest::prelude::*;
use tranche_api::gpu_node::{Inventory, MigMode};
use tranche_api::withheld::reason;

use super::super::{Offer, of_gpu as all_of_gpu};
use super::*;
use crate::mig::{Slices, tables};
use crate::policy::Terms;
use crate::slices::tests::limits::check_device;
use crate::slices::tests::{PARTITION_ATTRIBUTES, PARTITION_CAPACITIES};
use crate::testing;

fn h100(change: impl FnOnce(&mut Gpu)) -> Gpu {
    let mut gpu = testing::gpu(0);
    change(&mut gpu);
    gpu
}

fn offer(gpu: &Gpu, tiers: &[Tier]) -> Offer {
    offer_of_profiles(gpu, tiers, &[])
}

fn offer_of_profiles(gpu: &Gpu, tiers: &[Tier], profiles: &[&str]) -> Offer {
    let inventory: Inventory = testing::inventory(vec![gpu.clone()]);
    let geometry = Geometry::read(&tables::h100(&[&gpu.uuid])).map(Some);
    let uuid = gpu.uuid.parse().unwrap();
    let parent = Parent {
        inventory: &inventory,
        gpu,
        uuid,
        prefix: uuid.name_prefix([]),
        counters: &Counters::of(uuid, geometry.as_ref().unwrap().as_ref()),
        geometry: &geometry,
    };
    let terms = Terms {
        tiers: tiers.iter().copied().collect(),
        profiles: profiles.iter().map(|name| name.parse().unwrap()).collect(),
        ..Terms::default()
    };
    let offer = all_of_gpu(&parent, &terms).unwrap();
    offer.devices.iter().for_each(check_device);
    offer
}

fn names(offer: &Offer) -> Vec<&str> {
    let names = offer.devices.iter().map(|device| &*device.name);
    names
        .map(|name| name.trim_start_matches("gpu-00000000-mig-"))
        .collect()
}

fn string<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(name)?.string.as_deref()
}

#[test]
fn all_that_mig_can_make_is_offered_before_the_whole_gpu() {
    let offer = offer(&h100(|_| ()), &[Tier::Partition, Tier::Exclusive]);
    assert_eq!(offer.devices.len(), 25 + 1);
    assert_eq!(offer.devices[25].name, "gpu-00000000");
    assert_eq!(names(&offer)[..3], ["1g10gb-6", "1g10gb-5", "1g10gb-4"]);
    let seventh = &offer.devices[24];
    assert_eq!(seventh.name, "gpu-00000000-mig-7g80gb-0");
    assert_eq!(string(seventh, attribute::TYPE), Some("mig"));
    assert_eq!(string(seventh, attribute::PROFILE), Some("7g.80gb"));
    assert_eq!(string(seventh, attribute::ISOLATION), Some("partition"));
    // It does not exist yet.
    let of_gpu = "GPU-00000000-0000-0000-0000-000000000000";
    assert_eq!(string(seventh, attribute::UUID), Some(of_gpu));
    let has = |names: &[&str], of: &dyn Fn(&str) -> bool| names.iter().all(|name| of(name));
    let (attributes, capacity) = (seventh.attributes.as_ref(), seventh.capacity.as_ref());
    assert!(has(&PARTITION_ATTRIBUTES, &|it| attributes
        .unwrap()
        .contains_key(it)));
    assert!(has(&PARTITION_CAPACITIES, &|it| capacity
        .unwrap()
        .contains_key(it)));
    let parent = string(seventh, attribute::PARENT_UUID);
    assert_eq!(parent, string(&offer.devices[25], attribute::UUID));
    let values = |device: &Device| {
        let capacity = device.capacity.clone().unwrap();
        let values = capacity
            .into_iter()
            .map(|(name, it)| format!("{name}={}", it.value.0));
        values.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        values(&offer.devices[0]),
        "copyEngines=1 cores=14 decoders=1 encoders=0 jpegEngines=1 memory=9984Mi multiprocessors=16 ofaEngines=0"
    );
}

#[test]
fn a_policy_that_names_profiles_offers_these() {
    let with = |profiles: &[&str]| offer_of_profiles(&h100(|_| ()), &[Tier::Partition], profiles);
    assert_eq!(
        names(&with(&["3g.40gb", "7g.80gb"])),
        ["3g40gb-4", "3g40gb-0", "7g80gb-0"]
    );
    // A policy may be for several models: a profile that the GPU does not have changes nothing.
    assert_eq!(names(&with(&["1g.6gb", "7g.80gb"])), ["7g80gb-0"]);
    let none = with(&["1g.6gb", "2g.12gb"]);
    assert_eq!(none.devices, []);
    let [(Tier::Partition, error)] = &none.refused[..] else {
        panic!("{:?}", none.refused);
    };
    assert_eq!(error.reason(), reason::NO_PROFILE);
    assert!(error.is_of_policy());
    assert_eq!(
        error.to_string(),
        "the GPU has none of the SharingPolicy's partition.profiles, 1g.6gb, 2g.12gb: add one of 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb, or do not offer the tier partition for this GPU"
    );
}

#[test]
fn a_claim_for_an_amount_of_memory_gets_the_smallest_partition() {
    let offer = offer(&h100(|_| ()), &[Tier::Partition]);
    for (gib, expected) in [
        (1, "1g10gb-6"),
        (10, "1g20gb-6"),
        (18, "1g20gb-6"),
        (20, "3g40gb-4"),
        (40, "7g80gb-0"),
    ] {
        let asked = Quantity::from_bytes(gib << 30);
        let fits = |device: &&Device| {
            let memory = &device.capacity.as_ref().unwrap()[capacity::MEMORY].value;
            Quantity::try_from(memory).unwrap() >= asked
        };
        let first = offer.devices.iter().find(fits).unwrap();
        assert_eq!(first.name, format!("gpu-00000000-mig-{expected}"), "{gib}");
    }
}

#[test]
fn a_gpu_has_no_partitions_before_the_reset_for_mig_mode() {
    let ampere = |current| {
        h100(|gpu| {
            gpu.architecture = "Ampere".to_owned();
            gpu.mig_mode = MigMode {
                current,
                pending: current,
            };
        })
    };
    let tiers = [Tier::Partition, Tier::Exclusive];
    let off = offer(&ampere(false), &tiers);
    assert_eq!(names(&off), ["gpu-00000000"]);
    let [(Tier::Partition, error)] = &off.refused[..] else {
        panic!("{:?}", off.refused);
    };
    assert_eq!(error.reason(), reason::MIG_MODE);
    assert!(error.to_string().contains("-mig 1"), "{error}");
    assert_eq!(offer(&ampere(true), &tiers).devices.len(), 25 + 1);
}

#[test]
fn an_administrators_instances_are_offered_as_they_are() {
    let instance = |profile: &str, start, uuid: Option<&str>| MigInstance {
        profile: profile.to_owned(),
        start,
        id: start,
        uuid: uuid.map(str::to_owned),
    };
    let with = |instances: &[MigInstance]| {
        let gpu = h100(|gpu| {
            gpu.mig_mode = MigMode {
                current: true,
                pending: true,
            };
            gpu.mig_instances = instances.to_vec();
        });
        offer(&gpu, &[Tier::Partition])
    };
    let made = instance("4g.40gb", 0, Some("MIG-4d8c1f9e"));
    let one = with(std::slice::from_ref(&made));
    assert_eq!(
        names(&one),
        [
            "1g10gb-6",
            "1g10gb-5",
            "1g10gb-4",
            "1g10gb-me-6",
            "1g10gb-me-5",
            "1g10gb-me-4",
            "1g20gb-6",
            "1g20gb-4",
            "2g20gb-4",
            "3g40gb-4",
            "4g40gb-0"
        ]
    );
    let found = one.devices.last().unwrap();
    assert_eq!(string(found, attribute::UUID), Some("MIG-4d8c1f9e"));

    // Without a compute instance, or with several, it cannot be allocated.
    let bare = with(&[instance("4g.40gb", 0, None)]);
    assert!(!names(&bare).contains(&"4g40gb-0"), "{bare:?}");
    assert_eq!(bare.devices.len(), one.devices.len() - 1);
    let full = with(&[made, instance("3g.40gb", 4, Some("MIG-0f6c1a3c"))]);
    assert_eq!(names(&full), ["3g40gb-4", "4g40gb-0"]);

    let impossible = with(&[instance("3g.40gb", 2, None)]);
    assert!(impossible.devices.is_empty());
    let error = impossible.refused[0].1.to_string();
    assert!(error.contains("3g.40gb at slice 2"), "{error}");
}

fn amounts(set: &CounterSet) -> impl Iterator<Item = (&str, u64)> {
    let read = |value| Quantity::try_from(value).unwrap().to_count().unwrap();
    let counters = set.counters.iter();
    counters.map(move |(name, counter)| (&**name, read(&counter.value)))
}

proptest! {
    /// The scheduler's rule (sums of counters) equals the rule of the geometry.
    #[test]
    fn what_the_counters_allow_is_what_mig_can_make(picks in prop::collection::btree_set(0_usize..25, 1..8)) {
        let gpu = h100(|_| ());
        let uuid = gpu.uuid.parse().unwrap();
        let geometry = Geometry::read(&tables::h100(&[&gpu.uuid])).unwrap();
        let picked: Vec<&Partition> = picks.iter().map(|at| &geometry.partitions[*at]).collect();
        let less = |left: Option<Slices>, it: &&Partition| left?.less(it.slices);
        let fits = picked.iter().fold(Some(geometry.whole), less).is_some();

        let set = Counters::of(uuid, Some(&geometry)).set();
        let taken: Vec<CounterSet> = picked.iter().map(|it| Counters::of_slices(uuid, &it.slices).set()).collect();
        let sum = |name: &str| {
            let of_name = taken.iter().flat_map(amounts).filter(|(other, _)| *other == name);
            of_name.map(|(_, amount)| amount).sum::<u64>()
        };
        let allowed = amounts(&set).all(|(name, has)| sum(name) <= has);
        prop_assert_eq!(allowed, fits);
        let known: BTreeSet<_> = amounts(&set).map(|(name, _)| name.to_owned()).collect();
        for taken in &taken {
            prop_assert!(amounts(taken).all(|(name, _)| known.contains(name)));
        }
        // The whole GPU takes all of every counter.
        prop_assert!(amounts(&set).all(|(_, has)| has > 0));
    }
}
