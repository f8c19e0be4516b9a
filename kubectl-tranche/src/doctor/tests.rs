//! The findings of the checks.

use std::collections::BTreeMap;

use crate::facts::{Access, Component};
use crate::testing::{World, busy, object, share};
use crate::usage::Usage;

use super::*;

fn healthy() -> Facts {
    Facts {
        version: Ok("v1.37.1".into()),
        dra_versions: Ok(vec!["v1".into(), "v1beta2".into()]),
        gates: Ok(BTreeMap::from([("DRAConsumableCapacity".into(), true)])),
        access: vec![Access {
            verb: "list",
            resource: "gpunodes",
            namespace: String::new(),
            is_allowed: true,
        }],
        components: Ok(vec![
            component("controller", true),
            component("node-plugin", true),
        ]),
        system: "tranche-system".into(),
        snapshot: World::new().snapshot(),
        usage: Ok(Usage::default()),
    }
}

fn component(name: &str, is_ready: bool) -> Component {
    Component {
        component: name.into(),
        pod: format!("tranche-{name}-x"),
        node: "node-a".into(),
        is_ready,
        images: vec!["tranche/tranche:0.1.0".into()],
    }
}

/// The findings that are not good.
fn wrong(facts: &Facts) -> Vec<Finding> {
    let mut findings = examine(facts).findings;
    findings.retain(|it| it.outcome != Outcome::Good && !it.message.contains("NoDivision"));
    findings
}

#[test]
fn a_healthy_cluster_has_no_errors() {
    let report = examine(&healthy());
    assert!(!report.has_errors(), "{report:?}");
    assert!(
        report
            .findings
            .iter()
            .any(|it| it.check == "dropped fields" && it.outcome == Outcome::Good)
    );
}

#[test]
fn each_problem_is_found_with_its_way_out() {
    type Change = fn(&mut Facts);
    let cases: [(&str, Change); 11] = [
        ("Kubernetes version", |it| {
            it.version = Ok("v1.33.2-gke.1".into());
        }),
        ("API resource.k8s.io/v1", |it| {
            it.dra_versions = Ok(vec!["v1beta1".into()]);
        }),
        ("feature gates", |it| {
            it.gates = Ok(BTreeMap::from([("DRAConsumableCapacity".into(), false)]));
        }),
        ("your rights", |it| it.access[0].is_allowed = false),
        ("use of GPUs", |it| {
            it.usage = Err("usage is not shown: nobody serves it".into());
        }),
        ("Tranche's pods", |it| {
            it.components = Ok(vec![component("controller", false)]);
        }),
        ("Tranche's pods", |it| it.components = Ok(Vec::new())),
        ("nodes", |it| it.snapshot.gpu_nodes.clear()),
        ("nodes", |it| {
            let status = it.snapshot.gpu_nodes[0].status.as_mut().unwrap();
            status.conditions.push(object(serde_json::json!({
                "type": "SoleProvider", "status": "False", "reason": "OtherProvider",
                "message": "stop NVIDIA's device plugin on the node", "lastTransitionTime": "2026-11-21T12:00:00Z",
            })));
        }),
        ("dropped fields", |it| {
            let mut devices = it
                .snapshot
                .slices
                .iter_mut()
                .flat_map(|it| it.spec.devices.iter_mut().flatten());
            devices.next().unwrap().consumes_counters = None;
        }),
        ("dropped fields", |it| {
            let mut world = World::new();
            let mut result = share("node-a", "gpu-a0000000-capped", "1Gi", "1");
            result.as_object_mut().unwrap().remove("consumedCapacity");
            world.claim("team-a/one", &[], &[result]);
            it.snapshot.claims = world.claims;
        }),
    ];
    let before = wrong(&healthy());
    for (check, change) in cases {
        let mut facts = healthy();
        change(&mut facts);
        let mut found = wrong(&facts);
        found.retain(|it| !before.contains(it));
        assert!(!found.is_empty(), "{check}");
        for finding in &found {
            assert_eq!(finding.check, check, "{finding:?}");
            assert!(
                !finding.way_out.is_empty() && !finding.message.contains('\n'),
                "{finding:?}"
            );
        }
    }
}

#[test]
fn what_cannot_be_checked_is_said_and_is_no_error() {
    let facts = Facts {
        snapshot: busy().snapshot(),
        components: Err("you may not list pods".into()),
        version: Err("forbidden".into()),
        dra_versions: Err("forbidden".into()),
        gates: Err("forbidden".into()),
        ..Facts::default()
    };
    let report = examine(&facts);
    assert!(!report.has_errors(), "{report:?}");
    let unknown = report
        .findings
        .iter()
        .filter(|it| it.outcome == Outcome::Unknown);
    assert_eq!(unknown.count(), 5);
}
