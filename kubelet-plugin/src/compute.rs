//! Ten times a second: the GPU time of all held shares is granted anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use tranche_node::compute::PERIOD_NANOS;
use tranche_node::nvml::Driver;
use tranche_node::sampler::{Sampled, Sampler, now};
use tranche_node::utilization::NvmlUtilization;

use crate::layout::Layout;
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::preparer::Preparer;

/// Samples the shares that are held.
#[derive(Debug)]
pub struct ShareSampler {
    ledger: Arc<Ledger>,
    layout: Layout,
    nvml: NvmlUtilization,
    sampler: Sampler,
    metrics: Arc<Metrics>,
    said: Said,
}

/// For how long a share must be right before what is wrong with it is said again: its tenant can make it
/// wrong and right five times a second.
const QUIET: Duration = Duration::from_mins(1);

/// What is wrong with whom, as it was said last.
#[derive(Debug, Default)]
struct Said(BTreeMap<PathBuf, Wrong>);

#[derive(Debug)]
struct Wrong {
    what: String,
    said: Instant,
    last: Instant,
}

impl Said {
    /// Whether it is to be said at `now` that `what` is wrong with a share.
    fn is_news(&mut self, now: Instant, share: &Path, what: &str) -> bool {
        if let Some(wrong) = self.0.get_mut(share) {
            wrong.last = now;
            // Two things in turn are as many lines.
            if wrong.what == what || now.duration_since(wrong.said) < QUIET {
                return false;
            }
        }
        let wrong = Wrong {
            what: what.to_owned(),
            said: now,
            last: now,
        };
        self.0.insert(share.to_owned(), wrong);
        true
    }

    /// Whether it is to be said at `now` that a share is right again.
    fn is_right(&mut self, now: Instant, share: &Path) -> bool {
        let quiet = |wrong: &Wrong| now.duration_since(wrong.last) >= QUIET;
        self.0.get(share).is_some_and(quiet) && self.0.remove(share).is_some()
    }
}

impl ShareSampler {
    /// Samples what `preparer` holds, and asks `driver` how busy the GPUs are. `proc` is the host's.
    #[must_use]
    pub fn new(
        preparer: &Preparer,
        layout: Layout,
        driver: Box<dyn Driver>,
        proc: PathBuf,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            ledger: Arc::clone(preparer.ledger()),
            layout,
            nvml: NvmlUtilization::new(driver),
            sampler: Sampler::new(proc),
            metrics,
            said: Said::default(),
        }
    }

    /// Samples until cancelled. Shares go on with their cores when nobody samples.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(Duration::from_nanos(PERIOD_NANOS));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // Reads and writes tmpfs, and asks NVML, which may take its time.
            let round = tokio::task::spawn_blocking(move || {
                self.round();
                self
            });
            // Only at shutdown: the runtime takes no more blocking work.
            let Ok(back) = round.await else { return };
            self = back;
        }
    }

    fn round(&mut self) {
        let shares = self.ledger.shares(&self.layout);
        let shares: Vec<_> = shares.into_iter().map(|share| share.device).collect();
        let sampled = self.sampler.step(now(), &shares, &mut self.nvml);
        let coarse = self.sampler.gpus_without_processes();
        let coarse = i64::try_from(coarse).unwrap_or(i64::MAX);
        self.metrics.gpus_without_process_utilization.set(coarse);
        self.said.0.retain(|share, _| shares.contains(share));
        let now = Instant::now();
        for Sampled { share, outcome } in sampled {
            let wrong = match outcome {
                Ok(decision) => decision.suspect.map(|suspicion| suspicion.to_string()),
                // Released since the ledger was read.
                Err(_) if !share.exists() => continue,
                Err(error) => Some(error.to_string()),
            };
            match wrong {
                Some(wrong) => {
                    if self.said.is_news(now, &share, &wrong) {
                        warn!(share = %share.display(), "a share's GPU time cannot be trusted to be what it was granted: {wrong}");
                    }
                }
                None => {
                    if self.said.is_right(now, &share) {
                        debug!(share = %share.display(), "a share's account is right again");
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_by_turns_is_said_once() {
        let (mut said, start) = (Said::default(), Instant::now());
        let share = Path::new("/run/tranche/shares/a");
        let at = |millis| start + Duration::from_millis(millis);
        assert!(said.is_news(at(0), share, "it went back"));
        // Five times a second, for an hour; and another thing now and then.
        let mut lines = 0;
        for step in 1..36_000 {
            let what = match step % 20 {
                0 => "it is cut off",
                n if n % 2 == 0 => "it went back",
                _ => {
                    assert!(!said.is_right(at(step * 100), share));
                    continue;
                }
            };
            lines += u32::from(said.is_news(at(step * 100), share, what));
        }
        assert!(lines <= 60, "{lines} lines in an hour");
        let later = at(36_000 * 100) + QUIET;
        assert!(said.is_right(later, share));
        assert!(!said.is_right(later, share));
        assert!(said.is_news(later, share, "it went back"));
    }
}
