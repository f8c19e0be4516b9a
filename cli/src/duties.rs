//! The maintenance of shares in use, which supervisors do here and the plugin on a node.
//!
//! Each supervisor sweeps its own share and measures the memory of its contexts. The one with the lock samples the GPU time of
//! all shares of the user, because the time of a GPU is divided among all its shares at once.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tranche_node::compute::PERIOD_NANOS;
use tranche_node::nvml::Nvml;
use tranche_node::sampler::{Sampler, now};
use tranche_node::sweep::{INTERVAL, Sweeper};
use tranche_node::utilization::NvmlUtilization;

use crate::contexts::Measuring;
use crate::shares::Shares;

#[derive(Debug)]
pub struct Duties {
    account: PathBuf,
    sweeper: Sweeper,
    utilization: NvmlUtilization,
    measuring: Option<Measuring>,
    sampling: Option<Sampling>,
    due: Instant,
}

#[derive(Debug)]
struct Sampling {
    sampler: Sampler,
    folders: Vec<PathBuf>,
    _lock: File,
}

impl Duties {
    /// The duties for the share with this account, on GPUs of `nvml`.
    pub fn new(account: PathBuf, nvml: Box<dyn Nvml>, measuring: Option<Measuring>) -> Self {
        Self {
            account,
            sweeper: Sweeper::new("/proc/self/exe", ["reclaim"]),
            utilization: NvmlUtilization::of(nvml),
            measuring,
            sampling: None,
            due: Instant::now(),
        }
    }

    /// Does the steps that are due, and returns the time until the next call. The next call repeats a step that failed: meanwhile
    /// programs can reclaim memory themselves, and shares that are not sampled keep their cores.
    pub fn turn(&mut self, shares: &Shares) -> Duration {
        if self.due <= Instant::now() {
            self.due = Instant::now() + INTERVAL;
            let _ = self.sweeper.sweep(&self.account);
            if let Some(measuring) = &mut self.measuring
                && let Some(processes) = self.utilization.process_memory(measuring.gpu())
            {
                let _ = measuring.note(&self.account, &processes);
            }
            self.sampling = self.sampling.take().or_else(|| {
                let lock = shares.try_lock_sampler()?;
                Some(Sampling {
                    sampler: Sampler::new("/proc"),
                    folders: Vec::new(),
                    _lock: lock,
                })
            });
            if let Some(sampling) = &mut self.sampling {
                sampling.folders = page_folders(shares.base());
            }
        }
        match &mut self.sampling {
            Some(sampling) => {
                sampling
                    .sampler
                    .step(now(), &sampling.folders, &mut self.utilization);
                Duration::from_nanos(PERIOD_NANOS)
            }
            None => self.due.saturating_duration_since(Instant::now()),
        }
    }
}

/// The folders of all shares that have a cap page.
fn page_folders(base: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    entries(base)
        .flat_map(|share| entries(&share).collect::<Vec<_>>())
        .filter(|folder| folder.join(tranche_shim_core::paths::CAP).exists())
        .collect()
}
