//! Whether the node is cordoned (`spec.unschedulable`).

use std::pin::pin;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Keeps `cordoned` up to date until cancelled.
pub async fn watch(
    client: Client,
    node: String,
    cordoned: watch::Sender<bool>,
    stop: CancellationToken,
) {
    let only = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let nodes = watcher(Api::<Node>::all(client), only)
        .default_backoff()
        .applied_objects();
    let mut nodes = pin!(nodes);
    while let Some(Some(node)) = stop.run_until_cancelled(nodes.next()).await {
        match node {
            Ok(node) => {
                let now = node.spec.and_then(|spec| spec.unschedulable);
                cordoned.send_if_modified(|known| {
                    let before = std::mem::replace(known, now.unwrap_or_default());
                    before != *known
                });
            }
            Err(error) => warn!(%error, "cannot watch the own Node; trying again"),
        }
    }
}
