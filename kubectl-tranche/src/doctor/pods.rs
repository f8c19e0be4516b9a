//! Pods with GPUs that cannot start or cannot end.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;

use super::checks::{finding, good};
use super::{Finding, Outcome};
use crate::facts::Facts;
use crate::pods::{self, Stopped};
use crate::serving;
use crate::snapshot::Resource;

const CHECK: &str = "pods with GPUs";

pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    let snapshot = &facts.snapshot;
    if !snapshot.asked.contains(&Resource::Pods) || snapshot.gap(Resource::Pods).is_some() {
        return Vec::new();
    }
    let mut findings: Vec<Finding> = snapshot
        .pods
        .iter()
        .filter_map(|pod| of_pod(facts, pod))
        .collect();
    if findings.is_empty() {
        findings.push(good(CHECK, "none waits for its node to start or end"));
    }
    findings
}

/// The UIDs of the pods that have devices of ours.
pub(crate) fn users(facts: &Facts) -> BTreeSet<&str> {
    let ours = serving::of_ours(&facts.snapshot.claims);
    let reserved = ours.flat_map(|claim| {
        let status = claim.status.as_ref();
        status
            .into_iter()
            .flat_map(|it| it.reserved_for.iter().flatten())
    });
    reserved
        .filter(|it| it.resource == "pods")
        .map(|it| it.uid.as_str())
        .collect()
}

/// Whether a pod cannot start or end for a reason that may be ours.
pub(crate) fn is_stuck(pod: &Pod, facts: &Facts) -> bool {
    pods::late(pod, facts.now).is_some()
        || unprepared(pod, facts).is_some()
        || pods::stopped(pod).iter().any(Stopped::may_be_of_devices)
}

/// Since when a pod waits for its node to prepare a claim, if that is too long.
fn unprepared(pod: &Pod, facts: &Facts) -> Option<Timestamp> {
    let since = pods::slow(pod, facts.now)?;
    let is_of_pod = |claim: &&ResourceClaim| {
        let status = claim.status.iter();
        let mut users = status.flat_map(|it| it.reserved_for.iter().flatten());
        users.any(|it| Some(&it.uid) == pod.metadata.uid.as_ref())
    };
    let mut claims = serving::of_ours(&facts.snapshot.claims).filter(is_of_pod);
    claims.any(|it| !serving::is_prepared(it)).then_some(since)
}

fn of_pod(facts: &Facts, pod: &Pod) -> Option<Finding> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (namespace, name) = (text(&pod.metadata.namespace), text(&pod.metadata.name));
    let uid = text(&pod.metadata.uid);
    let node = text(&pod.spec.as_ref()?.node_name);
    let told = facts
        .warnings
        .get(&uid)
        .map(|it| format!(": {it}"))
        .unwrap_or_default();
    let found = |what: String, way_out: String| {
        let message = format!("{namespace}/{name} on node {node}: {what}");
        Some(finding(CHECK, Outcome::Error, message, way_out))
    };
    let explain = format!("kubectl tranche explain pod {name} --namespace {namespace}");
    if let Some(since) = pods::late(pod, facts.now) {
        return found(
            format!("it should have ended at {since} and has not{told}"),
            format!("see the lines about {node} above; {explain}"),
        );
    }
    let mut stopped = pods::stopped(pod).into_iter();
    if let Some(stopped) = stopped.find(Stopped::may_be_of_devices) {
        let way_out = stopped.way_out().map_or(explain, str::to_owned);
        return found(stopped.text(), way_out);
    }
    if let Some(since) = unprepared(pod, facts) {
        return found(
            format!("it waits since {since} for the node to prepare its claim{told}"),
            format!("see the lines about {node} above; {explain}"),
        );
    }
    None
}
