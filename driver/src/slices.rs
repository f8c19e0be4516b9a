//! From inventory and policy to the ResourceSlices of one node.
//!
//! ```text
//!  counter slices   one counter set per GPU, up to 8 sets a slice
//!  GPU slices       one per GPU; each of its devices takes the whole set
//! ```
//!
//! That is how a GPU serves one tier at a time: the first allocation of any of its devices takes
//! the counters, further shares of a shared device are free of charge, and the last release gives
//! them back. No flag on the node, nothing to drain.
//!
//! **The order is the packing policy.** The scheduler takes the first device that fits, by slice
//! name and then by place in the slice. So slices are named by the GPU's minor number, which fills
//! one GPU before the next; and in a slice shared devices come before the exclusive one, so that a
//! class that accepts both joins a GPU that is shared already and leaves whole GPUs to those who
//! need one.
//!
//! **Names are for ever.** Counters are charged from the slices as they are now: renaming or
//! dropping a device that a claim holds would free its GPU under it. So names and positions depend
//! on the minor number alone, not on which other GPUs there are, and a device that is no longer
//! offered but still allocated ([`NodeInput::retained`]) stays, with a taint.
//!
//! **One GPU costs its own devices only.** A GPU that the node withholds, one that its policy does
//! not fit, one whose description is invalid: each is listed in [`SlicePlan::withheld`], and the
//! other GPUs of the node are offered.

mod compare;
mod device;
mod dropped;
mod error;
mod names;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::names::{self as vocabulary, DRIVER, EPOCH_ANNOTATION};
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::withheld::WithheldGpu;

use self::device::Offer;
use self::error::OfferError;
use crate::claim::DeviceName;
use crate::policy;

pub use compare::same;
pub use device::AttributeError;
pub use dropped::{DroppedField, FeatureGate, dropped};
pub use names::NodeNameError;

/// Counter sets in one slice, at most.
const SETS_PER_SLICE: u32 = 8;
/// Minor numbers that have a place in the order of names. NVIDIA's driver uses 0 to 254.
const MINORS: u32 = 1000;
/// The place of the first GPU slice in the order of names: behind every counter slice, with room
/// for other kinds between.
const FIRST_GPU_SLICE: u32 = 10_000;

/// What the slices of a node depend on, and nothing else.
#[derive(Clone, Copy, Debug)]
pub struct NodeInput<'a> {
    /// The node's name.
    pub name: &'a str,
    /// The node's UID: the slices are its property, and another node of the same name has others.
    pub uid: &'a str,
    /// The node's labels, for the policies' selectors.
    pub labels: &'a BTreeMap<String, String>,
    /// The GPUs and their driver.
    pub inventory: &'a Inventory,
    /// What the node itself says must not be offered.
    pub withheld: &'a [WithheldGpu],
    /// All policies of the cluster.
    pub policies: &'a [SharingPolicy],
    /// The plugin's registration for which the slices are made.
    pub epoch: i64,
    /// Devices as they are published now that claims hold. Those that would not be planned any more
    /// are kept, closed to new claims by a taint.
    pub retained: &'a [Device],
}

/// The slices of one node, without the pool's generation.
#[derive(Clone, Debug, PartialEq)]
pub struct SlicePlan {
    /// The pool's name.
    pub pool: String,
    /// The node's name.
    pub node: String,
    /// The node's UID.
    pub node_uid: String,
    /// The registration for which the slices are made.
    pub epoch: i64,
    /// The slices, by name.
    pub slices: Vec<PlannedSlice>,
    /// What is not offered and why: what the node withholds first, then by GPU.
    pub withheld: Vec<WithheldGpu>,
}

/// One slice.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedSlice {
    /// `metadata.name`: an index of five digits, the driver, the node, a hash.
    pub name: String,
    /// What it holds: devices or counters, never both.
    pub content: Content,
}

/// What a slice holds. The API allows one of both.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Devices, in the order in which the scheduler tries them.
    Devices(Vec<Device>),
    /// Counter sets.
    Counters(Vec<CounterSet>),
}

/// Plans the slices of a node. The same input gives the same plan, in whatever order the inventory
/// and the policies come. A node without GPUs has no slices.
pub fn plan(node: &NodeInput<'_>) -> Result<SlicePlan, NodeNameError> {
    names::check_node(node.name)?;
    let mut withheld = node.withheld.to_vec();
    let mut offered: BTreeMap<u32, Vec<Device>> = BTreeMap::new();
    for gpu in in_order(node.inventory) {
        let mut offer = offer(node, gpu, &mut withheld);
        offer.devices.retain(|device| is_open(node, gpu, device));
        if !offer.devices.is_empty() {
            offered.insert(gpu.minor, offer.devices);
        }
    }
    for (minor, devices) in withdrawn(node, &offered) {
        offered.entry(minor).or_default().extend(devices);
    }
    let mut sets: BTreeMap<u32, Vec<CounterSet>> = BTreeMap::new();
    for minor in offered.keys() {
        sets.entry(minor / SETS_PER_SLICE)
            .or_default()
            .push(counter_set(*minor));
    }
    let counters = sets.into_iter().map(|(index, sets)| PlannedSlice {
        name: names::slice(index, node.name, node.uid),
        content: Content::Counters(sets),
    });
    let gpus = offered.into_iter().map(|(minor, devices)| PlannedSlice {
        name: names::slice(FIRST_GPU_SLICE + minor, node.name, node.uid),
        content: Content::Devices(devices),
    });
    Ok(SlicePlan {
        pool: vocabulary::pool(node.name),
        node: node.name.to_owned(),
        node_uid: node.uid.to_owned(),
        epoch: node.epoch,
        slices: counters.chain(gpus).collect(),
        withheld,
    })
}

/// The node's GPUs by minor number.
fn in_order(inventory: &Inventory) -> Vec<&Gpu> {
    let mut gpus: Vec<&Gpu> = inventory.gpus.iter().collect();
    gpus.sort_by(|a, b| (a.minor, &a.uuid).cmp(&(b.minor, &b.uuid)));
    gpus
}

/// How `gpu` is offered by its policy; what is not offered is added to `withheld`.
fn offer(node: &NodeInput<'_>, gpu: &Gpu, withheld: &mut Vec<WithheldGpu>) -> Offer {
    if node.withheld.iter().any(|entry| is_whole(entry, gpu)) {
        return Offer::default();
    }
    let policy = policy::matching(node.policies, node.labels, gpu);
    let name = match &policy {
        Ok(policy) => policy.and_then(|policy| policy.metadata.name.clone()),
        Err(error) => Some(error.policy.clone()),
    };
    let entry = |tiers, error: &OfferError| WithheldGpu {
        gpu: gpu.uuid.clone(),
        tiers,
        reason: error.reason().to_owned(),
        message: error.to_string(),
        policy: name.clone().filter(|_| error.is_of_policy()),
    };
    let planned = check_identity(node.inventory, gpu).and_then(|()| {
        let terms = policy::terms(node.policies, node.labels, gpu)?;
        device::of_gpu(node.inventory, gpu, &terms)
    });
    match planned {
        Ok(offer) => {
            let refused = offer.refused.iter();
            withheld.extend(refused.map(|(tier, error)| entry(vec![*tier], error)));
            offer
        }
        Err(error) => {
            withheld.push(entry(Vec::new(), &error));
            Offer::default()
        }
    }
}

fn is_whole(entry: &WithheldGpu, gpu: &Gpu) -> bool {
    entry.gpu == gpu.uuid && entry.tiers.is_empty()
}

/// Whether the node lets the device's tier be offered.
fn is_open(node: &NodeInput<'_>, gpu: &Gpu, device: &Device) -> bool {
    let name = device.name.parse::<DeviceName>();
    name.is_ok_and(|name| {
        !node
            .withheld
            .iter()
            .any(|entry| entry.covers(&gpu.uuid, name.tier()))
    })
}

/// Whether no other GPU of the node has this one's number or UUID, and the number has a place.
fn check_identity(inventory: &Inventory, gpu: &Gpu) -> Result<(), OfferError> {
    let others = |same: fn(&Gpu, &Gpu) -> bool| {
        inventory
            .gpus
            .iter()
            .filter(|other| same(other, gpu))
            .count()
            > 1
    };
    if others(|a, b| a.minor == b.minor) {
        return Err(OfferError::Duplicate {
            field: "minor number",
            value: gpu.minor.to_string(),
        });
    }
    if others(|a, b| a.uuid == b.uuid) {
        return Err(OfferError::Duplicate {
            field: "UUID",
            value: gpu.uuid.clone(),
        });
    }
    if gpu.minor >= MINORS {
        return Err(OfferError::Minor { minor: gpu.minor });
    }
    Ok(())
}

/// Devices that are no longer offered but still allocated, with the minor number of their GPU.
fn withdrawn(
    node: &NodeInput<'_>,
    offered: &BTreeMap<u32, Vec<Device>>,
) -> BTreeMap<u32, Vec<Device>> {
    let planned: BTreeSet<&str> = offered
        .values()
        .flatten()
        .map(|device| device.name.as_str())
        .collect();
    let mut kept = BTreeMap::new();
    for device in node.retained {
        let Ok(name) = device.name.parse::<DeviceName>() else {
            continue;
        };
        if name.minor() < MINORS && !planned.contains(device.name.as_str()) {
            kept.insert(name, device.clone());
        }
    }
    let mut by_gpu: BTreeMap<u32, Vec<Device>> = BTreeMap::new();
    for (name, mut device) in kept {
        device.consumes_counters = Some(vec![device::whole_gpu(name.minor())]);
        // A taint that is there keeps the time at which it was added.
        let ours = |taint: &DeviceTaint| taint.key == vocabulary::taint::WITHDRAWN;
        let taint = device.taints.into_iter().flatten().find(ours);
        device.taints = Some(vec![
            taint.unwrap_or_else(|| closed(vocabulary::taint::WITHDRAWN)),
        ]);
        by_gpu.entry(name.minor()).or_default().push(device);
    }
    by_gpu
}

/// A taint that closes a device to new claims, but for those that tolerate it.
fn closed(key: &str) -> DeviceTaint {
    DeviceTaint {
        key: key.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..DeviceTaint::default()
    }
}

fn counter_set(minor: u32) -> CounterSet {
    CounterSet {
        name: device::counter_set_name(minor),
        counters: BTreeMap::from([(
            device::COUNTER.to_owned(),
            Counter {
                value: Quantity::from_count(1).into(),
            },
        )]),
    }
}

impl SlicePlan {
    /// The slice at `index` as an object, at this generation of the pool.
    #[must_use]
    pub fn object(&self, slice: &PlannedSlice, generation: i64) -> ResourceSlice {
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(slice.name.clone()),
                annotations: Some(self.annotations()),
                owner_references: Some(vec![self.owner()]),
                ..ObjectMeta::default()
            },
            spec: self.spec(slice, generation),
        }
    }

    /// The slice's spec at this generation of the pool.
    #[must_use]
    pub fn spec(&self, slice: &PlannedSlice, generation: i64) -> ResourceSliceSpec {
        let (devices, shared_counters) = match &slice.content {
            Content::Devices(devices) => (Some(devices.clone()), None),
            Content::Counters(sets) => (None, Some(sets.clone())),
        };
        ResourceSliceSpec {
            driver: DRIVER.to_owned(),
            node_name: Some(self.node.clone()),
            pool: ResourcePool {
                name: self.pool.clone(),
                generation,
                // At most MINORS slices of each kind.
                resource_slice_count: i64::try_from(self.slices.len()).unwrap_or(i64::MAX),
            },
            devices,
            shared_counters,
            ..ResourceSliceSpec::default()
        }
    }

    /// The annotations of every slice of the plan.
    #[must_use]
    pub fn annotations(&self) -> BTreeMap<String, String> {
        BTreeMap::from([(EPOCH_ANNOTATION.to_owned(), self.epoch.to_string())])
    }

    /// The owner of every slice of the plan: the node.
    #[must_use]
    pub fn owner(&self) -> OwnerReference {
        OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.node.clone(),
            uid: self.node_uid.clone(),
            controller: Some(true),
            block_owner_deletion: None,
        }
    }
}

#[cfg(test)]
mod tests;
