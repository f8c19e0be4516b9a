//! The MPS daemons of a GPU's partitions: one for each partition with concurrent shares.
//!
//! A daemon serves a MIG device, so it starts after its partition is created and ends before it is removed. The GPU's
//! compute mode stays as it is: `EXCLUSIVE_PROCESS` does not suit a GPU in MIG mode, because each of its partitions has
//! a server (NVIDIA's MIG user guide, "CUDA MPS").

use crate::mig::Placement;
use serde::{Deserialize, Serialize};

use super::{
    Actual, ComputeMode, Daemon, GpuChanges, Next, Obstacle, Served, Wanted, WantedDaemon,
};

/// An MPS daemon of Tranche that serves a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionDaemon {
    /// The partition.
    #[serde(rename = "place")]
    pub placement: Placement,
    /// The UUID of the MIG device that the partition had when the daemon was requested.
    pub uuid: String,
}

/// The next step to end a daemon that is no longer wanted, or that serves a MIG device that is gone. A daemon that does not end
/// stays in the record.
pub(super) fn without(wanted: &Wanted, record: &GpuChanges, actual: &Actual) -> Option<Next> {
    let mut daemons = record.partition_daemons.iter();
    let daemon = daemons.find(|daemon| {
        let is_wanted = wanted.partition_daemons.contains_key(&daemon.placement);
        let is_there = actual.mig_uuid(daemon.placement) == Some(&daemon.uuid);
        !(is_wanted && is_there) && actual.partition_daemon(&daemon.uuid) != Daemon::Stuck
    })?;
    if actual.partition_daemon(&daemon.uuid) != Daemon::Ended {
        let served = Served::Partition(daemon.uuid.clone());
        return Some(Next::EndDaemon(served));
    }
    let mut left = record.clone();
    left.partition_daemons.retain(|it| it != daemon);
    Some(Next::Write(left))
}

/// The next step to start the daemons that are needed now; `None` if all of them answer. Their partitions exist.
pub(super) fn with(
    wanted: &Wanted,
    record: &GpuChanges,
    actual: &Actual,
) -> Result<Option<Next>, Obstacle> {
    let needed = wanted
        .partition_daemons
        .iter()
        .filter(|(_, daemon)| **daemon == WantedDaemon::Ready);
    for (&placement, _) in needed {
        if actual.compute_mode == ComputeMode::Prohibited {
            return Err(Obstacle::Prohibited);
        }
        let uuid = actual
            .mig_uuid(placement)
            .ok_or(Obstacle::NoSuchPartition(placement))?;
        let daemon = PartitionDaemon {
            placement,
            uuid: uuid.clone(),
        };
        if !record.partition_daemons.contains(&daemon) {
            let mut record = record.clone();
            record.partition_daemons.push(daemon);
            return Ok(Some(Next::Write(record)));
        }
        if actual.partition_daemon(uuid) != Daemon::Ready {
            return Ok(Some(Next::EnsureDaemon(Served::Partition(daemon.uuid))));
        }
    }
    Ok(None)
}

impl Actual {
    /// The UUID of the MIG device that has all of the instance at a placement.
    fn mig_uuid(&self, placement: Placement) -> Option<&String> {
        match &self.at(placement)?.compute[..] {
            [only] => Some(&only.uuid),
            _ => None,
        }
    }

    fn partition_daemon(&self, uuid: &str) -> Daemon {
        self.partition_daemons
            .get(uuid)
            .copied()
            .unwrap_or_default()
    }
}

impl GpuChanges {
    /// Whether a daemon serves the partition, so that it cannot be removed.
    pub(super) fn has_daemon(&self, placement: Placement) -> bool {
        self.partition_daemons
            .iter()
            .any(|it| it.placement == placement)
    }
}
