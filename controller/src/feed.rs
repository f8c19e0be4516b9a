//! The watches, as one stream of observations.
//!
//! Each watch ends and begins again with a list once or twice an hour, at a random moment, and whenever a
//! write does not come back through it. The list finds what the watch lost.
//!
//! Only the parts of an object that decisions need are passed on ([`crate::known`]); the rest is dropped with
//! the list's page or the event.

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
use crate::known::{KnownSlice, kept, trimmed_gpu_node, trimmed_node, trimmed_policy};
use crate::metrics::Metrics;

/// The shortest life of a watch; the longest is twice that. At 6,000 nodes a list of the slices is 400 MB of
/// JSON.
const RELIST: Duration = Duration::from_mins(30);
/// Objects in one page of a list; a page is held whole while it is read.
const PAGE: u32 = 100;
/// The most observations that wait for the index. A full queue slows the watches down, as intended.
const QUEUE: usize = 256;

#[derive(Debug)]
pub struct Feed {
    observations: mpsc::Receiver<Observation>,
    relist: Arc<Notify>,
}

impl Feed {
    /// Starts the watches. They end when the feed is dropped.
    #[must_use]
    pub fn start(client: &Client, metrics: &Metrics) -> Self {
        let (sender, observations) = mpsc::channel(QUEUE);
        let relist = Arc::new(Notify::new());
        let all = || watcher::Config::default().page_size(PAGE);
        let ours = all().fields(&format!("spec.driver={DRIVER}"));
        let tap = Tap {
            sender,
            relist: relist.clone(),
            metrics: metrics.clone(),
        };

        let api = Api::<GpuNode>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), all());
        let observe = |event| Observation::GpuNode(kept(event, trimmed_gpu_node));
        spawn("gpunodes", watch, observe, tap.clone());

        let api = Api::<SharingPolicy>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), all());
        let observe = |event| Observation::Policy(kept(event, trimmed_policy));
        spawn("sharingpolicies", watch, observe, tap.clone());

        let api = Api::<PartialObjectMeta<Node>>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), all());
        let observe = |event| Observation::Node(kept(event, trimmed_node));
        spawn("nodes", watch, observe, tap.clone());

        let api = Api::<ResourceSlice>::all(client.clone());
        let watch = move || watcher::watcher(api.clone(), ours.clone());
        let known = |slice: ResourceSlice| KnownSlice::from(&slice);
        let observe = move |event| Observation::Slice(kept(event, known));
        spawn("resourceslices", watch, observe, tap);

        Self {
            observations,
            relist,
        }
    }

    /// The next observation; waits for ever when the watches have ended.
    pub async fn next(&mut self) -> Observation {
        match self.observations.recv().await {
            Some(observation) => observation,
            None => std::future::pending().await,
        }
    }

    /// Restarts all watches.
    pub fn relist(&self) {
        self.relist.notify_waiters();
    }
}

/// Where a watch's events go.
#[derive(Clone, Debug)]
struct Tap {
    sender: mpsc::Sender<Observation>,
    relist: Arc<Notify>,
    metrics: Metrics,
}

fn spawn<K, S>(
    kind: &'static str,
    watch: impl Fn() -> S + Send + 'static,
    observe: impl Fn(Event<K>) -> Observation + Send + 'static,
    tap: Tap,
) where
    K: Debug + Send + 'static,
    S: Stream<Item = Result<Event<K>, watcher::Error>> + Send + 'static,
{
    let Tap {
        sender,
        relist,
        metrics,
    } = tap;
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
                        tracing::warn!(%error, "the watch failed and is retried");
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
    // The standard library's only source of randomness, which is good enough for a spread.
    let random = RandomState::new().hash_one(0u8);
    let seconds = limit.as_secs().max(1);
    Duration::from_secs(random % seconds)
}
