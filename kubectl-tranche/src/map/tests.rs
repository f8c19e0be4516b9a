//! The bars of a cluster.

use proptest::prelude::*;

use crate::output::{Format, text};
use crate::testing::{World, busy, gpu, part};
use crate::usage::{PartUsed, Usage};

use super::*;

fn drawn(world: &World, is_ascii: bool) -> String {
    let model = Model::new(&world.snapshot(), &Err(String::new()));
    let text = text(&map(&model, is_ascii), Format::Table).unwrap();
    anstream::adapter::strip_str(&text).to_string()
}

#[test]
fn a_bar_has_tenants_free_room_and_what_is_stranded() {
    let map = drawn(&busy(), true);
    let expected = "\
node-a
  GPU-a0000000 [A=========B====================.........] capped      NVIDIA H100 80GB HBM3 79.6Gi, free: 17.1Gi 25% 14 places
    A team-a/notebook 20Gi 25%
    B team-b/training 40Gi 50%
  GPU-a0000001 [A===================B===================] partition   NVIDIA H100 80GB HBM3 79.6Gi, free: nothing fits
    A 3g.40gb: team-a/left 40448Mi
    B 3g.40gb: team-a/right 40448Mi
node-b
  GPU-b0000000 [A=======================================] exclusive   Tesla T4 15Gi, free: nothing
    A team-c/card 15Gi
. free   x stranded   - not offered
";
    assert_eq!(map, expected);
    assert!(drawn(&World::new(), true).contains("[........................................] free"));
}

#[test]
fn what_is_used_stands_beside_what_is_held() {
    let used = |memory: u64, time| Used {
        memory: memory << 30,
        time,
        ..Used::default()
    };
    let notebook = PartUsed {
        all: used(3, Some(41.6)),
        ..PartUsed::default()
    };
    let usage = Usage {
        gpus: [
            (gpu('a', 0), used(5, Some(60.0))),
            (gpu('a', 1), used(1, None)),
        ]
        .into(),
        parts: [(part("uid-team-a-notebook", "gpu-a0000000-capped"), notebook)].into(),
        ..Usage::default()
    };
    let model = Model::new(&busy().snapshot(), &Ok(usage));
    let text = text(&map(&model, true), Format::Table).unwrap();
    let map = anstream::adapter::strip_str(&text).to_string();
    for line in [
        "free: 17.1Gi 25% 14 places, used: 5Gi 60%\n",
        "    A team-a/notebook 20Gi 25% (uses 3Gi 42%)\n    B team-b/training 40Gi 50%\n",
        "free: nothing fits, used: 1Gi\n",
        "free: nothing\n",
    ] {
        assert!(map.contains(line), "{line}: {map}");
    }
}

#[test]
fn characters_beyond_ascii_are_drawn_only_where_they_may_be() {
    assert!(drawn(&busy(), true).is_ascii());
    assert!(drawn(&busy(), false).contains('█'));
}

proptest! {
    #[test]
    fn every_segment_is_seen_and_the_bar_is_full(parts in prop::collection::vec(prop_oneof![1..9_u64, 1..u64::MAX / 64], 1..40)) {
        let segments: Vec<_> = parts
            .into_iter()
            .map(|part| Segment { part, content: Content::Free })
            .collect();
        let widths = widths(&segments);
        prop_assert!(widths.iter().all(|width| *width >= 1));
        prop_assert_eq!(widths.len(), segments.len());
        prop_assert_eq!(widths.iter().sum::<u64>(), WIDTH);
    }
}
