//! What the watchdog found last, for metrics and for Prepare.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tranche_node::watchdog::compare::Findings;

/// A GPU as it was watched last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// What was found.
    Yes(Findings),
    /// It could not be read.
    No {
        /// Whether it is still withheld for what was found before.
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

/// What the watchdog found last, by GPU.
#[derive(Debug, Default)]
pub struct Board {
    gpus: Mutex<(u64, BTreeMap<String, Watched>)>,
    released: watch::Sender<()>,
}

impl Board {
    /// Replaces what was found before. `now` is in nanoseconds, as in [`Findings`].
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

    /// When it was found, and all of it.
    #[must_use]
    pub fn get(&self) -> (u64, BTreeMap<String, Watched>) {
        self.lock().clone()
    }

    /// Whether no new claim gets a GPU, because memory of it is in use by nobody.
    #[must_use]
    pub fn is_withheld(&self, gpu_uuid: &str) -> bool {
        let known = self.lock();
        known.1.get(gpu_uuid).is_some_and(Watched::is_withheld)
    }

    /// Changes whenever a GPU is withheld no longer.
    #[must_use]
    pub fn releases(&self) -> watch::Receiver<()> {
        self.released.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<String, Watched>)> {
        // Nothing that holds it can panic half way through a change.
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
