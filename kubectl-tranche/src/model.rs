//! Nodes and their GPUs, with what is allocated and what is free: a pure function of what was read.
//!
//! ```text
//!  ResourceSlices ─► devices ─► the GPU, tier and amounts of each device
//!  ResourceClaims ─► claims ──► what each claim waits for or holds
//!  GpuNodes ───────► gpus ────► Node ─► Gpu ─► AllocatedDevice ─► Tenant (a claim's part of it)
//!                                          └─► room: what is free, what is stranded
//! ```
//!
//! The snapshot lacks objects that cannot be read, and the model uses the other objects: without GpuNodes, it knows GPUs from
//! their slices; without slices, from what the node wrote into the claims.

mod amounts;
mod claims;
mod devices;
mod gpus;
mod room;

use std::collections::BTreeMap;

use serde::Serialize;
use tranche_api::Tier;
use tranche_api::withheld::WithheldGpu;

use crate::snapshot::Snapshot;
use crate::usage::{self, Part, PartUsed, Used};

pub use amounts::Amounts;
pub use claims::{Claim, ClaimDevice, State, Want, wants_of_ours};
pub use devices::Devices;
pub use room::{Room, SharesRoom, SlicesRoom};

/// The GPUs of a cluster and the claims on them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// The nodes with GPUs, by name.
    pub nodes: Vec<Node>,
    /// The claims that request or have devices of ours, by namespace and name.
    pub claims: Vec<Claim>,
    /// Why the use of GPUs is not known; `None` where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage_unknown: Option<String>,
}

/// A node with GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    pub name: String,
    /// The GPU driver's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin_version: Option<String>,
    /// The messages of its conditions that are false, and the problem of its slices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Its GPUs, by PCI address.
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// `GPU-…`.
    pub uuid: String,
    /// Its number in `nvidia-smi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// The product, as NVML names it; empty where it is not known.
    pub product: String,
    pub pci_bus_id: String,
    /// All of its memory, bytes; 0 where it is not known.
    pub memory: u64,
    /// The tier that it serves now; `None` where no claim has any of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// The tiers in which it is offered.
    pub offered: Vec<Tier>,
    /// Its allocated devices, by name.
    pub held: Vec<AllocatedDevice>,
    /// What is free of it.
    pub room: Room,
    /// What of it is not offered, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub withheld: Vec<WithheldGpu>,
    /// What of it is used now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
}

/// An allocated device: a whole GPU, a partition, or a GPU or partition that shares divide.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedDevice {
    /// Its name, as in the slice.
    pub device: String,
    /// The tier in which it is allocated.
    pub tier: Tier,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// A partition's first memory slice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slice: Option<u8>,
    /// A partition's compute slices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_slices: Option<u8>,
    /// Its memory for all tenants together, bytes; 0 where it is not known or has no limit.
    pub memory: u64,
    /// What is free of it, where claims share it by sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub room: Option<SharesRoom>,
    /// The claims that have it, by namespace and name.
    pub tenants: Vec<Tenant>,
}

/// A claim's part of a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Tenant {
    pub namespace: String,
    pub claim: String,
    pub uid: String,
    /// The pods for which it is reserved.
    pub pods: Vec<String>,
    #[serde(flatten)]
    pub device: ClaimDevice,
    /// What of it is used now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
    /// The same by pod, where several pods share the claim and their use is known.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub used_by_pod: BTreeMap<String, Used>,
}

impl Model {
    /// The model of what was read, with the use where it is known.
    #[must_use]
    pub fn new(snapshot: &Snapshot, usage: &usage::UsageResult) -> Self {
        let devices = Devices::read(&snapshot.slices);
        let claims = claims::read(snapshot, &devices);
        let nodes = gpus::nodes(snapshot, &devices, &claims, usage.as_ref().ok());
        Self {
            nodes,
            claims,
            usage_unknown: usage.as_ref().err().cloned(),
        }
    }

    /// All GPUs, each with its node.
    pub fn gpus(&self) -> impl Iterator<Item = (&Node, &Gpu)> {
        let nodes = self.nodes.iter();
        nodes.flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)))
    }
}

impl AllocatedDevice {
    /// Its tenants, without those with admin access.
    pub fn holders(&self) -> impl Iterator<Item = &Tenant> {
        let tenants = self.tenants.iter();
        tenants.filter(|tenant| !tenant.device.is_admin)
    }
}

impl Tenant {
    /// The key of its use.
    #[must_use]
    pub fn part(&self) -> Part {
        Part {
            node: self.device.node.clone(),
            claim: self.uid.clone(),
            device: self.device.device.clone(),
            share: self.device.share_id.clone(),
        }
    }

    fn set_used(&mut self, used: &PartUsed) {
        self.used = Some(used.all);
        if self.pods.len() > 1 {
            self.used_by_pod.clone_from(&used.pods);
        }
    }

    /// What one of its pods uses.
    #[must_use]
    pub fn used_by(&self, pod: &str) -> Option<Used> {
        if self.pods.len() > 1 {
            self.used_by_pod.get(pod).copied()
        } else {
            self.used
        }
    }
}

impl Gpu {
    /// The claims with admin access.
    pub fn observers(&self) -> impl Iterator<Item = &Tenant> {
        let tenants = self.held.iter().flat_map(|held| &held.tenants);
        tenants.filter(|tenant| tenant.device.is_admin)
    }

    /// Why none of it is offered: one word in CamelCase.
    #[must_use]
    pub fn withheld_whole(&self) -> Option<&str> {
        let mut whole = self.withheld.iter().filter(|it| it.tiers.is_empty());
        whole.next().map(|it| it.reason.as_str())
    }

    /// All tenants, without those with admin access.
    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.held.iter().flat_map(AllocatedDevice::holders)
    }

    /// The UUID's first digits, as in the names of its devices: `GPU-4d8c1f9e`.
    #[must_use]
    pub fn short(&self) -> &str {
        short(&self.uuid)
    }
}

/// A UUID's prefix and first group: `GPU-4d8c1f9e`, `MIG-2b1f4a4e`.
#[must_use]
pub fn short(uuid: &str) -> &str {
    uuid.get(..12).unwrap_or(uuid)
}

#[cfg(test)]
mod tests;
