//! What a pod's own status and its node say, before any question of devices: containers that do not start, a pod that does not end,
//! a node whose GPUs nobody serves, containers that name no claim.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod};
use tranche_api::conditions::DRIVER_READY;
use tranche_api::names::{DRIVER, own_node};

use super::facts::{Facts, Source, sources};
use crate::pods;
use crate::serving::{self, Existing};
use crate::snapshot::Resource;

/// The state of a pod, or of a claim's node.
#[derive(Debug, Default)]
pub(super) struct State {
    /// A line each; empty where all is well.
    pub(super) lines: Vec<String>,
    /// Whether a container cannot start.
    pub(super) is_stopped: bool,
    /// Whether the pod is being deleted.
    pub(super) is_ending: bool,
    /// Whether it should have ended.
    pub(super) is_late: bool,
}

impl State {
    pub(super) fn of(facts: &Facts) -> Self {
        let mut state = Self::default();
        let placed = facts.pod.as_ref().filter(|pod| pods::is_placed(pod));
        if let Some(pod) = placed {
            state.read(pod, facts);
        }
        for node in own_nodes(facts) {
            let faults = node_faults(facts, &node);
            let lines = faults.into_iter().map(|it| format!("node {node}: {it}"));
            state.lines.extend(lines);
        }
        if let Some(pod) = &facts.pod {
            state.lines.extend(unnamed(pod));
        }
        state
    }

    fn read(&mut self, pod: &Pod, facts: &Facts) {
        let stopped = pods::stopped(pod);
        for it in &stopped {
            self.lines.push(it.text());
            self.lines.extend(it.way_out().map(str::to_owned));
        }
        self.is_stopped = stopped.iter().any(|it| !it.is_of_program());
        let claims = facts.own_claims();
        let mut ours = serving::of_ours(claims.iter().copied());
        let is_unprepared = ours.any(|it| !serving::is_prepared(it));
        if let Some(since) = pods::slow(pod, facts.now).filter(|_| is_unprepared) {
            self.is_stopped = true;
            self.lines.push(format!(
                "it waits since {since} for its node to prepare its claims"
            ));
        }
        self.is_ending = pod.metadata.deletion_timestamp.is_some();
        if let Some(since) = pods::late(pod, facts.now) {
            self.is_late = true;
            self.lines.push(format!(
                "it should have ended at {since}: its node has not released its devices or its volumes"
            ));
        }
        if let Some(warning) = &facts.warning {
            self.lines.push(format!("the newest warning: {warning}"));
        }
    }
}

/// The nodes on which the claims of the pod or claim have devices of ours.
fn own_nodes(facts: &Facts) -> BTreeSet<String> {
    let mut nodes = BTreeSet::new();
    for claim in facts.own_claims() {
        let allocation = claim.status.as_ref().and_then(|it| it.allocation.as_ref());
        let results = allocation.and_then(|it| it.devices.as_ref()?.results.as_ref());
        let ours = results
            .into_iter()
            .flatten()
            .filter(|it| it.driver == DRIVER);
        nodes.extend(ours.filter_map(|it| own_node(&it.pool)).map(str::to_owned));
    }
    nodes
}

/// Why the GPUs of a node cannot be used, a line each.
pub(super) fn node_faults(facts: &Facts, node: &str) -> Vec<String> {
    let mut objects = facts.gpu_nodes.iter();
    let Some(object) = objects.find(|it| it.metadata.name.as_deref() == Some(node)) else {
        return Vec::new();
    };
    let is_read = |resource| !facts.unread.contains(&resource);
    let existing = Existing {
        nodes: is_read(Resource::Nodes).then_some(facts.nodes.as_slice()),
        slices: is_read(Resource::ResourceSlices).then_some(facts.slices.as_slice()),
        plugins: facts.plugins.as_ref(),
    };
    let held = serving::held(&facts.claims);
    let faults = serving::faults(object, existing, held.get(node));
    let mut lines: Vec<String> = faults
        .into_iter()
        .map(|it| format!("{} ({})", it.message, it.way_out))
        .collect();
    let conditions = object.status.iter().flat_map(|it| &it.conditions);
    let mut failed = conditions.filter(|it| it.type_ == DRIVER_READY && it.status == "False");
    lines.extend(failed.next().map(|it| it.message.clone()));
    lines
}

/// The claims that no container names, and the containers that name no claim: a container has only the devices of the claims in its
/// `resources.claims`.
fn unnamed(pod: &Pod) -> Vec<String> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let init = spec.init_containers.iter().flatten();
    let containers: Vec<&Container> = init.chain(&spec.containers).collect();
    // The scheduler says which containers have the devices of extended resources.
    let by_claim = |name: &str| {
        let mut claims = spec.resource_claims.iter().flatten();
        claims.any(|it| it.name == name)
    };
    let claims: BTreeSet<&str> = sources(pod)
        .into_iter()
        .filter(|(name, source)| !matches!(source, Source::Nothing) && by_claim(name))
        .map(|(name, _)| name)
        .collect();
    if claims.is_empty() || containers.is_empty() {
        return Vec::new();
    }
    let named = |container: &Container| -> BTreeSet<String> {
        let resources = container.resources.as_ref();
        let claims = resources.and_then(|it| it.claims.as_ref());
        claims
            .into_iter()
            .flatten()
            .map(|it| it.name.clone())
            .collect()
    };
    let all: BTreeSet<String> = containers.iter().flat_map(|it| named(it)).collect();
    let mut lines: Vec<String> = claims
        .iter()
        .filter(|claim| !all.contains(**claim))
        .map(|claim| {
            format!(
                "no container names the claim {claim} in its resources.claims, so that none has its devices"
            )
        })
        .collect();
    if lines.is_empty() {
        let without = containers.iter().filter(|it| named(it).is_empty());
        lines.extend(without.map(|it| {
            format!(
                "container {} names no claim in its resources.claims, so that it has no devices",
                it.name
            )
        }));
    }
    lines
}
