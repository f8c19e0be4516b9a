//! What a node has and does not offer, and why.
//!
//! ```text
//!  the node's plugin ─► GpuNode.status.withheld ─┐
//!  (lost, MIG mode, another provider, …)         ├─► GpuNode.status.published.withheld, events
//!  the controller: policy, sizes ────────────────┘
//! ```
//!
//! `status.withheld` is what the node found; the controller offers nothing of these GPUs. `status.published.withheld`
//! is everything that is not offered: what the node found, and what a SharingPolicy or the GPU's own description rules
//! out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::tier::Tier;

/// A GPU of the node of which not everything is offered that the policy asks for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WithheldGpu {
    /// The GPU's UUID; `index N` (as NVML counts) where the driver does not tell the UUID.
    pub gpu: String,
    /// The tiers that are not offered; all of them where empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<Tier>,
    /// One word for the cause, in CamelCase.
    #[schemars(length(min = 1, max = 1024))]
    pub reason: String,
    /// What is wrong and what to do about it.
    pub message: String,
    /// The SharingPolicy that has to change, where one has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}

impl WithheldGpu {
    /// All tiers of a GPU.
    #[must_use]
    pub fn whole(gpu: &str, reason: &str, message: String) -> Self {
        Self {
            gpu: gpu.to_owned(),
            tiers: Vec::new(),
            reason: reason.to_owned(),
            message,
            policy: None,
        }
    }

    /// Whether the entry speaks of this tier of this GPU.
    #[must_use]
    pub fn covers(&self, uuid: &str, tier: Tier) -> bool {
        self.gpu == uuid && (self.tiers.is_empty() || self.tiers.contains(&tier))
    }

    /// Whether the entry closes a device of this GPU: one of the tier `tier`, for which the GPU itself serves
    /// `gpu_tier`. The two differ for a share of a partition. An entry that closes a tier of the whole GPU does not
    /// close the shares of its partitions, except for the MPS daemon.
    #[must_use]
    pub fn closes(&self, uuid: &str, tier: Tier, gpu_tier: Tier) -> bool {
        let is_of_shares = self.reason == reason::MPS_DAEMON;
        self.covers(uuid, gpu_tier) || is_of_shares && self.covers(uuid, tier)
    }
}

/// How many GPUs a list speaks of.
#[must_use]
pub fn count(withheld: &[WithheldGpu]) -> u32 {
    let gpus: std::collections::BTreeSet<_> = withheld.iter().map(|entry| &entry.gpu).collect();
    u32::try_from(gpus.len()).unwrap_or(u32::MAX)
}

/// Reasons of a [`WithheldGpu`].
pub mod reason {
    vocabulary! {
        /// All of them.
        ALL;
        GPU_LOST = "GpuLost", "node", "": "The driver counts the GPU and cannot reach it (`NVML_ERROR_GPU_IS_LOST`): it fell off the bus or needs a reset.";
        NOT_DESCRIBED = "NotDescribed", "node", "": "An NVML call that describes the GPU failed.";
        MIG_MODE = "MigMode", "node, controller", "": "The GPU is in MIG mode, or will be after its next reset: it cannot be offered whole. Or it is not in MIG mode and must be reset to be: it has no partitions.";
        UNOWNED_MEMORY = "UnownedMemory", "node", "": "Memory of the GPU is in use by no process, so that it is not there for a new claim.";
        OTHER_PROVIDER = "OtherProvider", "node", "": "NVIDIA's device plugin, NVIDIA's DRA driver or HAMi on this node offers the same GPU.";
        NOT_DIVIDED = "NotDivided", "controller", "": "The tier `partition` is not offered, because the driver does not report how MIG divides the GPU.";
        NO_PROFILE = "NoProfile", "controller", "": "The tier `partition` is not offered, because MIG can make none of the profiles that the SharingPolicy's `partition.profiles` names.";
        NO_MPS = "NoMps", "controller", "": "The tier `concurrent` is not offered, because the GPU is older than Volta: its MPS has no limits per client.";
        NO_VFIO = "NoVfio", "controller", "": "The tier `passthrough` is not offered, because no virtual machine can get the GPU: there is no IOMMU, its group has another device, or VFIO is not loaded.";
        VGPU_GUEST = "VgpuGuest", "node, controller", "": "The GPU is a vGPU, and the tier does not work in the virtual machine that has it: only its host divides it or gives it away, and NVIDIA does not document MPS for it.";
        VGPU_HOST = "VgpuHost", "node", "": "vGPUs of the GPU exist, which keep memory of it whether they are used or not, or its driver is for vGPUs only and has no CUDA. Or its virtual functions are on: it cannot be given to a virtual machine as a whole. Tranche serves no vGPUs.";
        MPS_DAEMON = "MpsDaemon", "node", "": "The tier `concurrent` is not offered while the MPS daemon of the GPU, or of one of its partitions, does not answer.";
        NOT_OVERSUBSCRIBED = "NotOversubscribed", "controller", "": "The tier `capped` is not offered, because the SharingPolicy oversubscribes memory and the driver cannot move this GPU's: it is a vGPU, or older than Pascal.";
        DUPLICATE = "Duplicate", "controller", "": "The node describes two GPUs under one UUID or PCI address.";
        INVALID_DESCRIPTION = "InvalidDescription", "controller", "": "A fact about the GPU has no place in a ResourceSlice.";
        INVALID_POLICY = "InvalidPolicy", "controller", "": "The SharingPolicy that matches the GPU is invalid.";
        TOO_SMALL = "TooSmall", "controller", "": "The GPU has too little memory for the tier under the SharingPolicy that matches it.";
    }
}
