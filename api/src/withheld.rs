//! The GPUs of a node that are not offered, or not in all tiers, and why.
//!
//! ```text
//!  the node's plugin ─► GpuNode.status.withheld ─┐
//!  (lost, MIG mode, another provider, …)         ├─► GpuNode.status.published.withheld, events
//!  the controller: policy, sizes ────────────────┘
//! ```
//!
//! `status.withheld` has what the node found; the controller does not offer these GPUs, or these tiers of them.
//! `status.published.withheld` has everything that is not offered: what the node found, and what cannot be offered
//! because of a SharingPolicy or the GPU's own description.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::tier::Tier;

/// A GPU that is not offered, or not in all tiers of its SharingPolicy, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WithheldGpu {
    /// The GPU's UUID, or `index N` with its number in NVML if the driver does not report the UUID.
    pub gpu: String,
    /// The tiers that are not offered. An empty list means all tiers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<Tier>,
    /// The reason, one word in CamelCase.
    #[schemars(length(min = 1, max = 1024))]
    pub reason: String,
    /// The problem, and what to do about it.
    pub message: String,
    /// The SharingPolicy that must be changed. Absent if no policy must be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}

impl WithheldGpu {
    /// An entry for all tiers of a GPU.
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

    /// Whether the entry applies to this tier of this GPU.
    #[must_use]
    pub fn covers(&self, uuid: &str, tier: Tier) -> bool {
        self.gpu == uuid && (self.tiers.is_empty() || self.tiers.contains(&tier))
    }

    /// Whether the entry closes a device of this GPU. `tier` is the device's tier; `gpu_tier` is the tier that the GPU
    /// itself serves for the device. They differ for a share of a partition. An entry that closes a tier of the whole
    /// GPU does not close the shares of its partitions, unless its reason is the MPS daemon.
    #[must_use]
    pub fn closes(&self, uuid: &str, tier: Tier, gpu_tier: Tier) -> bool {
        let is_of_shares = self.reason == reason::MPS_DAEMON;
        self.covers(uuid, gpu_tier) || is_of_shares && self.covers(uuid, tier)
    }
}

/// The number of GPUs in a list.
#[must_use]
pub fn count(withheld: &[WithheldGpu]) -> u32 {
    let gpus: std::collections::BTreeSet<_> = withheld.iter().map(|entry| &entry.gpu).collect();
    u32::try_from(gpus.len()).unwrap_or(u32::MAX)
}

/// The reasons of a [`WithheldGpu`].
pub mod reason {
    vocabulary! {
        /// All of them.
        ALL;
        GPU_LOST = "GpuLost", "node", "": "The driver counts the GPU and cannot reach it (`NVML_ERROR_GPU_IS_LOST`): it fell off the bus or needs a reset.";
        DRIVER_HANGS = "DriverHangs", "node", "": "A call of the driver for the GPU, or the start of NVML, does not return. The GPU is offered again when the call returns.";
        NO_DEVICE_NODE = "NoDeviceNode", "node", "": "The host has no device node `/dev/nvidiaN` of the GPU, which a container needs.";
        LEFT_OVER = "LeftOver", "node", "": "Something of released claims is still on the GPU: an MPS daemon that its supervisor does not end, a GPU instance in use, a GPU that does not come back from VFIO.";
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
