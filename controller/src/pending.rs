//! Counts the pods that wait for claims of our classes, by namespace and reason; off unless the command line asks for it.
//!
//! One watch follows the pods whose phase is Pending, and [`waiting`] keeps what matters of them. A claim is ours if one of its
//! requests names a class of ours: each claim and each template that such a pod names is read once, because their specs do not change. Pods of one Job or
//! Deployment name one template, so that thousands of them cost one request. A claim that a pod names itself, which others may
//! share, is read again twice a minute: it may have devices by then.
//!
//! Instead of a claim, a pod may ask for a resource that a DeviceClass stands for; the class is looked up among all classes.
//!
//! Both replicas count: the numbers are the same, and a change of the leader leaves no gap.

pub mod waiting;

use std::pin::pin;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::api::ListParams;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;
use tranche_driver::class::is_ours;
use tranche_driver::extended_resources;

use crate::known::kept;
use crate::metrics::Metrics;
use waiting::{MOST, Ownership, Pending, Source, WaitingPod, ownership};

/// Pods in one page of a list; a page is held whole while it is read.
const PAGE: u32 = 50;
/// How often the counts are renewed, where something changed.
const RENEW: Duration = Duration::from_secs(1);
/// Claims and templates that are read in one renewal.
const READS: usize = 20;
/// After how many renewals the sources that may have changed are read again.
const READ_AGAIN: u32 = 30;

/// Watches the pods and keeps `metrics` true until `stop`.
pub async fn watch(client: Client, metrics: Metrics, stop: CancellationToken) {
    let pods = Api::<Pod>::all(client.clone());
    let config = watcher::Config::default()
        .fields("status.phase=Pending")
        .page_size(PAGE);
    let mut events = pin!(watcher::watcher(pods, config).default_backoff());
    let mut renew = tokio::time::interval(RENEW);
    renew.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut pending, mut changed, mut renewals) = (Pending::default(), false, 0_u32);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            event = events.next() => match event {
                Some(Ok(event)) => {
                    if matches!(event, Event::InitDone) {
                        metrics.listed("pods");
                    }
                    pending.apply(kept(event, |pod| WaitingPod::of(&pod)));
                    changed = true;
                }
                Some(Err(error)) => {
                    metrics.watch_failed("pods");
                    tracing::warn!(%error, "the watch of pending pods failed and is retried");
                }
                None => return,
            },
            _ = renew.tick() => {
                renewals = renewals.wrapping_add(1);
                if renewals.is_multiple_of(READ_AGAIN) {
                    pending.read_again();
                    changed = true;
                }
                if !changed {
                    continue;
                }
                changed = read(&client, &mut pending).await;
                if pending.was_full() {
                    tracing::warn!("more than {MOST} pods with claims are pending: tranche_pods_pending counts so many");
                }
                metrics.pending(pending.counts().iter().map(|((namespace, reason), count)| {
                    (&**namespace, reason.as_str(), count.pods, count.since.as_second())
                }));
            }
        }
    }
}

/// Reads some claims and templates; true where there may be more to read.
async fn read(client: &Client, pending: &mut Pending) -> bool {
    let sources = pending.to_read(READS);
    let mut more = sources.len() == READS;
    let mut classes = None;
    for (namespace, source) in sources {
        let found = match &source {
            Source::Resource(name) => classes_of(client, &mut classes).await.map(|classes| {
                let class = extended_resources::class_of(name, classes);
                let is_ours = class.is_some_and(is_ours);
                Some(if is_ours {
                    Ownership::Ours
                } else {
                    Ownership::Others
                })
            }),
            Source::Claim(name) => {
                let claims = Api::<ResourceClaim>::namespaced(client.clone(), &namespace);
                let claim = claims.get_opt(name).await;
                claim.map(|it| it.map(|it| Ownership::of(&it)))
            }
            Source::Template(name) => {
                let templates =
                    Api::<ResourceClaimTemplate>::namespaced(client.clone(), &namespace);
                let template = templates.get_opt(name).await;
                template.map(|it| {
                    let devices = |it: ResourceClaimTemplate| it.spec?.spec?.devices;
                    it.map(|it| ownership(devices(it).as_ref()))
                })
            }
        };
        match found {
            Ok(known) => {
                pending.learn(namespace, source, known.unwrap_or(Ownership::Missing));
            }
            Err(error) => {
                tracing::warn!(%namespace, ?source, %error, "cannot read what a pending pod claims; asked again");
                more = true;
            }
        }
    }
    more
}

/// All DeviceClasses, read once for the resources of one renewal.
async fn classes_of<'a>(
    client: &Client,
    classes: &'a mut Option<Vec<DeviceClass>>,
) -> kube::Result<&'a [DeviceClass]> {
    if classes.is_none() {
        let all = Api::<DeviceClass>::all(client.clone());
        *classes = Some(all.list(&ListParams::default()).await?.items);
    }
    Ok(classes.as_deref().unwrap_or_default())
}
