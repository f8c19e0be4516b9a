use serde_json::{Value, json};
use tranche_api::usage::NodeUsage;
use tranche_api::{GpuNode, SharingPolicy};
use tranche_driver::policy::Action;

use super::*;
use crate::idle::asked::{Allowed, Asked};
use crate::idle::holder::holders;
use crate::index::NodeView;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("a well-formed object")
}

/// What a policy with this `spec.idle` asks of a node with two GPUs.
fn asked(idle: &Value, allowed: Allowed) -> NodeTerms {
    let gpu = |n: u32| {
        json!({
            "uuid": format!("GPU-{n}"), "minor": n, "productName": "T4", "brand": "", "architecture": "Turing",
            "cudaComputeCapability": "7.5", "pciBusID": format!("0000:0{n}:00.0"), "memory": "16Gi", "reservedMemory": "0",
        })
    };
    let gpu_node: GpuNode = object(json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "a"}, "spec": {},
        "status": {"inventory": {"driverVersion": "580", "cudaDriverVersion": "13.0", "gpus": [gpu(0), gpu(1)]}},
    }));
    let policy: SharingPolicy = object(json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy", "metadata": {"name": "p"},
        "spec": {"tiers": ["capped"], "idle": idle},
    }));
    let asked = Asked::new(allowed);
    asked.note(&NodeView {
        name: "a".into(),
        node: Some(
            object::<kube::core::PartialObjectMeta<_>>(json!({"metadata": {"name": "a"}})).into(),
        ),
        gpu_node: Some(gpu_node.into()),
        policies: [policy].into(),
        slices: Vec::new(),
    });
    let all = asked.all();
    all.get("a")
        .map(|terms| (**terms).clone())
        .unwrap_or_default()
}

fn evict() -> NodeTerms {
    let team = json!({"matchLabels": {"idle": "evict"}});
    asked(
        &json!({"namespaces": team, "afterSeconds": 30, "action": "Evict", "graceSeconds": 10}),
        Allowed::Evict,
    )
}

/// Claims with the seconds in which they ran no kernel, each on the GPU of its number.
fn idle(claims: &[(&str, u32, u64)]) -> BTreeMap<String, Holder> {
    let gpu = |n: u32| {
        let shares: Vec<_> = claims
            .iter()
            .filter(|(_, gpu, _)| *gpu == n)
            .map(|(name, _, idle)| {
                json!({
                    "claim": {"namespace": "team", "name": name, "uid": name}, "request": "gpu", "pool": "a/gpu",
                    "device": format!("gpu-{n}"), "tier": "capped", "memory": {"reserved": 0, "used": 7}, "processes": 1,
                    "idleSeconds": idle,
                })
            })
            .collect();
        json!({"uuid": format!("GPU-{n}"), "minor": n, "pciBusID": "", "productName": "", "shares": shares})
    };
    let usage: NodeUsage =
        object(json!({"node": "a", "unixMillis": 0, "gpus": [gpu(0), gpu(1), gpu(2)]}));
    holders(&usage)
}

fn pod(name: &str, claims: &[&str]) -> PodFacts {
    PodFacts {
        name: name.into(),
        uid: name.into(),
        claims: claims.iter().map(|it| (*it).to_owned()).collect(),
        is_ending: false,
    }
}

fn facts(pods: &[PodFacts]) -> Facts {
    Facts {
        labels: [("idle".to_owned(), "evict".to_owned())].into(),
        is_kept: false,
        pods: pods.to_vec(),
    }
}

/// The steps at a time, by claim.
fn steps(
    now: u64,
    holders: &BTreeMap<String, Holder>,
    facts: &[(&str, Facts)],
    watches: &mut BTreeMap<String, Noticed>,
) -> Vec<(String, Step)> {
    let facts = facts
        .iter()
        .map(|(uid, it)| ((*uid).to_owned(), it.clone()));
    let acts = decide(
        seconds(now),
        "a",
        holders,
        &evict(),
        &facts.collect(),
        watches,
    );
    let step = |act: Act| (act.holder.claim.name, act.step);
    acts.into_iter().map(step).collect()
}

fn act(name: &str, step: Step) -> (String, Step) {
    (name.to_owned(), step)
}

const NOTICE: Step = Step::Notice { idle: seconds(30) };

#[test]
fn an_idle_claim_is_named_and_evicted_after_its_grace() {
    let mut watches = BTreeMap::new();
    let one = [("one", facts(&[pod("p", &["one"])]))];
    let at = |now: u64| idle(&[("one", 0, now - 100), ("two", 1, 3)]);
    assert_eq!(steps(129, &at(129), &[], &mut watches), []);
    assert_eq!(
        steps(130, &at(130), &one, &mut watches),
        [act("one", NOTICE)]
    );
    assert_eq!(steps(139, &at(139), &one, &mut watches), []);
    assert_eq!(
        steps(140, &at(140), &one, &mut watches),
        [act("one", Step::Evict)]
    );
    // It is gone.
    assert_eq!(steps(141, &idle(&[]), &[], &mut watches), []);
    assert!(watches.is_empty());
}

#[test]
fn other_namespaces_an_annotation_and_unread_facts_keep_a_claim() {
    let holders = idle(&[("one", 0, 60)]);
    let is_named =
        |facts: &[(&str, Facts)]| !steps(100, &holders, facts, &mut BTreeMap::new()).is_empty();
    assert!(is_named(&[("one", facts(&[]))]));
    let elsewhere = Facts {
        labels: BTreeMap::new(),
        ..facts(&[])
    };
    assert!(!is_named(&[("one", elsewhere)]));
    let kept = Facts {
        is_kept: true,
        ..facts(&[])
    };
    assert!(!is_named(&[("one", kept)]));
    assert!(!is_named(&[]), "the API server did not answer");
}

#[test]
fn what_is_exempt_or_works_again_is_named_no_more() {
    let named = |facts: &[(&str, Facts)], idle_for| {
        let mut watches = BTreeMap::new();
        let one = [("one", self::facts(&[]))];
        steps(100, &idle(&[("one", 0, 30)]), &one, &mut watches);
        let steps = steps(105, &idle(&[("one", 0, idle_for)]), facts, &mut watches);
        (steps, watches.len())
    };
    let withdrawn = |why| (vec![act("one", Step::Withdraw(why))], 0);
    assert_eq!(named(&[], 2), withdrawn(Why::Works));
    let kept = Facts {
        is_kept: true,
        ..facts(&[])
    };
    assert_eq!(named(&[("one", kept)], 35), withdrawn(Why::NotAsked));
    // Without an answer nothing changes.
    assert_eq!(named(&[], 35), (vec![], 1));
}

#[test]
fn a_pod_is_not_evicted_for_one_claim_while_another_one_works() {
    let mut watches = BTreeMap::new();
    let both = pod("p", &["one", "two", "network"]);
    let facts = [
        ("one", facts(std::slice::from_ref(&both))),
        ("two", facts(&[both])),
    ];
    steps(
        130,
        &idle(&[("one", 0, 30), ("two", 1, 5)]),
        &facts[..1],
        &mut watches,
    );
    let busy = idle(&[("one", 0, 60), ("two", 1, 5)]);
    assert_eq!(steps(160, &busy, &facts[..1], &mut watches), []);
    let named = idle(&[("one", 0, 90), ("two", 1, 30)]);
    assert_eq!(
        steps(190, &named, &facts, &mut watches),
        [act("two", NOTICE)]
    );
    let idle = idle(&[("one", 0, 100), ("two", 1, 40)]);
    let evicted = [act("one", Step::Evict), act("two", Step::Evict)];
    assert_eq!(steps(200, &idle, &facts, &mut watches), evicted);
}

#[test]
fn a_claim_with_a_gpu_that_no_idle_policy_names_is_left_alone() {
    // The policy has no rule for GPU-2.
    let holders = idle(&[("one", 0, 60), ("one", 2, 60)]);
    assert_eq!(holders["one"].gpus.len(), 2);
    let one = [("one", facts(&[]))];
    assert_eq!(steps(100, &holders, &one, &mut BTreeMap::new()), []);
}

#[test]
fn a_node_that_does_not_answer_names_nobody() {
    let mut watches = BTreeMap::new();
    let all = [("one", facts(&[])), ("two", facts(&[]))];
    steps(
        100,
        &idle(&[("one", 0, 30), ("two", 1, 30)]),
        &all,
        &mut watches,
    );
    assert_eq!(withdraw("b", Why::NotKnown, &mut watches), []);
    let withdrawn = withdraw("a", Why::NotKnown, &mut watches);
    assert_eq!(withdrawn.len(), 2);
    assert!(
        withdrawn
            .iter()
            .all(|act| act.step == Step::Withdraw(Why::NotKnown))
    );
    assert!(watches.is_empty());
}

#[test]
fn only_what_is_allowed_and_selected_is_asked() {
    let all = json!({"namespaces": {}, "afterSeconds": 30, "action": "Evict"});
    let labels = BTreeMap::new();
    let action = |allowed| {
        let asked = asked(&all, allowed);
        Some(asked.get("GPU-0")?.of_namespace(&labels)?.action)
    };
    assert_eq!(action(Allowed::Off), None);
    assert_eq!(action(Allowed::Report), Some(Action::Report));
    let grace = seconds(600);
    assert_eq!(action(Allowed::Evict), Some(Action::Evict { grace }));
    // Without a selector no namespace is opted in.
    let nobody = json!({"afterSeconds": 30, "action": "Evict"});
    assert_eq!(asked(&nobody, Allowed::Evict), NodeTerms::new());
    let wrong = json!({"namespaces": {}, "afterSeconds": 9});
    assert_eq!(asked(&wrong, Allowed::Evict), NodeTerms::new());
}
