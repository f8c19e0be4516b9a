//! What claims hold of the GPUs, who uses it, and when it last did something.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tranche_api::usage::{Measure, Peak};
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{PAGES, PreparedDevice};
use tranche_driver::usage::{GpuReading, HeldDevice, Owner, User};
use tranche_node::page::AccountFile;
use tranche_node::usage::Busy;

use crate::host::layout::Layout;
use crate::kubelet::pod_resources::Listing;
use crate::ledger::Ledger;
use crate::share::held_device::{limit, reference};

/// A pod is gone if this many lists of the kubelet in a row lack it: it may have been created after the first.
const MISSING: u32 = 2;

/// What the kubelet last listed.
#[derive(Debug, Default)]
pub struct LastListing {
    newest: Option<Arc<Listing>>,
    /// Pods of held claims that the last lists did not have, by namespace and name, and in how many.
    missing: BTreeMap<(String, String), u32>,
}

impl LastListing {
    /// Takes a list; `None` if the kubelet did not answer.
    pub fn add(&mut self, ledger: &Ledger, listing: Option<Arc<Listing>>) {
        let Some(listing) = listing else {
            // A pod that is no longer known is not gone.
            *self = Self::default();
            return;
        };
        let mut missing = BTreeMap::new();
        for record in ledger.held() {
            let allocation = &record.plan.allocation;
            for pod in ledger.pods(&allocation.uid) {
                if listing.in_use.has_pod(&allocation.namespace, &pod) {
                    continue;
                }
                let pod = (allocation.namespace.clone(), pod);
                let before = self.missing.get(&pod).copied().unwrap_or(0);
                missing.insert(pod, before.saturating_add(1));
            }
        }
        self.missing = missing;
        self.newest = Some(listing);
    }

    /// The containers that have a claim's device: those that the kubelet lists, and pods of the claim that it does not list.
    fn users(&self, ledger: &Ledger, record: &ClaimRecord, device: &PreparedDevice) -> Vec<User> {
        let allocation = &record.plan.allocation;
        let mut pods = ledger.pod_uids(&allocation.uid);
        let uids: BTreeMap<String, String> = pods
            .iter()
            .map(|(uid, pod)| (pod.clone(), uid.clone()))
            .collect();
        let mut users = Vec::new();
        let listed = self.newest.iter().flat_map(|it| it.in_use.users(device));
        for container in listed.filter(|it| it.namespace == allocation.namespace) {
            let pod_uid = uids.get(&container.pod).cloned();
            if let Some(uid) = &pod_uid {
                pods.remove(uid);
            }
            users.push(User {
                pod: Some(container.pod.clone()),
                pod_uid,
                container: Some(container.name.clone()),
                is_gone: false,
            });
        }
        users.extend(pods.into_iter().map(|(uid, pod)| {
            let name = (allocation.namespace.clone(), pod.clone());
            let missing = self.missing.get(&name).copied().unwrap_or(0);
            User {
                pod: Some(pod),
                pod_uid: Some(uid),
                container: None,
                is_gone: missing >= MISSING,
            }
        }));
        users
    }
}

/// What claims hold, by GPU, with the `peaks` of devices by key. The idle seconds of a device count from the last launch that its
/// account knows, if there is one, to `now`.
#[must_use]
pub fn held_of(
    now: u64,
    ledger: &Ledger,
    layout: &Layout,
    listed: &LastListing,
    peaks: &BTreeMap<String, Peak>,
) -> BTreeMap<String, Vec<HeldDevice>> {
    let mut held: BTreeMap<String, Vec<HeldDevice>> = BTreeMap::new();
    for record in ledger.held() {
        // The driver does not know a GPU that is at VFIO. An administrator's access holds nothing.
        let devices = record.plan.devices.iter();
        for device in devices.filter(|it| it.vfio.is_none() && !it.admin_access) {
            let of_gpu = held.entry(device.gpu_uuid.clone()).or_default();
            let account = account(&record, device, layout);
            let last_launch = account.as_ref().and_then(|it| it.last_launch);
            of_gpu.push(HeldDevice {
                key: device.key.clone(),
                claim: reference(&record),
                request: device.request.clone(),
                pool: device.pool.clone(),
                device: device.device.clone(),
                share_id: device.share_id.clone(),
                tier: device.tier,
                partition: partition(device),
                limit: limit(device),
                account: account.map(|it| it.charged),
                peak: peaks.get(&device.key).copied(),
                idle_seconds: last_launch.map(|launch| seconds_between(launch, now)),
                users: listed.users(ledger, &record, device),
            });
        }
    }
    held
}

/// The MIG device of a device on a partition.
fn partition(device: &PreparedDevice) -> Option<String> {
    let partition = device.partition.as_ref()?;
    let mig = partition.mig.as_ref();
    // A device whose MIG device is not known yet does not count for the GPU as a whole.
    Some(mig.map(|mig| mig.uuid.clone()).unwrap_or_default())
}

/// What the account of a share says.
struct Account {
    /// Bytes that its processes hold on the GPU.
    charged: u64,
    /// When they last launched something, `CLOCK_MONOTONIC` in nanoseconds.
    last_launch: Option<u64>,
}

fn account(record: &ClaimRecord, device: &PreparedDevice, layout: &Layout) -> Option<Account> {
    // An oversubscribed share has a second account, of the memory that cannot move.
    let account = device.cap.accounts().last()?;
    if record.plan.pages != PAGES {
        return None;
    }
    let pages = layout.share(&record.plan.allocation.uid, &device.key);
    let copy = AccountFile::open(pages.page_of(*account))
        .and_then(|account| account.copy())
        .ok()?;
    let snapshot = copy.snapshot();
    let charged = snapshot.processes().map(|slot| slot.charged);
    Some(Account {
        charged: charged.fold(0, u64::saturating_add),
        last_launch: snapshot.last_launch(),
    })
}

fn seconds_between(earlier: u64, later: u64) -> u64 {
    later.saturating_sub(earlier) / 1_000_000_000
}

/// How long a device counts as seen after the last look, in nanoseconds: some looks in a row may fail.
const SEEN: u64 = 10_000_000_000;

/// When each held device last did something, by its key.
#[derive(Debug, Default)]
pub struct LastSeen {
    devices: BTreeMap<String, Looks>,
}

/// The time that a look covers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Covers {
    /// The second before it.
    Now,
    /// All the time since the look before.
    SinceLast,
}

/// When a device was looked at, `CLOCK_MONOTONIC` in nanoseconds.
#[derive(Debug)]
struct Looks {
    /// When it last did something; at first, when it was first looked at.
    busy: u64,
    /// When somebody last looked.
    last: u64,
}

impl LastSeen {
    /// Takes what ran on GPUs as a whole, and forgets devices that are not held.
    pub fn add(
        &mut self,
        now: u64,
        busy: &BTreeMap<String, Busy>,
        ledger: &Ledger,
        owners: &BTreeMap<u32, Owner>,
    ) {
        let records = ledger.held();
        let devices: Vec<_> = records.iter().flat_map(|it| &it.plan.devices).collect();
        self.devices
            .retain(|key, _| devices.iter().any(|it| it.key == *key));
        for (uuid, busy) in busy {
            let on_gpu: Vec<_> = devices
                .iter()
                .filter(|it| it.gpu_uuid == *uuid && it.partition.is_none())
                .collect();
            let ran = busy.pids.as_ref().map(|pids| {
                let owners = pids.iter().filter_map(|pid| owners.get(pid));
                let keys = owners.filter_map(|owner| match owner {
                    Owner::Claims { keys, .. } => Some(keys),
                    Owner::Foreign | Owner::Ended => None,
                });
                keys.flatten().collect::<BTreeSet<_>>()
            });
            for device in &on_gpu {
                let is_busy = match &ran {
                    Some(keys) => keys.contains(&device.key),
                    // Without the processes this is known only for a device that is alone on the GPU.
                    None if on_gpu.len() == 1 => busy.is_busy,
                    None => continue,
                };
                self.note(now, &device.key, is_busy, Covers::Now);
            }
        }
    }

    /// Takes what GPM says of those partitions of a GPU that one claim has alone.
    pub fn add_partitions(&mut self, now: u64, reading: &GpuReading, held: &[HeldDevice]) {
        for device in held {
            let Some(uuid) = &device.partition else {
                continue;
            };
            let sharers = held.iter().filter(|it| it.partition == device.partition);
            if let (Some(is_busy), 1) = (is_active(reading, uuid), sharers.count()) {
                self.note(now, &device.key, is_busy, Covers::SinceLast);
            }
        }
    }

    fn note(&mut self, now: u64, key: &str, is_busy: bool, covers: Covers) {
        let new = || Looks {
            busy: now,
            last: now,
        };
        let looks = self.devices.entry(key.to_owned()).or_insert_with(new);
        // What it did while nobody looked is not known.
        let is_gap = covers == Covers::Now && now.saturating_sub(looks.last) > SEEN;
        looks.last = now;
        if is_busy || is_gap {
            looks.busy = now;
        }
    }

    /// Seconds since a device last did something, if that is known and the last look is recent.
    #[must_use]
    pub fn idle_seconds(&self, now: u64, key: &str) -> Option<u64> {
        let looks = self.devices.get(key)?;
        let is_seen = now.saturating_sub(looks.last) <= SEEN;
        is_seen.then(|| seconds_between(looks.busy, now))
    }
}

/// Whether a device did something, by what GPM says of a MIG instance.
fn is_active(reading: &GpuReading, uuid: &str) -> Option<bool> {
    let partition = reading.partitions.iter().find(|it| it.uuid == uuid)?;
    let active = partition.device.utilization.get(Measure::GraphicsActive)?;
    Some(active > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn what_a_device_did_while_nobody_looked_is_not_known() {
        let mut seen = LastSeen::default();
        let idle = |seen: &LastSeen, second| seen.idle_seconds(second * SECOND, "key");
        assert_eq!(idle(&seen, 0), None);
        for second in 100..160 {
            seen.note(second * SECOND, "key", second == 120, Covers::Now);
        }
        assert_eq!(idle(&seen, 160), Some(40));
        assert_eq!(idle(&seen, 169), Some(49), "a look or two failed");
        assert_eq!(idle(&seen, 170), None, "the driver does not answer");
        seen.note(200 * SECOND, "key", false, Covers::Now);
        assert_eq!(
            idle(&seen, 201),
            Some(1),
            "counted from the first look after that"
        );
        seen.note(260 * SECOND, "key", false, Covers::SinceLast);
        assert_eq!(idle(&seen, 260), Some(60), "an average over all the time");
    }
}
