//! The devices of our slices, by pool and name.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceCapacity, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Wire;
use tranche_api::Quantity;
use tranche_api::names::{attribute, capacity};
use tranche_driver::claim::DeviceName;
use tranche_driver::stranded::Shares;

/// The devices of the newest generation of each pool.
#[derive(Debug, Default)]
pub struct Devices<'a> {
    by_name: BTreeMap<(&'a str, &'a str), &'a Device>,
    by_gpu: BTreeMap<&'a str, OfGpu<'a>>,
}

/// The pool of a GPU, and its devices.
type OfGpu<'a> = (&'a str, Vec<(DeviceName, &'a Device)>);

impl<'a> Devices<'a> {
    /// Reads slices. It skips slices of an older generation of their pool, and devices that are not ours.
    #[must_use]
    pub fn read(slices: &'a [ResourceSlice]) -> Self {
        let mut newest: BTreeMap<&str, i64> = BTreeMap::new();
        for slice in slices {
            let pool = &slice.spec.pool;
            let generation = newest.entry(&pool.name).or_insert(pool.generation);
            *generation = pool.generation.max(*generation);
        }
        let mut devices = Self::default();
        for slice in slices {
            let pool = &slice.spec.pool;
            if newest.get(pool.name.as_str()) != Some(&pool.generation) {
                continue;
            }
            for device in slice.spec.devices.iter().flatten() {
                devices.add(&pool.name, device);
            }
        }
        devices
    }

    fn add(&mut self, pool: &'a str, device: &'a Device) {
        let Ok(name) = device.name.parse::<DeviceName>() else {
            return;
        };
        self.by_name.insert((pool, &device.name), device);
        if let Some(uuid) = gpu_of(device) {
            let (_, devices) = self.by_gpu.entry(uuid).or_insert((pool, Vec::new()));
            devices.push((name, device));
        }
    }

    #[must_use]
    pub fn get(&self, pool: &str, name: &str) -> Option<&'a Device> {
        self.by_name.get(&(pool, name)).copied()
    }

    /// The devices of a GPU, in the order of their slice.
    #[must_use]
    pub fn of_gpu(&self, uuid: &str) -> &[(DeviceName, &'a Device)] {
        self.by_gpu
            .get(uuid)
            .map_or(&[], |(_, devices)| devices.as_slice())
    }

    /// The GPUs, each with its pool.
    pub fn gpus(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.by_gpu.iter().map(|(uuid, (pool, _))| (*uuid, *pool))
    }
}

/// The UUID of a device's GPU.
pub(super) fn gpu_of(device: &Device) -> Option<&str> {
    string(device, attribute::PARENT_UUID).or_else(|| string(device, attribute::UUID))
}

/// An attribute that is a string.
pub(super) fn string<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(name)?.string.as_deref()
}

/// An attribute that is a number.
pub(super) fn number(device: &Device, name: &str) -> Option<i64> {
    device.attributes.as_ref()?.get(name)?.int
}

fn capacity_of<'a>(device: &'a Device, name: &str) -> Option<&'a DeviceCapacity> {
    device.capacity.as_ref()?.get(name)
}

/// A capacity, as a count.
pub(super) fn amount(device: &Device, name: &str) -> Option<u64> {
    count(&capacity_of(device, name)?.value)
}

/// What a device has for all shares with sizes together; `None` where it has no such shares.
pub(super) fn for_shares(device: &Device) -> Option<Shares> {
    if device.allow_multiple_allocations != Some(true) {
        return None;
    }
    Some(Shares {
        memory: amount(device, capacity::MEMORY)?,
        cores: amount(device, capacity::CORES)?,
        sharers: amount(device, capacity::SHARERS)?,
    })
}

/// The smallest share that a device's request policies allow.
pub(super) fn least_share(device: &Device) -> Shares {
    let least = |name| {
        let policy = capacity_of(device, name)?.request_policy.as_ref()?;
        count(&policy.valid_range.as_ref()?.min)
    };
    Shares {
        memory: least(capacity::MEMORY).unwrap_or(1),
        cores: least(capacity::CORES).unwrap_or(1),
        sharers: 1,
    }
}

/// A quantity, as a count of bytes or of anything else; `None` where it is not a count.
pub(super) fn count(quantity: &Wire) -> Option<u64> {
    Quantity::try_from(quantity).ok()?.to_count().ok()
}
