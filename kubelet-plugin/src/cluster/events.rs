//! Publishes problems as events on the pods that wait for a claim and on the node's GpuNode.

use std::fmt;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};
use tracing::warn;
use tranche_api::GpuNode;
use tranche_api::conditions::State;

use crate::FIELD_MANAGER;
use crate::cluster::api_server::within;

/// The API server refuses a longer note.
const LONGEST_NOTE: usize = 1024;

/// What happened to a process that bypasses its share's cap. Each has its own reason: an event with the same reason
/// within minutes would be merged with the first one and keep its note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bypass {
    Noticed,
    /// It was ended because of the policy.
    Ended,
}

impl Bypass {
    const fn reason(self) -> &'static str {
        match self {
            Self::Noticed => "CapBypassed",
            Self::Ended => "CapBypassEnded",
        }
    }
}

#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Events")
    }
}

impl Events {
    /// Publishes in the name of this node's plugin.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        let reporter = Reporter {
            controller: FIELD_MANAGER.to_owned(),
            instance: Some(node.to_owned()),
        };
        Self {
            recorder: Recorder::new(client, reporter),
        }
    }

    /// Publishes on every pod that reserved the claim (or on the claim, if no pod did) why it is
    /// not ready. `outcome` distinguishes different problems of one pod. Returns at once.
    pub fn prepare_failed(&self, claim: &ResourceClaim, outcome: &str, problem: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: "PrepareFailed".to_owned(),
            note: Some(shortened(problem).to_owned()),
            action: outcome.to_owned(),
            secondary: Some(claim.object_ref(&())),
        };
        self.publish(event, regarding(claim));
    }

    /// Publishes on the node's GpuNode that its driver is ready, or why there is no usable driver.
    /// Returns at once.
    pub fn driver(&self, node: &GpuNode, ready: &State) {
        let type_ = if ready.holds {
            EventType::Normal
        } else {
            EventType::Warning
        };
        let event = Event {
            type_,
            reason: ready.reason.to_owned(),
            note: Some(shortened(&ready.message).to_owned()),
            action: "FindDriver".to_owned(),
            secondary: None,
        };
        self.publish(event, vec![node.object_ref(&())]);
    }

    /// Publishes what happened to a process of `regarding`, a pod or a claim, that bypasses its share's cap. Returns at
    /// once.
    pub fn bypass(&self, regarding: ObjectReference, bypass: Bypass, note: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: bypass.reason().to_owned(),
            note: Some(shortened(note).to_owned()),
            action: "Compare".to_owned(),
            secondary: None,
        };
        self.publish(event, vec![regarding]);
    }

    /// Publishes on a pod that a GPU of it has a fault. Returns at once.
    pub fn gpu_unhealthy(&self, pod: ObjectReference, note: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: "GpuUnhealthy".to_owned(),
            note: Some(shortened(note).to_owned()),
            action: "Watch".to_owned(),
            secondary: None,
        };
        self.publish(event, vec![pod]);
    }

    /// Publishes on the node's GpuNode that a GPU has a fault, or no fault any more. Returns at once.
    pub fn gpu_health(&self, node: &GpuNode, gpu: &str, healthy: &Condition) {
        let (type_, reason) = if healthy.status == "False" {
            (EventType::Warning, "GpuUnhealthy")
        } else {
            (EventType::Normal, "GpuHealthy")
        };
        let text = format!("{gpu}: {}", healthy.message);
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(shortened(&text).to_owned()),
            // Events that differ only in their notes are merged.
            action: healthy.reason.clone(),
            secondary: None,
        };
        self.publish(event, vec![node.object_ref(&())]);
    }

    fn publish(&self, event: Event, regarding: Vec<ObjectReference>) {
        let recorder = self.recorder.clone();
        tokio::spawn(async move {
            for object in regarding {
                let published = within(recorder.publish(&event, &object)).await;
                let failed = match published {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => error.to_string(),
                    Err(silent) => silent.to_string(),
                };
                warn!(
                    error = failed,
                    object = object.name,
                    "cannot publish an event; check that the plugin may create and patch events (events.k8s.io)"
                );
            }
        });
    }
}

fn regarding(claim: &ResourceClaim) -> Vec<ObjectReference> {
    let status = claim.status.as_ref();
    let reserved = status.and_then(|status| status.reserved_for.as_deref());
    let pods: Vec<_> = reserved
        .unwrap_or_default()
        .iter()
        // It may also name a PodGroup.
        .filter(|consumer| consumer.resource == "pods")
        .map(|pod| {
            let namespace = claim.metadata.namespace.clone();
            pod_reference(namespace, pod.name.clone(), pod.uid.clone())
        })
        .collect();
    if pods.is_empty() {
        vec![claim.object_ref(&())]
    } else {
        pods
    }
}

/// The reference of an event to a pod.
#[must_use]
pub fn pod_reference(namespace: Option<String>, name: String, uid: String) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(name),
        namespace,
        uid: Some(uid),
        ..ObjectReference::default()
    }
}

fn shortened(text: &str) -> &str {
    let mut end = text.len().min(LONGEST_NOTE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_note_is_cut_between_characters() {
        let note = shortened(&"é".repeat(600)).to_owned();
        assert_eq!(note.len(), 1024);
        let odd = format!("a{}", "é".repeat(600));
        assert_eq!(shortened(&odd).len(), 1023);
        assert_eq!(shortened("short"), "short");
    }

    #[test]
    fn events_go_to_the_pods_or_without_one_to_the_claim() {
        let claim: ResourceClaim = serde_json::from_value(serde_json::json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "ns", "uid": "u"},
            "spec": {},
            "status": {"reservedFor": [
                {"resource": "pods", "name": "p", "uid": "pu"},
                {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g", "uid": "gu"},
            ]},
        }))
        .unwrap();
        let targets = regarding(&claim);
        assert_eq!(targets.len(), 1);
        assert_eq!(targets[0].kind.as_deref(), Some("Pod"));
        assert_eq!(targets[0].uid.as_deref(), Some("pu"));
        let mut alone = claim;
        alone.status = None;
        assert_eq!(regarding(&alone)[0].kind.as_deref(), Some("ResourceClaim"));
    }
}
