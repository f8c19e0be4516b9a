//! The verdict about claims on a node, and its reasons.

use std::collections::BTreeMap;

use serde::Serialize;
use tranche_api::Quantity;

use super::problem::Problem;

/// Whether a node has devices for the claims of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// What the scheduler would allocate on this node: for each claim, its devices.
    Fits(Vec<Vec<Granted>>),
    /// The node does not have the devices.
    DoesNotFit,
    /// No verdict.
    Problem(Problem),
}

/// A device of an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Granted {
    /// `request`, or `request/alternative`.
    pub request: String,
    /// The device.
    #[serde(flatten)]
    pub device: DeviceId,
    /// Whether it is a share of the device.
    pub share: bool,
    /// What a share takes of the capacities.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub consumed: BTreeMap<String, Quantity>,
}

/// A device in the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceId {
    /// The driver's name.
    pub driver: String,
    /// The driver's pool.
    pub pool: String,
    /// The name in the pool.
    pub device: String,
}

/// What a node has for the claims of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether the claims fit.
    pub verdict: Verdict,
    /// Pools whose devices are not allocated at present.
    pub pools: Vec<PoolProblem>,
    /// Each request, and each alternative of one, with every device.
    pub requests: Vec<RequestReport>,
}

/// A pool whose devices are not allocated at present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolProblem {
    /// The driver's name.
    pub driver: String,
    /// The pool.
    pub pool: String,
    /// Why, as a sentence without its end.
    pub why: String,
}

/// What a node has for a request or an alternative.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestReport {
    /// The claim: `namespace/name`.
    pub claim: String,
    /// `request`, or `request/alternative`.
    pub request: String,
    /// The DeviceClass.
    pub class: String,
    /// How many devices; `None` for all.
    pub count: Option<usize>,
    /// The requested amounts of capacities.
    pub asks: BTreeMap<String, Quantity>,
    /// The node's devices in the order in which they are tried.
    pub devices: Vec<DeviceReport>,
}

/// Whether a request can get a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceReport {
    /// The device.
    #[serde(flatten)]
    pub device: DeviceId,
    /// Why the request does not get it; `None` if it would get it as the pod's only request.
    pub obstacle: Option<Obstacle>,
}

/// Why a request does not get a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(
    tag = "reason",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum Obstacle {
    /// A claim has the whole device.
    InUse {
        /// Who has it.
        holders: Vec<Holder>,
    },
    /// The DeviceClass does not select it.
    NotOfClass {
        /// The class's selector that is false.
        selector: String,
    },
    /// The request's selector is false.
    NotSelected {
        /// The selector.
        selector: String,
    },
    /// The device is for other nodes.
    OtherNode,
    /// The device does not have a capacity that the request names.
    NoSuchCapacity {
        /// The capacity.
        capacity: String,
    },
    /// The device's request policy does not allow the amount.
    AgainstPolicy {
        /// The capacity.
        capacity: String,
        /// The amount.
        wanted: Quantity,
        /// The most that is allowed.
        most: Option<Quantity>,
    },
    /// The request takes more than is left.
    TooLittle {
        /// The capacity.
        capacity: String,
        /// What the request takes: rounded up, or the default.
        wanted: Quantity,
        /// What is left.
        left: Quantity,
        /// What the device has.
        total: Quantity,
        /// The claims that have the rest.
        holders: Vec<Holder>,
    },
    /// Other devices of the same GPU are in use and take counters that this one needs.
    Counters {
        /// The set of counters, one for each GPU.
        counter_set: String,
        /// The counter that is short.
        counter: String,
        /// What the device takes.
        wanted: Quantity,
        /// What is left; below zero if more is in use than there is.
        left: Quantity,
        /// The claims whose devices take it.
        holders: Vec<Holder>,
    },
    /// A taint that the request does not tolerate.
    Taint {
        /// Its key.
        key: String,
        /// Its value.
        #[serde(skip_serializing_if = "Option::is_none")]
        value: Option<String>,
        /// `NoSchedule` or `NoExecute`.
        effect: String,
        /// The DeviceTaintRule that it comes from, as [`name_taint_rules`](super::name_taint_rules) finds it.
        #[serde(skip_serializing_if = "Option::is_none")]
        rule: Option<String>,
    },
    /// The device alone breaks a constraint of the claim: it does not have the attribute.
    Constraint {
        /// As the claim has it.
        constraint: String,
    },
}

impl Obstacle {
    /// The claims whose release may remove it.
    #[must_use]
    pub fn holders(&self) -> &[Holder] {
        match self {
            Self::InUse { holders }
            | Self::TooLittle { holders, .. }
            | Self::Counters { holders, .. } => holders,
            _ => &[],
        }
    }

    /// Whether the device is not of the requested kind.
    #[must_use]
    pub fn is_another_kind(&self) -> bool {
        matches!(
            self,
            Self::NotOfClass { .. } | Self::NotSelected { .. } | Self::OtherNode
        )
    }
}

/// A claim that has a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// `namespace/name`.
    pub claim: String,
    /// The device in the same pool.
    pub device: String,
    /// What it takes of the capacity or of the counter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amount: Option<Quantity>,
}

/// Claims whose release would make a pod fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Release {
    /// `namespace/name` of each.
    pub claims: Vec<String>,
    /// Whether no smaller set does it on this node: the search is bounded.
    pub smallest: bool,
}
