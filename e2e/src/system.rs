//! Tranche's own components on the cluster.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::Client;
use kube::api::Api;
use kube::runtime::watcher;
use tranche_api::gpu_node::GpuNode;
use tranche_api::names::{DRIVER, taint};

use crate::node::Node;
use crate::{SYSTEM, wait};

/// Label selector of the node plugin's pods.
pub const NODE_PLUGIN: &str = "app.kubernetes.io/component=node-plugin";
/// Name of the node plugin's `DaemonSet` and `ServiceAccount`.
pub const NODE_PLUGIN_NAME: &str = "tranche-node-plugin";

/// Our slices of all nodes.
#[must_use]
pub fn slices_config() -> watcher::Config {
    watcher::Config::default().fields(&format!("spec.driver={DRIVER}"))
}

/// The plugin of one node, and the node's objects.
#[derive(Clone)]
pub struct NodePlugin {
    client: Client,
    node: String,
}

impl fmt::Debug for NodePlugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NodePlugin").field(&self.node).finish()
    }
}

impl NodePlugin {
    /// The plugin of the node with this name.
    #[must_use]
    pub fn new(client: Client, node: String) -> Self {
        Self { client, node }
    }

    /// Waits until a plugin pod of the node other than `not` runs and is ready.
    pub async fn ready(&self, not: Option<&str>) -> anyhow::Result<Pod> {
        self.ready_pod(|pod| pod.metadata.uid.as_deref() != not)
            .await
    }

    /// Kills the plugin, and waits until its container runs again and is ready.
    pub async fn kill(&self) -> anyhow::Result<()> {
        let before = restarts(&self.ready(None).await?);
        Node::new(self.node.clone()).kill_plugin().await?;
        self.ready_pod(|pod| restarts(pod) > before).await.map(drop)
    }

    async fn ready_pod(&self, wanted: impl Fn(&Pod) -> bool) -> anyhow::Result<Pod> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), SYSTEM);
        let config = watcher::Config::default()
            .labels(NODE_PLUGIN)
            .fields(&format!("spec.nodeName={}", self.node));
        let what = format!("the plugin of {} ready", self.node);
        wait::for_all(pods, config, &what, wait::USUAL, |pods| {
            pods.values()
                .find(|pod| {
                    wanted(pod) && pod.metadata.deletion_timestamp.is_none() && is_ready(pod)
                })
                .cloned()
        })
        .await
    }

    /// Waits until `wanted` returns a value for the node's slices.
    pub async fn slices<T>(
        &self,
        what: &str,
        limit: wait::Limit,
        wanted: impl FnMut(&BTreeMap<String, ResourceSlice>) -> Option<T>,
    ) -> anyhow::Result<T> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let config = watcher::Config::default()
            .fields(&format!("spec.driver={DRIVER},spec.nodeName={}", self.node));
        wait::for_all(api, config, what, limit, wanted).await
    }

    /// The node's slices once their pools are complete.
    pub async fn published(&self) -> anyhow::Result<BTreeMap<String, ResourceSlice>> {
        self.slices("whole pools", wait::USUAL, complete).await
    }

    /// The node's slices once their pools are complete and have no devices of a removed policy.
    pub async fn settled(&self) -> anyhow::Result<BTreeMap<String, ResourceSlice>> {
        self.slices("no withdrawn device", wait::TRIED_AGAIN, |slices| {
            let slices = complete(slices)?;
            let devices = slices
                .values()
                .flat_map(|it| it.spec.devices.iter().flatten());
            let mut taints = devices.flat_map(|device| device.taints.iter().flatten());
            let is_settled = !taints.any(|taint| taint.key == taint::WITHDRAWN);
            is_settled.then_some(slices)
        })
        .await
    }

    /// The node's `GpuNode`.
    pub async fn gpu_node(&self) -> anyhow::Result<GpuNode> {
        let api: Api<GpuNode> = Api::all(self.client.clone());
        api.get(&self.node)
            .await
            .with_context(|| format!("GpuNode {}", self.node))
    }
}

/// The slices, if their pools are complete.
#[must_use]
pub fn complete(
    slices: &BTreeMap<String, ResourceSlice>,
) -> Option<BTreeMap<String, ResourceSlice>> {
    let whole = slices.values().all(|slice| {
        let pool = &slice.spec.pool;
        let members = slices.values().filter(|other| {
            other.spec.pool.name == pool.name && other.spec.pool.generation == pool.generation
        });
        usize::try_from(pool.resource_slice_count) == Ok(members.count())
    });
    (whole && !slices.is_empty()).then(|| slices.clone())
}

/// The text of a device's attribute.
#[must_use]
pub fn text<'a>(device: &'a Device, attribute: &str) -> Option<&'a str> {
    let attributes = device.attributes.as_ref()?;
    attributes.get(attribute)?.string.as_deref()
}

/// Whether the pod's condition `Ready` is true.
#[must_use]
pub fn is_ready(pod: &Pod) -> bool {
    pod.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// How often the pod's containers were started again.
pub(crate) fn restarts(pod: &Pod) -> i32 {
    let status = pod.status.iter();
    let containers = status.flat_map(|it| it.container_statuses.iter().flatten());
    containers.map(|it| it.restart_count).sum()
}

/// The epoch of the node plugin's newest registration.
#[must_use]
pub fn epoch(node: &GpuNode) -> i64 {
    node.status
        .iter()
        .flat_map(|status| &status.registration)
        .map(|registration| registration.epoch)
        .sum()
}
