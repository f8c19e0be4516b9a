//! Prepares and unprepares claims: the order of the steps, the locks and the deadlines.
//!
//! ```text
//!  claim lock ─► GET ─► UID, allocation ─► ledger: plan, reserve ─► execute ─► hold ─► answer
//!                 ▲                                  │                         └─► status, later
//!                 └────── another claim is released ◄┘ the GPU is taken
//! ```
//!
//! Blocking work runs on its own thread and owns the claim's lock: a cancelled call does not leave a
//! claim half prepared, and the next call waits for the lock.

mod error;
mod in_use;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};
use tranche_api::Tier;
use tranche_driver::audit::{Ended, Pod};
use tranche_driver::claim::{Allocation, check_uid};
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{
    PAGES, PreparationError, PreparationPlan, PreparationProblem, PreparedDevice, plan,
    refuse_withheld,
};

use tranche_driver::competing_drivers::Verdict;

pub use error::{PrepareError, Problem, UnprepareError};

use self::in_use::{processes_of, refuse_in_use};
use crate::claim::executor::{End, ExecuteError, Executor, StepError, UndoError};
use crate::cluster::claims::ClaimReader;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::{DriverState, Ready, SpecFile};
use crate::gpu::gpus::Gpus;
use crate::host::install::{InstallError, Installation, Needs};
use crate::host::layout::Layout;
use crate::ledger::claim_ref::{ClaimRef, claim_of, pods_of};
use crate::ledger::{Booking, Ledger};
use crate::locks::Locks;
use crate::metrics::Metrics;
use crate::share::last_findings::LastFindings;
use tranche_node::processes::containers::Containers;
use tranche_node::root::{DriverRoot, Kind};

/// How long one claim may take, of the 45 s that the kubelet gives a call.
const DEADLINE: Duration = Duration::from_secs(40);

/// How long a claim waits for temporary obstacles: a GPU whose last holder is just being released, a
/// driver that was not checked yet. The kubelet (1.37) repeats a refused call only after a minute or
/// more, and sends the next pod's Prepare before the Unprepare of a pod that was deleted by force.
const PATIENCE: Duration = Duration::from_secs(25);

/// The pause before a GPU that somebody else has open is tried again.
const IN_USE_PAUSE: Duration = Duration::from_secs(1);

/// The pause before a claim whose processes have not ended is tried again.
const ENDING_PAUSE: Duration = Duration::from_millis(100);

/// How long a claim waits for the policy of its GPUs. The plugin reads it when it starts, and the controller publishes
/// it a moment after the slices of a new node. If it is still missing, the controller or the API server has a problem.
const POLICY_PATIENCE: Duration = Duration::from_secs(5);

/// Reports to the cluster after the kubelet has its answer.
pub trait Reporter: Send + Sync + std::fmt::Debug {
    /// A claim is ready.
    fn prepared(&self, record: &Arc<ClaimRecord>);
    /// A claim could not be prepared; `claim` is the object that was read from the API server.
    fn failed(&self, claim: &ResourceClaim, problem: &Problem, text: &str);
    /// A claim is released.
    fn released(&self, uid: &str);
}

/// What a preparer needs.
#[derive(Debug)]
pub struct PreparerParts {
    pub pool: String,
    /// The driver's CDI spec.
    pub spec_file: Arc<SpecFile>,
    pub executor: Executor,
    /// What belongs to GPUs and not to one claim.
    pub gpus: Arc<Gpus>,
    /// Our files for containers.
    pub installation: Result<Installation, InstallError>,
    pub driver: watch::Receiver<DriverState>,
    /// Other systems that hand out the GPUs; `None` until the first search.
    pub others: watch::Receiver<Option<Verdict>>,
    /// What the policies ask of this node.
    pub policy: watch::Receiver<NodePolicy>,
    pub claims: ClaimReader,
    pub ledger: Arc<Ledger>,
    pub reporter: Arc<dyn Reporter>,
    pub metrics: Arc<Metrics>,
    /// What the watchdog found.
    pub last_findings: Arc<LastFindings>,
    /// The paths of the pages.
    pub layout: Layout,
    /// The containers of the host.
    pub containers: Containers,
    /// Sends claims that block another one to the search for orphans.
    pub suspect_orphans: mpsc::Sender<String>,
}

/// Prepares and unprepares the claims of this node.
#[derive(Debug)]
pub struct Preparer {
    parts: PreparerParts,
    locks: Arc<Locks>,
}

impl Preparer {
    /// Starts with free locks.
    #[must_use]
    pub fn new(parts: PreparerParts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            locks: Arc::default(),
        })
    }

    #[must_use]
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.parts.ledger
    }

    /// Prepares all of a claim's devices, or none.
    pub async fn prepare(
        self: &Arc<Self>,
        claim: &ClaimRef,
    ) -> Result<Arc<ClaimRecord>, PrepareError> {
        let within = tokio::time::timeout(DEADLINE, self.prepare_in_turn(claim)).await;
        let (object, result) = within.unwrap_or_else(|_| (None, Err(Problem::Timeout(DEADLINE))));
        match result {
            Ok(record) => {
                if let Some(object) = &object {
                    self.parts.ledger.note_pods(object);
                }
                info!(devices = record.plan.devices.len(), "prepared");
                self.parts.reporter.prepared(&record);
                Ok(record)
            }
            Err(problem) => {
                let error = PrepareError {
                    claim: claim.clone(),
                    problem,
                };
                warn!(%error, outcome = error.problem.outcome(), "not prepared");
                if let Some(object) = object {
                    let text = error.to_string();
                    self.parts.reporter.failed(&object, &error.problem, &text);
                }
                Err(error)
            }
        }
    }

    async fn prepare_in_turn(
        self: &Arc<Self>,
        claim: &ClaimRef,
    ) -> (Option<ResourceClaim>, Result<Arc<ClaimRecord>, Problem>) {
        let start = Instant::now();
        let mut claim_lock = self.locks.lock(&claim.uid).await;
        let mut driver = self.parts.driver.clone();
        let mut policy = self.parts.policy.clone();
        let mut released = self.parts.ledger.releases();
        let mut freed = self.parts.last_findings.releases();
        loop {
            // The waits below react to changes from here on.
            driver.mark_unchanged();
            policy.mark_unchanged();
            released.mark_unchanged();
            freed.mark_unchanged();
            // Read again after a wait: the claim may be deleted or allocated again.
            let object = match self.parts.claims.get(claim).await {
                Ok(Some(object)) => object,
                Ok(None) => return (None, Err(Problem::Gone)),
                Err(e) => return (None, Err(e.into())),
            };
            if let Err(e) = check_uid(&object, &claim.uid) {
                // The event would go to the pods of the claim that has the name now.
                return (None, Err(e.into()));
            }
            let allocation = match Allocation::from_claim(&object, &self.parts.pool) {
                Ok(allocation) => allocation,
                Err(e) => return (Some(object), Err(e.into())),
            };
            let this = Arc::clone(self);
            let pods = pods_of(&object);
            let work = move || (claim_lock, this.carry_out(&allocation, &pods));
            let Ok(done) = tokio::task::spawn_blocking(work).await else {
                return (Some(object), Err(Problem::Stopping));
            };
            let result;
            (claim_lock, result) = done;
            let change = async {
                match &result {
                    Err(Problem::Plan(e)) if is_conflict(e) => released.changed().await.is_ok(),
                    Err(Problem::DriverUnknown) => driver.changed().await.is_ok(),
                    Err(Problem::PolicyUnknown { .. }) => policy.changed().await.is_ok(),
                    Err(Problem::Unowned { .. }) => freed.changed().await.is_ok(),
                    Err(Problem::Execute(e)) if is_in_use(e) => {
                        tokio::time::sleep(IN_USE_PAUSE).await;
                        true
                    }
                    _ => false,
                }
            };
            let patience = match &result {
                Err(Problem::PolicyUnknown { .. }) => POLICY_PATIENCE,
                _ => PATIENCE,
            };
            if !tokio::time::timeout_at(start + patience, change)
                .await
                .unwrap_or(false)
            {
                return (Some(object), result);
            }
        }
    }

    fn carry_out(
        &self,
        allocation: &Allocation,
        pods: &BTreeSet<Pod>,
    ) -> Result<Arc<ClaimRecord>, Problem> {
        let PreparerParts {
            ledger,
            executor,
            gpus,
            ..
        } = &self.parts;
        let ready = self.ready()?;
        self.recorded(&allocation.uid)?;
        self.read_refused_again();
        loop {
            let now = executor.audit().now();
            let booked = ledger.book(allocation, now, |others| {
                let policy = self.parts.policy.borrow();
                let plan = plan(allocation, &ready.inventory, others)?;
                refuse_unknown_policy(&plan, &policy)?;
                Ok(plan
                    .with_time_slices(|gpu| policy.interval(gpu))
                    .with_floors(|gpu| policy.low_priority_floor(gpu))
                    .with_capabilities(|gpu| policy.capabilities(gpu)))
            });
            match booked.inspect_err(|problem| self.suspect(problem))? {
                // A boot removed its pages, so no container uses them: it gets pages of this
                // release.
                Booking::Kept(record)
                    if record.plan.pages != PAGES && !executor.has_pages(&record.plan)? =>
                {
                    self.undo(&record, Ended::PreparedAnew)?;
                    ledger.remove(&allocation.uid);
                }
                Booking::Kept(record) => {
                    let record = self.located(record, &ready)?;
                    self.verify(&record.plan, &ready)?;
                    self.verify_accounts(&record.plan)?;
                    let plan = executor.rebuild(&record, pods, gpus, &ready.dev_root_on_host)?;
                    if plan == record.plan {
                        return Ok(record);
                    }
                    let rebuilt = Arc::new(record.with_plan(plan));
                    ledger.replace(Arc::clone(&rebuilt));
                    return Ok(rebuilt);
                }
                // Nothing of the old allocation is in use.
                Booking::Moved(record) => {
                    self.undo(&record, Ended::Reallocated)?;
                    ledger.remove(&allocation.uid);
                }
                Booking::New(reservation) => {
                    self.refuse_withheld(&reservation.record().plan, &ready)?;
                    self.verify(&reservation.record().plan, &ready)?;
                    self.verify_freed(&reservation.record().plan)?;
                    let record = reservation.record();
                    return match executor.execute(record, pods, gpus, &ready.dev_root_on_host) {
                        // What could not be undone is still held.
                        Err(error) if !error.cleanup.is_empty() => {
                            reservation.hold();
                            Err(error.into())
                        }
                        Err(error) => Err(error.into()),
                        Ok(plan) => Ok(reservation.with_plan(plan).hold()),
                    };
                }
            }
        }
    }

    /// The held claims with a file that somebody deleted.
    pub fn damaged(&self) -> Vec<ClaimRef> {
        let held = self.parts.ledger.held();
        let is_damaged = |record: &&Arc<ClaimRecord>| {
            let missing = self.parts.executor.missing_file(&record.plan);
            // What cannot be read cannot be restored either: the attempt says why.
            missing.map_or(true, |file| file.is_some())
        };
        let damaged = held.iter().filter(is_damaged);
        damaged.map(|record| claim_of(record)).collect()
    }

    /// Makes the missing files of a held claim again. Returns whether any was missing.
    pub async fn restore(self: &Arc<Self>, claim: &ClaimRef) -> Result<bool, Problem> {
        let claim_lock = self.locks.lock(&claim.uid).await;
        let (this, uid) = (Arc::clone(self), claim.uid.clone());
        let work = move || {
            let _lock = claim_lock;
            this.restore_locked(&uid)
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|_| Problem::Stopping)?
    }

    fn restore_locked(&self, uid: &str) -> Result<bool, Problem> {
        let PreparerParts { executor, gpus, .. } = &self.parts;
        let Some(record) = self.recorded(uid)? else {
            return Ok(false);
        };
        if executor
            .missing_file(&record.plan)
            .map_err(StepError::from)?
            .is_none()
        {
            return Ok(false);
        }
        let ready = self.ready()?;
        self.verify(&record.plan, &ready)?;
        self.verify_accounts(&record.plan)?;
        executor.make_files(&record.plan, gpus, &ready.dev_root_on_host)?;
        Ok(true)
    }

    fn ready(&self) -> Result<Arc<Ready>, Problem> {
        match &*self.parts.driver.borrow() {
            DriverState::Ready(ready) => Ok(Arc::clone(ready)),
            DriverState::Unknown => Err(Problem::DriverUnknown),
            DriverState::Absent(why) => Err(Problem::Driver(Arc::clone(why))),
        }
    }

    /// Refuses a claim whose account was deleted while containers have it: with a second one beside it, the claim's programs
    /// could hold twice its memory.
    fn verify_accounts(&self, plan: &PreparationPlan) -> Result<(), Problem> {
        let missing = self.parts.executor.missing_account(plan);
        let Some(path) = missing.map_err(StepError::from)? else {
            return Ok(());
        };
        let processes = processes_of(plan, &self.parts.containers)?;
        match processes.len() {
            0 => Ok(()),
            count => Err(Problem::AccountDeleted { path, count }),
        }
    }

    /// The record of a held claim with the current location of its GPUs: a boot may have changed
    /// their minor numbers.
    fn located(
        &self,
        record: Arc<ClaimRecord>,
        ready: &Ready,
    ) -> Result<Arc<ClaimRecord>, Problem> {
        let plan = record.plan.located(&ready.inventory)?;
        if plan == record.plan {
            return Ok(record);
        }
        info!(
            uid = plan.allocation.uid,
            "a GPU of the claim has another minor number or PCI address than when it was last prepared"
        );
        let record = Arc::new(record.with_plan(plan));
        let journal = self.parts.executor.journal();
        journal.write(&record).map_err(StepError::from)?;
        self.parts.ledger.replace(Arc::clone(&record));
        Ok(record)
    }

    /// The record of a claim, whose lock the caller holds.
    fn recorded(&self, uid: &str) -> Result<Option<Arc<ClaimRecord>>, Problem> {
        let PreparerParts {
            ledger, executor, ..
        } = &self.parts;
        ledger.reload(uid, || executor.journal().load(uid));
        ledger.get(uid).map_err(Problem::Journal)
    }

    /// Reads unreadable journals again: they may have been repaired or deleted, and until then they block
    /// other claims.
    pub fn read_refused_again(&self) {
        let PreparerParts {
            ledger, executor, ..
        } = &self.parts;
        for uid in ledger.refused().keys() {
            // A holder of the claim's lock reads it again itself.
            if let Some(_lock) = self.locks.try_lock(uid) {
                ledger.reload(uid, || executor.journal().load(uid));
            }
        }
    }

    /// After a conflict, asks the search whether the holders are orphans.
    fn suspect(&self, problem: &Problem) {
        let Problem::Plan(PreparationError {
            problem: PreparationProblem::Conflict(conflict),
            ..
        }) = problem
        else {
            return;
        };
        let holders = conflict.holders();
        for record in self.parts.ledger.held() {
            let claim = claim_of(&record);
            if holders.contains(&claim.to_string()) {
                // If the channel is full, a search is running, and the next conflict repeats it.
                let _ = self.parts.suspect_orphans.try_send(claim.uid);
            }
        }
    }

    /// Refuses a GPU with memory without an owner: that memory would be missing for the new claim.
    fn verify_freed(&self, plan: &PreparationPlan) -> Result<(), Problem> {
        let is_withheld = |gpu: &&str| self.parts.last_findings.is_withheld(gpu);
        let mut gpus = plan.devices.iter().map(|device| device.gpu_uuid.as_str());
        match gpus.find(is_withheld) {
            Some(gpu) => Err(Problem::Unowned {
                gpu: gpu.to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// A withheld GPU may have been allocated before it was known to be withheld.
    fn refuse_withheld(&self, plan: &PreparationPlan, ready: &Ready) -> Result<(), Problem> {
        let verdict = self.parts.others.borrow();
        let by_others = verdict.iter().flat_map(|verdict| &verdict.withheld);
        refuse_withheld(plan, &ready.withheld.iter().chain(by_others))?;
        Ok(())
    }

    /// Verifies everything that the containers need and that the plan does not make.
    fn verify(&self, plan: &PreparationPlan, ready: &Ready) -> Result<(), Problem> {
        let parts = &self.parts;
        let needs = if plan.devices.iter().any(|device| device.cap.is_share()) {
            Needs::Shim { pages: plan.pages }
        } else {
            Needs::Hooks
        };
        match &parts.installation {
            Ok(installation) => installation.verify(needs)?,
            Err(error) => return Err(Problem::NotInstalled(error.to_string())),
        }
        let root = DriverRoot::open(&ready.dev_root)?;
        for device in &plan.devices {
            let node = format!("/dev/nvidia{}", device.minor);
            match root.resolve(Path::new(&node))? {
                Some((_, Kind::CharDevice)) => {}
                _ => {
                    return Err(Problem::NoDeviceNode {
                        node,
                        root: ready.dev_root_on_host.clone(),
                    });
                }
            }
        }
        // Without a spec all GPUs are withheld.
        if let Some(spec) = &ready.spec {
            parts.spec_file.ensure(spec)?;
        }
        Ok(())
    }

    /// Writes the driver's CDI spec if somebody deleted or changed it.
    pub fn ensure_driver_spec(&self) -> Result<(), Problem> {
        if let DriverState::Ready(ready) = &*self.parts.driver.borrow()
            && let Some(spec) = &ready.spec
        {
            self.parts.spec_file.ensure(spec)?;
        }
        Ok(())
    }

    fn undo(&self, record: &ClaimRecord, how: Ended) -> Result<(), UndoError> {
        let PreparerParts {
            executor,
            gpus,
            last_findings,
            ..
        } = &self.parts;
        let unowned = |gpu: &str| last_findings.unowned(gpu);
        let end = End {
            how,
            unowned: &unowned,
        };
        executor.undo(record, gpus, end)
    }

    /// Notes which pods use a held claim, as its object says now: for metrics, the watchdog and the audit trail.
    pub fn note_pods(&self, record: &ClaimRecord, object: &ResourceClaim) {
        self.parts.ledger.note_pods(object);
        let audit = self.parts.executor.audit();
        audit.joined(record, &pods_of(object));
    }

    /// Releases a claim whose pods have ended; succeeds if it is not held. Waits for processes that still run: within a minute after
    /// a pod was deleted by force the kubelet calls, even if its runtime has not ended the containers.
    pub async fn unprepare(self: &Arc<Self>, claim: &ClaimRef) -> Result<(), UnprepareError> {
        self.release(claim, Ended::Unprepared, PATIENCE).await
    }

    /// Releases a claim that is gone.
    pub async fn release_orphan(self: &Arc<Self>, claim: &ClaimRef) -> Result<(), UnprepareError> {
        self.release(claim, Ended::Orphan, Duration::ZERO).await
    }

    async fn release(
        self: &Arc<Self>,
        claim: &ClaimRef,
        ended: Ended,
        patience: Duration,
    ) -> Result<(), UnprepareError> {
        let release = self.release_in_turn(claim, ended, patience);
        let within = tokio::time::timeout(DEADLINE, release).await;
        let result = within.unwrap_or(Err(Problem::Timeout(DEADLINE)));
        self.parts.reporter.released(&claim.uid);
        result.map_err(|problem| {
            let error = UnprepareError {
                claim: claim.clone(),
                problem,
            };
            warn!(%error, outcome = error.problem.outcome(), "not unprepared");
            error
        })
    }

    async fn release_in_turn(
        self: &Arc<Self>,
        claim: &ClaimRef,
        ended: Ended,
        patience: Duration,
    ) -> Result<(), Problem> {
        let until = Instant::now() + patience;
        let mut claim_lock = self.locks.lock(&claim.uid).await;
        loop {
            let (this, uid) = (Arc::clone(self), claim.uid.clone());
            let work = move || (claim_lock, this.release_unused(&uid, ended));
            let done = tokio::task::spawn_blocking(work).await;
            let result;
            (claim_lock, result) = done.map_err(|_| Problem::Stopping)?;
            match result {
                Err(Problem::InUse(_)) if Instant::now() < until => {
                    tokio::time::sleep(ENDING_PAUSE).await;
                }
                result => return result.inspect(|()| info!("unprepared")),
            }
        }
    }

    /// Releases a claim, whose lock the caller holds, if nobody uses its devices.
    fn release_unused(&self, uid: &str, ended: Ended) -> Result<(), Problem> {
        let PreparerParts {
            ledger,
            executor,
            layout,
            containers,
            ..
        } = &self.parts;
        match self.recorded(uid)? {
            Some(record) => {
                refuse_in_use(&record, containers, layout)?;
                self.undo(&record, ended)?;
            }
            // Its journal may have been deleted by hand, but not its files.
            None => executor.sweep(uid)?,
        }
        ledger.remove(uid);
        Ok(())
    }
}

/// Refuses shares of a GPU whose policy is not known: a container keeps the libraries that it was started with, and a
/// claim the time slices that it was planned with.
fn refuse_unknown_policy(plan: &PreparationPlan, policy: &NodePolicy) -> Result<(), Problem> {
    let is_share = |it: &&PreparedDevice| it.cap.is_share() || it.tier == Tier::Timeshared;
    let shares = plan.devices.iter().filter(is_share);
    let mut gpus = shares.map(|device| &device.gpu_uuid);
    match gpus.find(|gpu| !policy.is_known(gpu)) {
        Some(gpu) => Err(Problem::PolicyUnknown { gpu: gpu.clone() }),
        None => Ok(()),
    }
}

/// Whether a program that is just ending, or a monitor, has the GPU open. Nothing tells when it closes the GPU.
fn is_in_use(error: &ExecuteError) -> bool {
    matches!(&error.error, StepError::Gpu(error) if error.is_in_use()) && error.cleanup.is_empty()
}

fn is_conflict(error: &PreparationError) -> bool {
    matches!(error.problem, PreparationProblem::Conflict(_))
}
