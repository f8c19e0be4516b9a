//! Notices that somebody deleted the node's own GpuNode.

use futures::{Stream, StreamExt, future};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tracing::warn;
use tranche_api::GpuNode;

/// An item for each time the GpuNode of `node` was seen to be missing: deleted while it was watched, or not there
/// when the watch began anew. Errors are logged and tried again.
pub fn deletions(client: Client, node: &str) -> impl Stream<Item = ()> + use<> {
    let api = Api::<PartialObjectMeta<GpuNode>>::all(client);
    let fields = format!("metadata.name={node}");
    watcher(api, watcher::Config::default().fields(&fields))
        .default_backoff()
        .scan(false, |listed, event| {
            let missing = match event {
                Ok(Event::Init) => {
                    *listed = false;
                    false
                }
                Ok(Event::InitApply(_) | Event::Apply(_)) => {
                    *listed = true;
                    false
                }
                Ok(Event::InitDone) => !*listed,
                Ok(Event::Delete(_)) => true,
                Err(error) => {
                    warn!(%error, "cannot watch the node's GpuNode; trying again");
                    false
                }
            };
            future::ready(Some(missing))
        })
        .filter_map(async |missing| missing.then_some(()))
}
