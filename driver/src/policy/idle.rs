//! The part of a policy about idle claims.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use tranche_api::gpu_node::Gpu;
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::{
    IdleAction, IdlePolicy, LEAST_AFTER_SECONDS, MOST_SECONDS, SharingPolicy,
};

use super::{PolicyError, PolicyProblem, matching, of, out_of_range, selector};

/// The part of a policy about idle claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleRule {
    /// A claim without a kernel for this long is idle.
    pub after: Duration,
    /// What happens to it then.
    pub action: Action,
}

/// What happens to an idle claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It is reported, with what its release would free.
    Report,
    /// It is reported, and evicted after a grace period in which it, or its owner, can react.
    Evict {
        /// The grace period.
        grace: Duration,
    },
}

impl IdleRule {
    /// The more patient of both, for a claim with devices of several GPUs.
    #[must_use]
    pub fn more_patient(self, other: Self) -> Self {
        let action = match (self.action, other.action) {
            (Action::Evict { grace: one }, Action::Evict { grace: two }) => Action::Evict {
                grace: one.max(two),
            },
            _ => Action::Report,
        };
        Self {
            after: self.after.max(other.after),
            action,
        }
    }
}

/// The rules for idle claims of one GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct IdleTerms {
    /// For holders in namespaces with these labels.
    namespaces: LabelSelector,
    terms: IdleRule,
}

impl IdleTerms {
    /// The rule for a claim in a namespace with these labels, if there is one.
    #[must_use]
    pub fn of_namespace(&self, labels: &BTreeMap<String, String>) -> Option<IdleRule> {
        // The selector was checked when the policy was read.
        let is_selected = selector::matches(&self.namespaces, labels).unwrap_or(false);
        is_selected.then_some(self.terms)
    }

    /// The rule that ignores the namespace: a claim is only reported.
    #[must_use]
    pub fn report(&self) -> IdleRule {
        IdleRule {
            action: Action::Report,
            ..self.terms
        }
    }

    /// The same, without evictions.
    #[must_use]
    pub fn report_only(self) -> Self {
        let terms = self.report();
        Self { terms, ..self }
    }

    /// The time without a kernel after which a claim is idle.
    #[must_use]
    pub fn after(&self) -> Duration {
        self.terms.after
    }
}

/// The rules of the policies for idle claims of `gpu` on a node with these labels; `None` without rules.
pub fn idle(
    policies: &[SharingPolicy],
    labels: &BTreeMap<String, String>,
    gpu: &Gpu,
) -> Result<Option<IdleTerms>, PolicyError> {
    let Some(policy) = matching(policies, labels, gpu)? else {
        return Ok(None);
    };
    let Some(idle) = &policy.spec.idle else {
        return Ok(None);
    };
    terms(idle).map_err(|problem| of(policy, problem))
}

/// The policy's numbers, checked. `None` if it selects no namespace.
pub(super) fn terms(policy: &IdlePolicy) -> Result<Option<IdleTerms>, PolicyProblem> {
    let after = seconds(
        "spec.idle.afterSeconds",
        policy.after_seconds,
        LEAST_AFTER_SECONDS,
    )?;
    let grace = seconds("spec.idle.graceSeconds", policy.grace_seconds, 0)?;
    let Some(namespaces) = &policy.namespaces else {
        return Ok(None);
    };
    selector::matches(namespaces, &BTreeMap::new()).map_err(PolicyProblem::IdleNamespaces)?;
    let action = match policy.action {
        IdleAction::Report => Action::Report,
        IdleAction::Evict => Action::Evict { grace },
    };
    Ok(Some(IdleTerms {
        namespaces: namespaces.clone(),
        terms: IdleRule { after, action },
    }))
}

fn seconds(field: &'static str, found: u32, least: u32) -> Result<Duration, PolicyProblem> {
    if (least..=MOST_SECONDS).contains(&found) {
        return Ok(Duration::from_secs(found.into()));
    }
    Err(out_of_range(
        field,
        Quantity::from_count(found.into()),
        format!("{least} to {MOST_SECONDS}"),
    ))
}
