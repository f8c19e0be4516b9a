//! The nodes: what their GpuNodes report, and whether somebody still serves them.

use std::collections::{BTreeMap, BTreeSet};

use tranche_api::GpuNode;
use tranche_api::gpu_node::GpuNodeStatus;
use tranche_api::names::taint;
use tranche_api::withheld::{WithheldGpu, reason};

use super::checks::{finding, good};
use super::{Finding, Outcome};
use crate::facts::Facts;
use crate::serving::{self, Existing};
use crate::snapshot::Resource;

const CHECK: &str = "nodes";

pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    let snapshot = &facts.snapshot;
    if snapshot.gap(Resource::GpuNodes).is_some() {
        return Vec::new();
    }
    let held = serving::held(&snapshot.claims);
    let mut findings = without_description(facts, &held);
    if snapshot.gpu_nodes.is_empty() {
        findings.push(finding(
            CHECK,
            Outcome::Error,
            "there are no GpuNodes: no plugin has described its node",
            "label the GPU nodes as nodePlugin.affinity of the chart requires, and look at the log of the node plugin",
        ));
    }
    let plugins = plugins(facts);
    let read = |resource| snapshot.gap(resource).is_none();
    let existing = Existing {
        nodes: (snapshot.asked.contains(&Resource::Nodes) && read(Resource::Nodes))
            .then_some(snapshot.nodes.as_slice()),
        slices: read(Resource::ResourceSlices).then_some(snapshot.slices.as_slice()),
        plugins: plugins.as_ref(),
    };
    for node in &snapshot.gpu_nodes {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let faults = serving::faults(node, existing, held.get(name));
        findings.extend(faults.into_iter().map(|fault| {
            let outcome = if fault.is_intended {
                Outcome::Warning
            } else {
                Outcome::Error
            };
            let message = format!("{name}: {}", fault.message);
            finding(CHECK, outcome, message, fault.way_out)
        }));
        findings.extend(described(node));
    }
    findings.extend(cordoned(facts));
    if findings.is_empty() {
        let count = snapshot.gpu_nodes.len();
        findings.push(good(
            CHECK,
            format!(
                "all {count} have their driver and their plugin, and all their GPUs are offered"
            ),
        ));
    }
    findings
}

/// The nodes with a pod of the plugin; `None` where pods cannot be listed.
fn plugins(facts: &Facts) -> Option<BTreeMap<String, bool>> {
    let components = facts.components.as_ref().ok()?.iter();
    let plugins = components.filter(|it| it.component == "node-plugin");
    Some(plugins.map(|it| (it.node.clone(), it.is_ready)).collect())
}

/// Nodes that should have a GpuNode and have none.
fn without_description(facts: &Facts, held: &BTreeMap<&str, BTreeSet<String>>) -> Vec<Finding> {
    let snapshot = &facts.snapshot;
    let names = snapshot.gpu_nodes.iter();
    let described: BTreeSet<&str> = names.filter_map(|it| it.metadata.name.as_deref()).collect();
    let mut findings = Vec::new();
    for (node, claims) in held.iter().filter(|(node, _)| !described.contains(*node)) {
        findings.push(finding(
            CHECK,
            Outcome::Error,
            format!(
                "{node}: it has no GpuNode, and {}; their pods can neither start nor end",
                serving::held_there(claims)
            ),
            "the node's plugin writes it: see that its pod runs there, and its log; if the node is gone, delete the pods",
        ));
    }
    for node in &snapshot.nodes {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let is_known = described.contains(name) || held.contains_key(name);
        if serving::should_have_plugin(node) && !is_known {
            findings.push(finding(
                CHECK,
                Outcome::Warning,
                format!("{name}: its labels say that it has an NVIDIA GPU, and it has no GpuNode"),
                "see that a pod of the node plugin runs there, and its log; the label gpu.tranche.dev/node-plugin=false says that it shall not",
            ));
        }
    }
    findings
}

/// What a GpuNode reports: driver, CDI files, competing drivers, journals, slices, GPUs that are not offered.
fn described(node: &GpuNode) -> Vec<Finding> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let Some(status) = &node.status else {
        return vec![finding(
            CHECK,
            Outcome::Error,
            format!("{name}: its plugin has not described it yet"),
            "look at the log of its node plugin",
        )];
    };
    let mut findings = conditions(name, status);
    let Some(published) = &status.published else {
        findings.push(finding(
            CHECK,
            Outcome::Error,
            format!("{name}: the controller has not published its GPUs"),
            "look at the log of the controller",
        ));
        return findings;
    };
    if !published.problem.is_empty() {
        let message = format!("{name}: its slices are not correct");
        findings.push(finding(
            CHECK,
            Outcome::Error,
            message,
            published.problem.clone(),
        ));
    }
    findings.extend(published.withheld.iter().map(|it| withheld(name, it)));
    findings
}

fn conditions(name: &str, status: &GpuNodeStatus) -> Vec<Finding> {
    let failed = status.conditions.iter().filter(|it| it.status == "False");
    let findings = failed.map(|condition| {
        let outcome = match condition.type_.as_str() {
            // Each GPU has its own line.
            tranche_api::conditions::ALL_OFFERED => Outcome::Warning,
            _ => Outcome::Error,
        };
        let message = format!(
            "{name}: {} is False ({})",
            condition.type_, condition.reason
        );
        finding(CHECK, outcome, message, condition.message.clone())
    });
    let faults = status.gpus.iter().filter_map(|gpu| {
        let mut conditions = gpu.conditions.iter();
        let healthy = conditions.find(|it| it.type_ == tranche_api::conditions::HEALTHY)?;
        let message = format!("{name}: {} has a fault ({})", gpu.uuid, healthy.reason);
        let is_faulty = healthy.status == "False";
        is_faulty.then(|| finding(CHECK, Outcome::Error, message, healthy.message.clone()))
    });
    findings.chain(faults).collect()
}

fn withheld(node: &str, it: &WithheldGpu) -> Finding {
    let tiers: Vec<_> = it.tiers.iter().map(|tier| tier.as_str()).collect();
    let what = if tiers.is_empty() {
        "all tiers".to_owned()
    } else {
        tiers.join(", ")
    };
    // A GPU that nobody can use is a fault, unless another system serves it.
    let is_elsewhere = matches!(
        it.reason.as_str(),
        reason::OTHER_PROVIDER | reason::VGPU_HOST
    );
    let outcome = if tiers.is_empty() && !is_elsewhere {
        Outcome::Error
    } else {
        Outcome::Warning
    };
    finding(
        CHECK,
        outcome,
        format!(
            "{node}: {} is not offered in {what} ({})",
            it.gpu, it.reason
        ),
        it.message.clone(),
    )
}

/// The pools that an administrator cordoned and may have forgotten.
fn cordoned(facts: &Facts) -> Vec<Finding> {
    let mut targets: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for rule in &facts.rules {
        if rule.spec.taint.key != taint::CORDONED {
            continue;
        }
        let Some(target) = crate::cordon::target_of(rule) else {
            continue;
        };
        let name = rule.metadata.name.as_deref().unwrap_or_default();
        targets.entry(target).or_default().push(name);
    }
    let findings = targets.into_iter().map(|(target, rules)| {
        finding(
            CHECK,
            Outcome::Warning,
            format!("{target} is cordoned by DeviceTaintRule {}", rules[0]),
            format!("kubectl tranche uncordon {target}"),
        )
    });
    findings.collect()
}
