//! `NodeUsage`: who uses which part of a node's GPUs now. The node's plugin serves it as JSON at [`PATH`] to clients
//! that may read `/metrics`, which shows the same numbers.
//!
//! ```text
//!  NodeUsage ─► GpuUsage ─┬─► ShareUsage ─► GroupUsage      what a claim has and uses of the GPU, by pod and container
//!                         ├─► PartitionUsage ─► the same    a MIG instance counts as a device
//!                         └─► Remainder ─► Zombie           what is in use and belongs to no claim
//! ```
//!
//! **All parts add up.** For memory and for each measure of utilization, a GPU's value is the sum of the values of its
//! shares, of its partitions (only for memory: a partition's utilization is in parts of the partition) and of its
//! remainder; the value of a share is the sum of its groups'. The values come from NVML and the processes' cgroups,
//! never from what a tenant's program says, unless a field says so.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::tier::Tier;

/// The path at which a plugin serves its node's usage, beside `/metrics`.
pub const PATH: &str = "/usage";

/// The value of a [`Utilization`] that stands for 100 percent.
pub const WHOLE: u32 = 10_000;

/// Who uses which part of a node's GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeUsage {
    /// The node's name.
    pub node: String,
    /// The driver's version (`nvmlSystemGetDriverVersion`). Absent while there is no driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// When NVML was read: Unix time in milliseconds. It may be some seconds old if no claim holds a GPU of the node.
    pub unix_millis: u64,
    /// The GPUs, in the order of their PCI addresses, including those that nobody uses.
    pub gpus: Vec<GpuUsage>,
}

/// One physical GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuUsage {
    /// The GPU's UUID, `GPU-…`.
    pub uuid: String,
    /// The GPU's number in NVML and `nvidia-smi`. Absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// The GPU's minor number, the N of `/dev/nvidiaN`.
    pub minor: u32,
    /// The PCI address, `dddd:bb:dd.f` in lower case, as in sysfs.
    #[serde(rename = "pciBusID")]
    pub pci_bus_id: String,
    /// The product name (`nvmlDeviceGetName`).
    pub product_name: String,
    /// Whether the GPU is in MIG mode.
    #[serde(default)]
    pub mig_mode: bool,
    /// Its memory. Absent if NVML does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// How busy it is.
    #[serde(default, skip_serializing_if = "Utilization::is_empty")]
    pub utilization: Utilization,
    /// Values that exist once for each GPU and belong to no claim: clocks, temperature, power, errors.
    #[serde(default)]
    pub sensors: Sensors,
    /// Its errors by the driver's numbers (Xids), since the plugin's start and while a claim held a GPU of the node.
    /// Absent if the driver does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xids: Option<Xids>,
    /// The claims that hold the GPU or a share of it, and what they use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<ShareUsage>,
    /// Its MIG instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<PartitionUsage>,
    /// The usage of the GPU that belongs to no claim.
    #[serde(default)]
    pub remainder: Remainder,
    /// Why NVML reports nothing about the GPU. Absent if NVML answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl GpuUsage {
    /// The shares of the GPU itself and of its partitions.
    pub fn all_shares(&self) -> impl Iterator<Item = &ShareUsage> {
        let on_partitions = self.partitions.iter().flat_map(|it| &it.shares);
        self.shares.iter().chain(on_partitions)
    }
}

/// Memory of a GPU or of a MIG instance in bytes (`nvmlDeviceGetMemoryInfo_v2`): `total` is the sum of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// All memory of the device.
    pub total: u64,
    /// The memory that the driver reserves.
    pub reserved: u64,
    /// The memory that is allocated.
    pub used: u64,
    /// The memory that can be allocated.
    pub free: u64,
}

/// What a utilization measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Measure {
    /// Time in which a kernel ran (`nvmlUtilization_t.gpu`; of a process `smUtil`).
    Gpu,
    /// Time in which the device's memory was read or written (`nvmlUtilization_t.memory`; of a process `memUtil`).
    MemoryCopy,
    /// Time in which the graphics or compute engine was active (`NVML_GPM_METRIC_GRAPHICS_UTIL`).
    GraphicsActive,
    /// Time in which a multiprocessor had a warp, averaged over all of them (`NVML_GPM_METRIC_SM_UTIL`).
    SmActive,
    /// The number of resident warps, relative to the maximum (`NVML_GPM_METRIC_SM_OCCUPANCY`).
    SmOccupancy,
    /// Cycles in which a tensor core was active (`NVML_GPM_METRIC_ANY_TENSOR_UTIL`).
    TensorActive,
    /// Cycles in which the memory interface was active (`NVML_GPM_METRIC_DRAM_BW_UTIL`).
    DramActive,
}

impl Measure {
    /// All measures.
    pub const ALL: [Self; 7] = [
        Self::Gpu,
        Self::MemoryCopy,
        Self::GraphicsActive,
        Self::SmActive,
        Self::SmOccupancy,
        Self::TensorActive,
        Self::DramActive,
    ];
}

/// How busy something is, in hundredths of a percent of its device: 0 to [`WHOLE`]. A measure that the driver does not
/// report is missing.
///
/// `gpu` and `memoryCopy` are averages over the last ten seconds, the others since the last reading. NVML reports only
/// these two by process. The others are divided among the users of a device in proportion to `gpu`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Utilization(pub BTreeMap<Measure, u32>);

impl Utilization {
    /// The value of a measure, if it is known.
    #[must_use]
    pub fn get(&self, measure: Measure) -> Option<u32> {
        self.0.get(&measure).copied()
    }

    /// Whether no measure is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(Measure, u32)> for Utilization {
    fn from_iter<T: IntoIterator<Item = (Measure, u32)>>(values: T) -> Self {
        Self(values.into_iter().collect())
    }
}

/// Values that exist once for each GPU. Each is absent if the driver does not report it for the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Sensors {
    /// The clock of the multiprocessors, in MHz (`nvmlDeviceGetClockInfo`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_clock: Option<u32>,
    /// The clock of the memory, in MHz (`nvmlDeviceGetClockInfo`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_clock: Option<u32>,
    /// The temperature, in degrees Celsius (`nvmlDeviceGetTemperature`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<u32>,
    /// The temperature of the memory, in degrees Celsius (`NVML_FI_DEV_MEMORY_TEMP`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_temperature: Option<u32>,
    /// The power, in milliwatts (`nvmlDeviceGetPowerUsage`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<u32>,
    /// The energy since the driver was loaded, in millijoules (`nvmlDeviceGetTotalEnergyConsumption`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<u64>,
    /// Retries on PCIe (`nvmlDeviceGetPcieReplayCounter`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_replays: Option<u32>,
    /// Percent of the encoder's time (`nvmlDeviceGetEncoderUtilization`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoder: Option<u32>,
    /// Percent of the decoder's time (`nvmlDeviceGetDecoderUtilization`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder: Option<u32>,
    /// Rows of memory that were remapped because of correctable errors (`NVML_FI_DEV_REMAPPED_COR`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remapped_correctable: Option<u64>,
    /// Rows of memory that were remapped because of uncorrectable errors (`NVML_FI_DEV_REMAPPED_UNC`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remapped_uncorrectable: Option<u64>,
    /// Whether a row could not be remapped (`NVML_FI_DEV_REMAPPED_FAILURE`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remap_failed: Option<bool>,
    /// Bytes per second that the GPU sends over PCIe (`NVML_GPM_METRIC_PCIE_TX_PER_SEC`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_sent: Option<u64>,
    /// Bytes per second that the GPU receives over PCIe (`NVML_GPM_METRIC_PCIE_RX_PER_SEC`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_received: Option<u64>,
    /// Bytes per second that the GPU sends over all NVLinks, headers included
    /// (`NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_sent: Option<u64>,
    /// Bytes per second that the GPU receives over all NVLinks, headers included
    /// (`NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_received: Option<u64>,
    /// Bytes of data per second in both directions over all NVLinks, since the last reading
    /// (`NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX` and `…_RX`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_data: Option<u64>,
    /// CRC errors in the flow control of NVLinks (`NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_flit_errors: Option<u64>,
    /// CRC errors in the data of NVLinks (`NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_data_errors: Option<u64>,
    /// Retries on NVLinks (`NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_replays: Option<u64>,
    /// Recoveries of NVLinks (`NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_recoveries: Option<u64>,
}

/// Errors of a GPU by the driver's numbers (`nvmlEventTypeXidCriticalError`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Xids {
    /// The number of the last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<u64>,
    /// How often each error occurred, by its number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub counts: BTreeMap<u64, u64>,
    /// When each error was last read, by its number: Unix time in seconds.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub times: BTreeMap<u64, u64>,
}

impl Xids {
    /// Counts an error that was read at this Unix time in seconds.
    pub fn add(&mut self, xid: u64, at: u64) {
        self.last = Some(xid);
        self.times.insert(xid, at);
        *self.counts.entry(xid).or_default() += 1;
    }
}

/// A MIG instance that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionUsage {
    /// The UUID of its MIG device, `MIG-…`.
    pub uuid: String,
    /// Its profile, for example `1g.10gb`.
    pub profile: String,
    /// The id of its GPU instance.
    pub gpu_instance: u32,
    /// The id of its compute instance.
    pub compute_instance: u32,
    /// Its memory. Absent if NVML does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// How busy it is, relative to the instance and not to the GPU.
    #[serde(default, skip_serializing_if = "Utilization::is_empty")]
    pub utilization: Utilization,
    /// The claims that hold the instance, and what they use: one claim has all of it, or several claims have a share
    /// each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<ShareUsage>,
    /// The usage of the instance that belongs to no claim.
    #[serde(default)]
    pub remainder: Remainder,
}

/// A claim that holds devices of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimReference {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// A device or a share that one claim has, and its usage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareUsage {
    /// The claim.
    pub claim: ClaimReference,
    /// The request that it satisfies.
    pub request: String,
    /// The pool, as in the allocation.
    pub pool: String,
    /// The device, as in the slice.
    pub device: String,
    /// The share, as in the allocation. Absent for a device that one claim has alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// How the device is isolated.
    pub tier: Tier,
    /// Its memory.
    pub memory: ShareMemory,
    /// Its part of the device's utilization.
    #[serde(default, skip_serializing_if = "Utilization::is_empty")]
    pub utilization: Utilization,
    /// The number of processes that have memory on the device.
    pub processes: u32,
    /// Seconds since a kernel was last seen: in NVML's utilization of its processes, or of the device if one claim has
    /// it alone, or in the share's account, which its programs can write. If none was seen, seconds since the plugin
    /// first saw the device. Absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u64>,
    /// The usage by pod and container. Each container that has the claim is listed, even if it has no process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupUsage>,
}

/// Memory of a share in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareMemory {
    /// The memory that the claim was allocated and that its programs may hold. Absent if the share's memory is not
    /// limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// The memory that the share has in addition for CUDA contexts. Its programs do not see it.
    pub reserved: u64,
    /// The memory that its processes hold according to NVML, contexts included.
    pub used: u64,
    /// The part of the device's free memory that it may still allocate. Absent for a tier that does not limit memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// The memory that its processes hold according to the shim's account, contexts included. Its programs can write
    /// the account. Absent if there is no account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<u64>,
    /// The maximum that its processes held at a time. Absent until the plugin has seen the share, and if NVML does not
    /// report what each process holds: for a MIG instance that one claim has alone, and for a vGPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<Peak>,
}

/// The maximum of the memory that NVML showed in use. It is read once a second, so memory that a program holds for a
/// shorter time may be missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peak {
    /// The memory in bytes, contexts included.
    pub bytes: u64,
    /// How long the share was watched, in seconds: since the claim was prepared, or since the start of the node's
    /// plugin.
    pub watched_seconds: u64,
}

/// The processes of one container of a pod that use a share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupUsage {
    /// The pod, which is in the claim's namespace. Absent if it is not known yet, for some seconds after the plugin's
    /// start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The pod's UID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The container. Absent if neither the kubelet nor the process's mounts show which of several containers it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The memory that its processes hold, in bytes.
    pub used: u64,
    /// Its part of the device's utilization.
    #[serde(default, skip_serializing_if = "Utilization::is_empty")]
    pub utilization: Utilization,
    /// The number of processes that have memory on the device.
    pub processes: u32,
}

/// The usage of a device that belongs to no claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Remainder {
    /// The memory in use, in bytes: of foreign processes, of zombies, and memory that belongs to no process (managed
    /// memory, and what the driver takes in addition to its reserve).
    pub used: u64,
    /// The free memory that is not part of a share, in bytes.
    pub free: u64,
    /// The part of the device's utilization that belongs to none of its shares.
    #[serde(skip_serializing_if = "Utilization::is_empty")]
    pub utilization: Utilization,
    /// The number of foreign processes: those that belong to no claim on the device.
    pub foreign_processes: u32,
    /// The memory that foreign processes hold, in bytes.
    pub foreign_used: u64,
    /// Memory of pods that are gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zombies: Vec<Zombie>,
}

/// Memory of a claim whose pod is gone, or whose processes are dead. It counts in [`Remainder::used`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Zombie {
    /// The claim, which may also be gone.
    pub claim: ClaimReference,
    /// The pod, which is in the claim's namespace. Absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The pod's UID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The memory in use, in bytes.
    pub used: u64,
    /// The number of its processes that still run; 0 if they are dead and the driver has not freed their memory.
    pub processes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_as_written_and_a_new_field_is_accepted() {
        let usage = NodeUsage {
            node: "a".into(),
            gpus: vec![GpuUsage {
                uuid: "GPU-1".into(),
                utilization: [(Measure::Gpu, 3_125), (Measure::SmActive, 0)]
                    .into_iter()
                    .collect(),
                ..GpuUsage::default()
            }],
            ..NodeUsage::default()
        };
        let mut json = serde_json::to_value(&usage).unwrap();
        assert_eq!(json["gpus"][0]["utilization"]["gpu"], 3_125);
        assert_eq!(json["gpus"][0]["utilization"]["smActive"], 0);
        assert_eq!(json["gpus"][0]["memory"], serde_json::Value::Null);
        json["gpus"][0]["later"] = "new".into();
        assert_eq!(serde_json::from_value::<NodeUsage>(json).unwrap(), usage);
    }
}
