//! Generated nodes, policies and events.

use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::Quantity;
use tranche_api::gpu_node::{Gpu, GpuVfio, Inventory, MigMode};
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::tier::Tier;

use crate::demand::{Claim, any_pod};

const MIB: u64 = 1 << 20;

/// A product: its name, architecture, compute capability, MiB in total, MiB that the driver reserves, whether it has MIG.
type Product = (&'static str, &'static str, &'static str, u64, u64, bool);

pub const PRODUCTS: [Product; 5] = [
    ("NVIDIA H100 80GB HBM3", "Hopper", "9.0", 81_559, 600, true),
    ("NVIDIA A100-SXM4-40GB", "Ampere", "8.0", 40_960, 570, true),
    ("NVIDIA A30", "Ampere", "8.0", 24_576, 430, true),
    ("NVIDIA L4", "Ada", "8.9", 23_034, 460, false),
    ("Tesla T4", "Turing", "7.5", 15_360, 400, false),
];

/// A node and what happens on it.
#[derive(Clone, Debug)]
pub struct Story {
    /// Products by number in [`PRODUCTS`], one per GPU.
    pub gpus: Vec<usize>,
    /// The policy at first.
    pub policy: Policy,
    pub events: Vec<Event>,
}

/// One policy for all GPUs of the node.
#[derive(Clone, Debug)]
pub struct Policy {
    /// At least one, without order.
    pub tiers: Vec<Tier>,
    pub max_sharers: u32,
    pub expected_sharers: u32,
    /// MiB.
    pub context: u64,
    /// Percent, above 100; `None` without oversubscription.
    pub over: Option<u32>,
    /// Bytes.
    pub step: u64,
    /// Steps.
    pub default_memory: Option<u64>,
    /// Percent.
    pub cores_step: u32,
    /// Steps.
    pub default_cores: Option<u32>,
    pub timeshared_sharers: u32,
}

#[derive(Clone, Debug)]
pub enum Event {
    /// A pod with these claims is created.
    Pod(Vec<Claim>),
    /// A pod ends.
    End(prop::sample::Index),
    /// The policy changes, and the node withholds some of its GPUs.
    Change(Policy, Vec<prop::sample::Index>),
}

impl Policy {
    pub fn object(&self) -> SharingPolicy {
        let spec: Value = json!({
            "tiers": self.tiers,
            "capped": {
                "maxSharers": self.max_sharers,
                "expectedSharers": self.expected_sharers,
                "contextMemory": self.context * MIB,
                "memoryOversubscription": self.over.unwrap_or(100),
                "memoryStep": self.step,
                "defaultMemory": self.default_memory.map(|steps| steps * self.step),
                "coresStep": self.cores_step,
                "defaultCores": self.default_cores.map(|steps| steps * self.cores_step),
            },
            "concurrent": {"maxSharers": self.max_sharers},
            "timeshared": {"maxSharers": self.timeshared_sharers},
        });
        serde_json::from_value(json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1",
            "kind": "SharingPolicy",
            "metadata": {"name": "default"},
            "spec": spec,
        }))
        .expect("a policy")
    }
}

/// The GPUs have UUIDs and PCI addresses in the order of `products`.
pub fn inventory(products: &[usize]) -> Inventory {
    let gpus = products.iter().zip(0_u32..).map(|(product, slot)| {
        let (name, architecture, capability, total, reserved, mig) = PRODUCTS[*product];
        Gpu {
            uuid: format!("GPU-{slot:08x}-0000-4000-8000-{slot:012x}"),
            minor: slot,
            index: Some(slot),
            product_name: name.to_owned(),
            brand: "Nvidia".to_owned(),
            architecture: architecture.to_owned(),
            cuda_compute_capability: capability.to_owned(),
            pci_bus_id: format!("0000:{:02x}:00.0", slot + 1),
            pcie_root: Some(format!("pci0000:{:02x}", slot / 2)),
            numa_node: Some(slot / 4),
            memory: Quantity::from_bytes(total * MIB),
            reserved_memory: Quantity::from_bytes(reserved * MIB),
            multiprocessors: None,
            context_memory: None,
            mig_capable: mig,
            mig_mode: MigMode::default(),
            vfio: Some(GpuVfio {
                iommu_group: slot + 1,
                obstacle: None,
            }),
            vgpu: None,
            mig_instances: Vec::new(),
        }
    });
    Inventory::new("580.65.06".to_owned(), "13.0".to_owned(), gpus.collect())
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let tiers = prop_oneof![
        3 => Just(Tier::ALL.to_vec()),
        1 => prop::sample::subsequence(Tier::ALL.to_vec(), 1..=Tier::ALL.len()),
    ];
    (
        tiers,
        1..=9_u32,
        0..=4_u32,
        prop::sample::select(vec![0_u64, 300, 512]),
        prop::sample::select(vec![
            1_u64,
            1_000_000,
            MIB,
            256 * MIB,
            1 << 30,
            1_610_612_736,
        ]),
        prop::option::weighted(0.3, 1..=4_u64),
        prop::option::weighted(0.08, 101..=400_u32),
        (
            prop::sample::select(vec![1_u32, 1, 5, 20, 50]),
            prop::option::weighted(0.3, 1..=60_u32),
        ),
        1..=5_u32,
    )
        .prop_map(
            |(
                tiers,
                most,
                expected,
                context,
                step,
                memory,
                over,
                (cores_step, cores),
                timeshared,
            )| {
                Policy {
                    tiers,
                    max_sharers: most,
                    expected_sharers: expected.min(most),
                    context,
                    over,
                    step,
                    default_memory: memory,
                    cores_step,
                    default_cores: cores.map(|percent| percent.div_ceil(cores_step)),
                    timeshared_sharers: timeshared,
                }
            },
        )
}

fn any_event(gpus: usize) -> impl Strategy<Value = Event> {
    let change = (
        any_policy(),
        prop::collection::vec(any::<prop::sample::Index>(), 0..=1),
    );
    prop_oneof![
        12 => any_pod(gpus).prop_map(Event::Pod),
        5 => any::<prop::sample::Index>().prop_map(Event::End),
        1 => change.prop_map(|(policy, withheld)| Event::Change(policy, withheld)),
    ]
}

/// Stories of a node with this number of GPUs.
pub fn any_story(gpus: usize, longest: usize) -> impl Strategy<Value = Story> {
    let products = prop_oneof![
        4 => (0..PRODUCTS.len()).prop_map(move |product| vec![product; gpus]),
        1 => prop::collection::vec(0..PRODUCTS.len(), gpus),
    ];
    let events = prop::collection::vec(any_event(gpus), 1..=longest);
    (products, any_policy(), events).prop_map(|(gpus, policy, events)| Story {
        gpus,
        policy,
        events,
    })
}
