//! Prepares and unprepares claims: the order of the steps, the locks and the deadlines.
//!
//! ```text
//!  claim lock ─► GET ─► UID, allocation ─► ledger: plan, reserve ─► execute ─► hold ─► answer
//!                 ▲                                  │                         └─► status, later
//!                 └────── another claim is released ◄┘ the GPU is taken
//! ```
//!
//! The work runs in a task of its own, which owns the claim's lock: a cancelled call does not leave a
//! claim half prepared, and the next call waits for the lock. See [`carry_out`].

mod carry_out;
mod error;
mod in_use;
mod restore;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;
use tracing::{Instrument as _, info, warn};
use tranche_api::Tier;
use tranche_driver::audit::Ended;
use tranche_driver::claim::{Allocation, check_uid};
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{
    PreparationError, PreparationPlan, PreparationProblem, PreparedDevice, refuse_withheld,
};

use tranche_driver::competing_drivers::Verdict;

pub use error::{PrepareError, Problem, UnprepareError};

use crate::claim::executor::{ExecuteError, Executor, StepError, TURNS};
use crate::cluster::claims::ClaimReader;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::{DriverState, Ready, SpecFile};
use crate::gpu::gpus::Gpus;
use crate::host::install::{InstallError, Installation, Needs};
use crate::host::layout::Layout;
use crate::ledger::Ledger;
use crate::ledger::claim_ref::{ClaimRef, claim_of, pods_of};
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
    turns: Semaphore,
}

impl Preparer {
    /// Starts with free locks.
    #[must_use]
    pub fn new(parts: PreparerParts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            locks: Arc::default(),
            turns: Semaphore::new(TURNS),
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
        let _announcement = self.parts.executor.announce(&claim.uid);
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
            let work = async move { (claim_lock, this.carry_out(allocation, pods).await) };
            let Ok(done) = tokio::spawn(work.in_current_span()).await else {
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
                    Err(Problem::InUse(_)) => {
                        tokio::time::sleep(IN_USE_PAUSE).await;
                        true
                    }
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
        let _announcement = self.parts.executor.announce(&claim.uid);
        loop {
            let (this, uid) = (Arc::clone(self), claim.uid.clone());
            let work = async move { (claim_lock, this.release_unused(uid, ended).await) };
            let done = tokio::spawn(work.in_current_span()).await;
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
