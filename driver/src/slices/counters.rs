//! The counters of a GPU, which its devices consume.
//!
//! A GPU that MIG can divide has one counter for every memory slice, because a partition takes certain adjacent ones;
//! one counter for its compute slices, which are interchangeable; and one for each kind of its engines. Any other GPU
//! has one counter. A whole GPU takes all counters, in every tier.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Counter, CounterSet, Device, DeviceCounterConsumption};
use tranche_api::quantity::Quantity;

use crate::gpu::GpuUuid;
use crate::mig::{self, Geometry, Slices};

/// The counter of a GPU that MIG cannot divide.
const GPU: &str = "gpu";
/// The counter of a GPU's compute slices.
const COMPUTE_SLICES: &str = "compute-slices";

/// An amount of the counters of one GPU.
#[derive(Clone, Debug)]
pub(super) struct Counters {
    uuid: GpuUuid,
    amounts: BTreeMap<String, Counter>,
}

impl Counters {
    /// All counters of the GPU. `geometry` says how MIG divides it, if that is known.
    pub(super) fn of(uuid: GpuUuid, geometry: Option<&Geometry>) -> Self {
        if let Some(geometry) = geometry {
            return Self::of_slices(uuid, &geometry.whole);
        }
        Self {
            uuid,
            amounts: BTreeMap::from([(GPU.to_owned(), count(1))]),
        }
    }

    /// Slices and engines: all of the GPU, or those that a partition takes.
    pub(super) fn of_slices(uuid: GpuUuid, slices: &Slices) -> Self {
        let memory = (0..u32::BITS)
            .filter(|slice| slices.memory >> slice & 1 == 1)
            .map(|slice| (format!("memory-slice-{slice}"), 1));
        let engines = mig::ENGINES
            .map(str::to_owned)
            .into_iter()
            .zip(slices.engines)
            .filter(|(_, engines)| *engines > 0);
        let amounts = memory
            .chain([(COMPUTE_SLICES.to_owned(), slices.compute)])
            .chain(engines)
            .map(|(name, amount)| (name, count(amount.into())));
        Self {
            uuid,
            amounts: amounts.collect(),
        }
    }

    /// What a published device consumes of the GPU `uuid`.
    pub(super) fn published(device: &Device, uuid: GpuUuid) -> Self {
        let consumption = device.consumes_counters.iter().flatten();
        let amounts = consumption.flat_map(|set| set.counters.clone()).collect();
        Self { uuid, amounts }
    }

    /// As the GPU's counter set.
    pub(super) fn set(&self) -> CounterSet {
        CounterSet {
            name: set_name(self.uuid),
            counters: self.amounts.clone(),
        }
    }

    /// As the consumption of a device.
    pub(super) fn consumption(&self) -> DeviceCounterConsumption {
        DeviceCounterConsumption {
            counter_set: set_name(self.uuid),
            counters: self.amounts.clone(),
            ..DeviceCounterConsumption::default()
        }
    }

    /// Adds this to the set of a GPU that is gone. Its counters are known only from what its devices consume: a whole
    /// GPU takes all of them.
    pub(super) fn add_to(&self, set: &mut CounterSet) {
        set.name = set_name(self.uuid);
        for (name, amount) in &self.amounts {
            let there = set.counters.entry(name.clone()).or_insert_with(|| count(0));
            *there = count(read(there).max(read(amount)));
        }
    }
}

/// The name does not depend on the other GPUs.
fn set_name(uuid: GpuUuid) -> String {
    format!("gpu-{}", uuid.all_digits())
}

fn count(amount: u64) -> Counter {
    Counter {
        value: Quantity::from_count(amount).into(),
    }
}

/// A value that is not a count was not written by us, and counts as 0.
fn read(counter: &Counter) -> u64 {
    Quantity::try_from(&counter.value)
        .ok()
        .and_then(|amount| amount.to_count().ok())
        .unwrap_or_default()
}
