//! Watches the MPS daemons of GPUs and partitions with concurrent shares: while one does not answer, the tier `concurrent` of its
//! GPU is withheld.

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
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = rounds.tick() => {}
            }
            let gpus = Arc::clone(&self);
            let Ok(wrong) = tokio::task::spawn_blocking(move || gpus.failing_daemons()).await
            else {
                return;
            };
            let lasting = wrong.iter().filter(|(key, _)| before.contains_key(*key));
            let entries = lasting.map(|((gpu, served), why)| entry(gpu, served, why));
            publish(&withheld, entries.collect());
            before = wrong;
        }
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
                message = it.message,
                "the tier concurrent of a GPU is withheld"
            );
        }
        if now.is_empty() {
            info!("the MPS daemons of all GPUs with concurrent shares answer again");
        }
        *known = now;
        true
    });
}
