//! Shares of a partition.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::withheld::reason;

use super::*;
use crate::claim::DeviceName;
use crate::mig::{Profile, Slices, tables};

/// A share of a partition of GPU 0, for example `1g10gb-6`.
fn share_of(partition: &str, memory: &str, cores: &str) -> Value {
    let device = format!("gpu-00000000-capped-{partition}");
    with(capped(memory, cores), &json!({"device": device}))
}

/// A concurrent share of one.
fn concurrent_share_of(partition: &str, memory: &str, threads: &str) -> Value {
    let device = format!("gpu-00000000-mps-{partition}");
    with(capped(memory, threads), &json!({"device": device}))
}

fn partition(name: &str) -> Value {
    plain(&format!("gpu-00000000-mig-{name}"))
}

fn planned(
    name: &str,
    results: &[Value],
    held: &[PreparationPlan],
) -> Result<PreparationPlan, String> {
    plan(&allocation(name, results), &with_mig(), held).map_err(|error| error.to_string())
}

fn placement(start: u8, profile: &str) -> Placement {
    Placement {
        start,
        profile: profile.parse().unwrap(),
    }
}

#[test]
fn a_share_holds_the_partition_and_has_a_cap() {
    let plan = planned("a", &[share_of("3g40gb-4", "20Gi", "50")], &[]).unwrap();
    let [device] = &plan.devices[..] else {
        panic!("{plan:?}")
    };
    let held = HeldPartition {
        placement: placement(4, "3g.40gb"),
        mig: None,
    };
    assert_eq!(device.partition, Some(held));
    assert_eq!(
        (device.tier, device.gpu_tier()),
        (Tier::Capped, Tier::Partition)
    );
    assert!(
        matches!(device.cap, Cap::Share { memory, cores: 50, mps: false, .. } if memory == 20 << 30)
    );
    assert_eq!(
        device.cdi_ids[1],
        cdi::DriverDevice::Capped { pages: PAGES }.id()
    );
    assert_eq!(plan.steps.len(), 3, "pages, account and spec");
    assert_eq!(plan.changed_gpus(), BTreeSet::from([&*gpu(0).uuid]));
    // Its page is for the MIG device.
    let mig = MigDevice {
        uuid: "MIG-1".to_owned(),
        gpu_instance: 1,
        compute_instance: 0,
        capabilities: [1, 2],
    };
    let made = plan
        .clone()
        .on_gpu(&gpu(0).uuid, None, |_| Some(mig.clone()));
    assert_eq!(made.device_uuid(&device.key), Some("MIG-1"));
    // Two claims hold one placement; it is held until the last of them is gone.
    let other = planned(
        "b",
        &[share_of("3g40gb-4", "10Gi", "50")],
        std::slice::from_ref(&plan),
    )
    .unwrap();
    let held = |plans: &[&PreparationPlan]| held_of(&gpu(0).uuid, plans.iter().copied()).partitions;
    assert_eq!(
        held(&[&plan, &other]),
        BTreeSet::from([placement(4, "3g.40gb")])
    );
    assert_eq!(held(&[&other]), BTreeSet::from([placement(4, "3g.40gb")]));
    assert_eq!(held(&[]), BTreeSet::new());
}

#[test]
fn an_observer_of_a_shared_partition_holds_nothing() {
    let plan = planned("a", &[admin("gpu-00000000-capped-3g40gb-4")], &[]).unwrap();
    assert_eq!(plan.devices[0].partition, None);
    assert_eq!(plan.devices[0].cap, Cap::None {});
}

/// What an allocator that ignores counters might allocate.
#[test]
fn what_does_not_go_with_the_shares_of_a_partition_is_refused() {
    let held = planned("held", &[share_of("3g40gb-4", "20Gi", "60")], &[]).unwrap();
    let held = std::slice::from_ref(&held);
    for (other, expected) in [
        (
            partition("3g40gb-4"),
            "3g.40gb at memory slice 4 of GPU GPU-00000000-0000-0000-0000-000000000000 is held by claim team-a/held in the tier capped",
        ),
        (
            partition("1g10gb-6"),
            "leave no room for 1g.10gb at memory slice 6; held by team-a/held",
        ),
        (
            share_of("1g10gb-6", "1Gi", "1"),
            "leave no room for 1g.10gb at memory slice 6; held by team-a/held",
        ),
        (
            plain("gpu-00000000"),
            "is held by claim team-a/held in the tier partition",
        ),
        (
            capped("1Gi", "1"),
            "is held by claim team-a/held in the tier partition",
        ),
        (
            share_of("3g40gb-4", "1Gi", "41"),
            "3g.40gb at memory slice 4 of GPU GPU-00000000-0000-0000-0000-000000000000: the shares' cores would add up to 101 of 100 percent; held by team-a/held",
        ),
        (
            share_of("3g40gb-4", "30Gi", "1"),
            "the shares' memory would add up to 50Gi of",
        ),
    ] {
        let error = planned("new", std::slice::from_ref(&other), held).expect_err("refused");
        assert!(error.contains(expected), "{other}: {error}");
    }
    for (name, other) in [
        ("beside", partition("1g10gb-0")),
        ("another", share_of("3g40gb-0", "30Gi", "100")),
        ("sharer", share_of("3g40gb-4", "10Gi", "40")),
        ("concurrent", concurrent_share_of("2g20gb-2", "9Gi", "100")),
        ("observer", admin("gpu-00000000-capped")),
    ] {
        planned(name, &[other], held).unwrap();
    }
    // All of the partition, and then a share of it.
    let held = planned("held", &[partition("3g40gb-4")], &[]).unwrap();
    let error = planned("new", &[share_of("3g40gb-4", "1Gi", "1")], &[held]).expect_err("refused");
    assert!(
        error.contains("held by claim team-a/held in the tier partition"),
        "{error}"
    );
}

#[test]
fn a_concurrent_share_holds_the_partition_and_its_daemon() {
    let held = planned(
        "held",
        &[
            concurrent_share_of("3g40gb-4", "20Gi", "60"),
            share_of("1g10gb-0", "1Gi", "50"),
        ],
        &[],
    );
    let held = std::slice::from_ref(held.as_ref().unwrap());
    let device = &held[0].devices[0];
    assert_eq!(
        (device.tier, device.gpu_tier()),
        (Tier::Concurrent, Tier::Partition)
    );
    assert!(device.cap.is_mps());
    let of_gpu = held_of(&gpu(0).uuid, held);
    assert!(!of_gpu.mps, "the whole GPU has no daemon");
    assert_eq!(of_gpu.partitions.len(), 2);
    assert_eq!(
        of_gpu.partition_daemons,
        BTreeSet::from([placement(4, "3g.40gb")])
    );
    let here = "held by claim team-a/held in the tier concurrent";
    for (other, expected) in [
        (share_of("3g40gb-4", "1Gi", "1"), here),
        (partition("3g40gb-4"), here),
        (
            concurrent_share_of("3g40gb-4", "1Gi", "41"),
            "add up to 101",
        ),
        (
            concurrent_share_of("3g40gb-4", "30Gi", "1"),
            "add up to 50Gi",
        ),
        (
            concurrent(0, "1Gi", "1"),
            "held by claim team-a/held in the tier partition",
        ),
    ] {
        let error = planned("new", std::slice::from_ref(&other), held).expect_err("refused");
        assert!(error.contains(expected), "{other}: {error}");
    }
    planned("new", &[concurrent_share_of("3g40gb-4", "9Gi", "40")], held).unwrap();
}

#[test]
fn a_dead_mps_daemon_withholds_concurrent_shares_of_partitions() {
    let refused = |result: Value| {
        let plan = planned("a", &[result], &[]).unwrap();
        let entry = WithheldGpu {
            tiers: vec![Tier::Concurrent],
            ..WithheldGpu::whole(&gpu(0).uuid, reason::MPS_DAEMON, "dead".to_owned())
        };
        refuse_withheld(&plan, &[entry].iter()).is_err()
    };
    assert!(refused(concurrent_share_of("3g40gb-4", "1Gi", "1")));
    assert!(!refused(share_of("3g40gb-4", "1Gi", "1")));
}

#[test]
fn a_share_is_no_larger_than_its_partition() {
    let error = planned("a", &[share_of("1g10gb-6", "10Gi", "1")], &[]).expect_err("refused");
    assert!(
        error.contains("the share's memory is 10Gi, but 1g.10gb at memory slice 6 of GPU GPU-00000000-0000-0000-0000-000000000000 has only"),
        "{error}"
    );
    planned("a", &[share_of("1g10gb-6", "9Gi", "1")], &[]).unwrap();
    let error = planned("a", &[share_of("3g40gb-2", "1Gi", "1")], &[]).expect_err("refused");
    assert!(
        error.contains("has no 3g.40gb at memory slice 2"),
        "{error}"
    );
}

#[test]
fn a_node_that_withholds_partitions_withholds_their_shares() {
    let plan = planned("a", &[share_of("3g40gb-4", "20Gi", "50")], &[]).unwrap();
    let entry = |tier| WithheldGpu {
        tiers: vec![tier],
        ..WithheldGpu::whole(&gpu(0).uuid, "MigMode", "no".to_owned())
    };
    assert!(refuse_withheld(&plan, &[entry(Tier::Partition)].iter()).is_err());
    // The GPU is in MIG mode: only the whole GPU cannot be allocated.
    assert!(refuse_withheld(&plan, &[entry(Tier::Capped)].iter()).is_ok());
}

/// Partitions of GPU 0, shares of them, and shares of the whole GPU.
fn any_results() -> impl Strategy<Value = Vec<Value>> {
    const PARTITIONS: [&str; 6] = [
        "1g10gb-6", "1g10gb-0", "2g20gb-4", "3g40gb-4", "3g40gb-0", "7g80gb-0",
    ];
    let one = (
        prop::sample::select(&PARTITIONS[..]),
        0..8_u32,
        1..45_u64,
        1..=100_u8,
    )
        .prop_map(|(name, kind, gib, cores)| match kind {
            0 => capped("1Gi", "1"),
            1 | 2 => partition(name),
            3 | 4 => concurrent_share_of(name, &format!("{gib}Gi"), &cores.to_string()),
            _ => share_of(name, &format!("{gib}Gi"), &cores.to_string()),
        });
    prop::collection::vec(one, 1..3)
}

proptest! {
    #[test]
    fn what_is_prepared_at_the_same_time_fits_on_the_gpu(claims in prop::collection::vec(any_results(), 1..12)) {
        let geometry = Geometry::read(&tables::h100(&[&gpu(0).uuid])).unwrap();
        let mut held: Vec<PreparationPlan> = Vec::new();
        for (index, results) in claims.iter().enumerate() {
            held.extend(planned(&index.to_string(), results, &held).ok());
        }
        let devices: Vec<_> = held.iter().flat_map(|plan| &plan.devices).collect();
        let is_divided = devices.iter().any(|it| it.partition.is_some());
        let mut placements: BTreeMap<Placement, Vec<&PreparedDevice>> = BTreeMap::new();
        for device in devices {
            let name: DeviceName = device.device.parse().unwrap();
            prop_assert_eq!(name.placement().is_some(), is_divided);
            placements.entry(name.placement().unwrap_or(Placement { start: 0, profile: "7g.80gb".parse::<Profile>().unwrap() })).or_default().push(device);
        }
        let mut left: Slices = geometry.whole;
        for (placement, holders) in placements {
            let partition = geometry.partition(placement).unwrap();
            left = left.less(partition.slices).unwrap();
            let is_shared = |tier| holders.iter().all(|it| it.tier == tier);
            prop_assert!(holders.len() == 1 || is_shared(Tier::Capped) || is_shared(Tier::Concurrent));
            let sum = |of: fn(u64, u64) -> u64| holders.iter().map(|it| match it.cap {
                Cap::Share { memory, cores, .. } => of(memory, cores.into()),
                Cap::None {} => 0,
            }).sum::<u64>();
            prop_assert!(sum(|memory, _| memory) <= partition.available_memory());
            prop_assert!(sum(|_, cores| cores) <= 100);
        }
    }
}
