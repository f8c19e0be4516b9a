//! Every second, reclaims the slots of dead processes in all held shares, and truncates pages that
//! their tenants made longer.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use tranche_node::sweep::{INTERVAL, Sweeper, Swept};

use crate::host::layout::Layout;
use crate::ledger::Ledger;
use crate::metrics::Metrics;

/// The first argument of this program for [`tranche_node::sweep::reclaim`]; the second is the
/// account's path.
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
    /// Sweeps the shares that `ledger` has, with this program as the child.
    #[must_use]
    pub fn new(ledger: Arc<Ledger>, layout: Layout, metrics: Arc<Metrics>) -> Self {
        Self {
            ledger,
            layout,
            sweeper: Sweeper::new("/proc/self/exe", [RECLAIM]),
            metrics,
        }
    }

    pub async fn run(self, stop: CancellationToken) {
        let this = Arc::new(self);
        let mut reported = Reported::default();
        loop {
            let sweeper = Arc::clone(&this);
            // Reads tmpfs, and waits for a child if a process died.
            let round = tokio::task::spawn_blocking(move || sweeper.round(&reported)).await;
            // This fails only at shutdown, when the runtime accepts no more blocking work.
            let Ok(now) = round else { return };
            reported = now;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Sweeps every share once. Problems are logged once for each share, not in every round; returns
    /// the shares with a problem that was logged now or `before`.
    fn round(&self, before: &Reported) -> Reported {
        let mut reported = Reported::default();
        for account in self.ledger.accounts(&self.layout) {
            // Logged once, however often it is made longer.
            if before.cut.contains(&account) {
                reported.cut.insert(account.clone());
            }
            match self.sweeper.sweep(&account) {
                Ok(Swept { dead, cut }) => {
                    if dead > 0 {
                        debug!(dead, account = %account.display(), "reclaimed what dead processes held");
                        self.metrics.dead_processes.inc_by(dead as u64);
                    }
                    if let Some(bytes) = cut
                        && reported.cut.insert(account.clone())
                    {
                        warn!(bytes, account = %account.display(), "a share's programs made its account page longer; it is truncated each time: find these programs and end them");
                    }
                }
                // Released since the ledger was read.
                Err(_) if !account.exists() => {}
                Err(error) => {
                    if !before.failing.contains(&account) {
                        warn!(%error, "a share's dead processes keep their memory until another process of the share asks for it");
                    }
                    reported.failing.insert(account);
                }
            }
        }
        reported
    }
}

/// The accounts with logged problems.
#[derive(Debug, Default)]
struct Reported {
    failing: BTreeSet<PathBuf>,
    cut: BTreeSet<PathBuf>,
}
