//! Attributes what NVML says of a GPU to claims, pods and containers.
//!
//! ```text
//!  NVML: memory, utilization, processes ─┐
//!  cgroups and mounts: a process's owner ┼─► attribute ─► GpuUsage, whose parts add up
//!  journals, kubelet: what is held, by whom ┘      ▲
//!  departed: whose processes died and left memory ─┘
//! ```
//!
//! A device's value is never changed, and no part is negative: where the parts are together more than the device, because they were not
//! read in the same instant, they are made smaller in proportion ([`apportion`]).

pub mod apportion;
mod attribute;
pub mod departed;
pub mod peaks;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use tranche_api::Tier;
use tranche_api::usage::{ClaimReference, Memory, Peak, Sensors, Utilization, Xids};

pub use attribute::attribute;

/// What NVML says of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuReading {
    /// `GPU-…`.
    pub uuid: String,
    /// Its number in NVML.
    pub index: Option<u32>,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// `dddd:bb:dd.f`.
    pub pci_bus_id: String,
    /// `nvmlDeviceGetName`.
    pub product_name: String,
    /// Whether it is in MIG mode.
    pub mig_mode: bool,
    /// The GPU as a whole, with the processes that are on none of its partitions.
    pub device: DeviceReading,
    /// What belongs to nobody.
    pub sensors: Sensors,
    /// Its errors, if NVML tells them.
    pub xids: Option<Xids>,
    /// Its MIG instances.
    pub partitions: Vec<PartitionReading>,
    /// Why NVML says nothing of it.
    pub problem: Option<String>,
}

/// What NVML says of a GPU as a whole, or of a MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReading {
    /// Its memory, if NVML tells it.
    pub memory: Option<Memory>,
    /// How busy it is.
    pub utilization: Utilization,
    /// The processes on it.
    pub processes: Vec<ProcessReading>,
}

/// A MIG instance that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionReading {
    /// `MIG-…`.
    pub uuid: String,
    /// As `1g.10gb`.
    pub profile: String,
    /// The id of its GPU instance.
    pub gpu_instance: u32,
    /// The id of its compute instance.
    pub compute_instance: u32,
    /// The instance.
    pub device: DeviceReading,
}

/// A process on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessReading {
    /// Bytes that it holds; 0 if NVML does not tell them.
    pub bytes: u64,
    /// How busy the device was for it, in hundredths of a percent; `None` if NVML does not tell it by process.
    pub busy: Option<u32>,
    /// The same for copies of its memory.
    pub copies: Option<u32>,
    /// Whose it is.
    pub owner: Owner,
}

/// Whose a process is, by its cgroup and mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A container's that has devices of claims.
    Claims {
        /// The devices' keys, at least one.
        keys: BTreeSet<String>,
        /// The UID of its pod, where its cgroup says.
        pod_uid: Option<String>,
        /// The container's name, where its mounts say.
        container: Option<String>,
    },
    /// No claim's on the device.
    Foreign,
    /// It has ended, and the driver is about to free its memory.
    Ended,
}

/// A device that a claim holds, or a share of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The device's key, which names it in owners.
    pub key: String,
    /// The claim.
    pub claim: ClaimReference,
    /// The request that it satisfies.
    pub request: String,
    /// The pool, as in the allocation.
    pub pool: String,
    /// The device, as in the slice.
    pub device: String,
    /// The share, as in the allocation.
    pub share_id: Option<String>,
    /// Its tier.
    pub tier: Tier,
    /// The MIG device that it is, or is a share of.
    pub partition: Option<String>,
    /// How much memory it may hold.
    pub limit: Limit,
    /// Bytes that the shim's account has, contexts included.
    pub account: Option<u64>,
    /// The most that its processes held until now, where it is known.
    pub peak: Option<Peak>,
    /// Seconds since a kernel of it was last seen.
    pub idle_seconds: Option<u64>,
    /// The containers that have it.
    pub users: Vec<User>,
}

/// How much memory a claim may hold of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// All of it: the claim has the device alone.
    Alone,
    /// So much, in bytes.
    Share {
        /// For its programs.
        allocated: u64,
        /// Beside it, for contexts.
        reserved: u64,
    },
    /// Whatever is free.
    Unlimited,
}

impl Limit {
    /// In which part a process that may use several devices of a GPU counts for this one.
    #[must_use]
    pub fn weight(self) -> u64 {
        match self {
            Self::Share {
                allocated,
                reserved,
            } => allocated.saturating_add(reserved).max(1),
            Self::Alone | Self::Unlimited => 1,
        }
    }
}

/// A container that has a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Its pod, in the claim's namespace.
    pub pod: Option<String>,
    /// The pod's UID.
    pub pod_uid: Option<String>,
    /// Its name.
    pub container: Option<String>,
    /// The kubelet does not know the pod any more.
    pub is_gone: bool,
}
