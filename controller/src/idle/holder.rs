//! What each claim does on a node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tranche_api::usage::{ClaimReference, GpuUsage, NodeUsage, ShareUsage};

use super::state::Activity;

/// A claim that holds devices of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub claim: ClaimReference,
    /// Its devices on the node.
    pub devices: BTreeSet<Device>,
    /// The GPUs of these devices.
    pub gpus: BTreeSet<String>,
    /// What all of them do together: for how long none of them has run a kernel, and what they hold.
    pub seen: Activity,
}

/// A device as in an allocation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device {
    pub pool: String,
    /// Its name in the pool.
    pub device: String,
    /// The share of it, where it is shared.
    pub share_id: Option<String>,
}

/// The claims on a node, by UID.
#[must_use]
pub fn holders(usage: &NodeUsage) -> BTreeMap<String, Holder> {
    let mut holders: BTreeMap<String, Holder> = BTreeMap::new();
    for gpu in &usage.gpus {
        for share in gpu.all_shares() {
            let seen = seen(gpu, share);
            let device = Device {
                pool: share.pool.clone(),
                device: share.device.clone(),
                share_id: share.share_id.clone(),
            };
            match holders.get_mut(&share.claim.uid) {
                None => {
                    let holder = Holder {
                        claim: share.claim.clone(),
                        devices: BTreeSet::from([device]),
                        gpus: BTreeSet::from([gpu.uuid.clone()]),
                        seen,
                    };
                    holders.insert(share.claim.uid.clone(), holder);
                }
                Some(holder) => {
                    holder.devices.insert(device);
                    holder.gpus.insert(gpu.uuid.clone());
                    holder.seen = both(holder.seen, seen);
                }
            }
        }
    }
    holders
}

/// What NVML says of a device of a claim.
fn seen(gpu: &GpuUsage, share: &ShareUsage) -> Activity {
    let is_known = gpu.problem.is_none();
    Activity {
        idle: share
            .idle_seconds
            .filter(|_| is_known)
            .map(Duration::from_secs),
        memory: share.memory.used,
    }
}

/// Both together are idle for the shorter of the two times; if one is unknown, the result is unknown.
fn both(one: Activity, two: Activity) -> Activity {
    let idle = one.idle.zip(two.idle);
    Activity {
        idle: idle.map(|(one, two)| one.min(two)),
        memory: one.memory.saturating_add(two.memory),
    }
}
