//! What released claims have left on GPUs, and cannot be taken back now. Such a GPU is withheld: the scheduler counts it as free, and
//! would give it to a claim that cannot be prepared.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tranche_api::WithheldGpu;
use tranche_api::withheld::reason;

use super::GpuError;

/// How long a program may use what is taken back before the GPU is withheld: it is usually just ending.
const ENDING: Duration = Duration::from_secs(5);

/// By GPU.
#[derive(Debug, Default)]
pub(super) struct LeftOvers {
    gpus: Mutex<BTreeMap<String, LeftOver>>,
    changed: Notify,
}

#[derive(Debug)]
struct LeftOver {
    why: String,
    /// From when on the GPU is withheld.
    from: Instant,
}

impl LeftOvers {
    /// Notes whether a GPU was taken back, or why not. What was on a GPU that is missing is gone with it.
    pub(super) fn note(&self, gpu_uuid: &str, failed: Option<&GpuError>) {
        let mut gpus = self.gpus();
        match failed.filter(|error| !error.is_absence()) {
            None => {
                if gpus.remove(gpu_uuid).is_none() {
                    return;
                }
            }
            Some(error) => {
                let now = Instant::now();
                let wait = if error.is_in_use() {
                    ENDING
                } else {
                    Duration::ZERO
                };
                let known = gpus.entry(gpu_uuid.to_owned());
                let left = known.or_insert(LeftOver {
                    why: String::new(),
                    from: now + wait,
                });
                left.why = error.to_string();
            }
        }
        drop(gpus);
        self.changed.notify_one();
    }

    /// Waits until a GPU was noted.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The GPUs that are withheld now.
    pub(super) fn withheld(&self) -> Vec<WithheldGpu> {
        let now = Instant::now();
        let gpus = self.gpus();
        let due = gpus.iter().filter(|(_, left)| left.from <= now);
        due.map(|(gpu, left)| {
            let message = format!(
                "what released claims had of the GPU is still there, and is removed as soon as that is possible: {}",
                left.why
            );
            WithheldGpu::whole(gpu, reason::LEFT_OVER, message)
        })
        .collect()
    }

    fn gpus(&self) -> MutexGuard<'_, BTreeMap<String, LeftOver>> {
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
