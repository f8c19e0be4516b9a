//! Stranded slices of known layouts, and a comparison with a search of all sets of partitions.

use proptest::prelude::*;

use crate::mig::tables;

use super::*;

fn h100() -> Geometry {
    Geometry::read(&tables::h100(&[])).unwrap()
}

fn placement(profile: &str, start: u8) -> Placement {
    Placement {
        start,
        profile: profile.parse().unwrap(),
    }
}

fn left(held: &[(&str, u8)], offered: &[&str]) -> SlicesLeft {
    let held = held
        .iter()
        .map(|(profile, start)| placement(profile, *start));
    let offered = offered.iter().map(|name| name.parse().unwrap());
    of_partitions(&h100(), &offered.collect(), &held.collect()).unwrap()
}

fn slices(compute: u32, memory: u32) -> SliceCount {
    SliceCount { compute, memory }
}

#[test]
fn two_halves_of_an_h100_strand_a_compute_slice() {
    let left = left(&[("3g.40gb", 0), ("3g.40gb", 4)], &[]);
    assert_eq!(left.whole, slices(7, 8));
    assert_eq!(left.free, slices(1, 0));
    assert_eq!(left.stranded, slices(1, 0));
}

#[test]
fn seven_small_partitions_strand_a_memory_slice() {
    let held: Vec<_> = (0..7).map(|start| ("1g.10gb", start)).collect();
    let left = left(&held, &[]);
    assert_eq!(left.free, slices(0, 1));
    assert_eq!(left.stranded, slices(0, 1));
}

#[test]
fn what_a_policy_does_not_offer_strands_too() {
    // Only larger partitions have the last memory slice, and they begin at slice 6 or before.
    assert_eq!(left(&[("1g.10gb", 6)], &[]).stranded, slices(0, 1));
    // Of the free memory slices 0 to 5 and 7, only 0 to 3 are a placement of the profile.
    let left = left(&[("1g.10gb", 6)], &["3g.40gb"]);
    assert_eq!(left.free, slices(6, 7));
    assert_eq!(left.stranded, slices(3, 3));
}

#[test]
fn an_empty_gpu_strands_nothing_of_all_profiles() {
    let left = left(&[], &[]);
    assert_eq!(left.free, left.whole);
    assert_eq!(left.stranded, SliceCount::default());
}

#[test]
fn partitions_that_cannot_be_are_refused() {
    let of = |held: &[(&str, u8)]| {
        let held = held
            .iter()
            .map(|(profile, start)| placement(profile, *start));
        of_partitions(&h100(), &BTreeSet::new(), &held.collect())
    };
    assert_eq!(
        of(&[("1g.5gb", 0)]),
        Err(HeldError::NoPartition(placement("1g.5gb", 0)))
    );
    assert!(matches!(
        of(&[("3g.40gb", 0), ("1g.10gb", 2)]),
        Err(HeldError::DoesNotFit(_))
    ));
}

/// The most slices that any set of partitions uses, found by trying all sets.
fn search(free: Slices, possible: &[Slices]) -> SliceCount {
    let Some((first, others)) = possible.split_first() else {
        return SliceCount::default();
    };
    let without = search(free, others);
    let Some(left) = free.less(*first) else {
        return without;
    };
    let with = search(left, others);
    let taken = count(*first);
    slices(
        without.compute.max(with.compute + taken.compute),
        without.memory.max(with.memory + taken.memory),
    )
}

/// Partitions that fit beside each other, chosen by trying partitions in an order.
fn held(geometry: &Geometry, tried: &[prop::sample::Index]) -> BTreeSet<Placement> {
    let mut free = geometry.whole;
    let mut held = BTreeSet::new();
    for index in tried {
        let partition = index.get(&geometry.partitions);
        if let Some(left) = free.less(partition.slices) {
            free = left;
            held.insert(Placement {
                start: partition.start,
                profile: partition.profile,
            });
        }
    }
    held
}

proptest! {
    #[test]
    fn stranded_is_what_no_set_of_partitions_uses(
        is_a30: bool,
        tried in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        offered in prop::collection::btree_set(any::<prop::sample::Index>().prop_map(|it| it.index(7)), 1..4),
    ) {
        let table = if is_a30 { tables::a30(&[]) } else { tables::h100(&[]) };
        let geometry = Geometry::read(&table).unwrap();
        let held = held(&geometry, &tried);
        let names = offered.iter().filter_map(|index| table.profiles.get(*index));
        let offered: BTreeSet<Profile> = names.map(|it| it.name.parse().unwrap()).collect();
        prop_assume!(!offered.is_empty());
        let left = of_partitions(&geometry, &offered, &held).unwrap();
        let mut free = geometry.whole;
        for placement in &held {
            let partition = geometry.partition(*placement).unwrap();
            free = free.less(partition.slices).unwrap();
        }
        let possible: Vec<_> = geometry
            .partitions
            .iter()
            .filter(|it| offered.contains(&it.profile))
            .map(|it| it.slices)
            .collect();
        let usable = search(free, &possible);
        prop_assert_eq!(left.free, count(free));
        prop_assert_eq!(left.stranded.compute, left.free.compute - usable.compute);
        prop_assert_eq!(left.stranded.memory, left.free.memory - usable.memory);
    }

    #[test]
    fn shares_strand_all_or_nothing(whole: (u16, u8, u8), held: (u16, u8, u8), least: (u16, u8)) {
        let shares = |(memory, cores, sharers): (u16, u8, u8)| Shares {
            memory: memory.into(),
            cores: cores.into(),
            sharers: sharers.into(),
        };
        let least = shares((least.0, least.1, 1));
        let left = of_shares(shares(whole), shares(held), least);
        let fits = left.free.memory >= least.memory
            && left.free.cores >= least.cores
            && left.free.sharers >= least.sharers;
        prop_assert_eq!(left.stranded_memory, if fits { 0 } else { left.free.memory });
        prop_assert_eq!(left.stranded_cores, if fits { 0 } else { left.free.cores });
    }
}

#[test]
fn memory_is_stranded_where_the_cores_are_taken_and_the_reverse() {
    let shares = |memory, cores, sharers| Shares {
        memory,
        cores,
        sharers,
    };
    let (whole, least) = (shares(80, 100, 16), shares(1, 1, 1));
    let left = of_shares(whole, shares(20, 100, 2), least);
    assert_eq!((left.stranded_memory, left.stranded_cores), (60, 0));
    let left = of_shares(whole, shares(80, 30, 2), least);
    assert_eq!((left.stranded_memory, left.stranded_cores), (0, 70));
    let left = of_shares(whole, shares(16, 16, 16), least);
    assert_eq!((left.stranded_memory, left.stranded_cores), (64, 84));
    let left = of_shares(whole, shares(20, 50, 2), least);
    assert_eq!((left.stranded_memory, left.stranded_cores), (0, 0));
}
