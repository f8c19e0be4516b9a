//! Why a GPU, or a tier of it, is not offered.

use std::collections::BTreeSet;

use tranche_api::Tier;
use tranche_api::pci_address::PciAddressError;
use tranche_api::quantity::{CountError, Quantity};
use tranche_api::withheld::reason;

use super::AttributeError;
use crate::gpu::GpuUuidError;
use crate::mig::{Geometry, GeometryError, Profile};
use crate::policy::PolicyError;

/// Why a GPU, or a tier of it, is not offered. The other GPUs of the node are offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum OfferError {
    /// Two GPUs under one UUID or PCI address.
    #[error("the node describes two GPUs with the {field} {value}: neither is offered")]
    Duplicate {
        /// The field of the inventory.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// An invalid UUID, from which no names can be made.
    #[error("uuid {0}")]
    Uuid(GpuUuidError),
    /// An invalid PCI address, which gives no order.
    #[error("pciBusID {0}")]
    PciAddress(PciAddressError),
    /// An invalid policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A number in the inventory that is not a count.
    #[error("{field} {problem}")]
    Count {
        /// The field of the inventory.
        field: &'static str,
        /// Why.
        problem: CountError,
    },
    /// The policy reserves so much that nothing is left to share.
    #[error(
        "of {} in total, {} reserved by the driver and {} for CUDA contexts leave {}, less than two steps of {}: lower contextMemory, expectedSharers or memoryStep in the SharingPolicy, or do not offer the tiers capped and concurrent for this GPU",
        Quantity::from_bytes(*total), Quantity::from_bytes(*reserved),
        Quantity::from_bytes(*contexts), Quantity::from_bytes(*usable), Quantity::from_bytes(*step)
    )]
    NothingToShare {
        /// Bytes.
        total: u64,
        /// Bytes.
        reserved: u64,
        /// Bytes.
        contexts: u64,
        /// Bytes.
        usable: u64,
        /// Bytes.
        step: u64,
    },
    /// A default that is larger than the usable memory.
    #[error(
        "defaultMemory {} of the SharingPolicy is more than the usable {}: lower it, or give this product a policy of its own",
        Quantity::from_bytes(*default), Quantity::from_bytes(*usable)
    )]
    DefaultMemory {
        /// Bytes.
        default: u64,
        /// Bytes.
        usable: u64,
    },
    /// MPS has limits for each client from Volta on.
    #[error(
        "its compute capability is {capability}, and MPS has limits per client from 7.0 (Volta) on: do not offer the tier concurrent for this GPU"
    )]
    NoMps {
        /// As in the inventory.
        capability: String,
    },
    /// Without an IOMMU a virtual machine's GPU could access all memory of the machine.
    #[error(
        "the GPU has no IOMMU group: switch the IOMMU on in the firmware and in the kernel's command line (`intel_iommu=on` or `amd_iommu=on`), or do not offer the tier passthrough for this GPU"
    )]
    NoIommu,
    /// The GPU cannot be given to a virtual machine.
    #[error("{0}; or do not offer the tier passthrough for this GPU")]
    NoVfio(String),
    /// The virtual machine that has a vGPU cannot divide it or give it away.
    #[error("the GPU is a vGPU: {why}; do not offer the tier {tier} for this GPU")]
    VgpuGuest {
        /// What is not offered.
        tier: Tier,
        /// Why.
        why: &'static str,
    },
    /// The driver cannot move memory of the GPU to the host.
    #[error(
        "memory of the GPU cannot be oversubscribed: {why}; give this GPU a policy without capped.memoryOversubscription"
    )]
    NotOversubscribed {
        /// Why.
        why: String,
    },
    /// MIG cannot divide the GPU, or its driver does not say how.
    #[error(
        "the driver does not report how MIG divides the GPU: it has no MIG, or its driver is too old"
    )]
    NotDivided,
    /// The driver's report about MIG is invalid.
    #[error("migGeometries: {0}")]
    Geometry(GeometryError),
    /// The GPU has none of the profiles that the policy offers.
    #[error(
        "the GPU has none of the SharingPolicy's {field}, {wanted}: add one of {has}, or {otherwise}"
    )]
    NoProfile {
        /// The policy's list.
        field: &'static str,
        /// What else can be done.
        otherwise: &'static str,
        /// Those of the policy.
        wanted: String,
        /// Those of the GPU.
        has: String,
    },
    /// A partition cannot be shared.
    #[error("shares of {profile}: {error}")]
    OnPartition {
        /// Its profile.
        profile: Profile,
        /// Why.
        error: Box<OfferError>,
    },
    /// An instance at a slice where its profile has no placement.
    #[error(
        "migInstances has a {profile} at slice {start}, where the driver says that none can be: no partition is offered while it is there"
    )]
    Instance {
        /// Its profile.
        profile: String,
        /// The first of its memory slices.
        start: u32,
    },
    /// MIG mode is off, and cannot be switched on without a reset.
    #[error(
        "MIG mode is off, and a GPU of the architecture {architecture} must be reset to switch it on: do so while nothing uses the GPU (`nvidia-smi -i {uuid} -mig 1`, then `nvidia-smi -i {uuid} --gpu-reset`), or do not offer the tier partition for this GPU"
    )]
    ModeOff {
        /// The GPU.
        uuid: String,
        /// As in the inventory.
        architecture: String,
    },
    /// A property of the GPU that does not fit into an attribute.
    #[error(transparent)]
    Attribute(#[from] AttributeError),
}

impl OfferError {
    /// The GPU has none of `wanted`, the profiles that the policy offers in the tier.
    pub(super) fn no_profile(tier: Tier, wanted: &BTreeSet<Profile>, geometry: &Geometry) -> Self {
        let (field, otherwise) = match tier {
            Tier::Capped => (
                "capped.onPartitions",
                "give this product a policy without capped.onPartitions",
            ),
            Tier::Concurrent => (
                "concurrent.onPartitions",
                "give this product a policy without concurrent.onPartitions",
            ),
            _ => (
                "partition.profiles",
                "do not offer the tier partition for this GPU",
            ),
        };
        let words = |profiles: &mut dyn Iterator<Item = Profile>| {
            let words: Vec<_> = profiles.map(|profile| profile.to_string()).collect();
            words.join(", ")
        };
        let mut has: Vec<_> = geometry.partitions.iter().map(|it| it.profile).collect();
        has.dedup();
        Self::NoProfile {
            field,
            otherwise,
            wanted: words(&mut wanted.iter().copied()),
            has: words(&mut has.into_iter()),
        }
    }

    /// The reason in the GpuNode's status.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Duplicate { .. } => reason::DUPLICATE,
            Self::Uuid(_) | Self::PciAddress(_) | Self::Count { .. } | Self::Attribute(_) => {
                reason::INVALID_DESCRIPTION
            }
            Self::Policy(_) => reason::INVALID_POLICY,
            Self::NothingToShare { .. } | Self::DefaultMemory { .. } => reason::TOO_SMALL,
            Self::NotDivided | Self::Geometry(_) | Self::Instance { .. } => reason::NOT_DIVIDED,
            Self::NoProfile { .. } => reason::NO_PROFILE,
            Self::NoMps { .. } => reason::NO_MPS,
            Self::NotOversubscribed { .. } => reason::NOT_OVERSUBSCRIBED,
            Self::NoIommu | Self::NoVfio(_) => reason::NO_VFIO,
            Self::ModeOff { .. } => reason::MIG_MODE,
            Self::VgpuGuest { .. } => reason::VGPU_GUEST,
            Self::OnPartition { error, .. } => error.reason(),
        }
    }

    /// Whether another SharingPolicy would solve it.
    pub(super) fn is_of_policy(&self) -> bool {
        match self {
            Self::Policy(_)
            | Self::NothingToShare { .. }
            | Self::DefaultMemory { .. }
            | Self::NoProfile { .. }
            | Self::NoMps { .. }
            | Self::NotOversubscribed { .. }
            | Self::NoIommu
            | Self::NoVfio(_)
            | Self::VgpuGuest { .. } => true,
            Self::OnPartition { error, .. } => error.is_of_policy(),
            Self::Duplicate { .. }
            | Self::Uuid(_)
            | Self::PciAddress(_)
            | Self::Count { .. }
            | Self::NotDivided
            | Self::Geometry(_)
            | Self::Instance { .. }
            | Self::ModeOff { .. }
            | Self::Attribute(_) => false,
        }
    }
}
