//! The watches, as one stream of observations.
//!
//! Each watch is thrown away and begun again with a list every few minutes, at a random moment, and whenever a
//! write does not come back through it. So nothing that a watch may have lost lasts.

use std::collections::hash_map::RandomState;
use std::fmt::Debug;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use tokio::sync::{Notify, mpsc};
use tracing::{Instrument, info_span};
use tranche_api::names::DRIVER;
use tranche_api::{GpuNode, SharingPolicy};

use crate::index::Observation;
use crate::metrics::Metrics;

/// The shortest life of a watch; the longest is twice that.
const RELIST: Duration = Duration::from_mins(5);
/// Observations that wait for the index. A full queue slows the watches down, which is what it is for.
const QUEUE: usize = 1024;

/// Running watches.
#[derive(Debug)]
pub struct Feed {
    observations: mpsc::Receiver<Observation>,
    relist: Arc<Notify>,
}

impl Feed {
    /// Starts the watches. They end when the feed is dropped.
    pub fn start(client: &Client, metrics: &Metrics) -> Self {
        let (sender, observations) = mpsc::channel(QUEUE);
        let relist = Arc::new(Notify::new());
        let all = watcher::Config::default;
        let ours = all().fields(&format!("spec.driver={DRIVER}"));

        let api = Api::<GpuNode>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), all());
        spawn(
            "gpunodes",
            watch,
            Observation::GpuNode,
            &sender,
            &relist,
            metrics,
        );

        let api = Api::<SharingPolicy>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), all());
        spawn(
            "sharingpolicies",
            watch,
            Observation::Policy,
            &sender,
            &relist,
            metrics,
        );

        let api = Api::<PartialObjectMeta<Node>>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), all());
        spawn("nodes", watch, Observation::Node, &sender, &relist, metrics);

        let api = Api::<ResourceSlice>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), ours.clone());
        spawn(
            "resourceslices",
            watch,
            Observation::Slice,
            &sender,
            &relist,
            metrics,
        );

        Self {
            observations,
            relist,
        }
    }

    /// The next observation. Pends for ever when the watches have ended.
    pub async fn next(&mut self) -> Observation {
        match self.observations.recv().await {
            Some(observation) => observation,
            None => std::future::pending().await,
        }
    }

    /// Begins all watches anew.
    pub fn relist(&self) {
        self.relist.notify_waiters();
    }
}

fn spawn<K, S>(
    kind: &'static str,
    watch: impl Fn() -> S + Send + 'static,
    observe: fn(Event<K>) -> Observation,
    sender: &mpsc::Sender<Observation>,
    relist: &Arc<Notify>,
    metrics: &Metrics,
) where
    K: Debug + Send + 'static,
    S: Stream<Item = Result<Event<K>, watcher::Error>> + Send + 'static,
{
    let (sender, relist, metrics) = (sender.clone(), relist.clone(), metrics.clone());
    let task = async move {
        loop {
            let mut events = watch().default_backoff().boxed();
            let end = tokio::time::sleep(RELIST + jitter(RELIST));
            tokio::pin!(end);
            loop {
                let event = tokio::select! {
                    () = &mut end => break,
                    () = relist.notified() => break,
                    event = events.next() => event,
                };
                match event {
                    Some(Ok(event)) => {
                        if matches!(event, Event::InitDone) {
                            metrics.listed(kind);
                        }
                        if sender.send(observe(event)).await.is_err() {
                            return;
                        }
                    }
                    Some(Err(error)) => {
                        metrics.watch_failed(kind);
                        tracing::warn!(%error, "the watch failed and is tried again");
                    }
                    None => break,
                }
            }
        }
    };
    tokio::spawn(task.instrument(info_span!("watch", kind)));
}

/// A random time below `limit`.
fn jitter(limit: Duration) -> Duration {
    // The standard library's only source of randomness; spread is all that is asked of it.
    let random = RandomState::new().hash_one(0u8);
    let seconds = limit.as_secs().max(1);
    Duration::from_secs(random % seconds)
}
