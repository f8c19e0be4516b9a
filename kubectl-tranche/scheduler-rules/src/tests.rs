//! The reasons and the releases. The verdicts are compared with the scheduler's in `tests/rules`.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};
use tranche_api::Quantity;

use super::*;

/// A GPU with 80Gi that is offered whole and in shares, and one with a taint.
fn slices() -> Vec<ResourceSlice> {
    let counters =
        |gpu: &str| json!([{"counterSet": gpu, "counters": {"memory": {"value": "80"}}}]);
    let shared = |gpu: &str, taints: Value| {
        json!({
            "name": format!("{gpu}-capped"),
            "attributes": {"isolation": {"string": "capped"}},
            "allowMultipleAllocations": true,
            "capacity": {
                "memory": {"value": "78Gi", "requestPolicy": {
                    "default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"},
                }},
                "sharers": {"value": "4", "requestPolicy": {"default": "1", "validValues": ["1"]}},
            },
            "consumesCounters": counters(gpu),
            "taints": taints,
        })
    };
    let whole = |gpu: &str| {
        json!({
            "name": gpu,
            "attributes": {"isolation": {"string": "exclusive"}},
            "consumesCounters": counters(gpu),
        })
    };
    let taint = json!([{"key": "gpu.tranche.dev/withdrawn", "effect": "NoSchedule"}]);
    let slice = |name: &str, content: Value| {
        let mut spec = json!({
            "driver": "gpu.tranche.dev", "nodeName": "node-a",
            "pool": {"name": "node-a/gpu", "generation": 1, "resourceSliceCount": 2},
        });
        spec.as_object_mut()
            .unwrap()
            .extend(content.as_object().unwrap().clone());
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    };
    let set = |name: &str| json!({"name": name, "counters": {"memory": {"value": "80"}}});
    vec![
        slice("0", json!({"sharedCounters": [set("gpu-1"), set("gpu-2")]})),
        slice(
            "1",
            json!({"devices": [
                shared("gpu-1", json!([])), whole("gpu-1"), shared("gpu-2", taint), whole("gpu-2"),
            ]}),
        ),
    ]
}

fn classes() -> Vec<DeviceClass> {
    let class = |tier: &str| {
        let expression = format!("device.attributes['gpu.tranche.dev'].isolation == '{tier}'");
        serde_json::from_value(json!({
            "metadata": {"name": tier},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        }))
        .unwrap()
    };
    vec![class("capped"), class("exclusive")]
}

fn wants(name: &str, class: &str, memory: Option<&str>) -> ResourceClaim {
    let mut exactly = json!({"deviceClassName": class});
    if let Some(memory) = memory {
        exactly["capacity"] = json!({"requests": {"memory": memory}});
    }
    serde_json::from_value(json!({
        "metadata": {"namespace": "team-a", "name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }))
    .unwrap()
}

fn has(name: &str, device: &str, memory: Option<&str>) -> ResourceClaim {
    let mut claim = json!({
        "metadata": {"namespace": "team-a", "name": name},
        "spec": {},
    });
    let mut result = json!({
        "request": "gpu", "driver": "gpu.tranche.dev", "pool": "node-a/gpu", "device": device,
    });
    if let Some(memory) = memory {
        result["shareID"] = json!(format!("share-of-{name}"));
        result["consumedCapacity"] = json!({"memory": memory, "sharers": "1"});
    }
    claim["status"] = json!({"allocation": {"devices": {"results": [result]}}});
    serde_json::from_value(claim).unwrap()
}

struct World {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    selectors: Selectors,
    held: Vec<ResourceClaim>,
}

impl World {
    fn with(held: Vec<ResourceClaim>) -> Self {
        Self {
            slices: slices(),
            classes: classes(),
            selectors: Selectors::default(),
            held,
        }
    }

    fn explain(&self, claim: &ResourceClaim) -> (Report, Option<Release>) {
        let held: Vec<&ResourceClaim> = self.held.iter().collect();
        let cluster = Cluster {
            slices: &self.slices,
            classes: &self.classes,
            claims: &held,
            selectors: &self.selectors,
            most_steps: MOST_STEPS,
        };
        let node = node();
        // The cluster and the claims that it judges have the same lifetime.
        let claim = [claim];
        let report = cluster.explain(&node, &claim);
        let release = cluster.releases(&node, &claim, &report, usize::MAX);
        (report, release)
    }
}

fn node() -> Node {
    serde_json::from_value(json!({"metadata": {"name": "node-a"}})).unwrap()
}

fn obstacle<'a>(report: &'a Report, device: &str) -> &'a Obstacle {
    let mut devices = report.requests[0].devices.iter();
    let device = devices.find(|it| it.device.device == device).unwrap();
    device.obstacle.as_ref().unwrap()
}

fn gib(count: u64) -> Quantity {
    Quantity::from_bytes(count << 30)
}

#[test]
fn each_device_has_its_reason_with_numbers() {
    let world = World::with(vec![
        has("x", "gpu-1-capped", Some("40Gi")),
        has("y", "gpu-1-capped", Some("21Gi")),
    ]);
    let (report, release) = world.explain(&wants("new", "capped", Some("39Gi")));
    assert_eq!(report.verdict, Verdict::DoesNotFit);
    let Obstacle::TooLittle {
        capacity,
        wanted,
        left,
        total,
        holders,
    } = obstacle(&report, "gpu-1-capped")
    else {
        panic!("{report:?}")
    };
    assert_eq!(
        (capacity.as_str(), *wanted, *left, *total),
        ("memory", gib(39), gib(17), gib(78))
    );
    let holders: Vec<_> = holders
        .iter()
        .map(|it| (it.claim.as_str(), it.amount))
        .collect();
    assert_eq!(
        holders,
        [("team-a/x", Some(gib(40))), ("team-a/y", Some(gib(21)))]
    );
    let taint = obstacle(&report, "gpu-2-capped");
    assert!(
        matches!(taint, Obstacle::Taint { key, .. } if key.ends_with("/withdrawn")),
        "{taint:?}"
    );
    assert!(obstacle(&report, "gpu-1").is_another_kind());
    // The release of one is not enough: 78 - 40 = 38.
    let release = release.unwrap();
    assert_eq!(
        (release.claims, release.smallest),
        (vec!["team-a/x".to_owned()], true)
    );
}

#[test]
fn another_tier_of_the_same_gpu_is_named_with_its_holders() {
    let world = World::with(vec![
        has("x", "gpu-1-capped", Some("1Gi")),
        has("y", "gpu-1-capped", Some("1Gi")),
        has("z", "gpu-2", None),
    ]);
    let (report, release) = world.explain(&wants("new", "exclusive", None));
    let Obstacle::Counters {
        counter_set,
        holders,
        ..
    } = obstacle(&report, "gpu-1")
    else {
        panic!("{report:?}")
    };
    assert_eq!(counter_set, "gpu-1");
    let holders: Vec<_> = holders
        .iter()
        .map(|it| (it.claim.as_str(), it.device.as_str()))
        .collect();
    assert_eq!(
        holders,
        [("team-a/x", "gpu-1-capped"), ("team-a/y", "gpu-1-capped")]
    );
    let in_use = obstacle(&report, "gpu-2");
    assert!(
        matches!(in_use, Obstacle::InUse { holders } if holders[0].claim == "team-a/z"),
        "{in_use:?}"
    );
    // One claim on the second GPU is fewer than two on the first.
    assert_eq!(release.unwrap().claims, ["team-a/z"]);
}

#[test]
fn what_no_release_gives_has_none() {
    let world = World::with(vec![has("x", "gpu-1-capped", Some("40Gi"))]);
    let (report, release) = world.explain(&wants("new", "capped", Some("79Gi")));
    assert_eq!((report.verdict, release), (Verdict::DoesNotFit, None));
    let (report, _) = world.explain(&wants("new", "nobody", None));
    let Verdict::Problem(Problem::Stops(why)) = report.verdict else {
        panic!("{report:?}")
    };
    assert_eq!(
        why,
        "claim team-a/new, request gpu: device class nobody does not exist"
    );
}

#[test]
fn a_large_set_is_found_and_said_to_be_no_proof() {
    let holders = ["a", "b", "c", "d"].map(|name| has(name, "gpu-1-capped", Some("1Gi")));
    let mut world = World::with(holders.to_vec());
    world.held.push(has("z", "gpu-2", None));
    // A release cannot free the second GPU: its device is tainted, too.
    let rule: DeviceTaintRule = serde_json::from_value(json!({"spec": {
        "deviceSelector": {"device": "gpu-2"},
        "taint": {"key": "repair", "effect": "NoExecute"},
    }}))
    .unwrap();
    add_taint_rules(&[rule], &mut world.slices);
    let (_, release) = world.explain(&wants("new", "exclusive", None));
    let release = release.unwrap();
    assert_eq!(
        release.claims,
        ["team-a/a", "team-a/b", "team-a/c", "team-a/d"]
    );
    assert!(release.smallest);
}

#[test]
fn a_fit_says_what_would_be_allocated() {
    let world = World::with(vec![has("x", "gpu-1-capped", Some("40Gi"))]);
    let (report, release) = world.explain(&wants("new", "capped", Some("1500Mi")));
    let Verdict::Fits(granted) = report.verdict else {
        panic!("{report:?}")
    };
    let [granted] = &granted[0][..] else {
        panic!("{granted:?}")
    };
    assert_eq!(
        (granted.device.device.as_str(), granted.share),
        ("gpu-1-capped", true)
    );
    assert_eq!(granted.consumed["memory"], gib(2));
    assert_eq!(release, None);
}
