//! Nodes and their GPUs, with the claims that have them.

use std::collections::{BTreeMap, BTreeSet};

use tranche_api::gpu_node::{Gpu as Described, GpuNode, Inventory};
use tranche_api::names::{attribute, capacity, node_of, pool};
use tranche_api::{PciAddress, Tier};
use tranche_driver::claim::DeviceName;
use tranche_driver::mig::Placement;

use super::claims::{Claim, ClaimDevice};
use super::devices::{Devices, amount, number, string};
use super::room::{Room, SharesRoom, SlicesRoom};
use super::{AllocatedDevice, Gpu, Node, Tenant};
use crate::snapshot::Snapshot;
use crate::usage::{NodeGpu, Usage};

/// The allocated devices of each GPU: by the device's name, the claims and what each has.
type ByDevice<'a> = BTreeMap<&'a str, Vec<(&'a Claim, &'a ClaimDevice)>>;

/// The nodes, by name, with all GPUs that any object names.
pub(super) fn nodes(
    snapshot: &Snapshot,
    devices: &Devices<'_>,
    claims: &[Claim],
    usage: Option<&Usage>,
) -> Vec<Node> {
    let mut held: BTreeMap<&str, ByDevice<'_>> = BTreeMap::new();
    for claim in claims {
        for device in &claim.devices {
            if let Some(uuid) = &device.gpu_uuid {
                let of_gpu = held.entry(uuid).or_default();
                let of_device = of_gpu.entry(&device.device).or_default();
                of_device.push((claim, device));
            }
        }
    }
    let context = Context {
        devices,
        held,
        usage,
    };
    let mut nodes: BTreeMap<String, Node> = BTreeMap::new();
    let mut known: BTreeSet<&str> = BTreeSet::new();
    for object in &snapshot.gpu_nodes {
        let node = context.node(object);
        if let Some(inventory) = inventory(object) {
            known.extend(inventory.gpus.iter().map(|gpu| gpu.uuid.as_str()));
        }
        nodes.insert(node.name.clone(), node);
    }
    // GPUs without a description: the GpuNode cannot be read, or the GPU is gone and still allocated.
    let of_slices = devices.gpus().map(|(uuid, pool)| (uuid, node_of(pool)));
    let of_claims = claims
        .iter()
        .flat_map(|claim| &claim.devices)
        .filter_map(|it| Some((it.gpu_uuid.as_deref()?, it.node.as_str())));
    for (uuid, name) in of_slices.chain(of_claims) {
        if known.insert(uuid) {
            let node = nodes.entry(name.to_owned()).or_insert_with(|| Node {
                name: name.to_owned(),
                ..Node::default()
            });
            node.gpus.push(context.gpu(name, uuid, None));
        }
    }
    let mut nodes: Vec<Node> = nodes.into_values().collect();
    for node in &mut nodes {
        let address = |gpu: &Gpu| (gpu.pci_bus_id.parse::<PciAddress>().ok(), gpu.uuid.clone());
        node.gpus.sort_by_cached_key(address);
    }
    nodes
}

fn inventory(node: &GpuNode) -> Option<&Inventory> {
    node.status.as_ref()?.inventory.as_ref()
}

struct Context<'a> {
    devices: &'a Devices<'a>,
    held: BTreeMap<&'a str, ByDevice<'a>>,
    usage: Option<&'a Usage>,
}

impl Context<'_> {
    fn node(&self, object: &GpuNode) -> Node {
        let status = object.status.as_ref();
        let described = inventory(object);
        let published = status.and_then(|it| it.published.as_ref());
        let name = object.metadata.name.clone().unwrap_or_default();
        let conditions = status.map(|it| it.conditions.as_slice());
        let failed = conditions
            .unwrap_or_default()
            .iter()
            .filter(|it| it.status == "False");
        let problem = published.map(|it| it.problem.clone());
        let gpus = described.into_iter().flat_map(|inventory| {
            let name = &name;
            let withheld = published.map(|it| it.withheld.as_slice());
            inventory.gpus.iter().map(move |gpu| {
                let mut built = self.gpu(name, &gpu.uuid, Some((inventory, gpu)));
                let of_gpu = withheld.unwrap_or_default().iter();
                built.withheld = of_gpu.filter(|it| it.gpu == gpu.uuid).cloned().collect();
                built
            })
        });
        Node {
            driver_version: described.map(|it| it.driver_version.clone()),
            plugin_version: status
                .and_then(|it| it.registration.as_ref())
                .map(|it| it.plugin_version.clone()),
            problems: failed
                .map(|it| it.message.clone())
                .chain(problem.filter(|text| !text.is_empty()))
                .collect(),
            gpus: gpus.collect(),
            name,
        }
    }

    fn gpu(&self, node: &str, uuid: &str, described: Option<(&Inventory, &Described)>) -> Gpu {
        let offered = self.devices.of_gpu(uuid);
        let any = offered.first().map(|(_, device)| *device);
        let held = self.held(uuid);
        let mut tiers: Vec<Tier> = offered
            .iter()
            .filter(|(_, device)| device.taints.as_deref().unwrap_or_default().is_empty())
            .map(|(name, _)| name.tier())
            .collect();
        tiers.sort_unstable_by(|a, b| b.cmp(a));
        tiers.dedup();
        let whole = offered
            .iter()
            .find(|(name, _)| name.tier() == Tier::Exclusive);
        let text = |name| {
            any.and_then(|device| string(device, name))
                .unwrap_or_default()
        };
        let gpu = described.map(|(_, gpu)| gpu);
        Gpu {
            uuid: uuid.to_owned(),
            index: gpu.map_or_else(
                || any.and_then(|it| u32::try_from(number(it, attribute::INDEX)?).ok()),
                |gpu| gpu.index,
            ),
            product: gpu.map_or_else(
                || text(attribute::PRODUCT_NAME).to_owned(),
                |gpu| gpu.product_name.clone(),
            ),
            pci_bus_id: gpu.map_or_else(
                || text(attribute::PCI_BUS_ID).to_owned(),
                |gpu| gpu.pci_bus_id.clone(),
            ),
            memory: gpu
                .and_then(|gpu| gpu.memory.to_count().ok())
                .or_else(|| amount(whole?.1, capacity::MEMORY))
                .unwrap_or_default(),
            tier: tier(&held),
            room: self.room(uuid, described, &held),
            offered: tiers,
            held,
            withheld: Vec::new(),
            used: self
                .usage
                .and_then(|usage| usage.gpus.get(&NodeGpu::new(node, uuid)).copied()),
        }
    }

    fn held(&self, uuid: &str) -> Vec<AllocatedDevice> {
        let of_gpu = self.held.get(uuid).into_iter().flatten();
        let held = of_gpu.filter_map(|(name, holders)| {
            let parsed: DeviceName = name.parse().ok()?;
            let (_, first) = holders.first()?;
            let pool = pool(&first.node);
            let device = self.devices.get(&pool, name);
            let counted = holders
                .iter()
                .map(|(_, device)| *device)
                .filter(|device| !device.is_admin);
            let placement = parsed.placement();
            Some(AllocatedDevice {
                device: (*name).to_owned(),
                tier: parsed.tier(),
                profile: placement.map(|placement| placement.profile.to_string()),
                slice: placement.map(|placement| placement.start),
                compute_slices: placement.map(|placement| placement.profile.compute_slices),
                memory: device
                    .and_then(|it| amount(it, capacity::MEMORY))
                    .unwrap_or_default(),
                room: device.and_then(|it| SharesRoom::of(it, counted)),
                tenants: holders
                    .iter()
                    .map(|(claim, device)| self.tenant(claim, device))
                    .collect(),
            })
        });
        held.collect()
    }

    fn tenant(&self, claim: &Claim, device: &ClaimDevice) -> Tenant {
        let mut tenant = Tenant {
            namespace: claim.namespace.clone(),
            claim: claim.name.clone(),
            uid: claim.uid.clone(),
            pods: claim.pods.clone(),
            device: device.clone(),
            used: None,
            used_by_pod: BTreeMap::new(),
        };
        if let Some(used) = self.usage.and_then(|usage| usage.parts.get(&tenant.part())) {
            tenant.set_used(used);
        }
        tenant
    }

    fn room(
        &self,
        uuid: &str,
        described: Option<(&Inventory, &Described)>,
        held: &[AllocatedDevice],
    ) -> Room {
        let offered = self.devices.of_gpu(uuid);
        let Some(first) = held.iter().find(|it| is_held(it)) else {
            return if offered.is_empty() {
                Room::NotOffered
            } else {
                Room::All
            };
        };
        if tier(held) == Some(Tier::Partition) {
            let places: BTreeSet<Placement> = held
                .iter()
                .filter(|it| is_held(it))
                .filter_map(|it| it.device.parse::<DeviceName>().ok()?.placement())
                .collect();
            let room = described
                .and_then(|(inventory, gpu)| SlicesRoom::of(inventory, gpu, offered, &places));
            return room.map_or(Room::Unknown, Room::Slices);
        }
        match first.tier {
            Tier::Capped | Tier::Concurrent => first.room.map_or(Room::Unknown, Room::Shares),
            Tier::Timeshared => self.places(first),
            Tier::Partition | Tier::Exclusive | Tier::Passthrough => Room::Nothing,
        }
    }

    /// A timeshared device has places without sizes.
    fn places(&self, held: &AllocatedDevice) -> Room {
        let node = held.holders().next().map(|it| it.device.node.as_str());
        let pool = pool(node.unwrap_or_default());
        let device = self.devices.get(&pool, &held.device);
        match device.and_then(|it| amount(it, capacity::SHARERS)) {
            Some(whole) => Room::Places {
                free: whole.saturating_sub(held.holders().count() as u64),
                whole,
            },
            None => Room::Unknown,
        }
    }
}

fn is_held(held: &AllocatedDevice) -> bool {
    held.holders().next().is_some()
}

/// The tier that the GPU serves: `partition` also where claims share a partition.
fn tier(held: &[AllocatedDevice]) -> Option<Tier> {
    let mut held = held.iter().filter(|it| is_held(it));
    let name: DeviceName = held.next()?.device.parse().ok()?;
    Some(name.gpu_tier())
}
