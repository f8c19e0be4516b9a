//! After a boot the node's GPUs come up in any order and at any address. Some are gone or replaced, some have UUIDs
//! that begin with the same digits. Every claim gets its own GPU, or the error that it is gone.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::Device;
use proptest::prelude::*;
use tranche_api::PciAddress;
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::names::{attribute, taint};

use super::{all_tiers, devices, input, inventory, limits, objects, plan};
use crate::claim::DeviceName;
use crate::gpu::{GpuUuid, UuidPrefix};
use crate::preparation::{self, PreparationPlan, PreparationProblem};
use crate::testing::{allocation, gpu, plain};

/// All GPUs, in the node or not. Of every three, two begin with the same eight digits, and two of those differ only in
/// the last digit.
const GPUS: u32 = 6;

fn uuid(card: u32) -> String {
    let (first, last) = (card % 2, card / 2);
    format!("GPU-{first:08x}-0000-4000-8000-{last:012x}")
}

/// One boot: the cards in the node's slots, and the order in which the kernel probes them.
#[derive(Clone, Debug)]
struct Boot {
    cards: Vec<u32>,
    minors: Vec<u32>,
    /// Claims that are made after it, and whether the kubelet prepares them.
    claims: Vec<bool>,
    /// Claims that end after it.
    ends: Vec<prop::sample::Index>,
}

fn any_boot() -> impl Strategy<Value = Boot> {
    let cards: Vec<u32> = (0..GPUS).collect();
    let minors = cards.clone();
    (
        Just(cards).prop_shuffle(),
        0..=GPUS as usize,
        Just(minors).prop_shuffle(),
        prop::collection::vec(any::<bool>(), 0..4),
        prop::collection::vec(any::<prop::sample::Index>(), 0..3),
    )
        .prop_map(|(mut cards, count, minors, claims, ends)| {
            cards.truncate(count);
            Boot {
                cards,
                minors,
                claims,
                ends,
            }
        })
}

impl Boot {
    fn inventory(&self) -> Inventory {
        let slots = self.cards.iter().zip(&self.minors).zip(0..);
        let gpus = slots.map(|((card, minor), slot)| Gpu {
            uuid: uuid(*card),
            minor: *minor,
            index: Some(slot),
            ..gpu(slot)
        });
        inventory(gpus.collect())
    }
}

/// A claim as the API server and the node know it.
#[derive(Clone, Debug)]
struct Claim {
    device: String,
    /// The GPU for which the device was published when it was allocated.
    uuid: String,
    journal: Option<PreparationPlan>,
}

fn attribute_of(device: &Device, name: &str) -> String {
    let attributes = device.attributes.as_ref().unwrap();
    attributes[name].string.clone().unwrap()
}

fn is_open(device: &Device) -> bool {
    let mut taints = device.taints.iter().flatten();
    !taints.any(|taint| taint.key == taint::WITHDRAWN)
}

/// The first exclusive device whose counters are free, as the scheduler finds it.
fn allocate(devices: &[Device], claims: &BTreeMap<u32, Claim>) -> Option<Claim> {
    let set = |device: &Device| {
        device.consumes_counters.as_ref().unwrap()[0]
            .counter_set
            .clone()
    };
    let taken: BTreeSet<String> = devices
        .iter()
        .filter(|device| claims.values().any(|claim| claim.device == device.name))
        .map(set)
        .collect();
    let free = devices.iter().find(|device| {
        is_open(device)
            && attribute_of(device, attribute::ISOLATION) == "exclusive"
            && !taken.contains(&set(device))
    })?;
    Some(Claim {
        device: free.name.clone(),
        uuid: attribute_of(free, attribute::UUID),
        journal: None,
    })
}

/// Prepares a claim as the node does: by its journal if it has one.
fn prepare(
    name: u32,
    claims: &BTreeMap<u32, Claim>,
    inventory: &Inventory,
) -> Result<PreparationPlan, PreparationProblem> {
    let claim = &claims[&name];
    let held = claims.values().filter_map(|claim| claim.journal.as_ref());
    let prepared = if let Some(plan) = &claim.journal {
        plan.located(inventory)
    } else {
        let allocation = allocation(&name.to_string(), &[plain(&claim.device)]);
        preparation::plan(&allocation, inventory, held)
    };
    prepared.map_err(|error| error.problem)
}

/// Whether a claim that was never prepared may get another GPU: its GPU was removed before the kubelet prepared the
/// claim, and was replaced by one with the same first eight digits. That happens once in 2^32 replacements, and the
/// node cannot detect it.
fn is_indistinguishable(claim: &Claim, inventory: &Inventory) -> bool {
    let Ok(DeviceName::Gpu { gpu: prefix, .. }) = claim.device.parse() else {
        return false;
    };
    let begins = |gpu: &&Gpu| prefix.begins(gpu.uuid.parse::<GpuUuid>().unwrap());
    let present = inventory.gpus.iter().any(|gpu| gpu.uuid == claim.uuid);
    claim.journal.is_none() && !present && inventory.gpus.iter().filter(begins).count() == 1
}

proptest! {
    #[test]
    fn every_claim_gets_its_own_gpu_or_the_error_that_it_is_gone(
        boots in prop::collection::vec(any_boot(), 1..8),
    ) {
        let labels = BTreeMap::new();
        let policies = [all_tiers()];
        let mut published: Vec<Device> = Vec::new();
        let mut claims: BTreeMap<u32, Claim> = BTreeMap::new();
        let mut next = 0;
        for boot in &boots {
            let inventory = boot.inventory();
            // The controller keeps the devices of its last plan that claims hold.
            let retained: Vec<Device> = published
                .iter()
                .filter(|device| is_open(device) || claims.values().any(|c| c.device == device.name))
                .cloned()
                .collect();
            let slices = plan(&super::NodeInput { retained: &super::whole(&retained), ..input(&inventory, &policies, &labels) }).unwrap();
            limits::check(&objects(&slices));
            published = devices(&slices);

            // The order is that of the PCI addresses, not of the minor numbers.
            let addresses: Vec<PciAddress> = published
                .iter()
                .map(|device| attribute_of(device, attribute::PCI_BUS_ID).parse().unwrap())
                .zip(&published)
                .filter(|(_, device)| is_open(device))
                .map(|(address, _)| address)
                .collect();
            prop_assert!(addresses.is_sorted(), "{:?}", addresses);

            // An allocated device keeps its name and its GPU.
            for claim in claims.values() {
                let named: Vec<_> = published.iter().filter(|d| d.name == claim.device).collect();
                prop_assert_eq!(named.len(), 1, "{}", &claim.device);
                prop_assert_eq!(attribute_of(named[0], attribute::UUID), claim.uuid.clone());
            }
            // The kubelet prepares all running pods' claims again after a boot.
            for name in claims.keys().copied().collect::<Vec<_>>() {
                if is_indistinguishable(&claims[&name], &inventory) {
                    continue;
                }
                let own = claims[&name].uuid.clone();
                let present = inventory.gpus.iter().find(|gpu| gpu.uuid == own);
                match (prepare(name, &claims, &inventory), present) {
                    (Ok(plan), Some(gpu)) => {
                        let device = &plan.devices[0];
                        prop_assert_eq!(&device.gpu_uuid, &own);
                        prop_assert_eq!(device.minor, gpu.minor);
                        prop_assert_eq!(&device.pci_bus_id, &gpu.pci_bus_id);
                        claims.get_mut(&name).unwrap().journal = Some(plan);
                    }
                    (Err(PreparationProblem::GpuGone { .. }), None) => {}
                    // Two present GPUs have the same first digits as the allocated one, and the
                    // claim was never prepared.
                    (Err(PreparationProblem::Ambiguous { .. }), _) => {
                        prop_assert!(claims[&name].journal.is_none());
                    }
                    (other, present) => prop_assert!(false, "{:?} with {:?}", other, present),
                }
            }
            for end in &boot.ends {
                if !claims.is_empty() {
                    let name = *claims.keys().nth(end.index(claims.len())).unwrap();
                    claims.remove(&name);
                }
            }
            // A new claim never gets a GPU that an old one holds.
            for prepared in &boot.claims {
                let Some(claim) = allocate(&published, &claims) else {
                    continue;
                };
                let own = claim.uuid.clone();
                claims.insert(next, claim);
                if *prepared {
                    let plan = prepare(next, &claims, &inventory).map_err(|problem| TestCaseError::fail(problem.to_string()))?;
                    prop_assert_eq!(&plan.devices[0].gpu_uuid, &own);
                    claims.get_mut(&next).unwrap().journal = Some(plan);
                }
                next += 1;
            }
        }
    }
}

/// The names of the open devices of a plan that are exclusive, by the slot of their GPU.
fn exclusive(cards: &[u32], retained: &[Device]) -> Vec<Device> {
    let boot = Boot {
        cards: cards.to_vec(),
        minors: (0..GPUS).collect(),
        claims: Vec::new(),
        ends: Vec::new(),
    };
    let (inventory, labels) = (boot.inventory(), BTreeMap::new());
    let policies = [all_tiers()];
    let node = super::NodeInput {
        retained: &super::whole(retained),
        ..input(&inventory, &policies, &labels)
    };
    let mut devices = devices(&plan(&node).unwrap());
    devices.retain(|device| {
        is_open(device) && attribute_of(device, attribute::ISOLATION) == "exclusive"
    });
    devices
}

#[test]
fn gpus_that_begin_alike_have_all_digits_in_their_names() {
    let names = |devices: &[Device]| -> Vec<String> {
        devices.iter().map(|device| device.name.clone()).collect()
    };
    // Cards 0 and 2 begin with eight zeros.
    let alone = exclusive(&[0, 1], &[]);
    assert_eq!(names(&alone), ["gpu-00000000", "gpu-00000001"]);
    let both = exclusive(&[0, 1, 2], &[]);
    let long = [
        "gpu-00000000000040008000000000000000",
        "gpu-00000001",
        "gpu-00000000000040008000000000000001",
    ];
    assert_eq!(names(&both), long);
    // A name that may be allocated never names another GPU: card 2 in the place of card 0.
    let replaced = exclusive(&[2, 1], &alone);
    assert_eq!(names(&replaced), [long[2], long[1]]);
    for name in long {
        let digits = name.strip_prefix("gpu-").unwrap();
        assert!(UuidPrefix::parse(digits).is_some());
    }
}
