//! Watches the node's own GpuNode: the settings of the policies for the node, and its deletion.

use futures::{Stream, StreamExt, future};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tracing::warn;
use tranche_api::GpuNode;

use super::policy::NodePolicy;

/// An event of the watch.
#[derive(Debug)]
pub enum Seen {
    /// The settings of the policies for the node.
    Policy(NodePolicy),
    /// The GpuNode is missing: it was deleted during the watch, or was missing when the watch
    /// restarted.
    Missing,
}

/// Watches the GpuNode of `node`. Errors are logged and tried again.
pub fn watch(client: Client, node: &str) -> impl Stream<Item = Seen> + use<> {
    let api = Api::<GpuNode>::all(client);
    let fields = format!("metadata.name={node}");
    watcher(api, watcher::Config::default().fields(&fields))
        .default_backoff()
        .scan(false, |listed, event| {
            let seen = match event {
                Ok(Event::Init) => {
                    *listed = false;
                    None
                }
                Ok(Event::InitApply(gpu_node) | Event::Apply(gpu_node)) => {
                    *listed = true;
                    NodePolicy::of(&gpu_node).map(Seen::Policy)
                }
                Ok(Event::InitDone) => (!*listed).then_some(Seen::Missing),
                Ok(Event::Delete(_)) => Some(Seen::Missing),
                Err(error) => {
                    warn!(%error, "cannot watch the node's GpuNode; trying again");
                    None
                }
            };
            future::ready(Some(seen))
        })
        .filter_map(future::ready)
}
