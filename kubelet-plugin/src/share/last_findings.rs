//! The watchdog's last findings, for metrics and for Prepare.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tranche_api::usage::{Peak, Zombie};
use tranche_driver::usage::Owner;
use tranche_node::watchdog::compare::Findings;

/// The last result of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    Yes(Findings),
    /// It could not be read.
    No {
        /// Whether it is still withheld because of earlier findings.
        is_withheld: bool,
    },
}

impl Watched {
    /// Whether no new claim gets the GPU.
    #[must_use]
    pub fn is_withheld(&self) -> bool {
        match self {
            Self::Yes(findings) => findings.is_withheld,
            Self::No { is_withheld } => *is_withheld,
        }
    }
}

/// The watchdog's last findings, by GPU.
#[derive(Debug, Default)]
pub struct LastFindings {
    known: Mutex<CurrentFindings>,
    ownership: Mutex<Arc<Ownership>>,
    released: watch::Sender<()>,
}

/// The owners of processes and memory on the GPUs, and the devices' peaks.
#[derive(Debug, Default)]
pub struct Ownership {
    /// By PID of the host.
    pub owners: BTreeMap<u32, Owner>,
    /// The memory that dead processes have left, by GPU.
    pub zombies: BTreeMap<String, Vec<Zombie>>,
    /// The most memory that held devices used, by their keys.
    pub peaks: BTreeMap<String, Peak>,
}

#[derive(Debug, Default)]
struct CurrentFindings {
    /// When, in nanoseconds, as in [`Findings`].
    at: u64,
    gpus: BTreeMap<String, Watched>,
    /// Whether a GPU without findings is withheld.
    withholds_others: bool,
}

impl CurrentFindings {
    fn is_withheld(&self, gpu_uuid: &str) -> bool {
        let found = self.gpus.get(gpu_uuid).map(Watched::is_withheld);
        found.unwrap_or(self.withholds_others)
    }
}

impl LastFindings {
    /// Replaces the findings. `now` is in nanoseconds, as in [`Findings`]; `withholds_others` says whether a GPU without
    /// findings is withheld.
    pub fn set(&self, now: u64, gpus: BTreeMap<String, Watched>, withholds_others: bool) {
        let mut known = self.lock();
        let new = CurrentFindings {
            at: now,
            gpus,
            withholds_others,
        };
        let mut watched = known.gpus.keys();
        let released = (known.withholds_others && !withholds_others)
            || watched.any(|gpu| known.is_withheld(gpu) && !new.is_withheld(gpu));
        *known = new;
        drop(known);
        if released {
            self.released.send_replace(());
        }
    }

    /// Replaces the ownership.
    pub fn set_ownership(&self, ownership: Ownership) {
        let mut current = self
            .ownership
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(ownership);
    }

    /// The ownership as of the last round.
    #[must_use]
    pub fn ownership(&self) -> Arc<Ownership> {
        let current = self.ownership.lock();
        Arc::clone(&current.unwrap_or_else(PoisonError::into_inner))
    }

    /// The time of the findings, and the findings.
    #[must_use]
    pub fn get(&self) -> (u64, BTreeMap<String, Watched>) {
        let known = self.lock();
        (known.at, known.gpus.clone())
    }

    /// Whether no new claim gets a GPU because memory of it has no owner.
    #[must_use]
    pub fn is_withheld(&self, gpu_uuid: &str) -> bool {
        self.lock().is_withheld(gpu_uuid)
    }

    /// The bytes of a GPU's memory that no process holds, as they were found last.
    #[must_use]
    pub fn unowned(&self, gpu_uuid: &str) -> Option<u64> {
        match self.lock().gpus.get(gpu_uuid)? {
            Watched::Yes(findings) => findings.unowned,
            Watched::No { .. } => None,
        }
    }

    /// Changes whenever a GPU is no longer withheld.
    #[must_use]
    pub fn releases(&self) -> watch::Receiver<()> {
        self.released.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, CurrentFindings> {
        // No holder of the lock can panic in the middle of a change.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
