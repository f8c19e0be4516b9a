//! The part of a policy about faults of GPUs.

use tranche_api::gpu_node::{PublishedFault, PublishedHealth};
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::HealthPolicy;

use super::{PolicyProblem, each_once, out_of_range};
use crate::health::Fault;

/// Checks the policy's names and numbers.
pub(super) fn check(policy: &HealthPolicy) -> Result<(), PolicyProblem> {
    let most = HealthPolicy::MOST_GRACE_SECONDS;
    if let Some(grace) = policy.grace_seconds.filter(|grace| *grace > most) {
        return Err(out_of_range(
            "spec.health.graceSeconds",
            Quantity::from_count(grace.into()),
            format!("0 to {most}"),
        ));
    }
    let names: Vec<&String> = policy.faults.iter().map(|rule| &rule.fault).collect();
    each_once("spec.health.faults", &names)?;
    for (index, name) in names.into_iter().enumerate() {
        name.parse::<Fault>()
            .map_err(|problem| PolicyProblem::Fault { index, problem })?;
    }
    Ok(())
}

/// What the node's plugin needs of it.
pub(super) fn published(policy: &HealthPolicy) -> PublishedHealth {
    let rules = policy.faults.iter();
    PublishedHealth {
        effect: policy.effect,
        grace_seconds: Some(policy.grace_seconds.unwrap_or(HealthPolicy::GRACE_SECONDS)),
        faults: rules
            .map(|rule| PublishedFault {
                fault: rule.fault.clone(),
                effect: rule.effect,
            })
            .collect(),
    }
}
