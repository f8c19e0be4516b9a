//! `explain`: why a pod or claim waits, by the rules of kube-scheduler, and which devices a running one has.
//!
//! ```text
//!  read ─► Facts ─► pod: what keeps the pod from every node, or from one ──┐
//!          (I/O)    tranche_scheduler_rules: what keeps it from devices ─┴─► Explanation ─► words (table)
//! ```

mod facts;
mod pod;
mod read;
mod state;
mod words;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::Serialize;
use tranche_scheduler_rules::{
    Cluster as Allocator, Granted, MOST_STEPS, PoolProblem, Problem, Release, Report,
    RequestReport, Selectors, Verdict, name_taint_rules,
};

use crate::model::{ClaimDevice, Model};

use state::State;

pub use facts::{Facts, NotFound, Subject};
pub use read::{Error, read};

/// The most nodes for which the command searches claims whose release would help.
const MOST_NODES_WITH_RELEASES: usize = 16;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// `pod` or `claim`.
    pub kind: &'static str,
    pub namespace: String,
    pub name: String,
    /// In one word.
    pub verdict: Conclusion,
    /// Whether something could not be read, so that the verdict may be wrong.
    pub is_partial: bool,
    /// The state of its containers and of its node, where something is wrong, a line each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub state: Vec<String>,
    /// What stands in the way on every node, a line each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub obstacles: Vec<String>,
    /// What the scheduler says of the pod itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub has: Vec<Has>,
    /// The claims that are still to be allocated, `namespace/name`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<String>,
    /// The nodes, seen from these claims.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeExplanation>,
    /// Whose release makes it fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_fit_after: Option<WouldFit>,
    /// Whether each of its claims fits alone, though they do not fit together.
    pub fits_one_by_one: bool,
}

/// The verdict in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Conclusion {
    /// All claims are allocated.
    Allocated,
    /// All claims are allocated, and a container cannot start.
    Stopped,
    /// All claims are allocated, and the pod is being deleted.
    Ending,
    /// All claims are allocated, and the pod should have ended.
    Late,
    /// A node has the devices, and nothing that is known keeps the pod from it.
    Fits,
    /// No node has the devices, or something keeps the pod from every node.
    Waits,
    /// The scheduler stops with an error before it looks at the devices.
    Fails,
    /// The scheduler may place it, but this program cannot say.
    Unjudged,
}

/// A device that a claim has.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Has {
    pub claim: String,
    #[serde(flatten)]
    pub device: ClaimDevice,
    /// The other claims on the same GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<Neighbour>,
}

/// Another claim on the same GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Neighbour {
    /// `namespace/name`.
    pub claim: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
    /// Bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u64>,
    /// Whether it only observes (admin access): nothing limits what it uses.
    pub is_admin: bool,
}

/// What a node has for the claims of a pod.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeExplanation {
    pub node: String,
    /// What keeps the pod off the node, whatever devices it has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub obstacles: Vec<String>,
    /// Whether the node has the devices.
    pub has_devices: bool,
    /// What the scheduler would allocate, for each claim.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub would_get: Vec<Vec<Granted>>,
    /// Why there is no verdict about the devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Why nobody serves the node's GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<String>,
    /// Pools whose devices are not allocated at present.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolProblem>,
    /// Each request with every device.
    pub requests: Vec<RequestReport>,
}

/// Whose release makes it fit.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WouldFit {
    /// On which node.
    pub node: String,
    /// Which claims.
    #[serde(flatten)]
    pub release: Release,
    /// Whether nodes were left out of the search.
    pub is_bounded: bool,
}

/// Explains why the subject waits, or what it has. The model must come from the same objects.
#[must_use]
pub fn explain(facts: &Facts, model: &Model) -> Explanation {
    let wanted = facts.wanted();
    let mut obstacles = pod::obstacles(facts);
    let has = self::has(facts, model);
    let state = State::of(facts);
    let verdict = match &state {
        _ if !facts.is_placed() => Conclusion::Allocated,
        State { is_late: true, .. } => Conclusion::Late,
        State {
            is_ending: true, ..
        } => Conclusion::Ending,
        State {
            is_stopped: true, ..
        } => Conclusion::Stopped,
        _ => Conclusion::Allocated,
    };
    let mut explanation = Explanation {
        kind: facts.subject.kind(),
        namespace: facts.namespace.clone(),
        name: facts.subject.name().to_owned(),
        verdict,
        is_partial: !facts.gaps.is_empty(),
        state: state.lines,
        obstacles: Vec::new(),
        scheduler: facts.scheduler(),
        has,
        claims: wanted.iter().map(|claim| facts::full_name(claim)).collect(),
        nodes: Vec::new(),
        would_fit_after: None,
        fits_one_by_one: false,
    };
    if facts.is_placed() {
        return explanation;
    }
    if wanted.is_empty() && obstacles.is_empty() && facts.pod.is_none() {
        return explanation;
    }
    let selectors = Selectors::default();
    let claims: Vec<_> = facts.claims.iter().collect();
    let allocator = Allocator {
        slices: &facts.slices,
        classes: &facts.classes,
        claims: &claims,
        selectors: &selectors,
        most_steps: MOST_STEPS,
    };
    let mut judged = Vec::new();
    for node in &facts.nodes {
        let keeps_off = pod::node_obstacles(facts, node);
        // The scheduler runs the allocator only for nodes that pass its other filters.
        let mut report = allocator.explain(node, &wanted);
        name_taint_rules(&facts.rules, &mut report);
        judged.push((node, keeps_off, report));
    }
    explanation.verdict = self::conclusion(&mut obstacles, &judged);
    if explanation.verdict == Conclusion::Waits && obstacles.is_empty() {
        let open = judged
            .iter()
            .filter(|(_, keeps_off, _)| keeps_off.is_empty());
        let fits_alone = |claim: &&ResourceClaim| {
            let mut nodes = open.clone().take(MOST_NODES_WITH_RELEASES);
            nodes.any(|(node, _, _)| matches!(allocator.judge(node, &[*claim]), Verdict::Fits(_)))
        };
        explanation.fits_one_by_one = wanted.len() > 1 && wanted.iter().all(fits_alone);
        let mut fewest: Option<(String, Release)> = None;
        for (node, _, report) in open.clone().take(MOST_NODES_WITH_RELEASES) {
            let best = fewest.as_ref();
            let fewer_than = best.map_or(usize::MAX, |(_, release)| release.claims.len());
            if let Some(release) = allocator.releases(node, &wanted, report, fewer_than) {
                let node = node.metadata.name.clone().unwrap_or_default();
                fewest = Some((node, release));
            }
        }
        explanation.would_fit_after = fewest.map(|(node, release)| WouldFit {
            node,
            release,
            is_bounded: open.count() > MOST_NODES_WITH_RELEASES,
        });
    }
    explanation.obstacles = obstacles;
    explanation.nodes = judged
        .into_iter()
        .map(|(node, obstacles, report)| {
            let name = node.metadata.name.as_deref().unwrap_or_default();
            let faults = state::node_faults(facts, name);
            NodeExplanation::new(node, obstacles, faults, report)
        })
        .collect();
    explanation
}

type Judged<'a> = (&'a k8s_openapi::api::core::v1::Node, Vec<String>, Report);

fn conclusion(obstacles: &mut Vec<String>, judged: &[Judged<'_>]) -> Conclusion {
    if !obstacles.is_empty() {
        return Conclusion::Waits;
    }
    if judged.is_empty() {
        obstacles.push("there is no node, or you may not list any".to_owned());
        return Conclusion::Waits;
    }
    let open = judged
        .iter()
        .filter(|(_, keeps_off, _)| keeps_off.is_empty());
    let mut problems: Vec<&Problem> = open
        .clone()
        .filter_map(|(_, _, report)| match &report.verdict {
            Verdict::Problem(problem) => Some(problem),
            _ => None,
        })
        .collect();
    // An error on one node ends the scheduling attempt on all nodes.
    problems.sort_by_key(|problem| matches!(problem, Problem::Unjudged(_)));
    match problems.first() {
        Some(Problem::Stops(why)) => {
            obstacles.push(format!("the scheduler stops with an error: {why}"));
            return Conclusion::Fails;
        }
        Some(Problem::Unjudged(why)) => {
            obstacles.push(format!("cannot judge: {why}"));
            return Conclusion::Unjudged;
        }
        None => {}
    }
    let fits = |(_, _, report): &&Judged<'_>| matches!(report.verdict, Verdict::Fits(_));
    if open.clone().any(|it| fits(&it)) {
        Conclusion::Fits
    } else {
        Conclusion::Waits
    }
}

impl NodeExplanation {
    fn new(
        node: &k8s_openapi::api::core::v1::Node,
        obstacles: Vec<String>,
        faults: Vec<String>,
        report: Report,
    ) -> Self {
        let has_devices = matches!(report.verdict, Verdict::Fits(_));
        let (would_get, problem) = match report.verdict {
            Verdict::Fits(granted) => (granted, None),
            Verdict::DoesNotFit => (Vec::new(), None),
            Verdict::Problem(problem) => (Vec::new(), Some(problem.to_string())),
        };
        Self {
            node: node.metadata.name.clone().unwrap_or_default(),
            obstacles,
            has_devices,
            would_get,
            problem,
            faults,
            pools: report.pools,
            requests: report.requests,
        }
    }
}

/// The devices of the claims, and the other claims on the same GPUs.
fn has(facts: &Facts, model: &Model) -> Vec<Has> {
    let mut result = Vec::new();
    for claim in facts.own_claims() {
        let (namespace, name) = (&claim.metadata.namespace, &claim.metadata.name);
        let known = model.claims.iter().find(|it| {
            Some(&it.namespace) == namespace.as_ref() && Some(&it.name) == name.as_ref()
        });
        let Some(known) = known else {
            continue;
        };
        for device in &known.devices {
            let gpu = model
                .gpus()
                .find(|(_, gpu)| Some(&gpu.uuid) == device.gpu_uuid.as_ref());
            let held = gpu.iter().flat_map(|(_, gpu)| &gpu.held);
            let tenants = held.flat_map(|held| &held.tenants);
            let others = tenants.filter(|tenant| tenant.uid != known.uid);
            result.push(Has {
                claim: known.name.clone(),
                device: device.clone(),
                neighbours: others
                    .map(|tenant| Neighbour {
                        claim: format!("{}/{}", tenant.namespace, tenant.claim),
                        pods: tenant.pods.clone(),
                        memory: tenant.device.memory,
                        cores: tenant.device.cores,
                        is_admin: tenant.device.is_admin,
                    })
                    .collect(),
            });
        }
    }
    result
}

#[cfg(test)]
mod tests;
