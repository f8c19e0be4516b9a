//! Grants the GPU time of all held shares, ten times a second.

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

use crate::host::layout::Layout;
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::periodic;

/// Samples the shares that are held.
#[derive(Debug)]
pub struct ShareSampler {
    ledger: Arc<Ledger>,
    layout: Layout,
    nvml: NvmlUtilization,
    sampler: Sampler,
    metrics: Arc<Metrics>,
    reported: ReportedProblems,
}

/// How long a share must be without a problem before the same problem is logged again: its tenant can
/// cause and repair it five times a second.
const QUIET: Duration = Duration::from_mins(1);

/// The last logged problem of each share.
#[derive(Debug, Default)]
struct ReportedProblems(BTreeMap<PathBuf, ReportedProblem>);

#[derive(Debug)]
struct ReportedProblem {
    what: String,
    reported: Instant,
    last: Instant,
}

impl ReportedProblems {
    /// Whether the problem `what` of a share must be logged at `now`.
    fn must_report(&mut self, now: Instant, share: &Path, what: &str) -> bool {
        if let Some(wrong) = self.0.get_mut(share) {
            wrong.last = now;
            // Two alternating problems are logged no more often than one.
            if wrong.what == what || now.duration_since(wrong.reported) < QUIET {
                return false;
            }
        }
        let wrong = ReportedProblem {
            what: what.to_owned(),
            reported: now,
            last: now,
        };
        self.0.insert(share.to_owned(), wrong);
        true
    }

    /// Whether it must be logged at `now` that a share has no problem any more.
    fn is_right(&mut self, now: Instant, share: &Path) -> bool {
        let quiet = |wrong: &ReportedProblem| now.duration_since(wrong.last) >= QUIET;
        self.0.get(share).is_some_and(quiet) && self.0.remove(share).is_some()
    }
}

impl ShareSampler {
    /// Samples the shares that `ledger` has, with the utilization from the NVML of `driver`.
    /// `proc` is the host's.
    #[must_use]
    pub fn new(
        ledger: Arc<Ledger>,
        layout: Layout,
        driver: Box<dyn Driver>,
        proc: PathBuf,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            ledger,
            layout,
            nvml: NvmlUtilization::new(driver),
            sampler: Sampler::new(proc),
            metrics,
            reported: ReportedProblems::default(),
        }
    }

    /// Samples until cancelled. Without sampling, shares keep their cores. A round reads and writes tmpfs and
    /// calls NVML, which may block.
    pub async fn run(self, stop: CancellationToken) {
        let interval = Duration::from_nanos(PERIOD_NANOS);
        periodic::run(self, interval, &stop, Self::round, |_, ()| {}).await;
    }

    fn round(&mut self) {
        let shares: Vec<_> = self
            .ledger
            .shares(&self.layout)
            .into_iter()
            .map(|share| share.device)
            .collect();
        let sampled = self.sampler.step(now(), &shares, &mut self.nvml);
        let gpus = self.sampler.gpus_without_processes();
        let coarse = i64::try_from(gpus).unwrap_or(i64::MAX);
        self.metrics.gpus_without_process_utilization.set(coarse);
        self.reported.0.retain(|share, _| shares.contains(share));
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
                    if self.reported.must_report(now, &share, &wrong) {
                        warn!(share = %share.display(), "a share's GPU time cannot be trusted: {wrong}");
                    }
                }
                None => {
                    if self.reported.is_right(now, &share) {
                        debug!(share = %share.display(), "a share's account is consistent again");
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
    fn alternating_problems_are_logged_at_most_once_a_minute() {
        let (mut reported, start) = (ReportedProblems::default(), Instant::now());
        let share = Path::new("/run/tranche/shares/a");
        let at = |millis| start + Duration::from_millis(millis);
        assert!(reported.must_report(at(0), share, "it went back"));
        // Five times a second for an hour, sometimes with another problem.
        let mut lines = 0;
        for step in 1..36_000 {
            let what = match step % 20 {
                0 => "it is cut off",
                n if n % 2 == 0 => "it went back",
                _ => {
                    assert!(!reported.is_right(at(step * 100), share));
                    continue;
                }
            };
            lines += u32::from(reported.must_report(at(step * 100), share, what));
        }
        assert!(lines <= 60, "{lines} lines in an hour");
        let later = at(36_000 * 100) + QUIET;
        assert!(reported.is_right(later, share));
        assert!(!reported.is_right(later, share));
        assert!(reported.must_report(later, share, "it went back"));
    }
}
