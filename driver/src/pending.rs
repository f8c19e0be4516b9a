//! Why a pod has not started yet, in a few words that metrics can count.
//!
//! What kube-scheduler says of a pod is prose, in the condition `PodScheduled`: `0/5 nodes are available: 3 cannot allocate all
//! claims, 2 node(s) had untolerated taint(s)`. [`reason`] reduces it to one [`Reason`], the one that is nearest to a GPU: nodes
//! with other obstacles, such as the control plane's, are in almost every such message.

use k8s_openapi::api::core::v1::PodCondition;

/// Why a pod has not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Nodes were considered, and none has devices left for the claims.
    NoRoom,
    /// A claim, or the template of one, is missing or is being deleted.
    ClaimMissing,
    /// A DeviceClass is missing.
    ClassMissing,
    /// The devices of a claim that is allocated are on a node that the pod cannot use.
    ElsewhereAllocated,
    /// No node has the processors, the memory or another resource.
    NodeResources,
    /// No node fits the pod's selector, affinity or spreading.
    Selector,
    /// Every node has a taint that the pod does not tolerate.
    Taint,
    /// A scheduling gate is closed.
    Gated,
    /// It has a node, which has not started its containers yet: the claim is being prepared, an image is being pulled.
    Starting,
    /// The scheduler has not said anything yet.
    NotScheduled,
    /// Anything else; the condition's message says it.
    Other,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::NoRoom,
        Self::ClaimMissing,
        Self::ClassMissing,
        Self::ElsewhereAllocated,
        Self::NodeResources,
        Self::Selector,
        Self::Taint,
        Self::Gated,
        Self::Starting,
        Self::NotScheduled,
        Self::Other,
    ];

    /// Its name in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoRoom => "no_room",
            Self::ClaimMissing => "claim_missing",
            Self::ClassMissing => "class_missing",
            Self::ElsewhereAllocated => "elsewhere_allocated",
            Self::NodeResources => "node_resources",
            Self::Selector => "selector",
            Self::Taint => "taint",
            Self::Gated => "gated",
            Self::Starting => "starting",
            Self::NotScheduled => "not_scheduled",
            Self::Other => "other",
        }
    }
}

/// What kube-scheduler 1.37 says, nearest to a GPU first, each with the words that only such a message has. The sources are
/// its plugins dynamicresources, noderesources, nodeaffinity, interpodaffinity, podtopologyspread and tainttoleration.
const WORDS: [(Reason, &[&str]); 6] = [
    (Reason::ClassMissing, &["device class "]),
    (
        Reason::NoRoom,
        &["cannot allocate all claims", "resourceclaim in use"],
    ),
    (
        Reason::ElsewhereAllocated,
        &["resourceclaim not available on the node"],
    ),
    (Reason::NodeResources, &["Insufficient ", "Too many pods"]),
    (
        Reason::Selector,
        &["node(s) didn't match", "node(s) didn't satisfy"],
    ),
    (
        Reason::Taint,
        &[
            "untolerated taint",
            "taints that the pod didn't tolerate",
            "node(s) were unschedulable",
        ],
    ),
];

/// What such a message says of a claim that is not there.
const MISSING: [&str; 4] = [
    "not found",
    "not created",
    "does not exist",
    "being deleted",
];

/// Why a pod whose phase is Pending has not started, by its condition `PodScheduled`, if it has one.
#[must_use]
pub fn reason(scheduled: Option<&PodCondition>) -> Reason {
    let Some(condition) = scheduled else {
        return Reason::NotScheduled;
    };
    if condition.status == "True" {
        return Reason::Starting;
    }
    if condition.reason.as_deref() == Some("SchedulingGated") {
        return Reason::Gated;
    }
    let message = condition.message.as_deref().unwrap_or_default();
    if message.is_empty() {
        return Reason::NotScheduled;
    }
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    // Before the others: it is said of the pod as a whole, before any node was considered.
    if message.to_lowercase().contains("resourceclaim") && has(&MISSING) {
        return Reason::ClaimMissing;
    }
    let found = WORDS.iter().find(|(_, words)| has(words));
    found.map_or(Reason::Other, |(reason, _)| *reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(status: &str, reason: &str, message: &str) -> PodCondition {
        PodCondition {
            type_: "PodScheduled".to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            ..PodCondition::default()
        }
    }

    /// Messages as kube-scheduler 1.37 writes them.
    #[test]
    fn each_of_the_schedulers_messages_has_its_reason() {
        for (message, expected) in [
            (
                "0/2 nodes are available: 1 cannot allocate all claims, 1 node(s) had untolerated taint(s). still not schedulable, preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.",
                Reason::NoRoom,
            ),
            (
                "0/3 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint(s).",
                Reason::NodeResources,
            ),
            (
                "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match Pod's node affinity/selector.",
                Reason::Selector,
            ),
            (
                "0/3 nodes are available: 3 node(s) had untolerated taint(s).",
                Reason::Taint,
            ),
            (
                "0/3 nodes are available: 2 node(s) were unschedulable, 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.",
                Reason::Taint,
            ),
            (
                "resourceclaim.resource.k8s.io \"quarter\" not found",
                Reason::ClaimMissing,
            ),
            (
                "pod \"a/b\": ResourceClaim not created yet",
                Reason::ClaimMissing,
            ),
            (
                "resourceclaim \"quarter\" is being deleted",
                Reason::ClaimMissing,
            ),
            (
                "request gpu: device class hard.gpu.tranche.dev does not exist",
                Reason::ClassMissing,
            ),
            (
                "0/3 nodes are available: 1 resourceclaim not available on the node, 2 node(s) had untolerated taint(s).",
                Reason::ElsewhereAllocated,
            ),
            ("a plugin of somebody else has an opinion", Reason::Other),
            ("", Reason::NotScheduled),
        ] {
            let condition = said("False", "Unschedulable", message);
            assert_eq!(reason(Some(&condition)), expected, "{message}");
        }
    }

    #[test]
    fn a_pod_with_a_node_is_starting_and_one_without_a_word_is_not_scheduled() {
        assert_eq!(reason(Some(&said("True", "", ""))), Reason::Starting);
        let gated = said(
            "False",
            "SchedulingGated",
            "Scheduling is blocked due to non-empty scheduling gates",
        );
        assert_eq!(reason(Some(&gated)), Reason::Gated);
        assert_eq!(reason(None), Reason::NotScheduled);
    }

    #[test]
    fn names_are_unique() {
        let names: std::collections::BTreeSet<_> =
            Reason::ALL.iter().map(|it| it.as_str()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
    }
}
