//! Watches the node's own GpuNode: what the controller published, and its deletion.

use futures::{Stream, StreamExt, future};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tracing::warn;
use tranche_api::GpuNode;
use tranche_api::gpu_node::Published;

/// An event of the watch.
#[derive(Debug)]
pub enum OwnEvent {
    /// What the controller published.
    Published(Box<Published>),
    /// The GpuNode is missing: it was deleted during the watch, or was missing when the watch
    /// restarted.
    Missing,
}

/// Watches the GpuNode of `node`. Errors are logged and tried again.
pub fn watch(client: Client, node: &str) -> impl Stream<Item = OwnEvent> + use<> {
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
                    let published = gpu_node.status.and_then(|status| status.published);
                    published.map(|published| OwnEvent::Published(Box::new(published)))
                }
                Ok(Event::InitDone) => (!*listed).then_some(OwnEvent::Missing),
                Ok(Event::Delete(_)) => Some(OwnEvent::Missing),
                Err(error) => {
                    warn!(%error, "cannot watch the node's GpuNode; trying again");
                    None
                }
            };
            future::ready(Some(seen))
        })
        .filter_map(future::ready)
}
