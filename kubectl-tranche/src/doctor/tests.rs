//! The findings of the checks.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;

use crate::facts::{Access, Component, Workload};
use crate::snapshot::Resource;
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
            Component {
                node: "node-b".into(),
                ..component("node-plugin", true)
            },
        ]),
        workloads: Ok(vec![
            workload("Deployment", "controller", 1),
            workload("DaemonSet", "node-plugin", 2),
        ]),
        usage_api_fault: None,
        now: Timestamp::UNIX_EPOCH,
        warnings: BTreeMap::new(),
        rules: Vec::new(),
        system: "tranche-system".into(),
        snapshot: World::new().snapshot(),
        usage: Ok(Usage::default()),
    }
}

fn workload(kind: &'static str, component: &str, wanted: usize) -> Workload {
    Workload {
        kind,
        name: format!("tranche-{component}"),
        component: component.into(),
        wanted,
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

/// The nodes of the world.
fn nodes() -> Vec<k8s_openapi::api::core::v1::Node> {
    let node = |name: &str| object(serde_json::json!({"metadata": {"name": name}}));
    vec![node("node-a"), node("node-b")]
}

/// A pod with a claim and this status, three minutes after noon.
fn stuck(facts: &mut Facts, status: &serde_json::Value) {
    facts.snapshot.claims = busy().claims;
    facts.snapshot.asked.insert(Resource::Pods);
    facts.snapshot.pods = vec![object(serde_json::json!({
        "metadata": {"namespace": "team-a", "name": "notebook", "uid": "uid-team-a-notebook"},
        "spec": {"containers": [], "nodeName": "node-a"},
        "status": status,
    }))];
    facts.now = "2026-11-21T12:03:00Z".parse().unwrap();
}

#[test]
fn each_problem_is_found_with_its_way_out() {
    let cases: Vec<(&str, Change)> = vec![
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
        ("nodes", |it| {
            let status = it.snapshot.gpu_nodes[0].status.as_mut().unwrap();
            status.gpus.push(object(serde_json::json!({
                "uuid": "GPU-a", "conditions": [{
                    "type": "Healthy", "status": "False", "reason": "Xid79",
                    "message": "reset it", "lastTransitionTime": "2026-11-21T12:00:00Z",
                }],
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
    are_found(cases);
}

type Change = fn(&mut Facts);

/// Each change is found by its check, with a way out.
fn are_found(cases: Vec<(&str, Change)>) {
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
fn programs_that_should_be_there_are_missed() {
    let cases: Vec<(&str, Change)> = vec![
        ("Tranche's pods", |it| {
            it.workloads = Ok(vec![
                workload("Deployment", "controller", 0),
                workload("DaemonSet", "node-plugin", 2),
            ]);
            it.components.as_mut().unwrap().remove(0);
        }),
        ("Tranche's pods", |it| {
            it.workloads = Ok(vec![workload("DaemonSet", "node-plugin", 2)]);
            it.components.as_mut().unwrap().remove(0);
        }),
        ("Tranche's pods", |it| {
            it.workloads = Err("you may not".into());
            it.components.as_mut().unwrap().remove(0);
        }),
        ("Tranche's pods", |it| {
            it.workloads.as_mut().unwrap()[1].wanted = 3;
        }),
        ("usage API", |it| {
            it.usage_api_fault = Some("no endpoints".into());
        }),
    ];
    are_found(cases);
}

#[test]
fn nodes_that_nobody_serves_are_found() {
    let cases: Vec<(&str, Change)> = vec![
        ("nodes", |it| {
            it.components.as_mut().unwrap().pop();
            it.workloads.as_mut().unwrap()[1].wanted = 1;
            it.snapshot.claims = busy().claims;
        }),
        ("nodes", |it| {
            it.snapshot.nodes = nodes();
            it.snapshot.nodes.pop();
            it.snapshot.asked.insert(Resource::Nodes);
        }),
        ("nodes", |it| {
            it.snapshot.nodes = nodes();
            let status = serde_json::json!({"conditions": [{"type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting"}]});
            it.snapshot.nodes[0].status = Some(object(status));
            it.snapshot.asked.insert(Resource::Nodes);
        }),
        ("nodes", |it| {
            it.snapshot.nodes = nodes();
            it.snapshot.nodes.push(object(serde_json::json!({
                "metadata": {"name": "node-c", "labels": {"nvidia.com/gpu.present": "true"}},
            })));
            it.snapshot.asked.insert(Resource::Nodes);
        }),
        ("nodes", |it| {
            it.snapshot.claims = busy().claims;
            it.snapshot.gpu_nodes.pop();
        }),
        ("nodes", |it| {
            let slices = &mut it.snapshot.slices;
            slices.retain(|slice| slice.spec.node_name.as_deref() != Some("node-b"));
        }),
        ("nodes", |it| {
            let status = it.snapshot.gpu_nodes[0].status.as_mut().unwrap();
            status.published.as_mut().unwrap().slices = vec!["gone".into()];
        }),
        ("nodes", |it| {
            let status = it.snapshot.gpu_nodes[0].status.as_mut().unwrap();
            let withheld = &mut status.published.as_mut().unwrap().withheld;
            withheld.push(tranche_api::withheld::WithheldGpu::whole(
                "GPU-1",
                "UnownedMemory",
                "end the process".into(),
            ));
        }),
    ];
    are_found(cases);
}

#[test]
fn pods_that_cannot_start_or_end_are_found() {
    let cases: Vec<(&str, Change)> = vec![
        ("pods with GPUs", |it| {
            stuck(
                it,
                &serde_json::json!({
                    "containerStatuses": [{
                        "name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 3,
                        "state": {"waiting": {"reason": "CreateContainerError", "message": "unresolvable CDI devices x"}},
                    }],
                }),
            );
        }),
        ("pods with GPUs", |it| {
            stuck(
                it,
                &serde_json::json!({
                    "phase": "Pending", "startTime": "2026-11-21T12:00:00Z",
                }),
            );
        }),
        ("pods with GPUs", |it| {
            stuck(it, &serde_json::json!({"phase": "Running"}));
            let deletion = object(serde_json::json!("2026-11-21T12:00:00Z"));
            it.snapshot.pods[0].metadata.deletion_timestamp = Some(deletion);
        }),
    ];
    are_found(cases);
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

/// What ends with an exit code other than 0 is what keeps pods from starting or ending, or GPUs from being used.
#[test]
fn an_administrators_label_is_an_error_only_while_claims_are_held() {
    let mut facts = healthy();
    facts.components.as_mut().unwrap().pop();
    facts.workloads.as_mut().unwrap()[1].wanted = 1;
    facts.snapshot.nodes = nodes();
    let label = ("gpu.tranche.dev/node-plugin".to_owned(), "false".to_owned());
    facts.snapshot.nodes[1].metadata.labels = Some([label].into());
    facts.snapshot.asked.insert(Resource::Nodes);
    let lines = |facts: &Facts| -> Vec<String> {
        let wrong = wrong(facts).into_iter();
        wrong
            .map(|it| format!("{} {}", it.message, it.way_out))
            .collect()
    };
    let report = examine(&facts);
    assert!(!report.has_errors(), "{report:?}");
    let [line] = &lines(&facts)[..] else {
        panic!("{:?}", lines(&facts))
    };
    for part in [
        "node-b: the label gpu.tranche.dev/node-plugin=false",
        "kubectl label node node-b gpu.tranche.dev/node-plugin-",
    ] {
        assert!(line.contains(part), "{line}");
    }
    facts.snapshot.claims = busy().claims;
    let report = examine(&facts);
    assert!(report.has_errors(), "{report:?}");
    let text = lines(&facts).join("\n");
    assert!(
        text.contains("1 claim is held there: team-c/card; their pods can neither start nor end"),
        "{text}"
    );
}

#[test]
fn a_cordoned_gpu_is_a_reminder() {
    let mut facts = healthy();
    facts.rules = vec![object(serde_json::json!({
        "metadata": {"name": "tranche-cordon-x"},
        "spec": {
            "deviceSelector": {"driver": "gpu.tranche.dev", "pool": "node-a/gpu", "device": "gpu-a0000000-capped"},
            "taint": {"key": "gpu.tranche.dev/cordoned", "effect": "NoSchedule"},
        },
    }))];
    let report = examine(&facts);
    assert!(!report.has_errors(), "{report:?}");
    let wrong = wrong(&facts);
    assert_eq!(wrong[0].way_out, "kubectl tranche uncordon gpu-a0000000");
}
