//! A node's pool and its GpuNode, followed by watches.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use tranche_api::GpuNode;
use tranche_api::names::DRIVER;

use crate::cluster::Cluster;

/// The node's slices and epoch after the last event.
pub struct PoolWatch {
    pool: String,
    slices: BTreeMap<String, Slice>,
    node: Option<GpuNode>,
    events: BoxStream<'static, kube::Result<Event>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Slice {
    generation: i64,
    of: i64,
}

enum Event {
    Slice(WatchEvent<ResourceSlice>),
    Node(WatchEvent<GpuNode>),
}

impl std::fmt::Debug for PoolWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "PoolWatch({}, {:?}, epoch {})",
            self.pool,
            self.slices,
            self.epoch()
        )
    }
}

impl PoolWatch {
    /// Starts with the current objects. The API server ends a watch after some minutes, so each measurement has its own.
    pub async fn start(cluster: &Cluster) -> anyhow::Result<Self> {
        let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
        let nodes: Api<GpuNode> = Api::all(cluster.client.clone());
        let of_driver = format!("spec.driver={DRIVER}");
        let there = slices
            .list(&ListParams::default().fields(&of_driver))
            .await?;
        let version = there.metadata.resource_version.unwrap_or_default();
        let slice_events = slices
            .watch(&WatchParams::default().fields(&of_driver), &version)
            .await?
            .map_ok(Event::Slice);
        let of_node = format!("metadata.name={}", cluster.node);
        let node_list = nodes.list(&ListParams::default().fields(&of_node)).await?;
        let version = node_list.metadata.resource_version.unwrap_or_default();
        let node_events = nodes
            .watch(&WatchParams::default().fields(&of_node), &version)
            .await?
            .map_ok(Event::Node);
        let mut watch = Self {
            pool: cluster.pool(),
            slices: BTreeMap::new(),
            node: node_list.items.into_iter().next(),
            events: futures::stream::select(slice_events, node_events).boxed(),
        };
        for slice in &there.items {
            watch.add(slice);
        }
        Ok(watch)
    }

    /// The number of slices.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// The plugin's newest registration.
    #[must_use]
    pub fn epoch(&self) -> i64 {
        let status = self.node.as_ref().and_then(|node| node.status.as_ref());
        status
            .and_then(|status| status.registration.as_ref())
            .map_or(0, |registration| registration.epoch)
    }

    /// Whether the scheduler uses the pool: it has all slices of one generation.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.slices.values().next().is_some_and(|first| {
            self.slices.values().all(|slice| slice == first)
                && usize::try_from(first.of) == Ok(self.slices.len())
        })
    }

    /// Follows the events until `is_so` is true; fails after `at_most`.
    pub async fn until(
        &mut self,
        at_most: Duration,
        is_so: impl Fn(&Self) -> bool,
    ) -> anyhow::Result<()> {
        let followed = async {
            while !is_so(self) {
                let event = self
                    .events
                    .next()
                    .await
                    .context("the API server ended the watch")??;
                self.take(event)?;
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(at_most, followed).await {
            Ok(result) => result,
            Err(_) => bail!("waited {} s in vain: {self:?}", at_most.as_secs()),
        }
    }

    fn take(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Slice(WatchEvent::Added(slice) | WatchEvent::Modified(slice)) => {
                self.add(&slice);
            }
            Event::Slice(WatchEvent::Deleted(slice)) => {
                self.slices.remove(&slice.name_any());
            }
            Event::Node(WatchEvent::Added(node) | WatchEvent::Modified(node)) => {
                self.node = Some(node);
            }
            Event::Node(WatchEvent::Deleted(_)) => self.node = None,
            Event::Slice(WatchEvent::Error(error)) | Event::Node(WatchEvent::Error(error)) => {
                bail!("watch: {}", error.message)
            }
            Event::Slice(WatchEvent::Bookmark(_)) | Event::Node(WatchEvent::Bookmark(_)) => {}
        }
        Ok(())
    }

    fn add(&mut self, slice: &ResourceSlice) {
        if slice.spec.pool.name != self.pool {
            return;
        }
        let known = Slice {
            generation: slice.spec.pool.generation,
            of: slice.spec.pool.resource_slice_count,
        };
        self.slices.insert(slice.name_any(), known);
    }
}
