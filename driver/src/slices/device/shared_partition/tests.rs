use std::collections::BTreeSet;

use tranche_api::gpu_node::{Gpu, MigMode};
use tranche_api::names::{attribute, capacity};
use tranche_api::quantity::Quantity;
use tranche_api::tier::Tier;
use tranche_api::withheld::reason;

use super::super::{Counters, Offer, of_gpu as all_of_gpu};
use super::*;
use crate::mig::{Geometry, Profile, tables};
use crate::slices::tests::limits::check_device;
use crate::testing;

fn profiles(names: &[&str]) -> BTreeSet<Profile> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

/// How a GPU is offered in these tiers, with shares of partitions of these profiles.
fn offer(gpu: &Gpu, tiers: &[Tier], on_partitions: &[&str]) -> Offer {
    let mut terms = Terms {
        tiers: tiers.iter().copied().collect(),
        ..Terms::default()
    };
    terms.capped.max_sharers = 4;
    terms.capped.expected_sharers = 2;
    terms.capped.context_memory = 512 << 20;
    terms.capped.memory_step = 1 << 20;
    terms.capped.on_partitions = profiles(on_partitions);
    offer_on_terms(gpu, &terms)
}

fn offer_on_terms(gpu: &Gpu, terms: &Terms) -> Offer {
    let inventory = testing::inventory(vec![gpu.clone()]);
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
    let offer = all_of_gpu(&parent, terms).unwrap();
    offer.devices.iter().for_each(check_device);
    offer
}

fn names(offer: &Offer) -> Vec<&str> {
    let names = offer.devices.iter().map(|device| &*device.name);
    names
        .map(|name| name.trim_start_matches("gpu-00000000"))
        .collect()
}

fn string<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(name)?.string.as_deref()
}

#[test]
fn shared_partitions_come_between_shared_gpu_and_partitions() {
    let tiers = [
        Tier::Capped,
        Tier::Timeshared,
        Tier::Partition,
        Tier::Exclusive,
    ];
    let mut terms = Terms {
        tiers: tiers.into(),
        profiles: profiles(&["1g.10gb+me", "7g.80gb"]),
        ..Terms::default()
    };
    terms.capped.on_partitions = profiles(&["3g.40gb", "7g.80gb"]);
    let offer = offer_on_terms(&testing::gpu(0), &terms);
    let expected = [
        "-capped",
        "-timeshared",
        "-capped-3g40gb-4",
        "-capped-3g40gb-0",
        "-capped-7g80gb-0",
    ];
    assert_eq!(names(&offer)[..5], expected);
    assert_eq!(names(&offer).last(), Some(&""));
    assert!(offer.refused.is_empty(), "{:?}", offer.refused);
}

#[test]
fn a_shared_partition_takes_what_the_partition_takes() {
    let tiers = [Tier::Capped, Tier::Partition];
    let offer = offer(&testing::gpu(0), &tiers, &["2g.20gb"]);
    let shared: Vec<_> = offer
        .devices
        .iter()
        .filter(|it| it.name.contains("capped-2g"))
        .collect();
    assert_eq!(shared.len(), 3);
    for device in shared {
        let whole = device.name.replace("-capped-", "-mig-");
        let whole = offer.devices.iter().find(|it| it.name == whole).unwrap();
        assert_eq!(device.consumes_counters, whole.consumes_counters);
        assert_eq!(device.allow_multiple_allocations, Some(true));
        assert_eq!(whole.allow_multiple_allocations, None);
        for same in [
            attribute::TYPE,
            attribute::PROFILE,
            attribute::PARENT_UUID,
            attribute::UUID,
        ] {
            assert_eq!(string(device, same), string(whole, same), "{same}");
        }
        assert_eq!(string(device, attribute::ISOLATION), Some("capped"));
        assert_eq!(
            string(device, attribute::MEMORY_ISOLATION),
            Some("software")
        );
    }
}

#[test]
fn shares_have_the_partition_memory_less_reserve_and_contexts() {
    let offer = offer(&testing::gpu(0), &[Tier::Capped], &["1g.10gb", "3g.40gb"]);
    let geometry = Geometry::read(&tables::h100(&[])).unwrap();
    let shared = offer.devices.iter().skip(1);
    let mut seen = 0;
    for device in shared {
        let name: DeviceName = device.name.parse().unwrap();
        let placement = name.placement().unwrap();
        let partition = geometry.partition(placement).unwrap();
        let capacity = device.capacity.as_ref().unwrap();
        let memory = Quantity::try_from(&capacity[capacity::MEMORY].value).unwrap();
        let expected = partition.memory - (64 << 20) - 2 * (512 << 20);
        assert_eq!(memory.to_count(), Ok(expected >> 20 << 20), "{name}");
        assert_eq!(capacity[capacity::CORES].value.0, "100");
        assert_eq!(capacity[capacity::SHARERS].value.0, "4");
        seen += 1;
    }
    assert_eq!(seen, 7 + 2);
}

#[test]
fn partition_shares_need_their_tier_and_the_policy() {
    let gpu = testing::gpu(0);
    assert_eq!(names(&offer(&gpu, &[Tier::Capped], &[])), ["-capped"]);
    let others = [Tier::Exclusive, Tier::Timeshared];
    assert_eq!(
        names(&offer(&gpu, &others, &["3g.40gb"])),
        ["-timeshared", ""]
    );
    let terms = Terms {
        tiers: others.into(),
        concurrent_on_partitions: profiles(&["3g.40gb"]),
        ..Terms::default()
    };
    let without = offer_on_terms(&gpu, &terms);
    assert_eq!(names(&without), ["-timeshared", ""]);
    let mut plain = testing::gpu(0);
    plain.mig_capable = false;
    let plain = offer(&plain, &[Tier::Capped], &["3g.40gb"]);
    assert_eq!(names(&plain), ["-capped"]);
    assert!(plain.refused.is_empty(), "{:?}", plain.refused);
}

#[test]
fn what_cannot_be_shared_is_refused_once_for_each_profile() {
    let gpu = testing::gpu(0);
    let mut terms = Terms {
        tiers: [Tier::Capped].into(),
        ..Terms::default()
    };
    terms.capped.default_memory = Some(20 << 30);
    terms.capped.on_partitions = profiles(&["1g.10gb", "3g.40gb"]);
    let small = offer_on_terms(&gpu, &terms);
    assert_eq!(
        names(&small),
        ["-capped", "-capped-3g40gb-4", "-capped-3g40gb-0"]
    );
    let [(Tier::Capped, error)] = &small.refused[..] else {
        panic!("{:?}", small.refused);
    };
    assert_eq!(error.reason(), reason::TOO_SMALL);
    assert!(error.is_of_policy());
    assert!(
        error.to_string().starts_with(
            "shares of 1g.10gb: defaultMemory 20Gi of the SharingPolicy is more than the usable"
        ),
        "{error}"
    );

    let none = offer(&gpu, &[Tier::Capped], &["1g.6gb"]);
    let [(Tier::Capped, error)] = &none.refused[..] else {
        panic!("{:?}", none.refused);
    };
    assert_eq!(names(&none), ["-capped"]);
    assert!(
        error.to_string().contains("capped.onPartitions, 1g.6gb"),
        "{error}"
    );

    let mut ampere = testing::gpu(0);
    ampere.architecture = "Ampere".to_owned();
    let off = offer(&ampere, &[Tier::Capped], &["3g.40gb"]);
    assert_eq!(names(&off), ["-capped"]);
    assert_eq!(off.refused[0].1.reason(), reason::MIG_MODE);
    ampere.mig_mode = MigMode {
        current: true,
        pending: true,
    };
    let on = offer(&ampere, &[Tier::Capped], &["3g.40gb"]);
    assert_eq!(names(&on).len(), 3);
}

#[test]
fn concurrent_partition_shares_are_capped_with_fewer_sharers() {
    let mut terms = Terms {
        tiers: [Tier::Capped, Tier::Concurrent].into(),
        concurrent_sharers: 3,
        concurrent_on_partitions: profiles(&["2g.20gb", "3g.40gb"]),
        ..Terms::default()
    };
    terms.capped.max_sharers = 9;
    terms.capped.default_memory = Some(1 << 30);
    terms.capped.on_partitions = profiles(&["3g.40gb"]);
    let offer = offer_on_terms(&testing::gpu(0), &terms);
    let expected = [
        "-capped",
        "-concurrent",
        "-capped-3g40gb-4",
        "-capped-3g40gb-0",
        "-mps-2g20gb-4",
        "-mps-2g20gb-2",
        "-mps-2g20gb-0",
        "-mps-3g40gb-4",
        "-mps-3g40gb-0",
    ];
    assert_eq!(names(&offer), expected);
    let [capped, concurrent] = [&offer.devices[2], &offer.devices[7]];
    assert_eq!(concurrent.consumes_counters, capped.consumes_counters);
    assert_eq!(string(concurrent, attribute::ISOLATION), Some("concurrent"));
    let capacity = |device: &Device, name: &str| device.capacity.as_ref().unwrap()[name].clone();
    assert_eq!(capacity(concurrent, capacity::SHARERS).value.0, "3");
    assert_eq!(capacity(capped, capacity::SHARERS).value.0, "9");
    for same in [capacity::MEMORY, capacity::CORES] {
        let value = |device| capacity(device, same).value;
        assert_eq!(value(concurrent), value(capped), "{same}");
    }

    terms.concurrent_on_partitions = profiles(&["1g.6gb"]);
    let none = offer_on_terms(&testing::gpu(0), &terms);
    let [(Tier::Concurrent, error)] = &none.refused[..] else {
        panic!("{:?}", none.refused);
    };
    assert_eq!(error.reason(), reason::NO_PROFILE);
    let error = error.to_string();
    assert!(error.contains("concurrent.onPartitions, 1g.6gb"), "{error}");
}
