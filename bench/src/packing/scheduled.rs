//! kube-scheduler's allocator, which takes the first device that fits, on a node of H100.

use std::collections::BTreeMap;

use anyhow::Context;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::json;
use tranche_allocator_oracle::{Knowledge, Outcome, Scheduler, geometry};
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::names::attribute;
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::tier::Tier;
use tranche_driver::slices::{self, NodeInput};
use tranche_simulator_machine::mig::{Model, ModelName};

use super::lives::Event;
use super::place::{Placer, Sum, place};

const NODE: &str = "node-a";

/// The node's slices, as planned for a tier.
pub struct Node {
    pub slices: Vec<ResourceSlice>,
    /// The GPU of each device.
    gpus: BTreeMap<String, usize>,
}

impl Node {
    /// Plans a node with `gpus` H100 in this tier under the default policy, and also returns the policy.
    pub fn plan(gpus: u32, tier: Tier) -> anyhow::Result<(Self, SharingPolicy)> {
        let policy: SharingPolicy = serde_json::from_value(json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1",
            "kind": "SharingPolicy",
            "metadata": {"name": "default"},
            "spec": {"tiers": [tier]},
        }))?;
        let inventory = h100s(gpus);
        let uuids: Vec<_> = inventory.gpus.iter().map(|gpu| &gpu.uuid).collect();
        let plan = slices::plan(&NodeInput {
            name: NODE,
            uid: "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d",
            labels: &BTreeMap::new(),
            inventory: &inventory,
            withheld: &[],
            health: &[],
            policies: std::slice::from_ref(&policy),
            retained: &[],
        })?;
        let slices: Vec<ResourceSlice> = plan
            .slices
            .iter()
            .map(|slice| plan.object(slice, 1))
            .collect();
        let mut of_device = BTreeMap::new();
        for device in slices
            .iter()
            .flat_map(|it| it.spec.devices.iter().flatten())
        {
            let uuid = device
                .attributes
                .as_ref()
                .and_then(|it| it.get(attribute::UUID)?.string.as_ref());
            let gpu = uuids
                .iter()
                .position(|it| Some(*it) == uuid)
                .with_context(|| format!("{} is of no GPU", device.name))?;
            of_device.insert(device.name.clone(), gpu);
        }
        anyhow::ensure!(!of_device.is_empty(), "no device is planned");
        let node = Self {
            slices,
            gpus: of_device,
        };
        Ok((node, policy))
    }

    /// Adds up the cost of the events under our order of devices, and under the reverse order.
    pub fn measure(
        &self,
        scheduler: &mut Scheduler,
        events: &[Event],
        claim: &impl Fn(usize, u32) -> ResourceClaim,
        [ours, reversed]: [&mut Sum; 2],
    ) -> anyhow::Result<()> {
        for (sum, slices) in [(ours, self.slices.clone()), (reversed, self.reversed())] {
            scheduler.reset()?;
            scheduler.publish(NODE, &slices)?;
            let mut first_fit = FirstFit {
                node: self,
                scheduler,
                claim,
            };
            place(events, &mut first_fit, sum)?;
        }
        Ok(())
    }

    /// The slices and their devices in the reverse order. The allocator uses the order of the slices' names.
    fn reversed(&self) -> Vec<ResourceSlice> {
        let mut reversed = self.slices.clone();
        let count = reversed.len();
        for (number, slice) in reversed.iter_mut().enumerate() {
            slice.metadata.name = Some(format!("{:03}-reversed", count - number));
            slice.spec.devices.iter_mut().for_each(|it| it.reverse());
        }
        reversed
    }
}

/// A node's inventory with `count` H100.
pub fn h100s(count: u32) -> Inventory {
    let gpus: Vec<Gpu> = (0..count).map(h100).collect();
    let uuids: Vec<String> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let mut inventory = Inventory::new("580.65.06".to_owned(), "13.0".to_owned(), gpus);
    inventory.mig_geometries = vec![geometry::of(Model::of(ModelName::H100), &uuids)];
    inventory
}

fn h100(number: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{number:08x}-0000-4000-8000-{number:012x}"),
        minor: number,
        index: Some(number),
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        cuda_compute_capability: "9.0".to_owned(),
        pci_bus_id: format!("0000:{number:02x}:00.0"),
        pcie_root: None,
        numa_node: None,
        memory: Quantity::from_bytes(81_559 << 20),
        reserved_memory: Quantity::from_bytes(600 << 20),
        multiprocessors: Some(132),
        context_memory: None,
        mig_capable: true,
        mig_mode: tranche_api::gpu_node::MigMode::default(),
        vfio: None,
        vgpu: None,
        mig_instances: Vec::new(),
    }
}

/// kube-scheduler's allocator.
struct FirstFit<'a, C> {
    node: &'a Node,
    scheduler: &'a mut Scheduler,
    claim: &'a C,
}

impl<C: Fn(usize, u32) -> ResourceClaim> Placer for FirstFit<'_, C> {
    fn start(&mut self, number: usize, size: u32) -> anyhow::Result<usize> {
        let claim = (self.claim)(number, size);
        let outcome = self.scheduler.allocate(&[claim], Knowledge::All)?;
        let Outcome::Allocated(results) = outcome else {
            anyhow::bail!("{outcome:?}: the node has too few GPUs");
        };
        let results = results.into_iter().filter_map(|it| it.devices?.results);
        let device = results.flatten().next().context("no device")?.device;
        let gpu = self.node.gpus.get(&device).copied();
        gpu.with_context(|| format!("no GPU has the device {device}"))
    }

    fn end(&mut self, number: usize, _: usize, _: u32) -> anyhow::Result<()> {
        Ok(self.scheduler.release(&[format!("packing/{number}")])?)
    }
}

/// A claim with one request.
pub fn claim(number: usize, request: &serde_json::Value) -> ResourceClaim {
    let name = number.to_string();
    serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "packing", "name": name, "uid": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}},
    }))
    .expect("a claim")
}
