//! Why slices cannot be planned.

use tranche_api::quantity::{CountError, Quantity};

use super::{AttributeError, MINORS, NodeNameError};
use crate::policy::PolicyError;

/// Why a node's slices cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The node's name is none, or too long for a pool's.
    #[error(transparent)]
    NodeName(#[from] NodeNameError),
    /// Two GPUs under one number or UUID.
    #[error("node {node}: two GPUs have the {field} {value}")]
    Twice {
        /// The node.
        node: String,
        /// The field of the inventory.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// A minor number that has no place in the order of names.
    #[error("node {node}, GPU {uuid}: the minor number {minor} must be below {MINORS}")]
    Minor {
        /// The node.
        node: String,
        /// The GPU.
        uuid: String,
        /// The number.
        minor: u32,
    },
    /// A policy that does not add up.
    #[error("node {node}, GPU {uuid}: {problem}")]
    Policy {
        /// The node.
        node: String,
        /// The GPU that it matches.
        uuid: String,
        /// Which, and why.
        problem: PolicyError,
    },
    /// A number in the inventory that is no count.
    #[error("node {node}, GPU {uuid}: {field} {problem}")]
    Count {
        /// The node.
        node: String,
        /// The GPU.
        uuid: String,
        /// The field of the inventory.
        field: &'static str,
        /// Why.
        problem: CountError,
    },
    /// What a policy keeps free leaves nothing to share.
    #[error(
        "node {node}, GPU {uuid}: of {} in total, {} reserved by the driver and {} for CUDA contexts leave {}, less than two steps of {}: lower contextMemory, expectedSharers or memoryStep in the SharingPolicy, or do not offer the tier capped for this GPU",
        Quantity::from_bytes(*total), Quantity::from_bytes(*reserved),
        Quantity::from_bytes(*contexts), Quantity::from_bytes(*usable), Quantity::from_bytes(*step)
    )]
    NothingToShare {
        /// The node.
        node: String,
        /// The GPU.
        uuid: String,
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
    /// A default that is more than there is.
    #[error(
        "node {node}, GPU {uuid}: defaultMemory {} of the SharingPolicy is more than the usable {}",
        Quantity::from_bytes(*default), Quantity::from_bytes(*usable)
    )]
    DefaultMemory {
        /// The node.
        node: String,
        /// The GPU.
        uuid: String,
        /// Bytes.
        default: u64,
        /// Bytes.
        usable: u64,
    },
    /// A fact of the GPU that does not fit into an attribute.
    #[error("node {node}, GPU {uuid}: {problem}")]
    Attribute {
        /// The node.
        node: String,
        /// The GPU.
        uuid: String,
        /// Which, and why.
        problem: AttributeError,
    },
}
