//! Finds held claims that are gone, and releases them.
//!
//! The kubelet releases every claim that it prepared, so orphans are rare: the kubelet lost its state or was
//! killed at the wrong moment. Polling the API server for each claim would mean thousands of requests a
//! second in a large cluster. So the plugin asks the kubelet which claims its pods use, and asks the API
//! server only for claims that the kubelet does not list, at growing intervals, and for a claim that blocks
//! a new one ([`schedule`]).
//!
//! A claim is released when all of these hold:
//! - the API server said twice, some time apart, that it has no claim of this name or one with another
//!   UID;
//! - the kubelet does not list it;
//! - no process runs in a container that has its devices.

pub mod schedule;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use tranche_api::names::DRIVER;
use tranche_driver::journal::ClaimRecord;

use self::schedule::{INTERVAL, PAUSE, Presence, Schedule};
use crate::claim::preparer::{Preparer, Reporter};
use crate::cluster::claims::ClaimReader;
use crate::kubelet::pod_resources::Kubelet;
use crate::ledger::Ledger;
use crate::ledger::claim_ref::{ClaimRef, claim_of};
use crate::metrics::Metrics;

/// The most waiting suspicions; the next conflict repeats one that is lost.
const WAITING: usize = 64;

/// A channel for the UIDs of claims that block a new claim: a Prepare with a conflict sends, the
/// search receives.
#[must_use]
pub fn suspicions() -> (mpsc::Sender<String>, mpsc::Receiver<String>) {
    mpsc::channel(WAITING)
}

#[derive(Debug)]
pub struct OrphanSearch {
    pub preparer: Arc<Preparer>,
    pub claims: ClaimReader,
    /// Lists which claims the pods use.
    pub kubelet: Arc<dyn Kubelet>,
    /// Reports the status of a claim that an earlier process did not report.
    pub reporter: Arc<dyn Reporter>,
    pub metrics: Arc<Metrics>,
}

impl OrphanSearch {
    pub async fn run(self, mut suspicions: mpsc::Receiver<String>, stop: CancellationToken) {
        let mut schedule = Schedule::default();
        let mut kubelet_tells = true;
        let mut refresh = Instant::now();
        loop {
            if refresh <= Instant::now() {
                kubelet_tells = self.refresh(&mut schedule, kubelet_tells).await;
                refresh = Instant::now() + INTERVAL;
            }
            if let Some(uid) = schedule.next(Instant::now()).map(str::to_owned) {
                kubelet_tells = self.check(&mut schedule, &uid, kubelet_tells).await;
            }
            let soonest = Instant::now() + PAUSE;
            let due = schedule.due().map_or(refresh, |due| due.max(soonest));
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(due.min(refresh)) => {}
                Some(uid) = suspicions.recv() => {
                    kubelet_tells = self.refresh(&mut schedule, kubelet_tells).await;
                    schedule.suspect(Instant::now(), &uid);
                    // Several claims may block one.
                    while let Ok(uid) = suspicions.try_recv() {
                        schedule.suspect(Instant::now(), &uid);
                    }
                }
            }
        }
    }

    /// Updates the schedule with the held claims and the kubelet's list. Returns whether the kubelet
    /// answered; `answered_before` says whether it did the last time.
    async fn refresh(&self, schedule: &mut Schedule, answered_before: bool) -> bool {
        let preparer = Arc::clone(&self.preparer);
        // Claims with unreadable journals are not held until they can be read. This fails only at shutdown.
        let _ = tokio::task::spawn_blocking(move || preparer.read_refused_again()).await;
        // A claim may have become held only a moment ago.
        let listing = self.kubelet.list(Duration::ZERO).await;
        if let Err(error) = &listing
            && answered_before
        {
            warn!(%error, "the kubelet does not list its pods' claims; asking the API server instead, every few hours");
        }
        let mut held = BTreeMap::new();
        let mut joined = Vec::new();
        for record in self.ledger().held() {
            let listed = listing.as_ref().ok().map(|listing| {
                let mut pods = listing.in_use.pods(&record);
                let listed = !pods.is_empty();
                for known in self.ledger().pods(uid(&record)) {
                    pods.remove(&known);
                }
                if !pods.is_empty() {
                    joined.push((uid(&record).to_owned(), pods));
                }
                listed
            });
            held.insert(uid(&record).to_owned(), listed);
        }
        let now = Instant::now();
        schedule.update(now, &held);
        // The kubelet prepares a claim once for all of its pods. Only the claim names pods that joined
        // later, with their UIDs.
        for (uid, pods) in joined {
            schedule.joined(now, &uid, pods);
        }
        listing.is_ok()
    }

    /// Asks the API server for one claim, and releases it if it has been gone for long enough and is not in use. Returns whether
    /// the kubelet answered the last time.
    async fn check(&self, schedule: &mut Schedule, uid: &str, mut kubelet_tells: bool) -> bool {
        let Ok(Some(record)) = self.ledger().get(uid) else {
            schedule.forget(uid);
            return kubelet_tells;
        };
        let claim = claim_of(&record);
        let found = self.query(&claim, &record).await;
        if found == Presence::Gone {
            // The last list may be a minute old.
            kubelet_tells = self.refresh(schedule, kubelet_tells).await;
        }
        if !schedule.found(Instant::now(), uid, found) {
            return kubelet_tells;
        }
        info!(%claim, uid, "the claim is gone and the kubelet did not release it; releasing it");
        if self.preparer.release_orphan(&claim).await.is_ok() {
            self.metrics.orphans.inc();
        }
        kubelet_tells
    }

    async fn query(&self, claim: &ClaimRef, record: &Arc<ClaimRecord>) -> Presence {
        match self.claims.get(claim).await {
            Ok(None) => Presence::Gone,
            Ok(Some(object)) if is(&object, claim) => {
                self.preparer.note_pods(record, &object);
                if !has_devices_in_status(&object) {
                    // An earlier process was killed after its answer and before its report.
                    self.reporter.prepared(record);
                }
                Presence::There
            }
            Ok(Some(object)) if is_another(&object, claim) => Presence::Gone,
            Ok(Some(_)) => Presence::Unknown,
            Err(error) => {
                debug!(%claim, %error, "cannot determine whether the claim is gone");
                Presence::Unknown
            }
        }
    }

    fn ledger(&self) -> &Ledger {
        self.preparer.ledger()
    }
}

fn uid(record: &ClaimRecord) -> &str {
    &record.plan.allocation.uid
}

fn is(object: &ResourceClaim, claim: &ClaimRef) -> bool {
    object.metadata.uid.as_ref() == Some(&claim.uid)
}

/// Whether the object is another claim of the same name. An object without a UID or with another name comes
/// from a broken server.
fn is_another(object: &ResourceClaim, claim: &ClaimRef) -> bool {
    let meta = &object.metadata;
    meta.name.as_ref() == Some(&claim.name)
        && meta.namespace.as_ref() == Some(&claim.namespace)
        && (meta.uid.as_ref()).is_some_and(|uid| !uid.is_empty() && *uid != claim.uid)
}

/// Whether `status.devices` has an entry of ours.
fn has_devices_in_status(claim: &ResourceClaim) -> bool {
    let devices = claim.status.as_ref().and_then(|s| s.devices.as_deref());
    devices
        .unwrap_or_default()
        .iter()
        .any(|d| d.driver == DRIVER)
}
