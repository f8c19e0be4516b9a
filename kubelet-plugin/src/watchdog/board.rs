//! The watchdog's last findings, for metrics and for Prepare.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tranche_node::watchdog::compare::Findings;

/// The last result of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// The findings.
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
pub struct Board {
    gpus: Mutex<(u64, BTreeMap<String, Watched>)>,
    released: watch::Sender<()>,
}

impl Board {
    /// Replaces the findings. `now` is in nanoseconds, as in [`Findings`].
    pub fn set(&self, now: u64, gpus: BTreeMap<String, Watched>) {
        let mut known = self.lock();
        let is_withheld = |gpu: &str| gpus.get(gpu).is_some_and(Watched::is_withheld);
        let released = known
            .1
            .iter()
            .any(|(gpu, watched)| watched.is_withheld() && !is_withheld(gpu));
        *known = (now, gpus);
        drop(known);
        if released {
            self.released.send_replace(());
        }
    }

    /// The time of the findings, and the findings.
    #[must_use]
    pub fn get(&self) -> (u64, BTreeMap<String, Watched>) {
        self.lock().clone()
    }

    /// Whether no new claim gets a GPU because memory of it has no owner.
    #[must_use]
    pub fn is_withheld(&self, gpu_uuid: &str) -> bool {
        let known = self.lock();
        known.1.get(gpu_uuid).is_some_and(Watched::is_withheld)
    }

    /// Changes whenever a GPU is no longer withheld.
    #[must_use]
    pub fn releases(&self) -> watch::Receiver<()> {
        self.released.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<String, Watched>)> {
        // No holder of the lock can panic in the middle of a change.
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
