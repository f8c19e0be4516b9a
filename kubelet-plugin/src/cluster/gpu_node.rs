//! The node's GpuNode: inventory, what must not be offered of it, the conditions of its driver, its journals and
//! other systems that hand out its GPUs, and the epoch of its registration
//! (ADR 0005).
//!
//! The epoch grows when the kubelet (re)registered the plugin, when published slices of the current
//! epoch vanished under the live plugin (the kubelet wiped them, or somebody deleted them), and when
//! somebody deleted the GpuNode. Nothing is written before the driver was checked: the inventory of an
//! earlier process could offer GPUs that are gone. What the API server has already is not written
//! again. What the policies ask of the node comes back in the same object, see [`NodePolicy`].

mod own;
mod slices;
#[cfg(test)]
mod tests;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tranche_api::conditions::{CLAIMS_KNOWN, DRIVER_READY, HEALTHY, State, condition};
use tranche_api::gpu_node::{GpuStatus, GpuTaint, Inventory, Published, Registration};
use tranche_api::names::API_VERSION;
use tranche_api::{GpuNode, GpuNodeStatus, WithheldGpu};
use tranche_driver::competing_drivers::Verdict as Providers;
use tranche_driver::health::{Verdict, Verdicts};
use tranche_serving::Clock;

use self::own::OwnEvent;
use self::slices::OwnSlices;
use crate::FIELD_MANAGER;
use crate::cluster::api_server::{NoAnswer, within};
use crate::cluster::events::Events;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::DriverState;
use crate::kubelet::registration::Registered;
use crate::ledger::Refused;
use crate::metrics::Metrics;

/// How long published slices must be missing before that counts: the watch of the slices may be behind that of
/// the GpuNode.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// The first pause after a failed write; it doubles up to the last.
const FIRST_RETRY: Duration = Duration::from_millis(250);
const LAST_RETRY: Duration = Duration::from_secs(15);
/// How often the API server's copy is read without a reason: somebody may have changed or deleted it.
const RESYNC: Duration = Duration::from_mins(5);

/// Why the GpuNode is not up to date.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Api(#[from] kube::Error),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error("node {0} has no UID")]
    NodeWithoutUid(String),
}

/// The sources of the GpuNode's status.
#[derive(Clone, Debug)]
pub struct Sources {
    pub driver: watch::Receiver<DriverState>,
    /// Other systems that hand out the GPUs; `None` until the first search.
    pub others: watch::Receiver<Option<Providers>>,
    /// GPUs that are withheld because memory of them has no owner.
    pub unowned: watch::Receiver<Vec<WithheldGpu>>,
    /// GPUs whose MPS daemon does not answer.
    pub daemons: watch::Receiver<Vec<WithheldGpu>>,
    /// The verdicts on the GPUs' health; `None` before the first.
    pub health: watch::Receiver<Option<Arc<Verdicts>>>,
    pub registered: watch::Receiver<Registered>,
    /// The claims whose journals cannot be read.
    pub refused: watch::Receiver<Refused>,
}

/// Keeps the node's GpuNode up to date.
pub struct GpuNodeWriter {
    client: Client,
    node: String,
    events: Events,
    clock: Clock,
    metrics: Arc<Metrics>,
}

impl fmt::Debug for GpuNodeWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuNodeWriter")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

/// What should be written.
#[derive(Clone, Debug, Default)]
struct Wanted {
    /// The driver; `None` until it was checked, and nothing is written before.
    driver: Option<DriverReport>,
    /// Other systems that hand out the GPUs; `None` until the first search, and nothing is written before.
    others: Option<Providers>,
    /// GPUs with memory that has no owner.
    unowned: Vec<WithheldGpu>,
    /// GPUs whose MPS daemon does not answer.
    daemons: Vec<WithheldGpu>,
    /// The verdicts on the GPUs' health. Before the first, what is stored stays.
    health: Option<Arc<Verdicts>>,
    /// Whether the epoch must grow.
    bump: bool,
    /// The claims whose journals cannot be read.
    refused: Refused,
}

/// `ClaimsKnown`.
fn claims_known(refused: &Refused) -> State {
    let message = match refused.first_key_value() {
        None => "all journals can be read".to_owned(),
        Some((_, why)) if refused.len() == 1 => why.to_string(),
        Some((_, why)) => format!(
            "{} journals cannot be read; the first: {why}",
            refused.len()
        ),
    };
    State {
        kind: CLAIMS_KNOWN,
        holds: refused.is_empty(),
        reason: if refused.is_empty() {
            "JournalsReadable"
        } else {
            "JournalUnreadable"
        },
        message,
    }
}

/// The next value of a source; `None` if there will be none.
async fn newest<T: Clone>(source: &mut watch::Receiver<T>) -> Option<T> {
    source.changed().await.ok()?;
    Some(source.borrow_and_update().clone())
}

/// What is written of each GPU's health.
fn gpu_statuses(verdicts: &Verdicts, stored: &[GpuStatus], now: Timestamp) -> Vec<GpuStatus> {
    let status = |(uuid, verdict): (&String, &Verdict)| {
        let known = stored.iter().find(|status| status.uuid == *uuid);
        let known = known.map_or(&[][..], |status| &status.conditions);
        let (status, reason) = (verdict.status.as_str(), &verdict.reason);
        let time = |seconds| Time(Timestamp::from_second(seconds).unwrap_or(now));
        GpuStatus {
            uuid: uuid.clone(),
            conditions: vec![condition(
                HEALTHY,
                status,
                reason,
                &verdict.message,
                known,
                now,
            )],
            taint: verdict.taint.as_ref().map(|taint| GpuTaint {
                value: taint.value.clone(),
                effect: taint.effect,
                time_added: time(taint.since),
            }),
        }
    };
    verdicts.iter().map(status).collect()
}

fn count_unhealthy(gpus: &[GpuStatus]) -> u32 {
    let unhealthy = gpus
        .iter()
        .filter(|gpu| healthy(gpu).is_some_and(|it| it.status == "False"));
    u32::try_from(unhealthy.count()).unwrap_or(u32::MAX)
}

fn healthy(gpu: &GpuStatus) -> Option<&Condition> {
    gpu.conditions.iter().find(|it| it.type_ == HEALTHY)
}

/// The GPUs that have a fault now and had none, or another one; and those that had one and have none.
fn news_of_health<'a>(old: &[GpuStatus], new: &'a [GpuStatus]) -> Vec<(&'a str, &'a Condition)> {
    let of_old = |uuid: &str| old.iter().find(|gpu| gpu.uuid == uuid).and_then(healthy);
    let news = new.iter().filter_map(|gpu| {
        let now = healthy(gpu)?;
        let before = of_old(&gpu.uuid);
        let had_fault = before.is_some_and(|before| before.status == "False");
        let is_news = match &*now.status {
            "False" => !had_fault || before.is_some_and(|before| before.reason != now.reason),
            "True" => had_fault,
            _ => false,
        };
        is_news.then_some((&*gpu.uuid, now))
    });
    news.collect()
}

/// The driver as the cluster sees it.
#[derive(Clone, Debug)]
struct DriverReport {
    /// Missing without a usable driver.
    inventory: Option<Inventory>,
    /// GPUs that the driver itself rules out.
    withheld: Vec<WithheldGpu>,
    /// `DriverReady`.
    ready: State,
}

impl Wanted {
    /// Whether everything that decides what is offered was checked.
    fn is_known(&self) -> bool {
        self.driver.is_some() && self.others.is_some()
    }
}

impl DriverReport {
    fn of(state: &DriverState) -> Option<Self> {
        let condition = |holds, reason, message| State {
            kind: DRIVER_READY,
            holds,
            reason,
            message,
        };
        match state {
            DriverState::Unknown => None,
            DriverState::Absent(why) => Some(Self {
                inventory: None,
                withheld: Vec::new(),
                ready: condition(false, why.reason(), why.to_string()),
            }),
            DriverState::Ready(ready) => Some(Self {
                inventory: Some(ready.inventory.clone()),
                withheld: ready.withheld.clone(),
                ready: match &ready.hang {
                    Some(why) => condition(false, "DriverHangs", why.to_string()),
                    None => condition(true, "DriverReady", ready.to_string()),
                },
            }),
        }
    }
}

impl GpuNodeWriter {
    /// Writes the GpuNode of `node`; `events` report changes of the driver.
    #[must_use]
    pub fn new(
        client: Client,
        node: String,
        events: Events,
        clock: Clock,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            client,
            node,
            events,
            clock,
            metrics,
        }
    }

    /// Writes whenever driver, registration, slices or journals change, or the GpuNode is deleted, and says
    /// in `policy` what the policies ask of the node, until cancelled.
    pub async fn run(
        self,
        sources: Sources,
        policy: watch::Sender<NodePolicy>,
        stop: CancellationToken,
    ) {
        let Sources {
            mut driver,
            mut others,
            mut unowned,
            mut daemons,
            mut health,
            mut registered,
            mut refused,
        } = sources;
        let mut slices = OwnSlices::default();
        let mut events = pin!(slices::watch(self.client.clone(), &self.node));
        let mut own = pin!(own::watch(self.client.clone(), &self.node));
        let mut wanted = Wanted {
            refused: refused.borrow_and_update().clone(),
            others: others.borrow_and_update().clone(),
            unowned: unowned.borrow_and_update().clone(),
            daemons: daemons.borrow_and_update().clone(),
            health: health.borrow_and_update().clone(),
            ..Wanted::default()
        };
        let mut epoch = 0;
        let mut dirty = false;
        let mut retry = FIRST_RETRY;
        let mut next_try = pin!(tokio::time::sleep(Duration::ZERO));
        let mut recorded = Published::default();
        let mut check = pin!(tokio::time::sleep(Duration::ZERO));
        let mut checking = false;
        let mut resync = tokio::time::interval(RESYNC);
        resync.reset();
        loop {
            let lacking = recorded.epoch == epoch && slices.lack(&recorded.slices);
            if lacking && !checking {
                check.as_mut().reset(tokio::time::Instant::now() + DEBOUNCE);
            }
            checking = lacking;
            tokio::select! {
                () = stop.cancelled() => return,
                Ok(()) = driver.changed() => {
                    wanted.driver = DriverReport::of(&driver.borrow_and_update());
                    dirty = true;
                }
                Some(new) = newest(&mut refused) => (wanted.refused, dirty) = (new, true),
                Some(new) = newest(&mut others) => (wanted.others, dirty) = (new, true),
                Some(new) = newest(&mut unowned) => (wanted.unowned, dirty) = (new, true),
                Some(new) = newest(&mut daemons) => (wanted.daemons, dirty) = (new, true),
                Some(new) = newest(&mut health) => (wanted.health, dirty) = (new, true),
                Ok(()) = registered.changed() => {
                    if registered.borrow_and_update().now {
                        self.metrics.registrations.inc();
                        wanted.bump = true;
                        dirty = true;
                    }
                }
                Some(event) = events.next() => slices.apply(event),
                () = check.as_mut(), if checking => {
                    check.as_mut().reset(tokio::time::Instant::now() + DEBOUNCE);
                    let asked = wanted.bump;
                    if !asked && registered.borrow().now && self.slices_vanished(&slices, epoch).await {
                        info!(epoch, "published slices of this epoch are gone; asking for them anew");
                        wanted.bump = true;
                        dirty = true;
                    }
                }
                Some(seen) = own.next() => match seen {
                    OwnEvent::Published(published) => {
                        note(&policy, NodePolicy::of(&published));
                        recorded = *published;
                    }
                    OwnEvent::Missing => dirty = true,
                },
                _ = resync.tick() => dirty = true,
                () = next_try.as_mut(), if dirty && wanted.is_known() => {
                    match self.write(&wanted, epoch).await {
                        Ok(written) => {
                            epoch = written;
                            self.metrics.epoch.set(epoch);
                            wanted.bump = false;
                            dirty = false;
                            retry = FIRST_RETRY;
                        }
                        Err(error) => {
                            warn!(%error, node = self.node, "cannot write the GpuNode; trying again");
                            next_try.as_mut().reset(tokio::time::Instant::now() + retry);
                            retry = (retry * 2).min(LAST_RETRY);
                        }
                    }
                }
            }
        }
    }

    /// Whether slices that the controller says it published for this epoch are not there.
    async fn slices_vanished(&self, slices: &OwnSlices, epoch: i64) -> bool {
        match self.read().await {
            Ok(Some(GpuNode {
                status: Some(status),
                ..
            })) => status.published.is_some_and(|published| {
                published.epoch == epoch && slices.lack(&published.slices)
            }),
            _ => false,
        }
    }

    /// Writes the GpuNode if it differs, and returns the present epoch.
    ///
    /// `known` is the epoch before: it never shrinks, not even when somebody deleted the GpuNode.
    async fn write(&self, wanted: &Wanted, known: i64) -> Result<i64, Error> {
        let (Some(driver), Some(others)) = (&wanted.driver, &wanted.others) else {
            return Ok(known);
        };
        let node = match self.read().await? {
            Some(node) => node,
            None => self.create().await?,
        };
        let old = node.status.clone().unwrap_or_default();
        let stored = old.registration.as_ref().map_or(0, |old| old.epoch);
        // If the epoch was lost with the object, it must grow, so that the slices are published again.
        let lost = stored < known;
        let registration = Registration {
            epoch: stored.max(known) + i64::from(wanted.bump || lost),
            plugin_version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let now = self.clock.now();
        let ready = driver.ready.since(&old.conditions, now);
        let sole = others.condition.since(&old.conditions, now);
        let is_news = !old.conditions.contains(&ready);
        let claims = claims_known(&wanted.refused).since(&old.conditions, self.clock.now());
        let withheld = [
            &driver.withheld[..],
            &others.withheld,
            &wanted.unowned,
            &wanted.daemons,
        ]
        .concat();
        let gpus = match &wanted.health {
            None => old.gpus.clone(),
            Some(verdicts) => gpu_statuses(verdicts, &old.gpus, now),
        };
        if old.registration.as_ref() == Some(&registration)
            && old.gpus == gpus
            && old.inventory == driver.inventory
            && old.withheld == withheld
            && old.conditions.contains(&sole)
            && !is_news
            && old.conditions.contains(&claims)
        {
            return Ok(registration.epoch);
        }
        let epoch = registration.epoch;
        let status = GpuNodeStatus {
            inventory: driver.inventory.clone(),
            registration: Some(registration),
            withheld,
            unhealthy_count: count_unhealthy(&gpus),
            gpus,
            conditions: vec![ready, claims, sole],
            ..GpuNodeStatus::default()
        };
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": "GpuNode",
            "metadata": {"name": self.node},
            "status": status,
        });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(&body);
        within(self.api().patch_status(&self.node, &params, &patch)).await??;
        info!(
            epoch,
            driver = driver.ready.reason,
            "wrote the GpuNode's status"
        );
        if is_news {
            self.events.driver(&node, &driver.ready);
        }
        for (uuid, condition) in news_of_health(&old.gpus, &status.gpus) {
            self.events.gpu_health(&node, uuid, condition);
        }
        Ok(epoch)
    }

    async fn read(&self) -> Result<Option<GpuNode>, Error> {
        Ok(within(self.api().get_opt(&self.node)).await??)
    }

    /// Creates the GpuNode. The garbage collector removes it with its Node.
    async fn create(&self) -> Result<GpuNode, Error> {
        let nodes = Api::<Node>::all(self.client.clone());
        let node = within(nodes.get(&self.node)).await??;
        let uid = node
            .metadata
            .uid
            .ok_or_else(|| Error::NodeWithoutUid(self.node.clone()))?;
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": "GpuNode",
            "metadata": {
                "name": self.node,
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": uid}],
            },
            "spec": {},
        });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(&body);
        Ok(within(self.api().patch(&self.node, &params, &patch)).await??)
    }

    fn api(&self) -> Api<GpuNode> {
        Api::all(self.client.clone())
    }
}

fn note(policy: &watch::Sender<NodePolicy>, asked: NodePolicy) {
    policy.send_if_modified(|known| {
        let is_news = *known != asked;
        if is_news {
            info!(?asked, "what the policies ask of this node changed");
            *known = asked;
        }
        is_news
    });
}
