//! Every second: the slots of dead processes in all held shares are given back, and pages that their
//! tenants made longer are cut back.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use tranche_node::sweep::{INTERVAL, Sweeper, Swept};

use crate::layout::{Layout, SharePaths};
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::preparer::Preparer;

/// The first argument by which this program is asked to do [`tranche_node::sweep::reclaim`]; the
/// second is the account's path.
pub const RECLAIM: &str = "reclaim";

/// Sweeps the accounts of all held shares.
#[derive(Debug)]
pub struct ShareSweeper {
    ledger: Arc<Ledger>,
    layout: Layout,
    sweeper: Sweeper,
    metrics: Arc<Metrics>,
}

impl ShareSweeper {
    /// Sweeps what `preparer` holds, with this program as the child.
    #[must_use]
    pub fn new(preparer: &Preparer, layout: Layout, metrics: Arc<Metrics>) -> Self {
        Self {
            ledger: Arc::clone(preparer.ledger()),
            layout,
            sweeper: Sweeper::new("/proc/self/exe", [RECLAIM]),
            metrics,
        }
    }

    /// Sweeps until cancelled.
    pub async fn run(self, stop: CancellationToken) {
        let this = Arc::new(self);
        let mut said = Said::default();
        loop {
            let sweeper = Arc::clone(&this);
            // Reads tmpfs; but waits for a child when somebody died.
            let round = tokio::task::spawn_blocking(move || sweeper.round(&said)).await;
            // Only at shutdown: the runtime takes no more blocking work.
            let Ok(now) = round else { return };
            said = now;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Looks at every share once. What is wrong is said once for each share, not at every look; returns
    /// of whom it was said now or `before`.
    fn round(&self, before: &Said) -> Said {
        let mut said = Said::default();
        for SharePaths { account, .. } in self.ledger.shares(&self.layout) {
            // However often it is made longer from now on.
            if before.cut.contains(&account) {
                said.cut.insert(account.clone());
            }
            match self.sweeper.sweep(&account) {
                Ok(Swept { dead, cut }) => {
                    if dead > 0 {
                        debug!(dead, account = %account.display(), "gave back what dead processes held");
                        self.metrics.dead_processes.inc_by(dead as u64);
                    }
                    if let Some(bytes) = cut
                        && said.cut.insert(account.clone())
                    {
                        warn!(bytes, account = %account.display(), "a share's programs made its account page longer; it was cut back, and will be: see which they are, and end them");
                    }
                }
                // Released since the ledger was read.
                Err(_) if !account.exists() => {}
                Err(error) => {
                    if !before.failing.contains(&account) {
                        warn!(%error, "a share's dead processes keep their memory until another process of the share asks for it");
                    }
                    said.failing.insert(account);
                }
            }
        }
        said
    }
}

/// The accounts of which something was said.
#[derive(Debug, Default)]
struct Said {
    failing: BTreeSet<PathBuf>,
    cut: BTreeSet<PathBuf>,
}
