//! Conditions of a `GpuNode` and of a claim's devices, in the Kubernetes style.
//!
//! The list is a map by `type`, so that plugin and controller each apply their own conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// The node's driver answers and its files are complete. Written by the plugin.
pub const DRIVER_READY: &str = "DriverReady";
/// No other device plugin or DRA driver on the node offers its GPUs. Written by the plugin.
pub const SOLE_PROVIDER: &str = "SoleProvider";
/// Every GPU is offered in every tier of its policy. Written by the controller.
pub const ALL_OFFERED: &str = "AllOffered";

/// The node knows what all of its claims hold. Written by the plugin. While it is false, the GPUs of claims whose
/// journals cannot be read count as taken, and new claims for them are refused.
pub const CLAIMS_KNOWN: &str = "ClaimsKnown";

/// The programs of the claim hold memory of the device and have run no kernel for the SharingPolicy's
/// `idle.afterSeconds`. A condition of a claim's device (`status.devices[].conditions`), written by the controller.
pub const IDLE: &str = "Idle";

/// The GPU has no fault. A condition of a GPU (`status.gpus[].conditions` of a GpuNode) and, while it has one, of each device
/// of a claim on it (`status.devices[].conditions`). Written by the plugin.
pub const HEALTHY: &str = "Healthy";

/// A condition without its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The condition's `type`.
    pub kind: &'static str,
    /// Whether the condition is true.
    pub holds: bool,
    /// The reason, one word in CamelCase.
    pub reason: &'static str,
    /// The message.
    pub message: String,
}

impl State {
    /// The condition to write: with the stored transition time if the status is unchanged, else
    /// with `now`.
    #[must_use]
    pub fn since(&self, stored: &[Condition], now: Timestamp) -> Condition {
        let status = if self.holds { "True" } else { "False" };
        condition(self.kind, status, self.reason, &self.message, stored, now)
    }
}

/// The condition to write, of any status: with the stored transition time if the status is unchanged, else with `now`.
#[must_use]
pub fn condition(
    kind: &str,
    status: &str,
    reason: &str,
    message: &str,
    stored: &[Condition],
    now: Timestamp,
) -> Condition {
    let same = stored
        .iter()
        .find(|condition| condition.type_ == kind && condition.status == status);
    Condition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: same.map_or_else(
            // Whole seconds, as the API server stores them.
            || Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
            |condition| condition.last_transition_time.clone(),
        ),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_condition_changes_with_its_status_only() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let state = |holds, message: &str| State {
            kind: DRIVER_READY,
            holds,
            reason: "Reason",
            message: message.to_owned(),
        };
        let first = state(false, "no driver").since(&[], at(10));
        assert_eq!(
            (&*first.status, first.last_transition_time.0),
            ("False", at(10))
        );
        let other = state(false, "another message").since(std::slice::from_ref(&first), at(20));
        assert_eq!(
            (&*other.message, other.last_transition_time.0),
            ("another message", at(10))
        );
        let changed = state(true, "").since(&[other], at(30));
        assert_eq!(
            (&*changed.status, changed.last_transition_time.0),
            ("True", at(30))
        );
    }
}
