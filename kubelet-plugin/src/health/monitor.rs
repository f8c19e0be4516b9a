//! Looks at all GPUs once a second, and decides what is wrong with them.
//!
//! Faults are remembered in a file, so that a restart of the plugin or a reboot ends none. NVML stays open, because it
//! reports no Xid from before. It is closed while the node is cordoned and no claim holds a GPU: then GPUs can be reset,
//! and the driver can be unloaded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tranche_api::withheld::reason;
use tranche_driver::health::{Look, Record, Seen, Verdicts, observe, verdict};
use tranche_node::health::{Looked, Watch};

use super::Board;
use super::check::Check;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::{DriverState, Ready};
use crate::host::fs::{self, Durability, Fs};
use crate::ledger::Ledger;
use crate::periodic;
use crate::share::usage::unix;

/// How often the GPUs are looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// For how long a GPU that cannot be asked counts as it was seen before.
const HYSTERESIS: Duration = Duration::from_secs(30);
/// The pause after a check that did not pass.
const CHECK_AGAIN: Duration = Duration::from_mins(1);

/// What the monitor works with.
#[derive(Debug)]
pub struct MonitorParts {
    pub fs: Arc<dyn Fs>,
    /// The file of the faults.
    pub faults: PathBuf,
    /// The kernel's boot ID.
    pub boot: PathBuf,
    pub ledger: Arc<Ledger>,
    pub state: watch::Receiver<DriverState>,
    pub policy: watch::Receiver<NodePolicy>,
    pub cordoned: watch::Receiver<bool>,
    pub check: Arc<dyn Check>,
    pub board: Arc<Board>,
}

/// Looks at the GPUs.
#[derive(Debug)]
pub struct Monitor {
    parts: MonitorParts,
    watch: Watch,
    records: BTreeMap<String, Record>,
    /// The records as they are in the file.
    saved: Vec<u8>,
    /// When each GPU was last seen, and how.
    seen: BTreeMap<String, (Instant, Seen)>,
    checks: BTreeMap<String, Running>,
    /// When GPUs may be checked again.
    not_before: BTreeMap<String, Instant>,
    was_paused: bool,
}

/// A check that runs.
#[derive(Debug)]
struct Running {
    thread: JoinHandle<Result<(), String>>,
    /// The record at its start.
    of: Record,
}

/// Which GPUs claims hold.
struct Held {
    gpus: BTreeSet<String>,
    /// A claim whose journal cannot be read may hold any of them.
    is_unsure: bool,
}

impl Held {
    fn of(ledger: &Ledger) -> Self {
        let held = ledger.held();
        let devices = held.iter().flat_map(|record| &record.plan.devices);
        Self {
            gpus: devices.map(|device| device.gpu_uuid.clone()).collect(),
            is_unsure: !ledger.refused().is_empty(),
        }
    }

    fn has(&self, uuid: &str) -> bool {
        self.is_unsure || self.gpus.contains(uuid)
    }

    fn is_empty(&self) -> bool {
        !self.is_unsure && self.gpus.is_empty()
    }
}

impl Monitor {
    /// Reads the faults of earlier processes.
    #[must_use]
    pub fn new(parts: MonitorParts, watch: Watch) -> Self {
        let saved = match parts.fs.read(&parts.faults) {
            Ok(found) => found.unwrap_or_default(),
            Err(error) => {
                warn!(%error, "earlier faults of GPUs are not known");
                Vec::new()
            }
        };
        let records = if saved.is_empty() {
            BTreeMap::new()
        } else {
            serde_json::from_slice(&saved).unwrap_or_else(|error| {
                let path = parts.faults.display();
                warn!(%path, %error, "the file of faults cannot be read; earlier faults of GPUs are not known");
                BTreeMap::new()
            })
        };
        Self {
            parts,
            watch,
            records,
            saved,
            seen: BTreeMap::new(),
            checks: BTreeMap::new(),
            not_before: BTreeMap::new(),
            was_paused: false,
        }
    }

    /// Looks again and again until cancelled.
    pub async fn run(self, stop: CancellationToken) {
        let look = |monitor: &mut Self| monitor.look(Instant::now(), unix().as_secs());
        periodic::run(self, INTERVAL, &stop, look, |_, ()| {}).await;
    }

    /// Looks once.
    pub fn look(&mut self, now: Instant, unix: u64) {
        let state = self.parts.state.borrow().clone();
        let held = Held::of(&self.parts.ledger);
        let ready = match &state {
            DriverState::Unknown => return,
            DriverState::Absent(_) => None,
            DriverState::Ready(ready) => Some(ready),
        };
        let is_paused = *self.parts.cordoned.borrow() && held.is_empty();
        if self.was_paused && !is_paused {
            self.records.values_mut().for_each(Record::note_maintenance);
        }
        self.was_paused = is_paused;
        let looked = match ready {
            None => self.unwatched(None, "there is no usable driver"),
            Some(ready) if is_paused => self.unwatched(
                Some(ready),
                "the node is cordoned and no claim holds a GPU: NVML is closed",
            ),
            Some(ready) => self.ask(now, unix, ready),
        };
        let verdicts = self.decide(now, unix, looked, &held, ready.filter(|_| !is_paused));
        self.save();
        self.parts.board.publish(now, verdicts);
    }

    /// Closes NVML.
    fn unwatched(&mut self, ready: Option<&Arc<Ready>>, why: &str) -> BTreeMap<String, Looked> {
        self.watch.close();
        self.seen.clear();
        let gpus = self.gpus(ready).into_iter().map(|uuid| {
            let looked = Looked {
                seen: Seen::Unwatched(why.to_owned()),
                xids: Vec::new(),
            };
            (uuid, looked)
        });
        gpus.collect()
    }

    fn ask(&mut self, now: Instant, unix: u64, ready: &Arc<Ready>) -> BTreeMap<String, Looked> {
        let gpus = self.gpus(Some(ready));
        let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
        let mut looked = self.watch.look(now, unix, &gpus);
        for (uuid, looked) in &mut looked {
            let last = self.seen.get(uuid);
            match (&looked.seen, last) {
                (Seen::Unwatched(_), Some((at, seen)))
                    if now.saturating_duration_since(*at) < HYSTERESIS =>
                {
                    looked.seen = seen.clone();
                }
                (Seen::Unwatched(_), _) => {}
                (seen, _) => {
                    self.seen.insert(uuid.clone(), (now, seen.clone()));
                }
            }
        }
        looked
    }

    /// The GPUs of the inventory, those that have left it because they are lost, and those that had a fault.
    fn gpus(&self, ready: Option<&Arc<Ready>>) -> BTreeSet<String> {
        let known = ready.into_iter().flat_map(|ready| &ready.inventory.gpus);
        let known = known.map(|gpu| gpu.uuid.clone());
        let withheld = ready.into_iter().flat_map(|ready| &ready.withheld);
        let lost = withheld.filter(|it| it.reason == reason::GPU_LOST);
        let lost = lost.map(|it| it.gpu.clone());
        known
            .chain(lost)
            .chain(self.records.keys().cloned())
            .collect()
    }

    fn decide(
        &mut self,
        now: Instant,
        unix: u64,
        looked: BTreeMap<String, Looked>,
        held: &Held,
        ready: Option<&Arc<Ready>>,
    ) -> Verdicts {
        let boot = std::fs::read_to_string(&self.parts.boot).unwrap_or_default();
        let policy = self.parts.policy.borrow().clone();
        let unix = i64::try_from(unix).unwrap_or(i64::MAX);
        let mut verdicts = Verdicts::new();
        for (uuid, Looked { seen, xids }) in looked {
            let terms = policy.health(&uuid);
            let before = self.records.remove(&uuid);
            if is_replaced(before.as_ref(), &seen, &boot, &uuid, ready) {
                info!(
                    gpu = uuid,
                    "a GPU with a fault is not in the machine any more"
                );
                continue;
            }
            let look = Look {
                seen: &seen,
                xids: &xids,
                boot: boot.trim(),
                now: unix,
            };
            let was_healthy = before.is_none();
            let mut record = observe(before, look, &terms);
            if let Some(faulty) = &mut record {
                let wants_check = faulty.wants_check(&seen, &terms) && !held.has(&uuid);
                if wants_check && self.passes(now, &uuid, faulty, ready) {
                    record = None;
                }
            }
            let verdict = verdict(record.as_ref(), &seen, held.has(&uuid), &terms, unix);
            match (was_healthy, &record) {
                (true, Some(_)) => {
                    warn!(
                        gpu = uuid,
                        reason = verdict.reason,
                        message = verdict.message,
                        "a GPU has a fault"
                    );
                }
                (false, None) => info!(gpu = uuid, "a GPU has no fault any more"),
                _ => {}
            }
            if let Some(record) = record {
                self.records.insert(uuid.clone(), record);
            }
            verdicts.insert(uuid, verdict);
        }
        verdicts
    }

    /// Whether the check of a GPU has passed. It begins one, if none runs.
    fn passes(
        &mut self,
        now: Instant,
        uuid: &str,
        record: &mut Record,
        ready: Option<&Arc<Ready>>,
    ) -> bool {
        let Some(ready) = ready else {
            return false;
        };
        let gpus = &ready.inventory.gpus;
        let gpu = gpus.iter().find(|gpu| gpu.uuid == uuid);
        // Until the driver has described it again, its place is not known.
        let Some(gpu) = gpu else {
            return false;
        };
        if gpu.mig_mode.current {
            // CUDA has no device on a GPU without instances, and instances are for claims.
            return true;
        }
        match self.checks.remove(uuid) {
            Some(running) if !running.thread.is_finished() => {
                self.checks.insert(uuid.to_owned(), running);
                false
            }
            Some(Running { thread, of }) => {
                let result = thread
                    .join()
                    .unwrap_or_else(|_| Err("the check ended early".to_owned()));
                match result {
                    // With a fault since its beginning, it is repeated.
                    Ok(()) => record.has_faults_of(&of),
                    Err(problem) => {
                        warn!(gpu = uuid, problem, "the check of a GPU did not pass");
                        record.note_check(problem);
                        self.not_before.insert(uuid.to_owned(), now + CHECK_AGAIN);
                        false
                    }
                }
            }
            None if self.not_before.get(uuid).is_some_and(|at| now < *at) => false,
            None => {
                let (check, gpu) = (Arc::clone(&self.parts.check), uuid.to_owned());
                let thread = std::thread::spawn(move || check.check(&gpu));
                let of = record.clone();
                self.checks.insert(uuid.to_owned(), Running { thread, of });
                false
            }
        }
    }

    /// Writes the records, if they have changed.
    fn save(&mut self) {
        let Ok(content) = serde_json::to_vec(&self.records) else {
            return;
        };
        if content == self.saved || self.records.is_empty() && self.saved.is_empty() {
            return;
        }
        let (fs, path) = (&*self.parts.fs, &self.parts.faults);
        match fs::replace(fs, path, &content, 0o600, Durability::Disk) {
            Ok(()) => self.saved = content,
            Err(error) => {
                warn!(%error, "the faults of GPUs cannot be saved; after a restart of the plugin they are not known");
            }
        }
    }
}

/// Whether a GPU with a fault was taken out of the machine: the machine has booted since, and the driver does not know the GPU.
fn is_replaced(
    record: Option<&Record>,
    seen: &Seen,
    boot: &str,
    uuid: &str,
    ready: Option<&Arc<Ready>>,
) -> bool {
    let is_of_earlier_boot = record.is_some_and(|record| !record.is_of_boot(boot.trim()));
    let is_known = |ready: &Arc<Ready>| ready.inventory.gpus.iter().any(|gpu| gpu.uuid == uuid);
    let is_gone = ready.is_some_and(|ready| !is_known(ready));
    is_of_earlier_boot && is_gone && matches!(seen, Seen::Unwatched(_))
}
