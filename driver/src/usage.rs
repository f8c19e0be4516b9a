//! Attributes NVML's values of a GPU to claims, pods and containers.
//!
//! ```text
//!  NVML: memory, utilization, processes ─┐
//!  cgroups and mounts: a process's owner ┼─► attribute ─► GpuUsage, whose parts add up
//!  journals, kubelet: what is held, by whom ┘      ▲
//!  departed: whose processes died and left memory ─┘
//! ```
//!
//! A device's value is never changed, and no part is negative. If the parts together exceed the device, because they
//! were not read at the same instant, they are reduced in proportion ([`apportion`]).

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

/// What NVML reports about one GPU.
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
    /// Values that belong to nobody.
    pub sensors: Sensors,
    /// Its errors, if NVML reports them.
    pub xids: Option<Xids>,
    /// Its MIG instances.
    pub partitions: Vec<PartitionReading>,
    /// Why NVML reports nothing about it.
    pub problem: Option<String>,
}

/// What NVML reports about a GPU as a whole, or about a MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReading {
    /// Its memory, if NVML reports it.
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
    /// Its values.
    pub device: DeviceReading,
}

/// A process on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessReading {
    /// Bytes that it holds; 0 if NVML does not report them.
    pub bytes: u64,
    /// How busy the device was for it, in hundredths of a percent; `None` if NVML does not report it by process.
    pub busy: Option<u32>,
    /// The same for copies of its memory.
    pub copies: Option<u32>,
    /// Its owner.
    pub owner: Owner,
}

/// The owner of a process, by its cgroup and mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A container that has devices of claims.
    Claims {
        /// The devices' keys, at least one.
        keys: BTreeSet<String>,
        /// The UID of its pod, if its cgroup names it.
        pod_uid: Option<String>,
        /// The container's name, if its mounts name it.
        container: Option<String>,
    },
    /// No claim on the device.
    Foreign,
    /// It has ended, and the driver is about to free its memory.
    Ended,
}

/// A device that a claim holds, or a share of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldDevice {
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
    /// The MIG device of the partition or of the share.
    pub partition: Option<String>,
    /// How much memory it may hold.
    pub limit: Limit,
    /// Bytes in the shim's account, contexts included.
    pub account: Option<u64>,
    /// The most that its processes have held, if that is known.
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
    /// This much, in bytes.
    Share {
        /// For its programs.
        allocated: u64,
        /// In addition, for contexts.
        reserved: u64,
    },
    /// All memory that is free.
    Unlimited,
}

impl Limit {
    /// The weight of this device for a process that may use several devices of a GPU.
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
    /// The kubelet no longer knows the pod.
    pub is_gone: bool,
}
