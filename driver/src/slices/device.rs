//! The devices of one GPU.

mod oversubscribed;
mod partition;
mod shared_partition;

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity,
    DeviceTaint,
};
use tranche_api::gpu_node::{Gpu, GpuVfio, Inventory};
use tranche_api::names::{attribute, capacity, taint};
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::UntestedDriver;
use tranche_api::tier::Tier;

use super::OfferError;
use super::counters::Counters;
use crate::claim::{DeviceName, WholeGpuTier};
use crate::gpu::{GpuUuid, UuidPrefix};
use crate::mig::{Geometry, GeometryError};
use crate::oversubscription::Oversubscription;
use crate::policy::{CappedTerms, Terms, UNMEASURED_CONTEXT};

/// The most bytes of an attribute's string or version.
const LONGEST_VALUE: usize = 64;
/// All of a GPU's time, percent.
const ALL_CORES: u64 = crate::policy::ALL_CORES as u64;

/// A property that does not fit into an attribute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttributeError {
    /// Not a version.
    #[error("{field} {value:?} is not a version: it must begin with numbers and dots")]
    Version {
        /// The field of the inventory.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// Too long; cut values might be equal.
    #[error("{field} {value:?} is longer than {LONGEST_VALUE} bytes")]
    TooLong {
        /// The field of the inventory.
        field: &'static str,
        /// Its value.
        value: String,
    },
}

/// How one GPU is offered.
#[derive(Debug, Default)]
pub(super) struct Offer {
    /// The devices, in order.
    pub(super) devices: Vec<Device>,
    /// Tiers of the policy in which the GPU cannot be offered.
    pub(super) refused: Vec<(Tier, OfferError)>,
}

/// A GPU whose devices are planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parent<'a> {
    pub(super) inventory: &'a Inventory,
    pub(super) gpu: &'a Gpu,
    pub(super) uuid: GpuUuid,
    /// The part of its UUID that is in the names of its devices.
    pub(super) prefix: UuidPrefix,
    /// All of its counters.
    pub(super) counters: &'a Counters,
    /// How MIG divides it, if its node reports that.
    pub(super) geometry: &'a Result<Option<Geometry>, GeometryError>,
}

/// The order in which the scheduler tries the tiers. Shared ones come first, so that a claim that accepts both gets a
/// part of a shared GPU. Partitions come before the whole GPU; otherwise the stronger isolation comes first. Shared
/// partitions come just before exclusive ones: a GPU that is shared as a whole is tried before one of its partitions.
const ORDER: [Tier; 6] = [
    Tier::Capped,
    Tier::Concurrent,
    Tier::Timeshared,
    Tier::Partition,
    Tier::Passthrough,
    Tier::Exclusive,
];

/// The devices under which a GPU is offered. Whole GPUs consume all of its counters. An error applies to every tier.
pub(super) fn of_gpu(parent: &Parent<'_>, terms: &Terms) -> Result<Offer, OfferError> {
    let Parent { inventory, gpu, .. } = *parent;
    let memory = Memory::read(gpu)?;
    let common = attributes(inventory, gpu)?;
    let mut offer = Offer::default();
    for tier in ORDER {
        if tier == Tier::Partition && !gpu.is_vgpu() {
            let (devices, refused) = shared_partition::of_gpu(parent, terms, &common);
            offer.devices.extend(devices);
            let refused = refused.into_iter();
            offer
                .refused
                .extend(refused.map(|(tier, error)| (tier.tier(), error)));
        }
        if !terms.tiers.contains(&tier) {
            continue;
        }
        if let Err(error) = works_in_guest(tier, gpu) {
            offer.refused.push((tier, error));
            continue;
        }
        let Some(whole) = WholeGpuTier::new(tier) else {
            match partition::of_gpu(parent, &terms.profiles, &common) {
                Ok(partitions) => offer.devices.extend(partitions),
                Err(error) => offer.refused.push((tier, error)),
            }
            continue;
        };
        let over = terms
            .capped
            .memory_oversubscription
            .filter(|_| whole == WholeGpuTier::Capped);
        let offered = supported(tier, gpu).and_then(|()| capacities(whole, terms, over, &memory));
        let movable = over.map_or(Ok(()), |_| oversubscribed::check(gpu));
        let capacity = match movable.and(offered) {
            Ok(capacity) => capacity,
            Err(error) => {
                offer.refused.push((tier, error));
                continue;
            }
        };
        let mut attributes = common.clone();
        attributes.extend(isolation(tier));
        attributes.extend(over.into_iter().flat_map(oversubscribed::attributes));
        if let (Tier::Passthrough, Some(vfio)) = (tier, &gpu.vfio) {
            let group = int(i64::from(vfio.iommu_group));
            attributes.insert(attribute::IOMMU_GROUP.to_owned(), group);
        }
        offer.devices.push(Device {
            name: name(parent.prefix, whole, over).to_string(),
            attributes: Some(attributes),
            capacity: Some(capacity),
            allow_multiple_allocations: tier.is_shared().then_some(true),
            consumes_counters: Some(vec![parent.counters.consumption()]),
            taints: taints(inventory, tier, terms),
            ..Device::default()
        });
    }
    Ok(offer)
}

fn name(gpu: UuidPrefix, tier: WholeGpuTier, over: Option<Oversubscription>) -> DeviceName {
    match over {
        Some(over) => DeviceName::Oversubscribed { gpu, over },
        None => DeviceName::Gpu { gpu, tier },
    }
}

fn is_untested(inventory: &Inventory) -> bool {
    !inventory.unknown_functions.is_empty()
}

/// A vGPU is shared like a GPU: the driver in the virtual machine does caps and time slices. Only the host can divide
/// the GPU itself. MPS is left out because NVIDIA does not promise its limits for vGPUs.
fn works_in_guest(tier: Tier, gpu: &Gpu) -> Result<(), OfferError> {
    let why = match tier {
        _ if !gpu.is_vgpu() => return Ok(()),
        Tier::Exclusive | Tier::Capped | Tier::Timeshared => return Ok(()),
        Tier::Partition => "MIG mode and GPU instances can only be changed on its host",
        Tier::Passthrough => "the virtual machine that has it cannot give it to another one",
        Tier::Concurrent => "NVIDIA does not document MPS and its limits per client for vGPUs",
    };
    Err(OfferError::VgpuGuest { tier, why })
}

/// MPS has limits for each client on GPUs of compute capability 7.0 (Volta) and later. The node checks what VFIO needs.
fn supported(tier: Tier, gpu: &Gpu) -> Result<(), OfferError> {
    if tier == Tier::Passthrough {
        return match &gpu.vfio {
            None => Err(OfferError::NoIommu),
            Some(GpuVfio {
                obstacle: Some(why),
                ..
            }) => Err(OfferError::NoVfio(why.clone())),
            Some(_) => Ok(()),
        };
    }
    let capability = &gpu.cuda_compute_capability;
    let major = capability.split('.').next().unwrap_or_default();
    if tier == Tier::Concurrent && major.parse::<u32>().is_ok_and(|major| major < 7) {
        return Err(OfferError::NoMps {
            capability: capability.clone(),
        });
    }
    Ok(())
}

/// Functions that the shim does not know can bypass a cap only in tiers in which the shim enforces one.
fn taints(inventory: &Inventory, tier: Tier, terms: &Terms) -> Option<Vec<DeviceTaint>> {
    let escapes = is_untested(inventory) && tier.has_shim();
    (escapes && terms.capped.untested_driver == UntestedDriver::Taint)
        .then(|| vec![super::closed(taint::UNTESTED_DRIVER)])
}

/// A GPU's memory in bytes.
struct Memory {
    total: u64,
    reserved: u64,
}

impl Memory {
    fn read(gpu: &Gpu) -> Result<Self, OfferError> {
        let count = |field, amount: Quantity| {
            amount
                .to_count()
                .map_err(|problem| OfferError::Count { field, problem })
        };
        Ok(Self {
            total: count("memory", gpu.memory)?,
            reserved: count("reservedMemory", gpu.reserved_memory)?,
        })
    }

    /// The memory of all shares together: a multiple of the step, at least two steps.
    fn usable(&self, terms: &CappedTerms) -> Result<u64, OfferError> {
        let contexts = terms
            .context_memory
            .saturating_mul(u64::from(terms.expected_sharers));
        let free = self
            .total
            .saturating_sub(self.reserved)
            .saturating_sub(contexts);
        let usable = free - free % terms.memory_step;
        // The API requires that minimum plus step, which is two steps, is within the capacity.
        if usable / terms.memory_step < 2 {
            return Err(OfferError::NothingToShare {
                total: self.total,
                reserved: self.reserved,
                contexts,
                usable,
                step: terms.memory_step,
            });
        }
        Ok(usable)
    }
}

fn capacities(
    tier: WholeGpuTier,
    terms: &Terms,
    over: Option<Oversubscription>,
    memory: &Memory,
) -> Result<BTreeMap<String, DeviceCapacity>, OfferError> {
    let entries = match tier {
        WholeGpuTier::Capped => sized(&terms.capped, terms.capped.max_sharers, over, memory)?,
        WholeGpuTier::Concurrent => sized(&terms.capped, terms.concurrent_sharers, None, memory)?,
        // A timeshared device has no sizes, because nothing enforces them: a claim that asks for
        // memory or cores is never placed in a tier that would ignore it.
        WholeGpuTier::Timeshared => vec![
            (capacity::SHARERS, placements(terms.timeshared.max_sharers)),
            (capacity::ANTI_AFFINITY, anti_affinity()),
        ],
        WholeGpuTier::Exclusive | WholeGpuTier::Passthrough => vec![
            (capacity::MEMORY, plain(Quantity::from_bytes(memory.total))),
            (capacity::CORES, plain(Quantity::from_count(ALL_CORES))),
        ],
    };
    Ok(entries
        .into_iter()
        .map(|(name, capacity)| (name.to_owned(), capacity))
        .collect())
}

/// What shares with sizes have.
fn sized(
    terms: &CappedTerms,
    sharers: u32,
    over: Option<Oversubscription>,
    memory: &Memory,
) -> Result<Vec<(&'static str, DeviceCapacity)>, OfferError> {
    let usable = memory.usable(terms)?;
    let usable = over.map_or(usable, |over| over.memory(usable, terms.memory_step));
    let default = default_memory(terms, sharers, usable)?;
    let mut entries = vec![
        (
            capacity::MEMORY,
            ranged(
                Quantity::from_bytes(usable),
                Quantity::from_bytes(default),
                Quantity::from_bytes(terms.memory_step),
            ),
        ),
        (
            capacity::CORES,
            ranged(
                Quantity::from_count(ALL_CORES),
                Quantity::from_count(default_cores(terms, sharers)),
                Quantity::from_count(terms.cores_step.into()),
            ),
        ),
        (capacity::SHARERS, placements(sharers)),
        (capacity::ANTI_AFFINITY, anti_affinity()),
    ];
    if terms.context_memory > 0 {
        entries.push((capacity::CONTEXT_MEMORY, contexts(terms, sharers)));
    }
    Ok(entries)
}

fn plain(value: Quantity) -> DeviceCapacity {
    DeviceCapacity {
        value: value.into(),
        request_policy: None,
    }
}

/// Requests from one step up to everything, by steps.
fn ranged(value: Quantity, default: Quantity, step: Quantity) -> DeviceCapacity {
    DeviceCapacity {
        value: value.into(),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(default.into()),
            valid_range: Some(CapacityRequestPolicyRange {
                min: step.into(),
                max: Some(value.into()),
                step: Some(step.into()),
            }),
            valid_values: None,
        }),
    }
}

/// Sharers: every share takes exactly one.
fn placements(most: u32) -> DeviceCapacity {
    let one = Quantity::from_count(1);
    DeviceCapacity {
        value: Quantity::from_count(most.into()).into(),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(one.into()),
            valid_range: None,
            valid_values: Some(vec![one.into()]),
        }),
    }
}

/// One unit, which only one share at a time can have. Shares that do not ask for it take none.
fn anti_affinity() -> DeviceCapacity {
    let [none, one] = [0, 1].map(Quantity::from_count);
    DeviceCapacity {
        value: one.into(),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(none.into()),
            valid_range: None,
            valid_values: Some(vec![none.into(), one.into()]),
        }),
    }
}

/// Every share consumes the size of one context; its allocation contains that size.
fn contexts(terms: &CappedTerms, sharers: u32) -> DeviceCapacity {
    let one = Quantity::from_bytes(terms.context_memory);
    // `sharers` is the limit. Shares that were allocated before the node measured the size still count with the earlier
    // size, and must not displace others.
    let all = terms
        .context_memory
        .max(UNMEASURED_CONTEXT)
        .saturating_mul(u64::from(sharers));
    DeviceCapacity {
        value: Quantity::from_bytes(all).into(),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(one.into()),
            valid_range: None,
            valid_values: Some(vec![one.into()]),
        }),
    }
}

/// The policy's, or an equal part for every sharer.
fn default_memory(terms: &CappedTerms, sharers: u32, usable: u64) -> Result<u64, OfferError> {
    let Some(default) = terms.default_memory else {
        let part = usable / u64::from(sharers);
        return Ok((part - part % terms.memory_step).max(terms.memory_step));
    };
    if default > usable {
        return Err(OfferError::DefaultMemory { default, usable });
    }
    Ok(default)
}

/// The policy's, or an equal part for every sharer, but at least one step.
fn default_cores(terms: &CappedTerms, sharers: u32) -> u64 {
    let step = u64::from(terms.cores_step);
    terms.default_cores.map_or_else(
        || {
            let part = ALL_CORES / u64::from(sharers);
            (part - part % step).max(step)
        },
        u64::from,
    )
}

/// The GPU's attributes, which are the same in every tier.
fn attributes(
    inventory: &Inventory,
    gpu: &Gpu,
) -> Result<BTreeMap<String, DeviceAttribute>, AttributeError> {
    let mut attributes = BTreeMap::from([
        (attribute::TYPE, text("gpu")),
        (attribute::UUID, exact_text("uuid", &gpu.uuid)?),
        (attribute::MINOR, int(i64::from(gpu.minor))),
        (attribute::PRODUCT_NAME, text(&gpu.product_name)),
        (attribute::BRAND, text(&gpu.brand)),
        (attribute::ARCHITECTURE, text(&gpu.architecture)),
        (
            attribute::CUDA_COMPUTE_CAPABILITY,
            version("cudaComputeCapability", &gpu.cuda_compute_capability)?,
        ),
        (
            attribute::DRIVER_VERSION,
            version("driverVersion", &inventory.driver_version)?,
        ),
        (
            attribute::CUDA_DRIVER_VERSION,
            version("cudaDriverVersion", &inventory.cuda_driver_version)?,
        ),
        (
            attribute::PCI_BUS_ID,
            exact_text("pciBusID", &gpu.pci_bus_id)?,
        ),
        (attribute::UNTESTED_DRIVER, flag(is_untested(inventory))),
    ]);
    if let Some(index) = gpu.index {
        attributes.insert(attribute::INDEX, int(i64::from(index)));
    }
    if let Some(root) = &gpu.pcie_root {
        attributes.insert(attribute::PCIE_ROOT, exact_text("pcieRoot", root)?);
    }
    if let Some(node) = gpu.numa_node {
        attributes.insert(attribute::NUMA_NODE, int(i64::from(node)));
    }
    Ok(attributes
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect())
}

/// The tier's isolation.
fn isolation(tier: Tier) -> [(String, DeviceAttribute); 5] {
    [
        (attribute::ISOLATION, text(tier.as_str())),
        (attribute::ISOLATION_LEVEL, int(i64::from(tier.level()))),
        (
            attribute::MEMORY_ISOLATION,
            text(tier.memory_isolation().as_str()),
        ),
        (
            attribute::COMPUTE_ISOLATION,
            text(tier.compute_isolation().as_str()),
        ),
        (
            attribute::FAULT_ISOLATION,
            text(tier.fault_isolation().as_str()),
        ),
    ]
    .map(|(name, value)| (name.to_owned(), value))
}

fn flag(value: bool) -> DeviceAttribute {
    DeviceAttribute {
        bool: Some(value),
        ..DeviceAttribute::default()
    }
}

fn int(value: i64) -> DeviceAttribute {
    DeviceAttribute {
        int: Some(value),
        ..DeviceAttribute::default()
    }
}

/// A string for people; cut if it is longer than the API allows.
fn text(value: &str) -> DeviceAttribute {
    let end = (0..=LONGEST_VALUE.min(value.len()))
        .rev()
        .find(|end| value.is_char_boundary(*end))
        .unwrap_or_default();
    DeviceAttribute {
        string: Some(value[..end].to_owned()),
        ..DeviceAttribute::default()
    }
}

/// A string that identifies something, so it is never cut.
fn exact_text(field: &'static str, value: &str) -> Result<DeviceAttribute, AttributeError> {
    if value.len() > LONGEST_VALUE {
        return Err(AttributeError::TooLong {
            field,
            value: value.to_owned(),
        });
    }
    Ok(text(value))
}

/// A semantic version from NVIDIA's version: three numbers without leading zeros; the rest is dropped. `535.261.03`
/// becomes `535.261.3`, `12.2` becomes `12.2.0`.
fn version(field: &'static str, value: &str) -> Result<DeviceAttribute, AttributeError> {
    let refuse = || AttributeError::Version {
        field,
        value: value.to_owned(),
    };
    let end = value
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(value.len());
    let mut numbers = [0_u32; 3];
    let parts = value[..end].trim_end_matches('.').split('.');
    for (number, part) in numbers.iter_mut().zip(parts) {
        *number = part.parse().map_err(|_| refuse())?;
    }
    let [major, minor, patch] = numbers;
    Ok(DeviceAttribute {
        version: Some(format!("{major}.{minor}.{patch}")),
        ..DeviceAttribute::default()
    })
}
