//! What is done for a claim under its lock.
//!
//! ```text
//!  a thread for files                  one thread for each GPU      a thread for files
//!  plan, reserve, journal ───────────► state of the GPUs ─────────► steps ─► hold
//!           └─► if the GPUs are at rest: steps ─► hold
//!  undo the steps ───────────────────► state of the GPUs ─────────► remove the journal
//!           └─► if the claim changed no GPU: remove the journal
//! ```
//!
//! A claim has no thread while it waits for its GPU.

use std::collections::BTreeSet;
use std::sync::Arc;

use tranche_driver::audit::{Ended, Pod};
use tranche_driver::claim::Allocation;
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{PAGES, PreparationPlan, plan};

use super::in_use::refuse_in_use;
use super::{Preparer, PreparerParts, Problem, refuse_unknown_policy};
use crate::claim::executor::{ExecuteError, StepError, UndoError};
use crate::gpu::driver_state::Ready;
use crate::ledger::{Booking, Reservation};

/// How far a claim got on its first thread.
enum Begun {
    /// It was prepared before, and everything is there.
    Ready(Arc<ClaimRecord>),
    /// Something that nobody uses is undone first.
    Undo(Arc<ClaimRecord>, Ended, Undone),
    /// Its steps were carried out, or failed.
    Carried(Booked, Result<PreparationPlan, StepError>),
    /// Its GPUs are next.
    Gpus(Booked, Arc<Ready>),
}

/// A claim that has its place in the ledger.
enum Booked {
    New(Reservation),
    /// It was prepared before.
    Held(Arc<ClaimRecord>),
}

/// How far the undoing got on its first thread.
enum Undone {
    All(Result<(), UndoError>),
    /// The GPUs are next; this failed so far.
    Steps(Vec<StepError>),
}

impl Booked {
    fn record(&self) -> &Arc<ClaimRecord> {
        match self {
            Self::New(reservation) => reservation.record(),
            Self::Held(record) => record,
        }
    }
}

impl Preparer {
    /// Runs work with the files of a claim.
    pub(super) async fn with_files<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Problem> {
        let Ok(_turn) = self.turns.acquire().await else {
            return Err(Problem::Stopping);
        };
        // Fails only at shutdown, when the runtime accepts no more blocking work.
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|_| Problem::Stopping)
    }

    /// Prepares a claim, whose lock the caller holds.
    pub(super) async fn carry_out(
        self: &Arc<Self>,
        allocation: Allocation,
        pods: BTreeSet<Pod>,
    ) -> Result<Arc<ClaimRecord>, Problem> {
        let (allocation, pods) = (Arc::new(allocation), Arc::new(pods));
        loop {
            let (this, all, of) = (Arc::clone(self), Arc::clone(&allocation), Arc::clone(&pods));
            match self.with_files(move || this.begin(&all, &of)).await?? {
                Begun::Ready(record) => return Ok(record),
                Begun::Undo(record, how, undone) => {
                    self.undo_gpus(&record, how, undone).await??;
                    self.parts.ledger.remove(&allocation.uid);
                }
                Begun::Carried(booked, result) => return self.complete(booked, result).await,
                Begun::Gpus(booked, ready) => {
                    let result = self.rebuild(&booked, ready, pods).await?;
                    return self.complete(booked, result).await;
                }
            }
        }
    }

    /// Plans and reserves a claim, and carries out its steps if its GPUs are at rest.
    fn begin(&self, allocation: &Allocation, pods: &BTreeSet<Pod>) -> Result<Begun, Problem> {
        let PreparerParts {
            ledger, executor, ..
        } = &self.parts;
        let ready = self.ready()?;
        self.recorded(&allocation.uid)?;
        self.read_refused_again();
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
        let booked = match booked.inspect_err(|problem| self.suspect(problem))? {
            // A boot removed its pages, so no container uses them: it gets pages of this
            // release.
            Booking::Kept(record)
                if record.plan.pages != PAGES && !executor.has_pages(&record.plan)? =>
            {
                let undone = self.undo_steps(&record, Ended::PreparedAnew);
                return Ok(Begun::Undo(record, Ended::PreparedAnew, undone));
            }
            Booking::Kept(record) => {
                let record = self.located(record, &ready)?;
                self.verify(&record.plan, &ready)?;
                self.verify_accounts(&record.plan)?;
                Booked::Held(record)
            }
            Booking::Moved(record) => {
                let PreparerParts {
                    containers, layout, ..
                } = &self.parts;
                // The kubelet may have lost its state while the old containers run.
                refuse_in_use(&record, containers, layout)?;
                let undone = self.undo_steps(&record, Ended::Reallocated);
                return Ok(Begun::Undo(record, Ended::Reallocated, undone));
            }
            Booking::New(reservation) => {
                self.refuse_withheld(&reservation.record().plan, &ready)?;
                self.verify(&reservation.record().plan, &ready)?;
                self.verify_freed(&reservation.record().plan)?;
                let journalled = executor.journal().write(reservation.record());
                let booked = Booked::New(reservation);
                if let Err(error) = journalled {
                    return Ok(Begun::Carried(booked, Err(error.into())));
                }
                booked
            }
        };
        let plan = &booked.record().plan;
        let result = match self.parts.gpus.are_at_rest_for(plan) {
            Ok(true) => self.steps(booked.record(), plan.clone(), &ready, pods),
            Ok(false) => return Ok(Begun::Gpus(booked, ready)),
            Err(error) => Err(error.into()),
        };
        Ok(match (booked, result) {
            (Booked::Held(record), Ok(plan)) if plan == record.plan => Begun::Ready(record),
            (booked, result) => Begun::Carried(booked, result),
        })
    }

    fn steps(
        &self,
        record: &ClaimRecord,
        prepared: PreparationPlan,
        ready: &Ready,
        pods: &BTreeSet<Pod>,
    ) -> Result<PreparationPlan, StepError> {
        let PreparerParts { executor, gpus, .. } = &self.parts;
        let dev_root = &ready.dev_root_on_host;
        executor.rebuild(record, prepared, pods, gpus.load_pages(), dev_root)
    }

    /// Reconciles the claim's GPUs, and carries out its steps.
    async fn rebuild(
        self: &Arc<Self>,
        booked: &Booked,
        ready: Arc<Ready>,
        pods: Arc<BTreeSet<Pod>>,
    ) -> Result<Result<PreparationPlan, StepError>, Problem> {
        let record = Arc::clone(booked.record());
        let prepared = match self.parts.gpus.prepare(record.plan.clone()).await {
            Ok(prepared) => prepared,
            Err(error) => return Ok(Err(error.into())),
        };
        let this = Arc::clone(self);
        self.with_files(move || this.steps(&record, prepared, &ready, &pods))
            .await
    }

    /// Holds the claim; undoes a new one whose steps failed.
    async fn complete(
        self: &Arc<Self>,
        booked: Booked,
        result: Result<PreparationPlan, StepError>,
    ) -> Result<Arc<ClaimRecord>, Problem> {
        let reservation = match booked {
            Booked::Held(record) => {
                let plan = result?;
                if plan == record.plan {
                    return Ok(record);
                }
                let rebuilt = Arc::new(record.with_plan(plan));
                self.parts.ledger.replace(Arc::clone(&rebuilt));
                return Ok(rebuilt);
            }
            Booked::New(reservation) => reservation,
        };
        let error = match result {
            Ok(plan) => return Ok(reservation.with_plan(plan).hold()),
            Err(error) => error,
        };
        let (this, record) = (Arc::clone(self), Arc::clone(reservation.record()));
        let undone = self
            .with_files(move || this.undo_steps(&record, Ended::Failed))
            .await?;
        let undone = self
            .undo_gpus(reservation.record(), Ended::Failed, undone)
            .await?;
        let cleanup = undone.err().map_or_else(Vec::new, |error| error.0);
        if !cleanup.is_empty() {
            // What could not be undone is still held.
            reservation.hold();
        }
        Err(ExecuteError { error, cleanup }.into())
    }

    /// Undoes a plan as far as its GPUs are not concerned.
    fn undo_steps(&self, record: &ClaimRecord, how: Ended) -> Undone {
        let PreparerParts {
            executor,
            gpus,
            last_findings,
            ..
        } = &self.parts;
        let unowned = |gpu: &str| match how {
            Ended::Failed => None,
            _ => last_findings.unowned(gpu),
        };
        let failed = executor.undo(record, gpus.load_pages(), &unowned);
        if record.plan.changed_gpus().is_empty() {
            Undone::All(executor.forget(record, how, failed))
        } else {
            Undone::Steps(failed)
        }
    }

    /// Undoes the rest of a plan.
    async fn undo_gpus(
        self: &Arc<Self>,
        record: &Arc<ClaimRecord>,
        how: Ended,
        undone: Undone,
    ) -> Result<Result<(), UndoError>, Problem> {
        let mut failed = match undone {
            Undone::All(result) => return Ok(result),
            Undone::Steps(failed) => failed,
        };
        let released = self.parts.gpus.release(&record.plan).await;
        failed.extend(released.err().map(StepError::from));
        let (this, record) = (Arc::clone(self), Arc::clone(record));
        self.with_files(move || this.parts.executor.forget(&record, how, failed))
            .await
    }

    /// Releases a claim, whose lock the caller holds, if nobody uses its devices.
    pub(super) async fn release_unused(
        self: &Arc<Self>,
        uid: String,
        ended: Ended,
    ) -> Result<(), Problem> {
        let (this, of) = (Arc::clone(self), uid.clone());
        let begun = self
            .with_files(move || this.begin_release(&of, ended))
            .await??;
        if let Some((record, undone)) = begun {
            self.undo_gpus(&record, ended, undone).await??;
        }
        self.parts.ledger.remove(&uid);
        Ok(())
    }

    fn begin_release(
        &self,
        uid: &str,
        ended: Ended,
    ) -> Result<Option<(Arc<ClaimRecord>, Undone)>, Problem> {
        let PreparerParts {
            executor,
            layout,
            containers,
            ..
        } = &self.parts;
        let Some(record) = self.recorded(uid)? else {
            // Its journal may have been deleted by hand, but not its files.
            executor.sweep(uid)?;
            return Ok(None);
        };
        refuse_in_use(&record, containers, layout)?;
        let undone = self.undo_steps(&record, ended);
        Ok(Some((record, undone)))
    }
}
