//! Which rules a target has, and who holds it.

use k8s_openapi::api::resource::v1::DeviceTaintRule;

use super::*;
use crate::testing::{busy, share, uuid};
use crate::usage::Usage;

fn model(snapshot: &Snapshot) -> Model {
    Model::new(snapshot, &Ok(Usage::default()))
}

fn find(name: &str) -> Result<Target, Error> {
    let snapshot = busy().snapshot();
    Target::find(name, &snapshot, &model(&snapshot))
}

/// The rules of a target, as the API server keeps them.
fn made(target: &Target, before: &[DeviceTaintRule]) -> Vec<DeviceTaintRule> {
    let missing = target.missing(before);
    let made = missing.iter().enumerate().map(|(number, selector)| {
        let mut rule = rules::rule(selector);
        let number = before.len() + number;
        rule.metadata.name = Some(format!("{NAMES}{number}"));
        rule
    });
    before.iter().cloned().chain(made).collect()
}

#[test]
fn a_target_is_a_node_or_a_gpu() {
    let node = find("node-a").unwrap();
    assert_eq!((node.gpu.as_deref(), node.selectors().len()), (None, 1));
    for name in [&uuid('a', 0), "GPU-a0000000", "gpu-a0000000"] {
        let gpu = find(name).unwrap();
        assert_eq!((gpu.node.as_str(), gpu.gpu), ("node-a", Some(uuid('a', 0))));
        assert!(gpu.devices.iter().all(|it| it.starts_with("gpu-a0000000")));
        for device in [
            "gpu-a0000000",
            "gpu-a0000000-capped",
            "gpu-a0000000-mig-1g10gb-0",
        ] {
            assert!(gpu.devices.contains(device), "{device}");
        }
    }
    let error = find("gpu-a").unwrap_err().to_string();
    assert!(
        error.contains(&uuid('a', 0)) && error.contains(&uuid('a', 1)),
        "{error}"
    );
    for name in ["gpu-", "node-c", ""] {
        assert!(matches!(find(name), Err(Error::NotFound(_))), "{name}");
    }
}

#[test]
fn rules_are_made_once_and_deleted_with_their_target() {
    let (node, gpu, other) = (
        find("node-a").unwrap(),
        find("gpu-a0000000").unwrap(),
        find("gpu-a0000001").unwrap(),
    );
    let of_gpu = made(&gpu, &[]);
    assert_eq!(of_gpu.len(), gpu.devices.len());
    assert_eq!(gpu.missing(&of_gpu), []);
    assert_eq!(other.own_rules(&of_gpu), Vec::<String>::new());
    let both = made(&node, &of_gpu);
    assert_eq!(both.len(), of_gpu.len() + 1);
    // A cordoned node has no need of rules for its GPUs.
    assert_eq!(other.missing(&both), []);
    assert_eq!(node.own_rules(&both).len(), 1);
    assert_eq!(gpu.own_rules(&both).len(), of_gpu.len());
    assert_eq!(gpu.still_cordoned(&both), ["node-a".to_owned()].into());
    assert_eq!(
        node.still_cordoned(&both),
        ["gpu-a0000000".to_owned()].into()
    );
    // Another's rule stays.
    let mut foreign = both.last().unwrap().clone();
    foreign.spec.taint.key = "example.com/repair".to_owned();
    assert_eq!(node.own_rules(&[foreign.clone()]), Vec::<String>::new());
    assert_eq!(node.missing(&[foreign]).len(), 1);
}

#[test]
fn a_gpu_without_devices_cannot_be_cordoned() {
    let mut snapshot = busy().snapshot();
    snapshot
        .slices
        .retain(|it| it.spec.node_name.as_deref() != Some("node-b"));
    snapshot.claims.clear();
    let target = Target::find("gpu-b0000000", &snapshot, &model(&snapshot)).unwrap();
    let error = target.check().unwrap_err().to_string();
    assert!(
        error.contains("has no devices in a ResourceSlice"),
        "{error}"
    );
    find("gpu-b0000000").unwrap().check().unwrap();
}

#[test]
fn holders_are_the_pods_of_claims_on_the_target() {
    let mut world = busy();
    let mut watching = share("node-a", "gpu-a0000000-capped", "1Gi", "1");
    watching["adminAccess"] = true.into();
    world.claim("monitoring/watch", &["exporter"], &[watching]);
    let snapshot = world.snapshot();
    let model = model(&snapshot);
    let names = |name: &str| {
        let target = Target::find(name, &snapshot, &model).unwrap();
        let holders = holders(&target, &snapshot, &model);
        let names = holders.into_keys();
        names
            .map(|it| format!("{}/{} {}", it.namespace, it.name, it.is_admin))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        names("gpu-a0000000"),
        [
            "monitoring/exporter true",
            "team-a/notebook false",
            "team-b/training false"
        ]
    );
    assert_eq!(names("node-a").len(), 5);
    assert_eq!(names("node-b"), ["team-c/card false"]);
}
