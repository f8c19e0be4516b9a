//! What keeps a pod from every node or from one, apart from devices.

use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, ResourceQuota, Taint, Toleration};
use k8s_openapi::api::resource::v1::{DeviceRequest, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Wire;
use tranche_driver::extended_resources;
use tranche_scheduler_rules::{selector_matches, term_matches};

use super::facts::{self, Facts, Source, Subject};
use crate::snapshot::Resource;

/// The most pods for which a claim can be reserved.
const MOST_CONSUMERS: usize = 256;

/// What keeps the pod or the claim from every node, a line each.
pub(super) fn obstacles(facts: &Facts) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(pod) = &facts.pod {
        let spec = pod.spec.as_ref();
        let gates = spec.and_then(|spec| spec.scheduling_gates.as_ref());
        for gate in gates.into_iter().flatten() {
            lines.push(format!(
                "the pod has the scheduling gate {}: whoever set it must remove it",
                gate.name
            ));
        }
    }
    lines.extend(unserved(facts));
    for (own, source) in facts.sources() {
        match source {
            Source::Named(name) if facts.claim(name).is_none() => {
                lines.push(missing(facts, "ResourceClaim", name));
            }
            Source::Template(template, Some(name)) if facts.claim(name).is_none() => {
                lines.push(format!(
                    "the claim {name}, made of the template {template}, does not exist any more: delete the pod"
                ));
            }
            Source::Template(template, None) => {
                lines.push(without_claim(facts, own, template));
            }
            _ => {}
        }
    }
    for claim in facts.own_claims() {
        lines.extend(of_claim(facts, claim));
    }
    lines
}

/// Extended resources that neither a class nor a node's device plugin serves: the scheduler finds a node for them nowhere.
fn unserved(facts: &Facts) -> Vec<String> {
    let is_known = |resource| !facts.unread.contains(&resource);
    let Some(pod) = &facts.pod else {
        return Vec::new();
    };
    if !is_known(Resource::Nodes) || !is_known(Resource::DeviceClasses) || facts.is_placed() {
        return Vec::new();
    }
    let has = |node: &Node, name: &str| {
        let status = node.status.as_ref();
        let allocatable = status.and_then(|it| it.allocatable.as_ref());
        allocatable.is_some_and(|it| it.get(name).is_some_and(is_positive))
    };
    let names = extended_resources::names(pod).into_iter();
    names
        .filter(|name| is_requested(pod, name))
        .filter(|name| extended_resources::class_of(name, &facts.classes).is_none())
        .filter(|name| !facts.nodes.iter().any(|node| has(node, name)))
        .map(|name| {
            let way_out = match name.strip_prefix("nvidia.com/") {
                Some("gpu") => "deviceClasses.extendedResources.gpu of Tranche's chart makes one".to_owned(),
                Some(mig) if mig.starts_with("mig-") => format!(
                    "deviceClasses.extendedResources.profiles of Tranche's chart makes one if it has {}",
                    &mig["mig-".len()..]
                ),
                _ => "make one with this extendedResourceName, or ask for a claim".to_owned(),
            };
            format!("no DeviceClass and no device plugin serves {name}: {way_out}")
        })
        .collect()
}

fn is_positive(amount: &Wire) -> bool {
    tranche_api::Quantity::try_from(amount).is_ok_and(tranche_api::Quantity::is_positive)
}

fn is_requested(pod: &Pod, name: &str) -> bool {
    let spec = pod.spec.iter();
    let mut containers = spec.flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    });
    containers.any(|it| {
        let requests = it.resources.as_ref().and_then(|it| it.requests.as_ref());
        requests.is_some_and(|it| it.get(name).is_some_and(is_positive))
    })
}

fn missing(facts: &Facts, kind: &str, name: &str) -> String {
    let claims = facts
        .claims
        .iter()
        .filter(|claim| claim.metadata.namespace.as_ref() == Some(&facts.namespace));
    let names = claims.filter_map(|claim| claim.metadata.name.as_deref());
    format!(
        "the {kind} {name} does not exist in namespace {}{}",
        facts.namespace,
        facts::there_is(name, names)
    )
}

/// Why no claim has been made from a template.
fn without_claim(facts: &Facts, own: &str, template: &str) -> String {
    if let Some(templates) = &facts.templates
        && !templates.contains(template)
    {
        let near = facts::there_is(template, templates.iter().map(String::as_str));
        return format!(
            "the ResourceClaimTemplate {template} does not exist in namespace {}{near}",
            facts.namespace
        );
    }
    let quotas: Vec<String> = facts.quotas.iter().filter_map(exhausted).collect();
    if quotas.is_empty() {
        return format!("no claim was made yet from the template {template} for {own}");
    }
    format!(
        "no claim was made from the template {template} for {own}: {}",
        quotas.join("; ")
    )
}

/// The message of a quota that has no room for a claim.
fn exhausted(quota: &ResourceQuota) -> Option<String> {
    let status = quota.status.as_ref()?;
    let (hard, used) = (status.hard.as_ref()?, status.used.as_ref()?);
    let devices = hard.iter().find_map(|(resource, most)| {
        let concerns = resource.contains("deviceclass.resource.k8s.io/")
            || resource == "count/resourceclaims.resource.k8s.io";
        let amount = |it: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| {
            tranche_api::Quantity::try_from(it).ok()
        };
        let used = used.get(resource)?;
        let full = amount(used)? >= amount(most)?;
        (concerns && full).then(|| format!("{resource}: {} of {} used", used.0, most.0))
    })?;
    let name = quota.metadata.name.as_deref().unwrap_or_default();
    Some(format!("the quota {name} is used up ({devices})"))
}

/// What a claim of the pod lacks on every node.
fn of_claim(facts: &Facts, claim: &ResourceClaim) -> Vec<String> {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let mut lines = Vec::new();
    if claim.metadata.deletion_timestamp.is_some() {
        lines.push(format!("the claim {name} is being deleted"));
    }
    if facts::is_allocated(claim) {
        let status = claim.status.as_ref();
        let reserved = status
            .and_then(|status| status.reserved_for.as_deref())
            .unwrap_or_default();
        let pod = facts
            .pod
            .as_ref()
            .and_then(|pod| pod.metadata.uid.as_deref());
        let is_ours = reserved.iter().any(|it| Some(it.uid.as_str()) == pod);
        if reserved.len() >= MOST_CONSUMERS && !is_ours {
            lines.push(format!(
                "the claim {name} is in use by {MOST_CONSUMERS} pods, the most that are possible"
            ));
        }
        return lines;
    }
    let known = |class: &str| {
        let mut classes = facts.classes.iter();
        classes.any(|it| it.metadata.name.as_deref() == Some(class))
    };
    let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
    for request in devices.iter().flat_map(|it| it.requests.iter().flatten()) {
        for class in classes(request) {
            if !known(class) {
                let names = facts
                    .classes
                    .iter()
                    .filter_map(|it| it.metadata.name.as_deref());
                lines.push(format!(
                    "the DeviceClass {class} of request {} does not exist{}",
                    request.name,
                    facts::there_is(class, names)
                ));
            }
        }
    }
    if facts.pod.is_none() && matches!(facts.subject, Subject::Claim(_)) {
        lines.push(format!(
            "no pod that waits uses the claim {name}: the scheduler allocates it for the first that does"
        ));
    }
    lines
}

fn classes(request: &DeviceRequest) -> Vec<&str> {
    if let Some(exactly) = &request.exactly {
        return vec![&exactly.device_class_name];
    }
    let alternatives = request.first_available.iter().flatten();
    alternatives
        .map(|it| it.device_class_name.as_str())
        .collect()
}

/// What keeps the pod off one node: the node's taints, the pod's selectors, a claim that is allocated elsewhere.
pub(super) fn node_obstacles(facts: &Facts, node: &Node) -> Vec<String> {
    let mut lines = Vec::new();
    let pod = facts.pod.as_ref().and_then(|pod| pod.spec.as_ref());
    let tolerations = pod
        .and_then(|pod| pod.tolerations.as_deref())
        .unwrap_or_default();
    let spec = node.spec.as_ref();
    let unschedulable = Taint {
        key: "node.kubernetes.io/unschedulable".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    let is_cordoned = spec.is_some_and(|spec| spec.unschedulable == Some(true));
    if is_cordoned && !tolerations.iter().any(|it| tolerates(it, &unschedulable)) {
        lines.push("the node is cordoned".to_owned());
    }
    let taints = spec
        .and_then(|spec| spec.taints.as_deref())
        .unwrap_or_default();
    let prevents = |taint: &&Taint| {
        let effect = taint.effect.as_str();
        matches!(effect, "NoSchedule" | "NoExecute")
            && !(is_cordoned && taint.key == unschedulable.key)
            && !tolerations.iter().any(|it| tolerates(it, taint))
    };
    for taint in taints.iter().filter(prevents) {
        let value = taint
            .value
            .as_deref()
            .filter(|value| !value.is_empty())
            .map(|value| format!("={value}"))
            .unwrap_or_default();
        lines.push(format!(
            "the node's taint {}{value}:{}",
            taint.key, taint.effect
        ));
    }
    if let Some(pod) = pod {
        lines.extend(unselected(pod, node));
    }
    for claim in facts.own_claims() {
        let allocation = claim.status.as_ref().and_then(|it| it.allocation.as_ref());
        let selector = allocation.and_then(|allocation| allocation.node_selector.as_ref());
        if selector.is_some_and(|selector| !selector_matches(selector, node)) {
            let name = claim.metadata.name.as_deref().unwrap_or_default();
            lines.push(format!("the claim {name} is allocated on another node"));
        }
    }
    lines
}

fn unselected(pod: &PodSpec, node: &Node) -> Option<String> {
    let labels = node.metadata.labels.as_ref();
    let own = |key: &String| labels.and_then(|labels| labels.get(key));
    let mut wanted = pod.node_selector.iter().flatten();
    if let Some((key, value)) = wanted.find(|(key, value)| own(key) != Some(value)) {
        return Some(format!("the pod's nodeSelector {key}={value}"));
    }
    let affinity = pod.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    let matches = required
        .node_selector_terms
        .iter()
        .any(|term| term_matches(term, node));
    (!matches).then(|| "the pod's node affinity".to_owned())
}

/// The rule of the scheduler's TaintToleration.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    if given(&toleration.effect).is_some_and(|effect| effect != taint.effect) {
        return false;
    }
    if given(&toleration.key).is_some_and(|key| key != taint.key) {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => given(&toleration.value) == given(&taint.value),
        "Exists" => true,
        _ => false,
    }
}
