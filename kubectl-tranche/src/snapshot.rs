//! What was read of a cluster at one time, and what could not be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::{Serialize, Serializer};
use tranche_api::{GpuNode, SharingPolicy};

/// A kind of object that commands read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// `gpunodes.gpu.tranche.dev`.
    GpuNodes,
    /// `sharingpolicies.gpu.tranche.dev`.
    SharingPolicies,
    /// `resourceslices.resource.k8s.io`, those of our driver.
    ResourceSlices,
    /// `resourceclaims.resource.k8s.io`.
    ResourceClaims,
    /// `deviceclasses.resource.k8s.io`.
    DeviceClasses,
    Pods,
    Nodes,
    /// The ConfigMap with the prices.
    Prices,
    /// `devicetaintrules.resource.k8s.io`.
    DeviceTaintRules,
    /// `resourceclaimtemplates.resource.k8s.io`.
    ResourceClaimTemplates,
    ResourceQuotas,
    /// `nodeusages.usage.gpu.tranche.dev`: in no snapshot, see [`crate::usage`].
    NodeUsages,
    /// `claimusages.usage.gpu.tranche.dev`: in no snapshot, see [`crate::usage`].
    ClaimUsages,
}

impl Resource {
    /// The name in RBAC and in `kubectl api-resources`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::GpuNodes => "gpunodes.gpu.tranche.dev",
            Self::SharingPolicies => "sharingpolicies.gpu.tranche.dev",
            Self::ResourceSlices => "resourceslices.resource.k8s.io",
            Self::ResourceClaims => "resourceclaims.resource.k8s.io",
            Self::DeviceClasses => "deviceclasses.resource.k8s.io",
            Self::Pods => "pods",
            Self::Nodes => "nodes",
            Self::Prices => "configmaps",
            Self::DeviceTaintRules => "devicetaintrules.resource.k8s.io",
            Self::ResourceClaimTemplates => "resourceclaimtemplates.resource.k8s.io",
            Self::ResourceQuotas => "resourcequotas",
            Self::NodeUsages => "nodeusages.usage.gpu.tranche.dev",
            Self::ClaimUsages => "claimusages.usage.gpu.tranche.dev",
        }
    }

    /// The verb with which it is read.
    #[must_use]
    pub const fn verb(self) -> &'static str {
        match self {
            Self::Prices => "get",
            _ => "list",
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Resource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Why something could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Cause {
    /// The caller lacks a right (403).
    Forbidden,
    /// The API server does not know the caller (401).
    Unauthenticated,
    /// The API server does not serve the resource (404).
    NotServed,
    /// The API server could not be reached, or did not answer in time.
    Unreachable,
    /// The objects are of a version that this release cannot read.
    Unreadable,
    /// The API server gave another error.
    Refused,
}

/// A resource that could not be read, or only in one namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gap {
    pub resource: Resource,
    pub cause: Cause,
    /// Whether one namespace of it was read.
    pub is_partial: bool,
    /// One line: what is missing and how to get it.
    pub message: String,
}

/// The namespaces whose claims and pods were read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    #[default]
    All,
    Namespace(String),
}

impl Scope {
    /// Whether it contains the namespace.
    #[must_use]
    pub fn has(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Namespace(name) => name == namespace,
        }
    }
}

/// The objects that a command asked for. The lists of other resources, and of those in [`Self::gaps`], are empty.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub asked: BTreeSet<Resource>,
    pub gpu_nodes: Vec<GpuNode>,
    pub policies: Vec<SharingPolicy>,
    /// ResourceSlices of our driver.
    pub slices: Vec<ResourceSlice>,
    /// ResourceClaims, of any driver.
    pub claims: Vec<ResourceClaim>,
    /// DeviceClasses, of any driver.
    pub classes: Vec<DeviceClass>,
    pub pods: Vec<Pod>,
    pub nodes: Vec<Node>,
    /// `data` of the ConfigMap with the prices; `None` where there is none.
    pub prices: Option<BTreeMap<String, String>>,
    /// What could not be read.
    pub gaps: Vec<Gap>,
    /// The namespaces of `claims` and `pods`.
    pub scope: Scope,
}

impl Snapshot {
    /// Why a resource could not be read.
    #[must_use]
    pub fn gap(&self, resource: Resource) -> Option<&Gap> {
        self.gaps.iter().find(|gap| gap.resource == resource)
    }

    /// A gap that prevents any true result: the API server does not answer, the cluster has no Tranche, or the claims cannot be
    /// read, so that GPUs in use would look free.
    #[must_use]
    pub fn obstacle(&self) -> Option<&Gap> {
        let is_obstacle = |gap: &&Gap| match (gap.resource, gap.cause) {
            (_, Cause::Unreachable | Cause::Unauthenticated)
            | (Resource::GpuNodes | Resource::ResourceSlices, Cause::NotServed) => true,
            (Resource::ResourceClaims, _) => !gap.is_partial,
            _ => false,
        };
        self.gaps.iter().find(is_obstacle)
    }
}
