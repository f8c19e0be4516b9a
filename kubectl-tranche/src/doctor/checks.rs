//! The checks.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::Device;
use tranche_api::Tier;
use tranche_api::names::{DRIVER, capacity};
use tranche_driver::claim::DeviceName;
use tranche_driver::slices::FeatureGate;

use super::{Finding, Outcome};
use crate::facts::Facts;
use crate::snapshot::Cause;
use crate::usage::notes;

/// The oldest Kubernetes whose default features suffice for the slices.
const OLDEST_MINOR: u32 = 36;

pub(super) fn all(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.push(version(facts));
    findings.push(dra(facts));
    findings.extend(gates(facts));
    findings.extend(reads(facts));
    findings.extend(rights(facts));
    findings.extend(super::components::check(facts));
    findings.extend(super::nodes::check(facts));
    findings.extend(super::pods::check(facts));
    findings.extend(dropped(facts));
    findings.extend(usage(facts));
    findings
}

pub(super) fn good(check: &'static str, message: impl Into<String>) -> Finding {
    Finding {
        check,
        outcome: Outcome::Good,
        message: message.into(),
        way_out: String::new(),
    }
}

pub(super) fn finding(
    check: &'static str,
    outcome: Outcome,
    message: impl Into<String>,
    way_out: impl Into<String>,
) -> Finding {
    Finding {
        check,
        outcome,
        message: message.into(),
        way_out: way_out.into(),
    }
}

pub(super) fn unknown(check: &'static str, why: &str) -> Finding {
    finding(check, Outcome::Unknown, why, "")
}

/// `v1.37.1`, `v1.36.3-gke.100`, `v1.37+`.
fn minor(version: &str) -> Option<u32> {
    let (major, rest) = version.strip_prefix('v')?.split_once('.')?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().filter(|_| major == "1")
}

fn version(facts: &Facts) -> Finding {
    const CHECK: &str = "Kubernetes version";
    let version = match &facts.version {
        Ok(version) => version,
        Err(why) => return unknown(CHECK, why),
    };
    match minor(version) {
        Some(minor) if minor < OLDEST_MINOR => finding(
            CHECK,
            Outcome::Error,
            format!("{version} lacks the dynamic resource allocation that Tranche needs"),
            format!("update the cluster to Kubernetes 1.{OLDEST_MINOR} or later"),
        ),
        Some(_) => good(CHECK, version.clone()),
        None => unknown(
            CHECK,
            &format!("{version} is not a version of Kubernetes that this release can read"),
        ),
    }
}

fn dra(facts: &Facts) -> Finding {
    const CHECK: &str = "API resource.k8s.io/v1";
    match &facts.dra_versions {
        Ok(versions) if versions.iter().any(|it| it == "v1") => good(CHECK, "served"),
        Ok(versions) => finding(
            CHECK,
            Outcome::Error,
            if versions.is_empty() {
                "not served".to_owned()
            } else {
                format!("not served; the API server has {}", versions.join(", "))
            },
            format!(
                "update the cluster to Kubernetes 1.{OLDEST_MINOR} or later, and do not turn the API off with --runtime-config"
            ),
        ),
        Err(why) => unknown(CHECK, why),
    }
}

fn gates(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "feature gates";
    let gates = match &facts.gates {
        Ok(gates) => gates,
        Err(why) => return vec![unknown(CHECK, why)],
    };
    let needed = [
        FeatureGate::ConsumableCapacity,
        FeatureGate::PartitionableDevices,
        FeatureGate::DeviceTaints,
    ];
    let off: Vec<_> = needed
        .iter()
        .filter(|gate| gates.get(gate.as_str()) == Some(&false))
        .map(|gate| gate.as_str())
        .collect();
    if off.is_empty() {
        return vec![good(CHECK, "no gate that Tranche needs is off")];
    }
    vec![finding(
        CHECK,
        Outcome::Error,
        format!("off at the API server: {}", off.join(", ")),
        "turn them on with --feature-gates at kube-apiserver, kube-scheduler, kube-controller-manager and the kubelets",
    )]
}

/// The objects that could not be read.
fn reads(facts: &Facts) -> Vec<Finding> {
    let gaps = facts.snapshot.gaps.iter().map(|gap| {
        let outcome = match gap.cause {
            Cause::NotServed | Cause::Unreachable | Cause::Unauthenticated => Outcome::Error,
            Cause::Forbidden | Cause::Unreadable | Cause::Refused => Outcome::Warning,
        };
        finding("objects", outcome, gap.message.clone(), "")
    });
    gaps.collect()
}

fn rights(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "your rights";
    if facts.access.is_empty() {
        return vec![unknown(
            CHECK,
            "the API server does not say what you may do",
        )];
    }
    let missing: Vec<String> = facts
        .access
        .iter()
        .filter(|it| !it.is_allowed)
        .map(|it| match it.namespace.as_str() {
            "" => format!("{} {}", it.verb, it.resource),
            namespace => format!("{} {} in {namespace}", it.verb, it.resource),
        })
        .collect();
    if missing.is_empty() {
        return vec![good(CHECK, "all commands work")];
    }
    vec![finding(
        CHECK,
        Outcome::Warning,
        format!("you may not {}", missing.join(", ")),
        "commands leave out what needs these rights; ask an administrator for a ClusterRole with them",
    )]
}

/// The fields of slices and claims that an old API server, or one with a feature gate off, dropped.
fn dropped(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "dropped fields";
    let snapshot = &facts.snapshot;
    let devices = snapshot
        .slices
        .iter()
        .flat_map(|it| it.spec.devices.iter().flatten());
    let mut lost: BTreeSet<(&str, FeatureGate)> = BTreeSet::new();
    for device in devices {
        lost.extend(lost_of_device(device));
    }
    let mut findings: Vec<Finding> = lost
        .into_iter()
        .map(|(field, gate)| {
            finding(
                CHECK,
                Outcome::Error,
                format!("the API server dropped {field} of ResourceSlices"),
                format!("turn on its feature gate {gate}"),
            )
        })
        .collect();
    for claim in &snapshot.claims {
        let results = claim
            .status
            .as_ref()
            .and_then(|it| it.allocation.as_ref()?.devices.as_ref()?.results.as_ref());
        let unsized_share = results.into_iter().flatten().find(|it| {
            let name = it.device.parse::<DeviceName>();
            let needs_sizes = name.is_ok_and(|name| name.tier().has_shim());
            let sizes = it.consumed_capacity.as_ref();
            it.driver == DRIVER
                && it.admin_access != Some(true)
                && needs_sizes
                && sizes.is_none_or(|sizes| !sizes.contains_key(capacity::MEMORY))
        });
        if let Some(result) = unsized_share {
            let metadata = &claim.metadata;
            let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
            findings.push(finding(
                CHECK,
                Outcome::Error,
                format!(
                    "claim {}/{} has {} without a size: the API server dropped consumedCapacity",
                    namespace.unwrap_or_default(),
                    name.unwrap_or_default(),
                    result.device
                ),
                format!(
                    "turn on the feature gate {} and create the claim again",
                    FeatureGate::ConsumableCapacity
                ),
            ));
        }
    }
    if findings.is_empty() && !snapshot.slices.is_empty() {
        findings.push(good(CHECK, "none in slices and claims"));
    }
    findings
}

/// What is missing of the use of GPUs, and why. The tiers work without it.
fn usage(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "use of GPUs";
    const WAY_OUT: &str = "`top`, `cost` and `ui` show what is allocated without it; to have it, set usageApi.enabled of the chart, and \
        look at the logs of the usage API and of the nodes' plugins";
    let notes = notes(&facts.usage).into_iter();
    let mut findings: Vec<Finding> = notes
        .map(|line| finding(CHECK, Outcome::Warning, line, WAY_OUT))
        .collect();
    if findings.is_empty() {
        findings.push(good(CHECK, "every node reports it"));
    }
    findings
}

fn lost_of_device(device: &Device) -> Vec<(&'static str, FeatureGate)> {
    let Ok(name) = device.name.parse::<DeviceName>() else {
        return Vec::new();
    };
    let mut lost = Vec::new();
    if device
        .consumes_counters
        .as_deref()
        .unwrap_or_default()
        .is_empty()
    {
        lost.push(("consumesCounters", FeatureGate::PartitionableDevices));
    }
    let is_shared = name.tier().is_shared() && name.tier() != Tier::Partition;
    if is_shared && device.allow_multiple_allocations != Some(true) {
        lost.push(("allowMultipleAllocations", FeatureGate::ConsumableCapacity));
    }
    let memory = device
        .capacity
        .as_ref()
        .and_then(|it| it.get(capacity::MEMORY));
    if name.tier().has_shim() && memory.is_some_and(|it| it.request_policy.is_none()) {
        lost.push(("requestPolicy", FeatureGate::ConsumableCapacity));
    }
    lost
}
