//! The watches, as one stream of observations.
//!
//! A watch that fails, or is silent for too long, goes on where it was, and lists again only if the API server does not know that
//! version any more.
//!
//! Only the parts of an object that decisions need are passed on ([`crate::known`]); the rest is dropped with
//! the list's page or the event.

use std::fmt::Debug;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use tokio::sync::mpsc;
use tracing::{Instrument, info_span};
use tranche_api::names::DRIVER;
use tranche_api::{GpuNode, SharingPolicy};

use crate::index::Observation;
use crate::known::{KnownSlice, kept, trimmed_gpu_node, trimmed_node, trimmed_policy};
use crate::metrics::Metrics;

/// Objects in one page of a list; a page is held whole while it is read.
const PAGE: u32 = 100;
/// The most observations that wait for the index. A full queue slows the watches down, as intended.
const QUEUE: usize = 256;

#[derive(Debug)]
pub struct Feed {
    observations: mpsc::Receiver<Observation>,
}

impl Feed {
    /// Starts the watches. They end when the feed is dropped.
    #[must_use]
    pub fn start(client: &Client, metrics: &Metrics) -> Self {
        let (sender, observations) = mpsc::channel(QUEUE);
        let all = || watcher::Config::default().page_size(PAGE);
        let ours = all().fields(&format!("spec.driver={DRIVER}"));
        let tap = Tap {
            sender,
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

        Self { observations }
    }

    /// The next observation; waits for ever when the watches have ended.
    pub async fn next(&mut self) -> Observation {
        match self.observations.recv().await {
            Some(observation) => observation,
            None => std::future::pending().await,
        }
    }
}

/// Where a watch's events go.
#[derive(Clone, Debug)]
struct Tap {
    sender: mpsc::Sender<Observation>,
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
    let Tap { sender, metrics } = tap;
    let task = async move {
        loop {
            let mut events = watch().default_backoff().boxed();
            while let Some(event) = events.next().await {
                match event {
                    Ok(event) => {
                        if matches!(event, Event::InitDone) {
                            metrics.listed(kind);
                        }
                        if sender.send(observe(event)).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        metrics.watch_failed(kind);
                        tracing::warn!(%error, "the watch failed and is retried");
                    }
                }
            }
        }
    };
    tokio::spawn(task.instrument(info_span!("watch", kind)));
}
