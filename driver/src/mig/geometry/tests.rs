use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::mig::tables;

fn geometry(reported: &MigGeometry) -> Geometry {
    Geometry::read(reported).unwrap()
}

fn placement(profile: &str, start: u8) -> Placement {
    let profile = profile.parse().unwrap();
    Placement { start, profile }
}

/// The partitions of a text like `3g.40gb@4 1g.10gb@0`.
fn layout<'a>(geometry: &'a Geometry, text: &str) -> Vec<&'a Partition> {
    let one = |word: &str| {
        let (profile, start) = word.split_once('@').unwrap();
        let found = geometry.partition(placement(profile, start.parse().unwrap()));
        found.unwrap_or_else(|| panic!("no partition {word}"))
    };
    text.split_whitespace().map(one).collect()
}

fn fits(geometry: &Geometry, partitions: &[&Partition]) -> bool {
    let mut left = Some(geometry.whole);
    for partition in partitions {
        left = left.and_then(|left| left.less(partition.slices));
    }
    left.is_some()
}

/// The layouts of NVIDIA's MIG User Guide ("A100 MIG Profiles" and "H100 MIG Profiles"), in H100's names.
const POSSIBLE: [&str; 13] = [
    "7g.80gb@0",
    "4g.40gb@0 3g.40gb@4",
    "4g.40gb@0 2g.20gb@4 1g.10gb@6",
    "4g.40gb@0 1g.10gb@4 1g.10gb@5 1g.10gb@6",
    "3g.40gb@0 3g.40gb@4",
    "3g.40gb@0 2g.20gb@4 1g.10gb@6",
    "2g.20gb@0 2g.20gb@2 3g.40gb@4",
    "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.10gb@6",
    "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4",
    "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6",
    "1g.20gb@0 1g.20gb@2 1g.20gb@4 1g.20gb@6",
    "1g.10gb+me@6 2g.20gb@4 4g.40gb@0",
    "1g.20gb@6 2g.20gb@4 4g.40gb@0",
];

const IMPOSSIBLE: [&str; 7] = [
    // No slice is left to get a seventh of the memory.
    "3g.40gb@0 3g.40gb@4 1g.10gb@6",
    "4g.40gb@0 3g.40gb@0",
    "4g.40gb@0 3g.40gb@4 1g.10gb@6",
    "7g.80gb@0 1g.10gb@0",
    "2g.20gb@0 1g.10gb@1",
    // One engine for optical flow.
    "1g.10gb+me@0 1g.10gb+me@1",
    "1g.10gb@3 1g.20gb@2",
];

#[test]
fn the_layouts_of_nvidias_guide_fit_and_others_do_not() {
    let h100 = geometry(&tables::h100(&["GPU"]));
    for text in POSSIBLE {
        assert!(fits(&h100, &layout(&h100, text)), "{text}");
    }
    for text in IMPOSSIBLE {
        assert!(!fits(&h100, &layout(&h100, text)), "{text}");
    }
    let fourth = h100.partition(placement("2g.20gb", 6));
    assert_eq!(fourth, None, "there are seven compute slices");
}

#[test]
fn all_that_a_gpu_has_is_known_from_its_profiles() {
    let h100 = geometry(&tables::h100(&["GPU"])).whole;
    assert_eq!((h100.compute, h100.memory), (7, 0xff));
    assert_eq!(h100.engines, [8, 7, 0, 7, 1]);
    let a30 = geometry(&tables::a30(&["GPU"])).whole;
    assert_eq!((a30.compute, a30.memory), (4, 0xf));
}

#[test]
fn the_first_that_fits_leaves_the_most_room() {
    let h100 = geometry(&tables::h100(&["GPU"]));
    let order: Vec<String> = h100
        .partitions
        .iter()
        .map(|it| format!("{}@{}", it.profile, it.start))
        .collect();
    assert_eq!(
        order.join(" "),
        "1g.10gb@6 1g.10gb@5 1g.10gb@4 1g.10gb@3 1g.10gb@2 1g.10gb@1 1g.10gb@0 \
         1g.10gb+me@6 1g.10gb+me@5 1g.10gb+me@4 1g.10gb+me@3 1g.10gb+me@2 1g.10gb+me@1 1g.10gb+me@0 \
         1g.20gb@6 1g.20gb@4 1g.20gb@2 1g.20gb@0 2g.20gb@4 2g.20gb@2 2g.20gb@0 \
         3g.40gb@4 3g.40gb@0 4g.40gb@0 7g.80gb@0"
    );
}

#[test]
fn what_cannot_be_names_the_profile_and_the_field() {
    let with = |change: &dyn Fn(&mut MigProfile)| {
        let mut reported = tables::h100(&["GPU"]);
        change(&mut reported.profiles[0]);
        Geometry::read(&reported).unwrap_err().to_string()
    };
    for (change, words) in [
        (
            &(|it: &mut MigProfile| it.name = "1c.1g".into()) as &dyn Fn(&mut MigProfile),
            ["1c.1g", "MIG profile"],
        ),
        (&|it| it.name = "1g.20gb".into(), ["1g.20gb", "twice"]),
        (&|it| it.compute_slices = 2, ["1g.10gb", "computeSlices"]),
        (&|it| it.memory_slices = 0, ["1g.10gb", "memorySlices"]),
        (&|it| it.memory_slices = 33, ["1g.10gb", "memorySlices"]),
        (&|it| it.placements = vec![32], ["1g.10gb", "placements"]),
        (
            &|it| it.placements = vec![u32::MAX],
            ["1g.10gb", "placements"],
        ),
        (
            &|it| it.memory = "100m".parse().unwrap(),
            ["1g.10gb", "memory"],
        ),
    ] {
        let error = with(change);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

proptest! {
    /// Partitions are allocated one by one as long as they fit: no memory slice is allocated twice, and the compute
    /// slices do not exceed the GPU's.
    #[test]
    fn what_fits_overlaps_nowhere(picks in prop::collection::vec(any::<prop::sample::Index>(), 1..40)) {
        let h100 = geometry(&tables::h100(&["GPU"]));
        let mut taken: Vec<&Partition> = Vec::new();
        for pick in picks {
            let partition = pick.get(&h100.partitions);
            taken.push(partition);
            if !fits(&h100, &taken) {
                taken.pop();
            }
        }
        let mut owners = [0; 8];
        for partition in &taken {
            for (slice, owner) in owners.iter_mut().enumerate() {
                *owner += partition.slices.memory >> slice & 1;
            }
        }
        prop_assert!(owners.iter().all(|owners| *owners <= 1), "{owners:?}");
        let compute: u32 = taken.iter().map(|it| it.slices.compute).sum();
        prop_assert!(compute <= 7);
    }

    #[test]
    fn no_report_makes_it_panic(
        name in "[0-9]g\\.[0-9]{1,3}gb(\\+me)?", numbers in prop::array::uniform4(any::<u32>()),
        placements in prop::collection::vec(any::<u32>(), 0..4),
    ) {
        let [compute, size, instances, engines] = numbers;
        let reported = serde_json::from_value(json!({
            "gpus": ["GPU"],
            "profiles": [{
                "name": name, "id": 1, "computeSlices": compute, "memorySlices": size, "placements": placements,
                "memory": "1Gi", "multiprocessors": 1, "instances": instances, "engines": {"copy": engines},
            }],
        }));
        let _ = Geometry::read(&reported.unwrap());
    }
}
