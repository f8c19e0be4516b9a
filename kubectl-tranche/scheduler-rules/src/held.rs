//! The devices that are allocated: the scheduler's claim tracker.

use std::collections::HashMap;

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use tranche_api::Quantity;

use super::capacity;
use super::problem::Problem;

/// A device's identity: its driver, pool and name.
pub(super) type DeviceKey<'a> = (&'a str, &'a str, &'a str);

/// A claim's hold on a device.
#[derive(Clone, Debug)]
pub(super) struct DeviceAllocation<'a> {
    pub claim: &'a ResourceClaim,
    /// What a share takes of the capacities; empty for a whole device.
    pub consumed: Vec<(&'a str, Quantity)>,
}

/// All allocations of one device.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceAllocations<'a> {
    /// Claims that have the whole device.
    pub whole: Vec<DeviceAllocation<'a>>,
    /// Claims that have a share.
    pub shares: Vec<DeviceAllocation<'a>>,
}

/// Allocations by device.
#[derive(Debug, Default)]
pub(super) struct Allocations<'a>(HashMap<DeviceKey<'a>, DeviceAllocations<'a>>);

impl<'a> Allocations<'a> {
    /// The allocations of these claims. Admin access takes nothing.
    pub fn of(claims: &[&'a ResourceClaim]) -> Result<Self, Problem> {
        let mut devices: HashMap<DeviceKey<'a>, DeviceAllocations<'a>> = HashMap::new();
        for claim in claims {
            for result in self::results(claim) {
                if result.admin_access == Some(true) {
                    continue;
                }
                let key = (&*result.driver, &*result.pool, &*result.device);
                let mut consumed = Vec::new();
                for (name, amount) in result.consumed_capacity.iter().flatten() {
                    consumed.push((name.as_str(), capacity::parse(amount)?));
                }
                let held = devices.entry(key).or_default();
                let holds = match result.share_id {
                    Some(_) => &mut held.shares,
                    None => &mut held.whole,
                };
                holds.push(DeviceAllocation { claim, consumed });
            }
        }
        Ok(Self(devices))
    }

    pub fn of_device(&self, key: DeviceKey<'a>) -> Option<&DeviceAllocations<'a>> {
        self.0.get(&key)
    }
}

impl<'a> DeviceAllocations<'a> {
    pub fn any(&self) -> bool {
        !self.whole.is_empty() || !self.shares.is_empty()
    }

    pub fn all(&self) -> impl Iterator<Item = &DeviceAllocation<'a>> {
        self.whole.iter().chain(&self.shares)
    }

    /// What the shares take of a capacity.
    pub fn consumed(&self, name: &str) -> Result<Quantity, Problem> {
        let consumed = self.shares.iter().filter_map(|hold| hold.consumed(name));
        let mut sum = Quantity::ZERO;
        for amount in consumed {
            sum = sum.checked_add(amount).map_err(Problem::unjudged)?;
        }
        Ok(sum)
    }
}

impl DeviceAllocation<'_> {
    pub fn consumed(&self, name: &str) -> Option<Quantity> {
        let mut consumed = self.consumed.iter();
        consumed.find(|(own, _)| *own == name).map(|it| it.1)
    }
}

/// The devices of a claim's allocation.
pub(super) fn results(claim: &ResourceClaim) -> &[DeviceRequestAllocationResult] {
    let status = claim.status.as_ref();
    let allocation = status.and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices
        .and_then(|devices| devices.results.as_deref())
        .unwrap_or_default()
}
