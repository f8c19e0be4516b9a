//! Executes steps; the only module that writes to the API server.
//!
//! Every write is checked against the lease just before it is sent, has a deadline, is sent once, and is
//! safe to repeat: creates have fixed names, replacements and deletes name the version that they
//! were decided on. After a failure the next reconcile starts from what is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tranche_api::GpuNode;
use tranche_api::gpu_node::Published;
use tranche_api::names::{API_VERSION, DRIVER, PLUGIN_PODS, pool};
use tranche_serving::Clock;

use crate::index::NodeView;
use crate::known::{KnownSlice, trimmed_gpu_node};
use crate::leader::Leadership;
use crate::metrics::{Metrics, Outcome, Verb};
use crate::offered::{self, News};
use crate::pool::Write;
use crate::withdrawn::{HeldDevices, ReadDevices, USABLE};

/// The field manager of `status.published`, and the events' reporter.
const MANAGER: &str = "tranche-controller";
/// How long a read may take. A write has [`Leadership::deadline`].
const DEADLINE: Duration = Duration::from_secs(10);
/// Claims in one page of a list.
const PAGE: u32 = 500;

/// Why a request was not executed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// This replica no longer leads, so it must not write.
    #[error("the lease is not held any more")]
    NotLeading,
    /// The object changed since the decision, exists already, or is gone. The watch delivers what happened.
    #[error("{what} changed in the meantime")]
    Changed {
        /// Verb and name.
        what: String,
    },
    /// The API server refuses what we write.
    #[error("{what}: the API server refuses it: {message}")]
    Refused {
        /// Verb and name.
        what: String,
        /// The API server's message.
        message: String,
    },
    /// No answer in time.
    #[error("{what}: no answer within {} s", after.as_secs())]
    Deadline {
        /// Verb and name.
        what: String,
        after: Duration,
    },
    /// Anything else.
    #[error("{what}: {source}")]
    Request {
        /// Verb and name.
        what: String,
        source: kube::Error,
    },
}

impl ApplyError {
    /// Whether the API server has too much to do.
    #[must_use]
    pub fn is_overload(&self) -> bool {
        match self {
            Self::Deadline { .. } => true,
            Self::Request {
                source: kube::Error::Api(status),
                ..
            } => matches!(status.code, 429 | 503 | 504),
            _ => false,
        }
    }

    fn outcome(&self) -> Outcome {
        match self {
            Self::NotLeading => Outcome::NotLeading,
            Self::Changed { .. } => Outcome::Changed,
            Self::Refused { .. } => Outcome::Refused,
            Self::Deadline { .. } => Outcome::Deadline,
            Self::Request { .. } => Outcome::Failed,
        }
    }
}

/// The result of a write of a slice.
#[derive(Debug)]
pub enum Written {
    /// What was sent, and what is stored now.
    Stored {
        /// As it was sent.
        sent: Box<ResourceSlice>,
        /// As it is stored.
        stored: Box<ResourceSlice>,
    },
    Deleted {
        name: String,
        uid: String,
    },
}

#[derive(Clone)]
pub struct Executor {
    slices: Api<ResourceSlice>,
    gpu_nodes: Api<GpuNode>,
    claims: Api<ResourceClaim>,
    pods: Api<Pod>,
    recorder: Recorder,
    leadership: Leadership,
    clock: Clock,
    metrics: Metrics,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").finish_non_exhaustive()
    }
}

impl Executor {
    /// The node plugins' pods are in `namespace`. The client must not repeat requests by itself: a repeated create
    /// fails as if somebody else had created the object.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        instance: String,
        leadership: Leadership,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        Self {
            slices: Api::all(client.clone()),
            gpu_nodes: Api::all(client.clone()),
            claims: Api::all(client.clone()),
            pods: Api::namespaced(client.clone(), namespace),
            recorder: Recorder::new(
                client,
                Reporter {
                    controller: MANAGER.to_owned(),
                    instance: Some(instance),
                },
            ),
            leadership,
            clock,
            metrics,
        }
    }

    pub async fn write(&self, write: Write) -> Result<Written, ApplyError> {
        match write {
            Write::Create(slice) => {
                let name = slice.name_any();
                let params = PostParams::default();
                let request = self.slices.create(&params, &slice);
                let stored = self
                    .send(Verb::Create, "resourceslices", &name, request)
                    .await?;
                Ok(Written::Stored {
                    sent: Box::new(slice),
                    stored: Box::new(stored),
                })
            }
            Write::Replace(slice) => {
                let name = slice.name_any();
                let params = PostParams::default();
                let request = self.slices.replace(&name, &params, &slice);
                let stored = self
                    .send(Verb::Update, "resourceslices", &name, request)
                    .await?;
                Ok(Written::Stored {
                    sent: Box::new(slice),
                    stored: Box::new(stored),
                })
            }
            Write::Delete { name, uid, version } => {
                let params = DeleteParams::default().preconditions(Preconditions {
                    uid: Some(uid.clone()),
                    resource_version: Some(version),
                });
                let request = self.slices.delete(&name, &params);
                self.send(Verb::Delete, "resourceslices", &name, request)
                    .await?;
                Ok(Written::Deleted { name, uid })
            }
        }
    }

    /// Writes `status.published` and the condition that goes with it, and returns the object as it is
    /// stored.
    pub async fn record(
        &self,
        view: &NodeView,
        published: &Published,
    ) -> Result<GpuNode, ApplyError> {
        let node = &view.name;
        let status = view.gpu_node.as_ref().and_then(|g| g.status.as_ref());
        let stored = status.map_or(&[][..], |status| &status.conditions);
        let condition = offered::condition(published).since(stored, self.clock.now());
        let mut metadata = json!({"name": node});
        // A write that a former leader sent late fails.
        if let Some(version) = view.gpu_node.as_ref().and_then(|it| it.resource_version()) {
            metadata["resourceVersion"] = json!(version);
        }
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": "GpuNode",
            "metadata": metadata,
            "status": {"published": published, "conditions": [condition]},
        });
        let params = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(&body);
        let request = self.gpu_nodes.patch_status(node, &params, &patch);
        self.send(Verb::Apply, "gpunodes/status", node, request)
            .await
    }

    /// Writes an event about a change, on the GpuNode and on the policy that has to change.
    pub async fn write_events(&self, view: &NodeView, news: &News) {
        use kube::Resource;
        let gpu_node = view.gpu_node.as_ref().map(|node| node.object_ref(&()));
        let policy = view
            .policies
            .iter()
            .find(|policy| policy.metadata.name.is_some() && policy.metadata.name == news.policy)
            .map(|policy| policy.object_ref(&()));
        let kind = if news.warning {
            EventType::Warning
        } else {
            EventType::Normal
        };
        let event = event(kind, news.reason, &news.note, &news.action);
        for object in gpu_node.into_iter().chain(policy) {
            self.publish(&view.name, &event, &object).await;
        }
    }

    /// Writes an event about the object `name`. A write that fails is not retried: the object's status and the log say the same.
    pub(crate) async fn publish(&self, name: &str, event: &Event, object: &ObjectReference) {
        let request = self.recorder.publish(event, object);
        if let Err(error) = self.send(Verb::Create, "events", name, request).await {
            tracing::warn!(about = name, %error, "cannot write an event");
        }
    }

    /// Reads slices by name and version; fails if one has another version now.
    pub async fn read(&self, slices: Vec<(String, String)>) -> Result<ReadDevices, ApplyError> {
        let mut all = ReadDevices::new();
        for (name, version) in slices {
            let what = || format!("read ResourceSlice {name}");
            let stored = read(what, self.slices.get_opt(&name)).await?;
            let has_version =
                |slice: &ResourceSlice| slice.resource_version().as_ref() == Some(&version);
            let Some(slice) = stored.filter(has_version) else {
                return Err(ApplyError::Changed { what: what() });
            };
            all.insert(name, (version, slice.spec.devices.unwrap_or_default()));
        }
        Ok(all)
    }

    /// A slice as it is stored now, by name.
    pub async fn read_slice(&self, name: &str) -> Result<Option<KnownSlice>, ApplyError> {
        let what = || format!("read ResourceSlice {name}");
        let stored = read(what, self.slices.get_opt(name)).await?;
        Ok(stored.map(|slice| KnownSlice::from(&slice)))
    }

    /// A node's GpuNode as it is stored now.
    pub async fn read_gpu_node(&self, name: &str) -> Result<Option<GpuNode>, ApplyError> {
        let what = || format!("read GpuNode {name}");
        let stored = read(what, self.gpu_nodes.get_opt(name)).await?;
        Ok(stored.map(trimmed_gpu_node))
    }

    /// Lists all claims once, and returns for each of these nodes the devices of its pool that claims hold.
    pub async fn held(
        &self,
        nodes: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, HeldDevices>, ApplyError> {
        let at = self.clock.now();
        let pools: BTreeMap<String, &String> =
            nodes.iter().map(|node| (pool(node), node)).collect();
        let mut devices: BTreeMap<&String, BTreeSet<String>> =
            nodes.iter().map(|node| (node, BTreeSet::new())).collect();
        let mut params = ListParams::default().limit(PAGE);
        loop {
            let what = || "list ResourceClaims".to_owned();
            let page = read(what, self.claims.list(&params)).await?;
            let results = page
                .items
                .iter()
                .filter_map(|claim| claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref())
                .flat_map(|allocation| allocation.results.iter().flatten())
                .filter(|result| result.driver == DRIVER);
            for result in results {
                if let Some(node) = pools.get(&result.pool) {
                    let held = devices.entry(node).or_default();
                    held.insert(result.device.clone());
                }
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => break,
            }
        }
        self.metrics.listed("resourceclaims");
        // The time counts from the end of the list: otherwise a list that takes long would be too old at once.
        let until = self.clock.now() + USABLE;
        let held = |devices| HeldDevices { devices, at, until };
        Ok(devices
            .into_iter()
            .map(|(node, devices)| (node.clone(), held(devices)))
            .collect())
    }

    /// Whether the node plugin's pod on a node is ready, which means that it is registered with the
    /// kubelet.
    pub async fn plugin_is_ready(&self, node: &str) -> Result<bool, ApplyError> {
        let params = ListParams::default()
            .labels(PLUGIN_PODS)
            .fields(&format!("spec.nodeName={node}"));
        let what = || format!("list the node plugin's pods on node {node}");
        let pods = read(what, self.pods.list(&params)).await?;
        Ok(pods.iter().any(|pod| {
            let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
            conditions
                .into_iter()
                .flatten()
                .any(|c| c.type_ == "Ready" && c.status == "True")
        }))
    }

    /// The clock for decisions.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Sends one write, if this replica leads, and counts it.
    pub(crate) async fn send<T>(
        &self,
        verb: Verb,
        resource: &'static str,
        name: &str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ApplyError> {
        let what = || format!("{} {resource} {name}", verb.as_str());
        let result = if self.leadership.holds() {
            let after = self.leadership.deadline();
            match tokio::time::timeout(after, request).await {
                Err(_) => Err(ApplyError::Deadline {
                    what: what(),
                    after,
                }),
                Ok(Err(kube::Error::Api(status))) => Err(match status.code {
                    404 | 409 => ApplyError::Changed { what: what() },
                    400 | 422 => ApplyError::Refused {
                        what: what(),
                        message: status.message.clone(),
                    },
                    _ => ApplyError::Request {
                        what: what(),
                        source: kube::Error::Api(status),
                    },
                }),
                Ok(Err(source)) => Err(ApplyError::Request {
                    what: what(),
                    source,
                }),
                Ok(Ok(answer)) => Ok(answer),
            }
        } else {
            Err(ApplyError::NotLeading)
        };
        let outcome = result
            .as_ref()
            .map_or_else(ApplyError::outcome, |_| Outcome::Done);
        self.metrics.written(verb, resource, outcome);
        result
    }
}

/// An event with a note of a length that the API server takes: at most 1024 bytes.
pub(crate) fn event(kind: EventType, reason: &str, note: &str, action: &str) -> Event {
    Event {
        type_: kind,
        reason: reason.to_owned(),
        note: Some(note.chars().take(900).collect()),
        action: action.to_owned(),
        secondary: None,
    }
}

/// One read of the API server, within the deadline.
pub(crate) async fn read<T>(
    what: impl Fn() -> String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApplyError> {
    tokio::time::timeout(DEADLINE, request)
        .await
        .map_err(|_| ApplyError::Deadline {
            what: what(),
            after: DEADLINE,
        })?
        .map_err(|source| ApplyError::Request {
            what: what(),
            source,
        })
}
