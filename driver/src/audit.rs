//! The audit trail: who had which part of which GPU, from when to when (ADR 0042).
//!
//! A grant is one device of a claim. It begins when the claim's journal is written, and ends when its steps are undone.
//! A trail has one line of JSON for its beginning and one for its end; `grant` and `event` together identify a line.
//!
//! [`Trail`] is the state that the lines written so far describe. Its functions return the lines that are due and
//! change nothing; [`Trail::apply`] takes account of a line when it is on the disk. So a process that was killed
//! continues from the file and the journals: lines that are missing are due again, and those that were written are not.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tranche_api::Tier;

use crate::journal::ClaimRecord;
use crate::mig::Profile;
use crate::moment::Moment;
use crate::preparation::{Cap, PreparedDevice};

/// The version of the lines. A later version may add fields; one that changes the meaning of a field raises it.
pub const VERSION: u64 = 1;

/// One line of the trail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    /// [`VERSION`].
    pub version: u64,
    /// When it happened.
    pub time: Moment,
    /// The node.
    pub node: String,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
    /// The grant.
    #[serde(flatten)]
    pub grant: Grant,
}

/// What happens to a grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "event",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum Event {
    /// The claim got the device.
    Allocated {},
    /// It still has the device. This line is written at the beginning of a file for all grants that began in an earlier
    /// one, and when a field of a grant changes.
    Held {},
    /// It no longer has the device.
    Released {
        /// How it ended.
        ended: Ended,
        /// The memory that was still in use then.
        held_at_end: HeldAtEnd,
    },
}

/// How a grant ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// The kubelet released it, after the end of its pods' containers.
    Unprepared,
    /// The claim was deleted and the kubelet had forgotten it; the plugin released it.
    Orphan,
    /// The claim was allocated again, with other devices.
    Reallocated,
    /// It was prepared anew, because its last release ended before the journal was removed, or because a boot had
    /// removed what an earlier release made for it.
    PreparedAnew,
    /// It could not be prepared, and no container got it.
    Failed,
    /// Its journal is gone and no end was recorded: the journal was removed by hand, a power failure lost its write, or
    /// a release without this trail released it. `time` is when that was found.
    Unrecorded,
}

/// The memory that was in use when a grant ended, in bytes; `None` if that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldAtEnd {
    /// Of a share: the charges of processes that still live in its account. Its programs write the account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account_bytes: Option<u64>,
    /// Of the whole GPU: memory that the driver reports as used and that no process holds, in the watchdog's last
    /// sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unowned_bytes: Option<u64>,
}

/// A pod that uses a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pod {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
}

/// One device of a claim, while the claim has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    /// `<device key>@<start>`: unique.
    pub grant: String,
    /// The start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Moment>,
    /// The claim's namespace.
    pub namespace: String,
    /// The known pods that use or used it, sorted.
    pub pods: BTreeSet<Pod>,
    /// The claim's name.
    pub claim: String,
    /// The claim's UID.
    #[serde(rename = "claimUID")]
    pub claim_uid: String,
    /// The claim's request.
    pub request: String,
    /// The tier.
    pub tier: Tier,
    /// The pool, as in the ResourceSlice.
    pub pool: String,
    /// The device, as in the ResourceSlice.
    pub device: String,
    /// The share, as in the claim's allocation.
    #[serde(rename = "shareID", default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Admin access: it observes a device that other claims may hold.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admin_access: bool,
    /// `GPU-…`.
    #[serde(rename = "gpuUUID")]
    pub gpu_uuid: String,
    /// `MIG-…`, for a partition or a share of one.
    #[serde(rename = "migUUID", default, skip_serializing_if = "Option::is_none")]
    pub mig_uuid: Option<String>,
    /// The partition's profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// The limits of a share; `None` without limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<Limits>,
}

/// The limits of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Bytes.
    pub memory_bytes: u64,
    /// Of an oversubscribed share: the most bytes that cannot move to the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// Percent of SM time, 1-100; with MPS, of the GPU's threads.
    pub cores: u8,
}

impl Line {
    /// The line as bytes, with a final newline.
    ///
    /// # Panics
    ///
    /// Never: serializing to memory fails only for maps whose keys are not strings, and there are none.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a line has only strings for keys");
        bytes.push(b'\n');
        bytes
    }

    /// Reads a line; unknown fields are ignored.
    pub fn decode(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }
}

impl Grant {
    fn new(record: &ClaimRecord, device: &PreparedDevice) -> Self {
        let allocation = &record.plan.allocation;
        let start = record.since.map(|since| since.to_string());
        let partition = device.partition.as_ref();
        let cap = match device.cap {
            Cap::None {} => None,
            Cap::Share {
                memory,
                resident,
                cores,
                ..
            } => Some(Limits {
                memory_bytes: memory,
                resident_bytes: resident,
                cores,
            }),
        };
        Self {
            grant: format!("{}@{}", device.key, start.unwrap_or_default()),
            start: record.since,
            namespace: allocation.namespace.clone(),
            pods: BTreeSet::new(),
            claim: allocation.name.clone(),
            claim_uid: allocation.uid.clone(),
            request: device.request.clone(),
            tier: device.tier,
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share_id.clone(),
            admin_access: device.admin_access,
            gpu_uuid: device.gpu_uuid.clone(),
            mig_uuid: partition
                .and_then(|it| it.mig.as_ref())
                .map(|mig| mig.uuid.clone()),
            profile: partition.map(|it| it.placement.profile),
            cap,
        }
    }

    /// The device's key: the part of [`Self::grant`] before the start.
    fn key(&self) -> &str {
        self.grant
            .split_once('@')
            .map_or(&self.grant, |(key, _)| key)
    }
}

/// The last line of a device key.
#[derive(Clone, Debug)]
struct Written(Line);

impl Written {
    const fn is_released(&self) -> bool {
        matches!(self.0.event, Event::Released { .. })
    }

    const fn grant(&self) -> &Grant {
        &self.0.grant
    }

    /// Whether a device of a journal belongs to this grant.
    fn is(&self, of_journal: &Grant) -> bool {
        self.grant().grant == of_journal.grant
    }

    /// The grant with its journal's fields and more pods.
    fn with(&self, of_journal: Grant, pods: &BTreeSet<Pod>) -> Grant {
        Grant {
            grant: self.grant().grant.clone(),
            start: self.grant().start,
            pods: self.grant().pods.union(pods).cloned().collect(),
            ..of_journal
        }
    }
}

/// What the lines of a node's trail describe.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    node: String,
    /// By device key: all grants that are held, and released ones whose journals may still exist.
    last: BTreeMap<String, Written>,
}

impl Trail {
    /// An empty trail of this node.
    #[must_use]
    pub fn new(node: String) -> Self {
        Self {
            node,
            last: BTreeMap::new(),
        }
    }

    /// Applies a line that is in the file.
    pub fn apply(&mut self, line: Line) {
        let key = line.grant.key().to_owned();
        self.last.insert(key, Written(line));
    }

    /// The lines that are due at the start of a process, after all lines of the file were applied: beginnings for journals
    /// that have none, and ends of grants without a journal. The claims in `unreadable`, by UID, have journals that cannot be
    /// read.
    pub fn settle<'a>(
        &mut self,
        journals: impl IntoIterator<Item = &'a ClaimRecord> + Clone,
        unreadable: &BTreeSet<&str>,
        now: Moment,
    ) -> Vec<Line> {
        let devices =
            |record: &'a ClaimRecord| record.plan.devices.iter().map(|it| it.key.as_str());
        let held: BTreeSet<_> = journals.clone().into_iter().flat_map(devices).collect();
        self.last.retain(|key, written| {
            let may_exist =
                held.contains(&**key) || unreadable.contains(&*written.grant().claim_uid);
            may_exist || !written.is_released()
        });
        let lost = self
            .last
            .iter()
            .filter(|(key, written)| {
                !held.contains(&***key) && !unreadable.contains(&*written.grant().claim_uid)
            })
            .map(|(_, written)| self.unrecorded(written, now));
        let mut due: Vec<_> = lost.collect();
        for record in journals {
            due.extend(self.held(record, &BTreeSet::new(), now));
        }
        due
    }

    /// The lines that are due for a claim that has its devices: those that are missing and those that changed.
    #[must_use]
    pub fn held(&self, record: &ClaimRecord, pods: &BTreeSet<Pod>, now: Moment) -> Vec<Line> {
        let mut due = Vec::new();
        for device in &record.plan.devices {
            let grant = Grant::new(record, device);
            match self.last.get(&device.key) {
                Some(written) if written.is(&grant) => {
                    let grant = written.with(grant, pods);
                    // A grant that was released while its journal is still there is released again; it is not held.
                    if !written.is_released() && grant != *written.grant() {
                        due.push(self.line(Event::Held {}, grant, now));
                    }
                }
                written => {
                    let old = written.filter(|written| !written.is_released());
                    due.extend(old.map(|written| self.unrecorded(written, now)));
                    due.push(self.allocated(grant, pods, now));
                }
            }
        }
        due
    }

    /// The lines that are due for more pods of a claim; empty if it has no devices now.
    #[must_use]
    pub fn joined(&self, record: &ClaimRecord, pods: &BTreeSet<Pod>, now: Moment) -> Vec<Line> {
        let mut due = self.held(record, pods, now);
        due.retain(|line| line.event == Event::Held {});
        due
    }

    /// The lines that are due for a claim whose steps are undone. `at_end` has the memory that is still in use, by
    /// device key. A claim that could not be prepared has lines only if its beginning was written.
    #[must_use]
    pub fn released(
        &self,
        record: &ClaimRecord,
        ended: Ended,
        at_end: &BTreeMap<String, HeldAtEnd>,
        now: Moment,
    ) -> Vec<Line> {
        let mut due = Vec::new();
        for device in &record.plan.devices {
            let event = Event::Released {
                ended,
                held_at_end: at_end.get(&device.key).copied().unwrap_or_default(),
            };
            let grant = Grant::new(record, device);
            match self.last.get(&device.key) {
                Some(written) if written.is(&grant) => {
                    if !written.is_released() {
                        let grant = written.with(grant, &BTreeSet::new());
                        due.push(self.line(event, grant, now));
                    }
                }
                _ if ended == Ended::Failed => {}
                written => {
                    let old = written.filter(|written| !written.is_released());
                    due.extend(old.map(|written| self.unrecorded(written, now)));
                    due.push(self.allocated(grant.clone(), &BTreeSet::new(), now));
                    due.push(self.line(event, grant, now));
                }
            }
        }
        due
    }

    /// Whether the end of a claim's grant, or of a part of it, is written.
    #[must_use]
    pub fn is_released(&self, record: &ClaimRecord) -> bool {
        record.plan.devices.iter().any(|device| {
            let grant = Grant::new(record, device);
            let written = self.last.get(&device.key);
            written.is_some_and(|written| written.is_released() && written.is(&grant))
        })
    }

    /// Forgets a released claim, whose journal is gone.
    pub fn forget(&mut self, record: &ClaimRecord) {
        for device in &record.plan.devices {
            let is_released = Written::is_released;
            if self.last.get(&device.key).is_some_and(is_released) {
                self.last.remove(&device.key);
            }
        }
    }

    /// The first lines of the next file: everything that a reader of that file alone needs.
    #[must_use]
    pub fn snapshot(&self, now: Moment) -> Vec<Line> {
        let line = |written: &Written| {
            if written.is_released() {
                // Its journal still exists: without this line its end would be written again.
                written.0.clone()
            } else {
                self.line(Event::Held {}, written.grant().clone(), now)
            }
        };
        self.last.values().map(line).collect()
    }

    /// A beginning, with the time of the grant if that is known.
    fn allocated(&self, grant: Grant, pods: &BTreeSet<Pod>, now: Moment) -> Line {
        let time = grant.start.unwrap_or(now);
        let pods = pods.clone();
        self.line(Event::Allocated {}, Grant { pods, ..grant }, time)
    }

    fn unrecorded(&self, written: &Written, now: Moment) -> Line {
        let event = Event::Released {
            ended: Ended::Unrecorded,
            held_at_end: HeldAtEnd::default(),
        };
        self.line(event, written.grant().clone(), now)
    }

    fn line(&self, event: Event, grant: Grant, time: Moment) -> Line {
        Line {
            version: VERSION,
            time,
            node: self.node.clone(),
            event,
            grant,
        }
    }
}
