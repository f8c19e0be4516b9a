//! Restores the files of held claims that somebody deleted: CDI specs, metadata and pages.
//!
//! A container that starts again in its pod's sandbox needs the files of its claims, and the kubelet does not call Prepare
//! for it. Without them it stays in `CreateContainerError`. A cleaner of `/var/run`, or an administrator who removes another
//! driver's specs, is enough.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::claim::preparer::Preparer;
use crate::ledger::claim_ref::ClaimRef;

/// From one look to the next. A look reads the attributes of some files of each claim.
const INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Restorer {
    pub preparer: Arc<Preparer>,
}

impl Restorer {
    pub async fn run(self, stop: CancellationToken) {
        let mut failing = Vec::new();
        loop {
            failing = self.round(failing).await;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Restores what is missing. Returns the claims that could not be restored, with the reason: it is logged once, and not in
    /// every round.
    async fn round(&self, before: Vec<(ClaimRef, String)>) -> Vec<(ClaimRef, String)> {
        let preparer = Arc::clone(&self.preparer);
        let look = move || {
            if let Err(error) = preparer.ensure_specs() {
                debug!(%error, "the CDI specs cannot be restored");
            }
            preparer.damaged()
        };
        // Fails only at shutdown, when the runtime accepts no more blocking work.
        let damaged = tokio::task::spawn_blocking(look).await;
        let mut failing = Vec::new();
        for claim in damaged.unwrap_or_default() {
            match self.preparer.restore(&claim).await {
                Ok(true) => info!(%claim, "restored files of a held claim that were deleted"),
                // Released meanwhile, or restored by a Prepare.
                Ok(false) => {}
                Err(problem) => {
                    let failed = (claim, problem.to_string());
                    if !before.contains(&failed) {
                        let (claim, error) = &failed;
                        warn!(%claim, error, "files of a held claim were deleted, and its containers cannot start again");
                    }
                    failing.push(failed);
                }
            }
        }
        failing
    }
}
