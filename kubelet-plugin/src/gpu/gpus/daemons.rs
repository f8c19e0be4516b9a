//! Watches the MPS daemons of GPUs and partitions with concurrent shares: while one does not answer, the tier `concurrent` of its
//! GPU is withheld. A GPU with something that released claims have left is withheld as a whole.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tranche_api::withheld::reason;
use tranche_api::{Tier, WithheldGpu};
use tranche_mps::protocol::{Daemon, Health};

use super::Gpus;
use crate::gpu::mps::MpsError;

/// How often the supervisor is asked, while there are concurrent shares.
pub(super) const PERIOD: Duration = Duration::from_secs(5);

/// What is wrong, by GPU and by what the daemon serves: the GPU, or one of its MIG devices.
type FailingDaemons = BTreeMap<(String, String), String>;

impl Gpus {
    /// Publishes the GPUs whose daemons do not answer, until `stop`. A daemon that failed only one check is being started.
    pub async fn watch_daemons(
        self: Arc<Self>,
        withheld: watch::Sender<Vec<WithheldGpu>>,
        stop: CancellationToken,
    ) {
        let mut rounds = interval(PERIOD);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before = FailingDaemons::new();
        let mut lasting = FailingDaemons::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = rounds.tick() => {}
                () = self.left_over.changed() => {
                    publish(&withheld, self.withheld(&lasting));
                    continue;
                }
            }
            let gpus = Arc::clone(&self);
            let Ok(wrong) = tokio::task::spawn_blocking(move || gpus.failing_daemons()).await
            else {
                return;
            };
            lasting.clone_from(&wrong);
            lasting.retain(|key, _| before.contains_key(key));
            publish(&withheld, self.withheld(&lasting));
            before = wrong;
        }
    }

    /// The GPUs with left-overs, and those with daemons that do not answer.
    fn withheld(&self, failing: &FailingDaemons) -> Vec<WithheldGpu> {
        let mut withheld = self.left_over.withheld();
        let is_whole = |gpu: &str, all: &[WithheldGpu]| all.iter().any(|it| it.gpu == gpu);
        let whole = withheld.len();
        for ((gpu, served), why) in failing {
            if !is_whole(gpu, &withheld[..whole]) {
                withheld.push(entry(gpu, served, why));
            }
        }
        withheld
    }

    /// The GPUs and MIG devices with concurrent shares whose daemons do not answer.
    fn failing_daemons(&self) -> FailingDaemons {
        let Ok(records) = self.records.readable() else {
            return FailingDaemons::new();
        };
        let mut served = Vec::new();
        for (gpu, record) in records {
            let partitions = record.partition_daemons.into_iter();
            served.extend(partitions.map(|it| (gpu.clone(), it.uuid)));
            served.extend(record.mps.map(|_| (gpu.clone(), gpu)));
        }
        if served.is_empty() {
            return FailingDaemons::new();
        }
        let daemons = self.hardware.daemons.list();
        let wrong = served.into_iter().filter_map(|(gpu, served)| {
            let why = why_not(&served, &daemons)?;
            Some(((gpu, served), why))
        });
        wrong.collect()
    }
}

/// Why the daemon of a GPU or of a MIG device does not serve it; `None` where it does.
fn why_not(served: &str, daemons: &Result<Vec<Daemon>, MpsError>) -> Option<String> {
    let daemons = match daemons {
        Ok(daemons) => daemons,
        Err(error) => return Some(error.to_string()),
    };
    match daemons.iter().find(|it| it.device.as_str() == served) {
        Some(daemon) => match &daemon.health {
            Health::Ready => None,
            Health::NotAnswering(why) => Some(format!("the MPS daemon does not answer: {why}")),
            Health::Dead(why) => Some(format!("the MPS daemon is dead: {why}")),
        },
        None => Some("the MPS supervisor has no daemon for it".to_owned()),
    }
}

fn entry(gpu: &str, served: &str, why: &str) -> WithheldGpu {
    let partition = if served == gpu {
        String::new()
    } else {
        format!("partition {served}: ")
    };
    let message = format!(
        "{partition}{why}; see the log of the DaemonSet `tranche-mps` on this node, and the daemon's own in /run/tranche/mps/{served}/log"
    );
    WithheldGpu {
        tiers: vec![Tier::Concurrent],
        ..WithheldGpu::whole(gpu, reason::MPS_DAEMON, message)
    }
}

fn publish(withheld: &watch::Sender<Vec<WithheldGpu>>, now: Vec<WithheldGpu>) {
    withheld.send_if_modified(|known| {
        if *known == now {
            return false;
        }
        for it in &now {
            warn!(
                gpu = it.gpu,
                reason = it.reason,
                message = it.message,
                "a GPU, or a tier of it, is withheld"
            );
        }
        if now.is_empty() {
            info!("no GPU is withheld any more because of its MPS daemons or of what released claims left");
        }
        *known = now;
        true
    });
}
