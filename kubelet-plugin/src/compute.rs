//! Ten times a second: the GPU time of all held shares is granted anew.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use tranche_node::compute::PERIOD_NANOS;
use tranche_node::nvml::Driver;
use tranche_node::sampler::{Sampled, Sampler, now};
use tranche_node::utilization::NvmlUtilization;

use crate::layout::Layout;
use crate::ledger::Ledger;
use crate::preparer::Preparer;

/// Samples the shares that are held.
#[derive(Debug)]
pub struct ShareSampler {
    ledger: Arc<Ledger>,
    layout: Layout,
    nvml: NvmlUtilization,
    sampler: Sampler,
    /// What is wrong with whom, as it was said last.
    said: BTreeMap<PathBuf, String>,
}

impl ShareSampler {
    /// Samples what `preparer` holds, and asks `driver` how busy the GPUs are. `proc` is the host's.
    #[must_use]
    pub fn new(
        preparer: &Preparer,
        layout: Layout,
        driver: Box<dyn Driver>,
        proc: PathBuf,
    ) -> Self {
        Self {
            ledger: Arc::clone(preparer.ledger()),
            layout,
            nvml: NvmlUtilization::new(driver),
            sampler: Sampler::new(proc),
            said: BTreeMap::new(),
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
        let shares = self.shares();
        let sampled = self.sampler.step(now(), &shares, &mut self.nvml);
        self.said.retain(|share, _| shares.contains(share));
        for Sampled { share, outcome } in sampled {
            let wrong = match outcome {
                Ok(decision) => decision.suspect.map(|suspicion| suspicion.to_string()),
                // Released since the ledger was read.
                Err(_) if !share.exists() => continue,
                Err(error) => Some(error.to_string()),
            };
            match wrong {
                Some(wrong) if self.said.get(&share) != Some(&wrong) => {
                    warn!(share = %share.display(), "a share's GPU time cannot be trusted to be what it was granted: {wrong}");
                    self.said.insert(share, wrong);
                }
                Some(_) => {}
                None => {
                    if self.said.remove(&share).is_some() {
                        debug!(share = %share.display(), "a share's account is right again");
                    }
                }
            }
        }
    }

    fn shares(&self) -> Vec<PathBuf> {
        let mut shares = Vec::new();
        for record in self.ledger.held() {
            let uid = &record.plan.allocation.uid;
            for device in record.plan.devices.iter().filter(|d| d.cap.is_share()) {
                shares.push(self.layout.share(uid, &device.key).device);
            }
        }
        shares
    }
}
