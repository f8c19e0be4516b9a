//! Why a claim is refused.

use tranche_api::Tier;
use tranche_api::names::DRIVER;
use tranche_api::quantity::{self, CountError};
use tranche_api::share_config;

use super::DeviceNameError;

/// Why a claim cannot be prepared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claim {namespace}/{name}: {problem}")]
pub struct ClaimError {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// What is wrong with it.
    pub problem: ClaimProblem,
}

/// What is wrong with a claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimProblem {
    /// No UID, or one that cannot be a file name.
    #[error("metadata.uid {uid:?} is not a UID")]
    Uid {
        /// What is there.
        uid: String,
    },
    /// The name now belongs to another claim.
    #[error(
        "metadata.uid is {found}, not {expected}: the claim was deleted and another took its name; delete the pod that waits for the old one"
    )]
    Replaced {
        /// The UID that was asked for.
        expected: String,
        /// The UID that was found.
        found: String,
    },
    /// Nothing is allocated.
    #[error("status.allocation is missing: the claim is not allocated, or not any more")]
    NotAllocated,
    /// Nothing is allocated on this node.
    #[error(
        "status.allocation.devices.results has nothing of driver {DRIVER} in pool {pool}: the claim is allocated elsewhere"
    )]
    NothingHere {
        /// This node's pool.
        pool: String,
    },
    /// A result is wrong.
    #[error("request {request}, device {device}: {problem}")]
    Device {
        /// The request that it satisfies.
        request: String,
        /// The device's name.
        device: String,
        /// What is wrong with it.
        problem: DeviceProblem,
    },
    /// Parameters are wrong.
    #[error("status.allocation.devices.config[{index}] ({origin}): {problem}")]
    Config {
        /// The position among all configs of the allocation.
        index: usize,
        /// `FromClass` or `FromClaim`.
        origin: String,
        /// What is wrong with them.
        problem: ConfigProblem,
    },
}

/// What is wrong with an allocation result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceProblem {
    /// The name is not one of ours.
    #[error(transparent)]
    Name(#[from] DeviceNameError),
    /// The claim asks for an amount that no share can have.
    #[error("the claim's capacity.requests[{capacity}] is {found}, must be {expected}")]
    Request {
        /// The capacity's name.
        capacity: &'static str,
        /// What is there.
        found: String,
        /// What may be there.
        expected: String,
    },
    /// A share without a UUID.
    #[error(
        "shareID is missing, though the tier {tier} is shared: is the feature gate DRAConsumableCapacity off?"
    )]
    NoShareId {
        /// The device's tier.
        tier: Tier,
    },
    /// A shareID for a tier that is not shared.
    #[error("shareID {share_id} is set, though the tier {tier} is not shared")]
    UnexpectedShare {
        /// The device's tier.
        tier: Tier,
        /// What is there.
        share_id: String,
    },
    /// A share without a size.
    #[error(
        "consumedCapacity[{capacity}] is missing: is the feature gate DRAConsumableCapacity off?"
    )]
    NoCapacity {
        /// The capacity's name.
        capacity: &'static str,
    },
    /// A size that cannot be read.
    #[error("consumedCapacity[{capacity}] {problem}")]
    NoQuantity {
        /// The capacity's name.
        capacity: &'static str,
        /// Why.
        problem: quantity::ParseError,
    },
    /// A size that is negative, a fraction or too large.
    #[error("consumedCapacity[{capacity}] {problem}")]
    NoCount {
        /// The capacity's name.
        capacity: &'static str,
        /// Why.
        problem: CountError,
    },
    /// A size that is out of range.
    #[error("consumedCapacity[{capacity}] is {found}, must be {expected}")]
    OutOfRange {
        /// The capacity's name.
        capacity: &'static str,
        /// What is there.
        found: u64,
        /// What may be there.
        expected: &'static str,
    },
}

/// What is wrong with parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigProblem {
    /// They cannot be decoded.
    #[error("opaque.parameters: {0}")]
    Parameters(#[from] share_config::DecodeError),
    /// A source of configs whose precedence is unknown.
    #[error("source is unknown, must be FromClass or FromClaim")]
    Source,
}
