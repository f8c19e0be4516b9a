//! What was read of a pod or claim and of its cluster.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use strsim::levenshtein;
use tranche_api::GpuNode;

use crate::pods;
use crate::snapshot::Resource;

/// The object to explain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Pod(String),
    Claim(String),
}

impl Subject {
    /// `pod` or `claim`.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Pod(_) => "pod",
            Self::Claim(_) => "claim",
        }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Pod(name) | Self::Claim(name) => name,
        }
    }
}

/// No object has the given name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no {kind} {name} in namespace {namespace}{nearest}: check the name and --namespace"
)]
pub struct NotFound {
    /// In words.
    pub kind: &'static str,
    pub name: String,
    /// Where it was searched.
    pub namespace: String,
    /// A similar name that exists, as a part of the sentence.
    pub nearest: String,
}

#[derive(Clone, Debug)]
pub struct Facts {
    /// The object to explain.
    pub subject: Subject,
    pub namespace: String,
    /// The pod; for a claim, the pod that waits for it, if there is one.
    pub pod: Option<Pod>,
    /// All claims of the cluster.
    pub claims: Vec<ResourceClaim>,
    /// The claim that the scheduler looks for in place of the pod's extended resources.
    pub extended: Option<ResourceClaim>,
    /// The names of the namespace's ResourceClaimTemplates; `None` if they could not be read.
    pub templates: Option<BTreeSet<String>>,
    /// All slices of all drivers, with the taints of DeviceTaintRules.
    pub slices: Vec<ResourceSlice>,
    /// All DeviceClasses; `None` in [`Facts::gaps`] if they could not be read.
    pub classes: Vec<DeviceClass>,
    /// The nodes; without labels and taints if they could not be read.
    pub nodes: Vec<Node>,
    pub quotas: Vec<ResourceQuota>,
    pub rules: Vec<DeviceTaintRule>,
    pub gpu_nodes: Vec<GpuNode>,
    /// The nodes with a pod of the node plugin, and whether it is ready; `None` where the caller may not list these pods.
    pub plugins: Option<BTreeMap<String, bool>>,
    /// The newest warning about the pod, if it does not run or is to end.
    pub warning: Option<String>,
    /// When the facts were read.
    pub now: Timestamp,
    /// What could not be read.
    pub unread: BTreeSet<Resource>,
    /// What could not be read, a line each.
    pub gaps: Vec<String>,
}

/// `namespace/name`.
pub(super) fn full_name(claim: &ResourceClaim) -> String {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    format!("{namespace}/{name}")
}

/// Where a claim of a pod comes from.
pub(super) enum Source<'a> {
    /// The name of a claim.
    Named(&'a str),
    /// A template, and the claim that was made from it; `None` while there is no claim.
    Template(&'a str, Option<&'a str>),
    /// The template needs no claim.
    Nothing,
}

/// A pod's claims: their name in the pod, and where they come from.
pub(super) fn sources(pod: &Pod) -> Vec<(&str, Source<'_>)> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.resource_claim_statuses.as_ref());
    let claims = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.resource_claims.as_ref());
    let sources = claims.into_iter().flatten().filter_map(|claim| {
        let made = statuses
            .into_iter()
            .flatten()
            .find(|it| it.name == claim.name);
        let source = match (
            &claim.resource_claim_name,
            &claim.resource_claim_template_name,
        ) {
            (Some(name), _) => Source::Named(name),
            (None, Some(template)) => match made {
                Some(made) => match &made.resource_claim_name {
                    Some(name) => Source::Template(template, Some(name)),
                    None => Source::Nothing,
                },
                None => Source::Template(template, None),
            },
            (None, None) => return None,
        };
        Some((claim.name.as_str(), source))
    });
    let extended = pod
        .status
        .as_ref()
        .and_then(|it| it.extended_resource_claim_status.as_ref())
        .map(|it| {
            let name = it.resource_claim_name.as_str();
            ("extended resources", Source::Named(name))
        });
    sources.chain(extended).collect()
}

impl Facts {
    pub(super) fn sources(&self) -> Vec<(&str, Source<'_>)> {
        self.pod.as_ref().map(self::sources).unwrap_or_default()
    }

    /// A claim of the namespace.
    pub(super) fn claim(&self, name: &str) -> Option<&ResourceClaim> {
        self.claims.iter().find(|claim| {
            claim.metadata.namespace.as_ref() == Some(&self.namespace)
                && claim.metadata.name.as_deref() == Some(name)
        })
    }

    /// The pod's claims, or the claim.
    pub(super) fn own_claims(&self) -> Vec<&ResourceClaim> {
        if let (Subject::Claim(name), None) = (&self.subject, &self.pod) {
            return self.claim(name).into_iter().collect();
        }
        let names = self
            .sources()
            .into_iter()
            .filter_map(|(_, source)| match source {
                Source::Named(name) | Source::Template(_, Some(name)) => Some(name),
                Source::Template(_, None) | Source::Nothing => None,
            });
        names.filter_map(|name| self.claim(name)).collect()
    }

    /// The claims that are not allocated, in the order of the scheduler.
    pub(super) fn wanted(&self) -> Vec<&ResourceClaim> {
        let own = self.own_claims().into_iter().chain(&self.extended);
        own.filter(|claim| !is_allocated(claim)).collect()
    }

    /// Whether the pod has a node.
    pub(super) fn is_placed(&self) -> bool {
        self.pod.as_ref().is_some_and(pods::is_placed)
    }

    /// The scheduler's own message.
    pub(super) fn scheduler(&self) -> Option<String> {
        let message = pods::unscheduled(self.pod.as_ref()?)?;
        (!message.is_empty()).then(|| message.to_owned())
    }
}

pub(super) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .is_some_and(|status| status.allocation.is_some())
}

/// `; there is NAME`, with the existing name that is most similar to `name`; empty if none is similar.
pub(super) fn there_is<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    let near = names.map(|other| (levenshtein(name, other), other)).min();
    near.filter(|(distance, _)| *distance <= 2.max(name.len() / 4))
        .map(|(_, other)| format!("; there is {other}"))
        .unwrap_or_default()
}
