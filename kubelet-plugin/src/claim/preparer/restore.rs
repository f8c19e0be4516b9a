//! Makes files of held claims again that somebody deleted.

use std::sync::Arc;

use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::PreparationPlan;

use super::in_use::processes_of;
use super::{Preparer, PreparerParts, Problem};
use crate::claim::executor::StepError;
use crate::gpu::driver_state::{DriverState, Ready};
use crate::ledger::claim_ref::{ClaimRef, claim_of};

impl Preparer {
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
        self.with_files(move || {
            let _lock = claim_lock;
            this.restore_locked(&uid)
        })
        .await?
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
        executor.make_files(&record.plan, gpus.load_pages(), &ready.dev_root_on_host)?;
        Ok(true)
    }

    pub(super) fn ready(&self) -> Result<Arc<Ready>, Problem> {
        match &*self.parts.driver.borrow() {
            DriverState::Ready(ready) => Ok(Arc::clone(ready)),
            DriverState::Unknown => Err(Problem::DriverUnknown),
            DriverState::Absent(why) => Err(Problem::Driver(Arc::clone(why))),
        }
    }

    /// Refuses a claim whose account was deleted while containers have it: with a second one beside it, the claim's programs
    /// could hold twice its memory.
    pub(super) fn verify_accounts(&self, plan: &PreparationPlan) -> Result<(), Problem> {
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

    /// Writes the CDI specs if somebody deleted or changed them.
    pub fn ensure_specs(&self) -> Result<(), Problem> {
        let restored = self.parts.executor.restore_spec_file();
        restored.map_err(StepError::from)?;
        if let DriverState::Ready(ready) = &*self.parts.driver.borrow()
            && let Some(spec) = &ready.spec
        {
            self.parts.spec_file.ensure(spec)?;
        }
        Ok(())
    }
}
