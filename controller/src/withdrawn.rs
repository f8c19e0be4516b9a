//! Devices that are no longer offered but may be allocated.
//!
//! The scheduler computes what a GPU has left from the slices as they are. A device that disappears while a
//! claim holds it gives its counters back, and the GPU would be handed out twice. So a device that
//! leaves the plan (its GPU vanished, or a policy stopped offering its tier) is tainted first, which
//! stops new allocations, and goes when a list of the claims, taken some time after the taint,
//! names it no more. Decisions that were under way when the taint appeared have arrived by then.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use tranche_api::names::taint;
use tranche_driver::slices::{Content, SlicePlan};

/// How long the taint stands before the claims are asked: the scheduler's decisions take less.
const GRACE: SignedDuration = SignedDuration::from_secs(10);
/// How often the claims are asked again while one of them holds the device.
const RECHECK: Duration = Duration::from_mins(1);

/// The devices of a node's pool that claims hold, at some time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Held {
    /// Names of devices.
    pub devices: BTreeSet<String>,
    /// Not later than the moment at which the claims were listed.
    pub at: Timestamp,
}

/// The published devices that the plan must not lose: all but those that are withdrawn and proved free.
#[must_use]
pub fn retained(existing: &[Arc<ResourceSlice>], held: Option<&Held>) -> Vec<Device> {
    existing
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .filter(|device| match (withdrawn_at(device), held) {
            (Some(at), Some(held)) => at + GRACE > held.at || held.devices.contains(&device.name),
            _ => true,
        })
        .cloned()
        .collect()
}

/// What the withdrawn devices in a plan wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// When to look again.
    pub again: Option<Duration>,
    /// Whether only the claims can tell if something may go.
    pub ask_claims: bool,
}

/// Says what the withdrawn devices of `plan` wait for, given how they are published.
#[must_use]
pub fn waiting(
    plan: &SlicePlan,
    existing: &[Arc<ResourceSlice>],
    held: Option<&Held>,
    now: Timestamp,
) -> Waiting {
    let mut waiting = Waiting::default();
    let published: Vec<&Device> = existing
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
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
        let at = published
            .iter()
            .filter(|p| p.name == device.name)
            .find_map(|p| withdrawn_at(p));
        let again = match at {
            // The taint is about to be written.
            None => GRACE.unsigned_abs(),
            Some(at) if now < at + GRACE => (at + GRACE).duration_since(now).unsigned_abs(),
            Some(at) if held.is_none_or(|held| held.at < at + GRACE) => {
                waiting.ask_claims = true;
                continue;
            }
            Some(_) => RECHECK,
        };
        waiting.again = Some(waiting.again.map_or(again, |a| a.min(again)));
    }
    waiting
}

fn is_withdrawn(device: &Device) -> bool {
    device
        .taints
        .iter()
        .flatten()
        .any(|there| there.key == taint::WITHDRAWN)
}

/// When the device was tainted; the API server fills the time in.
fn withdrawn_at(device: &Device) -> Option<Timestamp> {
    let taints = device.taints.as_ref()?;
    let taint = taints.iter().find(|there| there.key == taint::WITHDRAWN)?;
    // A server without the field is one without taints; nothing is lost by asking the claims at once.
    Some(
        taint
            .time_added
            .as_ref()
            .map_or(Timestamp::UNIX_EPOCH, |time| time.0),
    )
}
