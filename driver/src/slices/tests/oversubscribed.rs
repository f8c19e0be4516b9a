//! Capped shares of GPUs whose memory is oversubscribed.

use tranche_api::names::{OVERSUBSCRIBED, attribute};
use tranche_api::vgpu::{GpuVgpu, VgpuRole};

use super::*;

fn policies(percent: u32) -> [SharingPolicy; 1] {
    [policy(
        "p",
        &json!({
            "tiers": ["capped", "concurrent", "exclusive"],
            "capped": {
                "maxSharers": 7, "expectedSharers": 3, "contextMemory": "300Mi", "memoryStep": "256Mi",
                "memoryOversubscription": percent,
            },
        }),
    )]
}

#[test]
fn the_device_has_its_own_name_and_attributes_and_more_memory() {
    let node = inventory(vec![gpu(0)]);
    let [plain, over] = [100, 250].map(|percent| devices(&planned(&node, &policies(percent))));
    limits::check(&objects(&planned(&node, &policies(250))));
    let all = |devices: &[Device]| -> Vec<_> { devices.iter().map(|it| it.name.clone()).collect() };
    let others = ["gpu-00000000-concurrent", "gpu-00000000"];
    assert_eq!(
        all(&plain),
        [&["gpu-00000000-capped"], &others[..]].concat()
    );
    assert_eq!(
        all(&over),
        [&["gpu-00000000-capped-250"], &others[..]].concat()
    );
    assert_eq!(over[1..], plain[1..], "the others are as they are");
    // 312 steps of the GPU, times 2.5; a seventh of that is 111 steps.
    let mut expected = capacities(&plain[0]);
    expected["memory"] = json!({
        "value": "195Gi",
        "requestPolicy": {
            "default": "28416Mi",
            "validRange": {"min": "256Mi", "max": "195Gi", "step": "256Mi"},
        },
    });
    assert_eq!(capacities(&over[0]), expected);
    let mut attributes = plain[0].attributes.clone().unwrap();
    for (name, value) in [
        (attribute::ISOLATION, json!({"string": OVERSUBSCRIBED})),
        (attribute::ISOLATION_LEVEL, json!({"int": 1})),
        (attribute::MEMORY_ISOLATION, json!({"string": "none"})),
        (attribute::MEMORY_OVERSUBSCRIPTION, json!({"int": 250})),
    ] {
        let value = serde_json::from_value(value).unwrap();
        attributes.insert(name.to_owned(), value);
    }
    assert_eq!(over[0].attributes, Some(attributes));
    assert_eq!(over[0].consumes_counters, plain[0].consumes_counters);
    assert_eq!(over[0].allow_multiple_allocations, Some(true));
}

/// The GPU's counters keep its shares apart from those of another percentage.
#[test]
fn a_change_of_the_percentage_leaves_held_shares_their_device() {
    let node = inventory(vec![gpu(0)]);
    for (before, after) in [(100, 200), (200, 100), (150, 400)] {
        let held = devices(&planned(&node, &policies(before))).remove(0);
        let plan = replanned(&node, &policies(after), &[], std::slice::from_ref(&held));
        let now = devices(&plan);
        let kept = now.iter().find(|it| it.name == held.name).unwrap();
        assert_eq!(kept.capacity, held.capacity);
        assert_eq!(kept.consumes_counters, held.consumes_counters);
        assert!(kept.taints.as_ref().is_some_and(|taints| taints.len() == 1));
        let new = devices(&planned(&node, &policies(after))).remove(0);
        assert!(now.contains(&new), "{now:?}");
    }
}

#[test]
fn a_gpu_whose_memory_cannot_move_has_no_such_shares() {
    let mut guest = gpu(0);
    guest.vgpu = Some(GpuVgpu {
        role: VgpuRole::Guest,
        ..GpuVgpu::default()
    });
    let mut old = gpu(0);
    old.cuda_compute_capability = "5.2".to_owned();
    for (gpu, word) in [(guest, "vGPU"), (old, "5.2")] {
        let node = inventory(vec![gpu]);
        let plan = planned(&node, &policies(200));
        let is_capped = |name: &String| name.contains("capped");
        assert!(!names(&plan).iter().any(is_capped), "{word}");
        let of_capped = |it: &&WithheldGpu| it.tiers == [Tier::Capped];
        let entry = plan.withheld.iter().find(of_capped).unwrap();
        assert_eq!(
            (&*entry.reason, entry.policy.as_deref()),
            ("NotOversubscribed", Some("p"))
        );
        assert!(
            entry.message.contains(word) && entry.message.contains("capped.memoryOversubscription"),
            "{}",
            entry.message
        );
        assert!(names(&planned(&node, &policies(100))).iter().any(is_capped));
    }
}
