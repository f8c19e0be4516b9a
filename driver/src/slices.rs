//! From inventory and policy to the ResourceSlices of one node.
//!
//! ```text
//!  counter slices   one counter set per GPU, up to 8 sets a slice
//!  GPU slices       one per GPU, and one more for every 64 of its devices: the most that the API allows
//! ```
//!
//! So a GPU serves one tier at a time: the first allocation of any of its devices takes the
//! counters, further shares of a shared device take none, and the last release returns them. It
//! needs no flag on the node and no drain.
//!
//! **The order is the packing policy.** The scheduler takes the first device that fits, by slice
//! name and then by place in the slice. So slices are named by the GPU's PCI address, which fills
//! one GPU before the next; and in a slice shared devices come before the exclusive one, so that a
//! claim that accepts both gets a part of a GPU that is already shared, and whole GPUs stay free
//! for claims that need one.
//!
//! **Names never change.** The scheduler computes counters from the current slices. If a device that a claim holds were
//! renamed or removed, its GPU would be free although it is in use; if a name were reused for another GPU, the claim
//! would move there. So the name of a device contains its GPU's UUID, counter sets are named by the whole UUID, and
//! slices by the GPU's PCI address alone. A device that is no longer offered but may be allocated
//! ([`NodeInput::retained`]) keeps its name, gets a taint, and belongs to the GPU that its attribute `uuid` names. If
//! another GPU, present or retained, has the same first digits, the names have all digits of the UUID.
//!
//! **A problem with one GPU affects only its own devices.** A GPU that the node withholds, that
//! does not fit its policy, or whose description is invalid is listed in [`SlicePlan::withheld`];
//! the other GPUs of the node are offered.

mod compare;
mod counters;
mod device;
mod dropped;
mod error;
mod names;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{
    CounterSet, Device, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use tranche_api::PciAddress;
use tranche_api::gpu_node::{Gpu, GpuStatus, GpuTaint, Inventory};
use tranche_api::names::{self as vocabulary, DRIVER, attribute};
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::withheld::WithheldGpu;

use self::counters::Counters;
use self::device::{Offer, Parent};
use self::error::OfferError;
use self::names::Position;
use crate::claim::DeviceName;
use crate::gpu::GpuUuid;
use crate::mig::{Geometry, GeometryError};
use crate::policy;

pub use compare::{Digest, same};
pub use device::AttributeError;
pub use dropped::{DroppedField, FeatureGate, dropped};
pub use names::NodeNameError;

/// The most counter sets in one slice.
const SETS_PER_SLICE: usize = 8;
/// The most devices in one slice, where they consume counters
/// (`ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`).
const DEVICES_PER_SLICE: usize = 64;

/// The longest value of a taint, which is that of a label.
const LONGEST_LABEL: usize = 63;

/// Everything that the slices of a node depend on.
#[derive(Clone, Copy, Debug)]
pub struct NodeInput<'a> {
    /// The node's name.
    pub name: &'a str,
    /// The node's UID: the node owns the slices, and a later node of the same name gets new ones.
    pub uid: &'a str,
    /// The node's labels, for the policies' selectors.
    pub labels: &'a BTreeMap<String, String>,
    /// The GPUs and their driver.
    pub inventory: &'a Inventory,
    /// GPUs that the node itself withholds.
    pub withheld: &'a [WithheldGpu],
    /// The health of the GPUs: the devices of those with a fault are tainted.
    pub health: &'a [GpuStatus],
    /// All policies of the cluster.
    pub policies: &'a [SharingPolicy],
    /// Published devices that claims may hold. Those that are no longer offered are kept, and a taint
    /// closes them to new claims.
    pub retained: &'a [PublishedDevice],
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
    /// The slices, by name.
    pub slices: Vec<PlannedSlice>,
    /// What is not offered and why: first what the node withholds, then by GPU.
    pub withheld: Vec<WithheldGpu>,
    /// Retained devices that are no longer offered and that were given only by identity. The plan is complete, and may
    /// be carried out, if there are none.
    pub lacking: Vec<DeviceName>,
}

/// One slice.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedSlice {
    /// `metadata.name`: its position in the order, the driver, the node, a hash.
    pub name: String,
    /// What it holds: devices or counters, never both.
    pub content: Content,
}

/// The content of a slice. The API allows only one of the two kinds.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Devices, in the order in which the scheduler tries them.
    Devices(Vec<Device>),
    /// Counter sets.
    Counters(Vec<CounterSet>),
}

/// One GPU of the inventory with its identifiers.
#[derive(Clone, Debug)]
struct IdentifiedGpu<'a> {
    gpu: &'a Gpu,
    uuid: GpuUuid,
    address: PciAddress,
    /// How MIG divides it, if its node reports that.
    geometry: Result<Option<Geometry>, GeometryError>,
}

/// A published device: its identity, and the whole device if that was read.
///
/// The identity is enough while the device is offered as before.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedDevice {
    /// Its name.
    pub name: DeviceName,
    /// The GPU that it was published for.
    pub uuid: GpuUuid,
    /// The whole device, if it was read.
    pub content: Option<Device>,
}

/// A published device that must be kept, with the GPU that it was published for.
#[derive(Clone, Debug)]
struct Retained {
    device: Device,
    name: DeviceName,
    uuid: GpuUuid,
    address: PciAddress,
}

/// What is published: devices by the address of their GPU, counters by its UUID.
#[derive(Debug, Default)]
struct Pool {
    devices: BTreeMap<PciAddress, Vec<Device>>,
    counters: BTreeMap<GpuUuid, CounterSet>,
}

/// Plans the slices of a node. The same input gives the same plan, in whatever order the inventory
/// and the policies come. A node without GPUs has no slices.
pub fn plan(node: &NodeInput<'_>) -> Result<SlicePlan, NodeNameError> {
    names::check_node(node.name)?;
    let mut withheld = node.withheld.to_vec();
    let gpus = identified(node, &mut withheld);
    let uuids: BTreeSet<GpuUuid> = gpus
        .iter()
        .map(|known| known.uuid)
        .chain(node.retained.iter().map(|device| device.uuid))
        .collect();

    let mut pool = Pool::default();
    for known in &gpus {
        let counters = known.counters();
        let mut offer = offer(node, known, &uuids, &counters, &mut withheld);
        offer
            .devices
            .retain(|device| is_open(node, known.gpu, device));
        if !offer.devices.is_empty() {
            pool.devices.insert(known.address, offer.devices);
            pool.counters.insert(known.uuid, counters.set());
        }
    }
    let lacking = withdraw(node.retained, &gpus, &mut pool);
    for device in pool.devices.values_mut().flatten() {
        taint_unhealthy(device, node.health);
    }

    let sets: Vec<CounterSet> = pool.counters.into_values().collect();
    let counters = sets
        .chunks(SETS_PER_SLICE)
        .enumerate()
        .map(|(number, sets)| PlannedSlice {
            name: names::slice(Position::Counters(number), node.name, node.uid),
            content: Content::Counters(sets.to_vec()),
        });
    let devices = pool.devices.iter().flat_map(|(&address, devices)| {
        let parts = devices.chunks(DEVICES_PER_SLICE).enumerate();
        parts.map(move |(part, devices)| PlannedSlice {
            name: names::slice(Position::Gpu(address, part), node.name, node.uid),
            content: Content::Devices(devices.to_vec()),
        })
    });
    Ok(SlicePlan {
        pool: vocabulary::pool(node.name),
        node: node.name.to_owned(),
        node_uid: node.uid.to_owned(),
        slices: counters.chain(devices).collect(),
        withheld,
        lacking,
    })
}

/// The node's GPUs by PCI address. A GPU that cannot be distinguished from others is added to
/// `withheld`.
fn identified<'a>(node: &NodeInput<'a>, withheld: &mut Vec<WithheldGpu>) -> Vec<IdentifiedGpu<'a>> {
    let mut gpus: Vec<&Gpu> = node.inventory.gpus.iter().collect();
    gpus.sort_by(|a, b| (&a.pci_bus_id, &a.uuid).cmp(&(&b.pci_bus_id, &b.uuid)));
    let mut known = Vec::with_capacity(gpus.len());
    for gpu in gpus {
        match identity(node.inventory, gpu) {
            Ok(gpu) => known.push(gpu),
            Err(_) if node.withheld.iter().any(|entry| is_whole(entry, gpu)) => {}
            Err(error) => withheld.push(WithheldGpu::whole(
                &gpu.uuid,
                error.reason(),
                error.to_string(),
            )),
        }
    }
    known.sort_by_key(|known| (known.address, known.uuid));
    known
}

/// The GPU's identifiers, if no other GPU of the node has the same UUID or PCI address.
fn identity<'a>(inventory: &Inventory, gpu: &'a Gpu) -> Result<IdentifiedGpu<'a>, OfferError> {
    let twice = |same: fn(&Gpu, &Gpu) -> bool| {
        let alike = inventory.gpus.iter().filter(|other| same(other, gpu));
        alike.count() > 1
    };
    if twice(|a, b| a.uuid == b.uuid) {
        return Err(OfferError::Duplicate {
            field: "UUID",
            value: gpu.uuid.clone(),
        });
    }
    if twice(|a, b| a.pci_bus_id == b.pci_bus_id) {
        return Err(OfferError::Duplicate {
            field: "PCI address",
            value: gpu.pci_bus_id.clone(),
        });
    }
    Ok(IdentifiedGpu {
        gpu,
        uuid: gpu.uuid.parse().map_err(OfferError::Uuid)?,
        address: gpu.pci_bus_id.parse().map_err(OfferError::PciAddress)?,
        geometry: inventory.mig_geometry(gpu).map(Geometry::read).transpose(),
    })
}

impl IdentifiedGpu<'_> {
    fn counters(&self) -> Counters {
        let geometry = self.geometry.as_ref().ok().and_then(Option::as_ref);
        Counters::of(self.uuid, geometry)
    }
}

/// How `gpu` is offered by its policy; reasons for what is not offered are added to `withheld`.
fn offer(
    node: &NodeInput<'_>,
    known: &IdentifiedGpu<'_>,
    uuids: &BTreeSet<GpuUuid>,
    counters: &Counters,
    withheld: &mut Vec<WithheldGpu>,
) -> Offer {
    let gpu = known.gpu;
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
    let planned = policy::terms(node.policies, node.labels, gpu)
        .map_err(OfferError::from)
        .and_then(|terms| {
            let prefix = known.uuid.name_prefix(uuids);
            let parent = Parent {
                inventory: node.inventory,
                gpu,
                uuid: known.uuid,
                prefix,
                counters,
                geometry: &known.geometry,
            };
            device::of_gpu(&parent, &terms)
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

/// Whether the node allows the device: the GPU, and the tier that it would serve.
fn is_open(node: &NodeInput<'_>, gpu: &Gpu, device: &Device) -> bool {
    let name = device.name.parse::<DeviceName>();
    name.is_ok_and(|name| {
        !node
            .withheld
            .iter()
            .any(|entry| entry.closes(&gpu.uuid, name.tier(), name.gpu_tier()))
    })
}

impl PublishedDevice {
    /// The identity of a published device. `None` for a device that is not ours: a name or a GPU that this driver never
    /// publishes.
    #[must_use]
    pub fn identify(device: &Device) -> Option<Self> {
        Retained::read(device).map(|retained| Self {
            name: retained.name,
            uuid: retained.uuid,
            content: None,
        })
    }
}

impl Retained {
    /// `None` if it is not ours: a device name or GPU that this driver never publishes.
    fn read(device: &Device) -> Option<Self> {
        let text = |name: &str| device.attributes.as_ref()?.get(name)?.string.as_deref();
        Some(Self {
            name: device.name.parse().ok()?,
            // The attribute is the partition's own UUID.
            uuid: text(attribute::PARENT_UUID)
                .or_else(|| text(attribute::UUID))?
                .parse()
                .ok()?,
            address: text(attribute::PCI_BUS_ID)?.parse().ok()?,
            device: device.clone(),
        })
    }
}

/// Adds the devices that are no longer offered but may be allocated, each to its own GPU. Returns those of which only
/// the identity is known.
fn withdraw(
    published: &[PublishedDevice],
    gpus: &[IdentifiedGpu<'_>],
    pool: &mut Pool,
) -> Vec<DeviceName> {
    let offered: BTreeSet<String> = pool
        .devices
        .values()
        .flatten()
        .map(|device| device.name.clone())
        .collect();
    let mut lacking = Vec::new();
    let mut kept = BTreeMap::new();
    let gone = |device: &&PublishedDevice| !offered.contains(&device.name.to_string());
    for device in published.iter().filter(gone) {
        match &device.content {
            Some(content) => kept.extend(Retained::read(content).map(|it| (it.name, it))),
            None => lacking.push(device.name),
        }
    }
    for retained in kept.into_values() {
        let present = gpus.iter().find(|known| known.uuid == retained.uuid);
        let mut device = retained.device;
        let counters = match (present, retained.name) {
            (Some(known), DeviceName::Gpu { .. } | DeviceName::Oversubscribed { .. }) => {
                known.counters()
            }
            // The devices are all that is known of a GPU that is gone; a partition takes its part of the counters.
            (None, _)
            | (Some(_), DeviceName::Partition { .. } | DeviceName::SharedPartition { .. }) => {
                Counters::published(&device, retained.uuid)
            }
        };
        device.consumes_counters = Some(vec![counters.consumption()]);
        // An existing taint keeps the time at which it was added.
        let ours = |taint: &DeviceTaint| taint.key == vocabulary::taint::WITHDRAWN;
        let taint = device.taints.into_iter().flatten().find(ours);
        device.taints = Some(vec![
            taint.unwrap_or_else(|| closed(vocabulary::taint::WITHDRAWN)),
        ]);
        // The GPU may have moved to another slot.
        let address = present.map_or(retained.address, |known| known.address);
        pool.devices.entry(address).or_default().push(device);
        let set = pool.counters.entry(retained.uuid);
        match present {
            Some(known) => {
                set.or_insert_with(|| known.counters().set());
            }
            None => counters.add_to(set.or_default()),
        }
    }
    lacking
}

/// Adds the taint of the device's GPU, if that has a fault.
fn taint_unhealthy(device: &mut Device, health: &[GpuStatus]) {
    let Some(uuid) = Retained::read(device).map(|it| it.uuid) else {
        return;
    };
    let mut of_gpu = health
        .iter()
        .filter(|status| status.uuid.parse() == Ok(uuid));
    if let Some(taint) = of_gpu.find_map(|status| status.taint.as_ref()) {
        let taints = device.taints.get_or_insert_default();
        taints.push(unhealthy(taint));
    }
}

/// The taint of a GPU with a fault. What the node wrote must not make the API server refuse the slice.
fn unhealthy(taint: &GpuTaint) -> DeviceTaint {
    let is_word = taint.value.chars().all(|it| it.is_ascii_alphanumeric());
    let fits = is_word && taint.value.len() <= LONGEST_LABEL;
    DeviceTaint {
        key: vocabulary::taint::UNHEALTHY.to_owned(),
        value: fits.then(|| taint.value.clone()),
        effect: taint.effect.as_str().to_owned(),
        time_added: Some(taint.time_added.clone()),
    }
}

/// A taint that closes a device to new claims that do not tolerate it.
fn closed(key: &str) -> DeviceTaint {
    DeviceTaint {
        key: key.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..DeviceTaint::default()
    }
}

impl SlicePlan {
    /// The slice at `index` as an object, at this generation of the pool.
    #[must_use]
    pub fn object(&self, slice: &PlannedSlice, generation: i64) -> ResourceSlice {
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(slice.name.clone()),
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
                resource_slice_count: i64::try_from(self.slices.len()).unwrap_or(i64::MAX),
            },
            devices,
            shared_counters,
            ..ResourceSliceSpec::default()
        }
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
