//! Reports faults of GPUs to those who use them: a condition on the claims, events on their pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::Client;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::warn;
use tranche_driver::health::{Status, Verdict, Verdicts};
use tranche_driver::journal::ClaimRecord;
use tranche_serving::Clock;

use super::Board;
use crate::cluster::claim_health;
use crate::cluster::events::{Events, pod_reference};
use crate::ledger::Ledger;

/// How often claims and verdicts are compared.
const INTERVAL: Duration = Duration::from_secs(1);
/// The pause after a failed write.
const RETRY: Duration = Duration::from_secs(10);

/// Reports.
#[derive(Debug)]
pub struct HealthReporter {
    pub ledger: Arc<Ledger>,
    pub board: Arc<Board>,
    pub events: Events,
    pub clock: Clock,
    /// What claims were told, by their UIDs.
    pub told: BTreeMap<String, Told>,
}

/// What a claim was told.
#[derive(Debug, Default)]
pub struct Told {
    /// The condition that was written, by the device's key.
    written: BTreeMap<String, Verdict>,
    /// The reason of the last event.
    reason: Option<String>,
    /// No write before this.
    not_before: Option<Instant>,
}

impl HealthReporter {
    /// Reports until cancelled.
    pub async fn run(mut self, client: Client, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            if let Some(verdicts) = self.board.now() {
                self.report(&client, &verdicts).await;
            }
        }
    }

    async fn report(&mut self, client: &Client, verdicts: &Verdicts) {
        let held = self.ledger.held();
        let is_held = |uid: &String| held.iter().any(|it| it.plan.allocation.uid == *uid);
        self.told.retain(|uid, _| is_held(uid));
        for record in held {
            let uid = &record.plan.allocation.uid;
            let faulty = faulty(&record, verdicts);
            if faulty.is_empty() && !self.told.contains_key(uid) {
                continue;
            }
            self.told.entry(uid.clone()).or_default();
            self.tell_pods(&record, &faulty);
            self.write(client, &record, faulty).await;
        }
    }

    /// An event for each pod, when a fault is new to it.
    fn tell_pods(&mut self, record: &ClaimRecord, faulty: &BTreeMap<String, Verdict>) {
        let allocation = &record.plan.allocation;
        let Some(told) = self.told.get_mut(&allocation.uid) else {
            return;
        };
        let Some(verdict) = faulty.values().next() else {
            told.reason = None;
            return;
        };
        if told.reason.as_ref() == Some(&verdict.reason) {
            return;
        }
        let pods = self.ledger.pod_uids(&allocation.uid);
        if pods.is_empty() {
            return;
        }
        told.reason = Some(verdict.reason.clone());
        let devices = record.plan.devices.iter();
        let gpus = devices.filter(|device| faulty.contains_key(&device.key));
        let gpus: Vec<&str> = gpus.map(|device| device.gpu_uuid.as_str()).collect();
        let note = format!(
            "{} of claim {}: {}",
            gpus.join(", "),
            allocation.name,
            verdict.message
        );
        for (uid, name) in pods {
            let pod = pod_reference(Some(allocation.namespace.clone()), name, uid);
            self.events.gpu_unhealthy(pod, &note);
        }
    }

    async fn write(
        &mut self,
        client: &Client,
        record: &ClaimRecord,
        faulty: BTreeMap<String, Verdict>,
    ) {
        let allocation = &record.plan.allocation;
        let Some(told) = self.told.get_mut(&allocation.uid) else {
            return;
        };
        let now = Instant::now();
        if told.written == faulty || told.not_before.is_some_and(|at| now < at) {
            return;
        }
        match claim_health::write(client, record, &faulty, self.clock.now()).await {
            Ok(()) => {
                told.written = faulty;
                told.not_before = None;
            }
            Err(error) => {
                told.not_before = Some(now + RETRY);
                warn!(
                    claim = allocation.name,
                    namespace = allocation.namespace,
                    error,
                    "cannot write the condition Healthy of a claim; trying again"
                );
            }
        }
    }
}

/// The verdicts on a claim's devices whose GPU has a fault, by the devices' keys.
fn faulty(record: &ClaimRecord, verdicts: &Verdicts) -> BTreeMap<String, Verdict> {
    let devices = record.plan.devices.iter();
    let faulty = devices.filter_map(|device| {
        let verdict = verdicts.get(&device.gpu_uuid)?;
        let is_faulty = verdict.status == Status::Unhealthy;
        is_faulty.then(|| (device.key.clone(), verdict.clone()))
    });
    faulty.collect()
}
