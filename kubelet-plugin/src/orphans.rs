//! Finds what no claim stands behind any more, at start and every minute.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::preparer::Preparer;

/// How often.
const INTERVAL: Duration = Duration::from_mins(1);
/// A claim must be gone at two looks this far apart at least: a pod that was deleted by force takes
/// its claim along while its containers still end. Short enough for a claim that waits for the
/// orphan's GPU to get it.
const GRACE: Duration = Duration::from_secs(15);

/// Looks until cancelled. `suspect` asks for a look out of turn.
pub async fn run(preparer: Arc<Preparer>, suspect: Arc<Notify>, stop: CancellationToken) {
    let mut missing = BTreeSet::new();
    loop {
        missing = preparer.release_orphans(&missing).await;
        // Asked for or not, a claim that is gone gets its grace.
        let pause = async {
            tokio::time::sleep(GRACE).await;
            if missing.is_empty() {
                let rest = INTERVAL.saturating_sub(GRACE);
                let _ = tokio::time::timeout(rest, suspect.notified()).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = pause => {}
        }
    }
}
