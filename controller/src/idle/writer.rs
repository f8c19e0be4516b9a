//! Carries a step out: the condition on the claim's devices, events on its pods, evictions.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams, Preconditions};
use kube::runtime::events::EventType;
use kube::{Api, Client};
use serde_json::{Value, json};
use tranche_api::Quantity;
use tranche_api::conditions::{IDLE, State};
use tranche_api::names::DRIVER;
use tranche_driver::policy::Action;

use super::decision::{Act, PodFacts};
use super::holder::Holder;
use super::state::{Step, Why};
use crate::apply::{ApplyError, Executor, event};
use crate::metrics::Verb;

/// The field manager of the condition: not that of the other objects that the controller applies.
const FIELD_MANAGER: &str = "tranche-controller-idle";

/// The condition's reason if nothing will happen.
const NO_KERNEL: &str = "NoKernel";
/// Its reason if the pods will be evicted.
const EVICTION_DUE: &str = "EvictionDue";
/// Its reason if the pods cannot be evicted now.
pub const EVICTION_REFUSED: &str = "EvictionRefused";

/// Writes to the API server, while this replica leads.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    executor: Executor,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Writer")
    }
}

impl Writer {
    /// Writes with `client`, as `executor` allows.
    #[must_use]
    pub fn new(client: Client, executor: Executor) -> Self {
        Self { client, executor }
    }

    /// Writes the condition on all of the claim's devices.
    pub async fn condition(
        &self,
        holder: &Holder,
        condition: &State,
        since: Timestamp,
    ) -> Result<(), ApplyError> {
        let claim = &holder.claim;
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let body = body(holder, &condition.since(&[], since));
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(&body);
        let request = claims.patch_status(&claim.name, &params, &patch);
        let name = format!("{}/{}", claim.namespace, claim.name);
        let sent = self
            .executor
            .send(Verb::Apply, "resourceclaims/status", &name, request);
        sent.await.map(drop)
    }

    /// Evicts a pod, as `kubectl drain` does.
    pub async fn evict(&self, namespace: &str, pod: &PodFacts) -> Result<(), ApplyError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let params = EvictParams {
            // The UID keeps another pod of the same name safe.
            delete_options: Some(DeleteParams::default().preconditions(Preconditions {
                uid: Some(pod.uid.clone()),
                resource_version: None,
            })),
            ..EvictParams::default()
        };
        let request = pods.evict(&pod.name, &params);
        let name = format!("{namespace}/{}", pod.name);
        let sent = self
            .executor
            .send(Verb::Create, "pods/eviction", &name, request);
        sent.await.map(drop)
    }

    /// Writes an event on a pod.
    pub async fn event(&self, namespace: &str, pod: &PodFacts, reason: &str, note: &str) {
        let object = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.clone()),
            namespace: Some(namespace.to_owned()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        };
        let name = format!("{namespace}/{}", pod.name);
        let event = event(EventType::Warning, reason, note, "LookForIdleClaims");
        self.executor.publish(&name, &event, &object).await;
    }
}

/// The condition after a step; `None` for a step that does not change it.
#[must_use]
pub fn condition_of(act: &Act) -> Option<State> {
    let (holds, reason, message) = match act.step {
        Step::Nothing | Step::Evict => return None,
        Step::Notice { idle } => {
            let reason = match act.terms.map(|terms| terms.action) {
                Some(Action::Evict { .. }) => EVICTION_DUE,
                _ => NO_KERNEL,
            };
            let memory = Quantity::from_bytes(act.holder.seen.memory);
            let idle = idle.as_secs();
            let then = match act.terms.map(|terms| terms.action) {
                Some(Action::Evict { grace }) => format!(
                    "its pods are evicted in {} s unless it runs one; the annotation gpu.tranche.dev/idle: keep on the claim or a pod exempts it",
                    grace.as_secs()
                ),
                _ => "nothing happens, by spec.idle.action of the SharingPolicy or controller.idleClaims of the chart".to_owned(),
            };
            let message = format!(
                "its programs hold {memory} of GPU memory and have run no kernel for {idle} s; {then}"
            );
            (true, reason, message)
        }
        Step::Withdraw(why) => {
            let (reason, message) = withdrawn(why);
            (false, reason, message.to_owned())
        }
    };
    Some(State {
        kind: IDLE,
        holds,
        reason,
        message,
    })
}

/// What a condition with this reason announced. The present policy says how long the eviction waits.
#[must_use]
pub fn told(reason: &str) -> Action {
    match reason {
        NO_KERNEL => Action::Report,
        _ => Action::Evict {
            grace: Duration::ZERO,
        },
    }
}

fn withdrawn(why: Why) -> (&'static str, &'static str) {
    match why {
        Why::Works => ("Works", "it ran a kernel"),
        Why::HoldsNothing => ("HoldsNothing", "its programs hold no GPU memory"),
        Why::NotKnown => (
            "NotKnown",
            "the node's plugin or its driver does not tell whether it runs kernels",
        ),
        Why::NotAsked => (
            "NotAsked",
            "no SharingPolicy asks for idle claims here, or the annotation gpu.tranche.dev/idle exempts it",
        ),
    }
}

/// The applied object. With its UID the write fails for another claim of the same name.
fn body(holder: &Holder, condition: &Condition) -> Value {
    let devices: Vec<_> = holder
        .devices
        .iter()
        .map(|device| {
            let mut entry = json!({
                "driver": DRIVER,
                "pool": device.pool,
                "device": device.device,
                "conditions": [condition],
            });
            if let Some(share_id) = &device.share_id {
                entry["shareID"] = json!(share_id);
            }
            entry
        })
        .collect();
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": holder.claim.name,
            "namespace": holder.claim.namespace,
            "uid": holder.claim.uid,
        },
        "status": {"devices": devices},
    })
}
