//! The health of the node's GPUs: faults are found, remembered, reported, and over when a check has passed.
//!
//! ```text
//!  NVML ─► monitor ─► driver::health ─► Board ─┬─► cluster::gpu_node ─► GpuNode.status.gpus ─► controller ─► taints
//!             │                                ├─► report ─► condition on claims, events on their pods
//!             └─► check, on a GPU that nobody  ├─► stream ─► kubelet ─► pod.status.containerStatuses[]
//!                 holds                        └─► /metrics
//! ```

pub mod check;
pub mod monitor;
pub mod report;
pub mod stream;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tranche_driver::health::Verdicts;

/// After this time without a look at the GPUs nothing is known of them: a call of NVML hangs.
const STALE: Duration = Duration::from_secs(15);

/// The verdicts on all GPUs.
#[derive(Debug)]
pub struct Board {
    verdicts: watch::Sender<Option<Arc<Verdicts>>>,
    looked: Mutex<Option<Instant>>,
}

impl Default for Board {
    fn default() -> Self {
        Self {
            verdicts: watch::Sender::new(None),
            looked: Mutex::default(),
        }
    }
}

impl Board {
    /// The newest verdicts, whenever they change; `None` before the first look.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Option<Arc<Verdicts>>> {
        self.verdicts.subscribe()
    }

    /// The verdicts; `None` before the first look, and if the last one was long ago.
    #[must_use]
    pub fn now(&self) -> Option<Arc<Verdicts>> {
        let is_fresh = self.looked().is_some_and(|at| at.elapsed() < STALE);
        self.verdicts.borrow().clone().filter(|_| is_fresh)
    }

    fn publish(&self, now: Instant, verdicts: Verdicts) {
        *self.looked() = Some(now);
        self.verdicts.send_if_modified(|known| {
            let is_news = known.as_deref() != Some(&verdicts);
            if is_news {
                *known = Some(Arc::new(verdicts));
            }
            is_news
        });
    }

    fn looked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
