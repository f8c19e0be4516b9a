//! Devices that are no longer offered but may be allocated.
//!
//! The scheduler computes what a GPU has left from the slices as they are. A device that disappears while a
//! claim holds it gives its counters back, and the GPU would be handed out twice. So a device that
//! leaves the plan (its GPU vanished, or a policy stopped offering its tier) is tainted first, which
//! stops new allocations, and is removed when a list of the claims, taken some time after the taint,
//! no longer names it. Allocations that the scheduler was writing when the taint appeared are in the list then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::resource::v1::Device;
use tranche_api::names::taint;
use tranche_driver::claim::DeviceName;
use tranche_driver::slices::{Content, PublishedDevice, SlicePlan};

use crate::known::{KnownDevice, KnownSlice};

/// How long after the taint the claims are listed: a decision of the scheduler takes less.
const GRACE: SignedDuration = SignedDuration::from_secs(10);
/// How long a list of the claims may be used.
pub const USABLE: SignedDuration = SignedDuration::from_secs(60);
/// After how many seconds the claims are listed again while one of them holds a device: at whole minutes, so that
/// all nodes ask at once and share one list.
const RECHECK: i64 = 60;

/// The devices of a node's pool that claims hold, at some time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeldDevices {
    /// Names of devices.
    pub devices: BTreeSet<String>,
    /// A time before the claims were listed.
    pub at: Timestamp,
    /// Until when it may be used. A claim that tolerates all taints can still get a withdrawn device, and the node may wait
    /// long for its turn. A node whose list is too old asks again.
    pub until: Timestamp,
}

/// Devices that were read, by the slice's name and the version that was read.
pub type ReadDevices = BTreeMap<String, (String, Vec<Device>)>;

/// The published devices that the plan must not lose: all but those that are withdrawn and proved free. Those that
/// are withdrawn or were read have their content.
#[must_use]
pub fn retained(
    existing: &[Arc<KnownSlice>],
    held: Option<&HeldDevices>,
    read: &ReadDevices,
) -> Vec<PublishedDevice> {
    let is_free = |device: &KnownDevice| match (&device.withdrawn, held) {
        (Some(withdrawn), Some(held)) => {
            let name = device.identity.name.to_string();
            withdrawn.at + GRACE <= held.at && !held.devices.contains(&name)
        }
        _ => false,
    };
    existing
        .iter()
        .flat_map(|slice| slice.devices.iter().map(move |device| (slice, device)))
        .filter(|(_, device)| !is_free(device))
        .map(|(slice, device)| with_content(slice, device, read))
        .collect()
}

fn with_content(slice: &KnownSlice, device: &KnownDevice, read: &ReadDevices) -> PublishedDevice {
    let mut published = device.published();
    let was_read = read
        .get(&*slice.name)
        .filter(|(version, _)| **version == *slice.version);
    if let (None, Some((_, devices))) = (&published.content, was_read) {
        let name = published.name.to_string();
        published.content = devices.iter().find(|device| device.name == name).cloned();
    }
    published
}

/// The names and versions of the slices that have one of the `lacking` devices.
#[must_use]
pub fn unread(existing: &[Arc<KnownSlice>], lacking: &[DeviceName]) -> Vec<(String, String)> {
    let lacks = |slice: &&Arc<KnownSlice>| {
        let mut devices = slice.devices.iter();
        devices.any(|device| lacking.contains(&device.identity.name))
    };
    existing
        .iter()
        .filter(lacks)
        .map(|slice| (slice.name.to_string(), slice.version.to_string()))
        .collect()
}

/// What the withdrawn devices in a plan wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// When to reconcile again.
    pub again: Option<Duration>,
    /// Whether the claims must be listed before something can be removed.
    pub ask_claims: bool,
}

/// Says what the withdrawn devices of `plan` wait for, given how they are published.
#[must_use]
pub fn waiting(
    plan: &SlicePlan,
    existing: &[Arc<KnownSlice>],
    held: Option<&HeldDevices>,
    now: Timestamp,
) -> Waiting {
    let mut waiting = Waiting::default();
    let since: BTreeMap<String, Timestamp> = existing
        .iter()
        .flat_map(|slice| &slice.devices)
        .filter_map(|device| {
            let withdrawn = device.withdrawn.as_ref()?;
            Some((device.identity.name.to_string(), withdrawn.at))
        })
        .collect();
    let withdrawn = plan
        .slices
        .iter()
        .filter_map(|slice| match &slice.content {
            Content::Devices(devices) => Some(devices),
            Content::Counters(_) => None,
        })
        .flatten()
        .filter(|device| is_withdrawn(device));
    for device in withdrawn {
        let again = match since.get(&device.name) {
            // The taint is about to be written, and the watch shows it then. An API server without taints drops it: then
            // there is nothing to wait for.
            None => continue,
            Some(at) if now < *at + GRACE => (*at + GRACE).duration_since(now).unsigned_abs(),
            Some(at) if held.is_none_or(|held| held.at < *at + GRACE) => {
                waiting.ask_claims = true;
                continue;
            }
            Some(_) => next_whole_minute(now),
        };
        waiting.again = Some(waiting.again.map_or(again, |a| a.min(again)));
    }
    waiting
}

fn next_whole_minute(now: Timestamp) -> Duration {
    let seconds = RECHECK - now.as_second().rem_euclid(RECHECK);
    Duration::from_secs(seconds.unsigned_abs())
}

fn is_withdrawn(device: &Device) -> bool {
    device
        .taints
        .iter()
        .flatten()
        .any(|there| there.key == taint::WITHDRAWN)
}
