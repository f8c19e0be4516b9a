//! Who uses which part of the node's GPUs: the values for `/metrics` and `/usage`.
//!
//! ```text
//!  NVML, once a second: utilization ─────────┐
//!  NVML, when somebody wants to know: memory ┼─► driver::usage::attribute ─► NodeUsage
//!  watchdog: owner of a process, by cgroup ──┤
//!  ledger, kubelet: what is held, by whom ───┘
//! ```
//!
//! While a claim holds a GPU, NVML stays open, as for the watchdog. Otherwise it is opened for a moment, at most once a minute: an open
//! NVML keeps the driver from being unloaded, and powers idle GPUs up. No lock that a Prepare needs is held while NVML is called.

pub mod held;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tranche_api::usage::NodeUsage;
use tranche_driver::usage::{HeldDevice, attribute};
use tranche_node::sampler;
use tranche_node::usage::Reader;

use self::held::{LastListing, LastSeen, held_of};
use crate::gpu::driver_state::DriverState;
use crate::host::layout::Layout;
use crate::kubelet::pod_resources::Kubelet;
use crate::ledger::Ledger;
use crate::periodic;
use crate::share::last_findings::LastFindings;

/// How often utilization is sampled.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often the kubelet is asked for its pods.
const LIST: Duration = Duration::from_secs(5);

/// How old the kubelet's answer may be. It is less than [`LIST`], so that each list is a new one.
const POD_RESOURCES_AGE: Duration = Duration::from_secs(4);

/// How old an answer may be: readers at the same time share one reading.
const FRESH: Duration = Duration::from_secs(1);

/// How old an answer may be while no claim holds a GPU.
const FRESH_UNHELD: Duration = Duration::from_mins(1);

#[derive(Debug)]
pub struct UsageParts {
    pub node: String,
    pub ledger: Arc<Ledger>,
    /// The paths of the pages.
    pub layout: Layout,
    pub state: watch::Receiver<DriverState>,
    /// The owners of processes.
    pub last_findings: Arc<LastFindings>,
    /// Lists the node's pods.
    pub kubelet: Arc<dyn Kubelet>,
}

/// Reads the usage of the node's GPUs.
#[derive(Debug)]
pub struct Usage {
    parts: UsageParts,
    listed: Mutex<LastListing>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    reader: Reader,
    seen: LastSeen,
    last: Option<(Instant, Arc<NodeUsage>)>,
}

impl Usage {
    /// Reads with `reader`.
    #[must_use]
    pub fn new(parts: UsageParts, reader: Reader) -> Self {
        Self {
            parts,
            listed: Mutex::default(),
            state: Mutex::new(State {
                reader,
                seen: LastSeen::default(),
                last: None,
            }),
        }
    }

    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        // The list runs on its own, so that a kubelet that does not answer delays no sample and no stop.
        let list = async {
            let mut ticks = tokio::time::interval(LIST);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                self.list().await;
            }
        };
        let usage = Arc::clone(&self);
        let sample = periodic::run(usage, INTERVAL, &stop, |usage| usage.sample(), |_, ()| {});
        tokio::select! {
            () = sample => {}
            () = list => {}
        }
    }

    /// Asks the kubelet for its pods, if claims are held.
    async fn list(&self) {
        if self.parts.ledger.held().is_empty() {
            return;
        }
        let listing = self.parts.kubelet.list(POD_RESOURCES_AGE).await;
        self.listed().add(&self.parts.ledger, listing.ok());
    }

    /// Samples the utilization of all GPUs, while a claim holds one.
    fn sample(&self) {
        let ready = self.parts.state.borrow().clone();
        let mut state = self.lock();
        let DriverState::Ready(ready) = ready else {
            return state.reader.close();
        };
        if !self.is_held() {
            return state.reader.close();
        }
        let now = sampler::now();
        let gpus: Vec<&str> = ready.inventory.gpus.iter().map(|gpu| &*gpu.uuid).collect();
        let busy = state.reader.sample(now, &gpus);
        state.seen.add(
            now,
            &busy,
            &self.parts.ledger,
            &self.parts.last_findings.ownership().owners,
        );
    }

    /// Whether a claim holds a GPU that the driver has.
    fn is_held(&self) -> bool {
        let held = self.parts.ledger.held();
        let mut devices = held.iter().flat_map(|record| &record.plan.devices);
        devices.any(|device| device.vfio.is_none())
    }

    /// The usage now, at most a second old, or a minute while no claim holds a GPU. It reads files and calls NVML, which may block.
    #[must_use]
    pub fn get(&self) -> Arc<NodeUsage> {
        let is_held = self.is_held();
        let mut state = self.lock();
        let fresh = if is_held { FRESH } else { FRESH_UNHELD };
        if let Some((at, usage)) = &state.last
            && at.elapsed() < fresh
        {
            return Arc::clone(usage);
        }
        let usage = Arc::new(self.read(&mut state));
        if !is_held {
            state.reader.close();
        }
        state.last = Some((Instant::now(), Arc::clone(&usage)));
        usage
    }

    fn read(&self, state: &mut State) -> NodeUsage {
        let driver = self.parts.state.borrow().clone();
        let millis = unix().as_millis();
        let mut usage = NodeUsage {
            node: self.parts.node.clone(),
            unix_millis: u64::try_from(millis).unwrap_or(u64::MAX),
            ..NodeUsage::default()
        };
        let DriverState::Ready(ready) = driver else {
            return usage;
        };
        usage.driver_version = Some(ready.inventory.driver_version.clone());
        let (now, seen) = (sampler::now(), self.parts.last_findings.ownership());
        let mut held: BTreeMap<String, Vec<HeldDevice>> = held_of(
            now,
            &self.parts.ledger,
            &self.parts.layout,
            &self.listed(),
            &seen.peaks,
        );
        let mut failed = 0;
        for gpu in &ready.inventory.gpus {
            let held = held.entry(gpu.uuid.clone()).or_default();
            let reading = state.reader.read(now, gpu, &seen.owners, !held.is_empty());
            failed += usize::from(reading.problem.is_some());
            state.seen.add_partitions(now, &reading, held);
            for device in &mut *held {
                let by_nvml = state.seen.idle_seconds(now, &device.key);
                // NVML's samples miss short kernels. Tenants write the account, and can make their own share look busy by it.
                let by_account = device.idle_seconds.unwrap_or(u64::MAX);
                device.idle_seconds = by_nvml.map(|idle| idle.min(by_account));
            }
            let zombies = seen.zombies.get(&gpu.uuid);
            usage
                .gpus
                .push(attribute(reading, held, zombies.map_or(&[], Vec::as_slice)));
        }
        if failed == ready.inventory.gpus.len() {
            state.reader.close_failed();
        }
        usage
    }

    fn listed(&self) -> MutexGuard<'_, LastListing> {
        self.listed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn unix() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default()
}

#[cfg(test)]
mod tests;
