//! The chart's Deployments, DaemonSets and pods: those that should be there, and those that are.

use std::collections::{BTreeMap, BTreeSet};

use super::checks::{finding, good, unknown};
use super::{Finding, Outcome};
use crate::facts::{Facts, Workload};

const CHECK: &str = "Tranche's pods";

/// The components that every cluster with Tranche has.
const NEEDED: [&str; 2] = ["controller", "node-plugin"];

pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    let components = match &facts.components {
        Ok(components) => components,
        Err(why) => return vec![unknown(CHECK, why)],
    };
    let workloads = facts.workloads.as_deref().unwrap_or_default();
    if components.is_empty() && workloads.is_empty() {
        return vec![finding(
            CHECK,
            Outcome::Error,
            format!("there are none in the namespace {}", facts.system),
            "install the chart, or name its namespace with --system-namespace",
        )];
    }
    let mut findings: Vec<Finding> = Vec::new();
    let mut by_name: BTreeMap<&str, (usize, Vec<&str>)> = BTreeMap::new();
    for it in components {
        let (count, missing) = by_name.entry(&it.component).or_default();
        *count += 1;
        if !it.is_ready {
            missing.push(&it.pod);
        }
    }
    for workload in workloads {
        let count = by_name
            .get(workload.component.as_str())
            .map_or(0, |(count, _)| *count);
        findings.extend(self::workload(workload, count, &facts.system));
    }
    for needed in NEEDED {
        let is_known = match &facts.workloads {
            Ok(workloads) => workloads.iter().any(|it| it.component == needed),
            // Who may not list them sees the pods.
            Err(_) => by_name.contains_key(needed),
        };
        if !is_known {
            findings.push(finding(
                CHECK,
                Outcome::Error,
                format!(
                    "{needed}: there is none in the namespace {}: {}",
                    facts.system,
                    without(needed)
                ),
                "install the chart again (helm upgrade --install)",
            ));
        }
    }
    for (name, (count, missing)) in by_name {
        findings.push(if missing.is_empty() {
            good(CHECK, format!("{name}: all {count} are ready"))
        } else {
            finding(
                CHECK,
                Outcome::Error,
                format!(
                    "{name}: {} of {count} are not ready: {}",
                    missing.len(),
                    missing.join(", ")
                ),
                format!(
                    "kubectl describe pod --namespace {} {}",
                    facts.system, missing[0]
                ),
            )
        });
    }
    findings.extend(images(facts));
    findings.extend(usage_api(facts));
    findings
}

/// A Deployment or DaemonSet that asks for no pods, or has fewer than it asks for.
fn workload(it: &Workload, pods: usize, system: &str) -> Option<Finding> {
    let Workload {
        kind,
        name,
        component,
        wanted,
    } = it;
    let object = kind.to_lowercase();
    if *wanted == 0 {
        let (message, way_out) = match *kind {
            "DaemonSet" => (
                format!("{component}: the DaemonSet {name} matches no node: {}", without(component)),
                "label the GPU nodes as nodePlugin.affinity of the chart requires, for example kubectl label node NODE nvidia.com/gpu.present=true".to_owned(),
            ),
            _ => (
                format!("{component}: the {kind} {name} has 0 replicas: {}", without(component)),
                format!("kubectl scale {object} {name} --namespace {system} --replicas 2"),
            ),
        };
        return Some(finding(CHECK, Outcome::Error, message, way_out));
    }
    (pods < *wanted).then(|| {
        finding(
            CHECK,
            Outcome::Error,
            format!("{component}: the {kind} {name} needs {wanted} pods, and {pods} exist"),
            format!("kubectl describe {object} {name} --namespace {system}"),
        )
    })
}

/// What does not work without a component.
fn without(component: &str) -> &'static str {
    match component {
        "controller" => {
            "what nodes and policies change is not published, and no slice that is deleted comes back"
        }
        "node-plugin" => "pods with GPUs neither start nor end",
        "mps" => "pods with concurrent shares do not start",
        "usage-api" => "use is not shown, and no namespace of the cluster is deleted",
        _ => "its part does not work",
    }
}

fn images(facts: &Facts) -> Option<Finding> {
    let components = facts.components.iter().flatten();
    let versions: BTreeSet<&str> = components
        .flat_map(|it| it.images.iter().map(String::as_str))
        .collect();
    if versions.len() < 2 {
        return None;
    }
    let listed: Vec<_> = versions.into_iter().collect();
    Some(finding(
        CHECK,
        Outcome::Warning,
        format!("they run several images: {}", listed.join(", ")),
        "wait for the roll-out to end; the MPS supervisor's pods are replaced only when they are deleted",
    ))
}

/// An aggregated API that does not answer keeps every namespace of the cluster from being deleted.
fn usage_api(facts: &Facts) -> Option<Finding> {
    let why = facts.usage_api_fault.as_ref()?;
    Some(finding(
        "usage API",
        Outcome::Error,
        format!(
            "the APIService v1alpha1.usage.gpu.tranche.dev is not available, so that no namespace of the cluster is deleted: {why}"
        ),
        "see the pods with the label app.kubernetes.io/component=usage-api; if Tranche is not installed any more: \
         kubectl delete apiservice v1alpha1.usage.gpu.tranche.dev",
    ))
}
