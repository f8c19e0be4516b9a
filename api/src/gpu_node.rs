//! `GpuNode`: what a node's hardware and driver can do, as its plugin reads it from NVML.
//!
//! A GpuNode is cluster-scoped, has the node's name and is owned by the node. Two writers share the status, each with
//! its own field manager: the plugin writes `inventory`, `withheld`, `gpus` and `registration`, the controller writes
//! `published`, and each writes its own `conditions`. The plugin's fields contain no policy. In `published.gpus` the
//! controller gives the plugin the settings of the policies that the plugin needs.
//!
//! The types can hold everything that the schema accepts, because one object that cannot be decoded would make a watch
//! fail for all nodes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mig::{MigGeometry, MigInstance};
use crate::pci_address::PciAddress;
use crate::quantity::{Quantity, bytes_schema};
use crate::sharing_policy::{FaultEffect, Interval, OnBypass};
use crate::vgpu::{GpuVgpu, VgpuRole};
use crate::withheld::WithheldGpu;

/// A GpuNode has no settings: it only reports.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpu.tranche.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    shortname = "gn",
    status = "GpuNodeStatus",
    derive = "PartialEq",
    doc = "A node's GPUs and their driver, and what is published for them.",
    printcolumn = r#"{"name": "GPUs", "type": "integer", "jsonPath": ".status.inventory.gpuCount"}"#,
    printcolumn = r#"{"name": "Product", "type": "string", "jsonPath": ".status.inventory.gpus[0].productName"}"#,
    printcolumn = r#"{"name": "Driver", "type": "string", "jsonPath": ".status.inventory.driverVersion"}"#,
    printcolumn = r#"{"name": "Epoch", "type": "integer", "jsonPath": ".status.registration.epoch"}"#,
    printcolumn = r#"{"name": "Unhealthy", "type": "integer", "jsonPath": ".status.unhealthyCount"}"#,
    printcolumn = r#"{"name": "Withheld", "type": "integer", "jsonPath": ".status.published.withheldCount"}"#,
    printcolumn = r#"{"name": "Slices", "type": "integer", "jsonPath": ".status.published.sliceCount"}"#,
    printcolumn = r#"{"name": "Problem", "type": "string", "jsonPath": ".status.published.problem"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
pub struct GpuNodeSpec {}

/// The node's GPUs and driver, and what is published for them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// The node's GPUs and driver, written by the node's plugin. Absent while there is no usable driver: the condition
    /// `DriverReady` says why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inventory: Option<Inventory>,
    /// The GPUs that must not be offered, or not in all tiers, and why. The node's plugin finds and writes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub withheld: Vec<WithheldGpu>,
    /// The health of the node's GPUs, written by the node's plugin: those of the inventory, and those with faults that
    /// the driver does not reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["uuid"],
    ))]
    pub gpus: Vec<GpuStatus>,
    /// The number of GPUs with faults, for `kubectl get`'s columns.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub unhealthy_count: u32,
    /// The plugin's newest registration with the kubelet, written by the node's plugin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registration: Option<Registration>,
    /// The ResourceSlices of this node, the settings for its plugin and the GPUs that are not offered, written by the
    /// controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
    /// The node's conditions. The node's plugin writes `DriverReady`, `SoleProvider` and `ClaimsKnown`; the controller
    /// writes `AllOffered`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["type"],
    ))]
    pub conditions: Vec<Condition>,
}

/// The GPUs of a node and their driver.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// The version of the kernel driver, for example `535.261.03`.
    pub driver_version: String,
    /// The newest CUDA version that the driver supports, `major.minor`.
    pub cuda_driver_version: String,
    /// The GPUs, in the order of their PCI addresses.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// The number of GPUs, for `kubectl get`'s columns.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub gpu_count: u32,
    /// The functions that the driver's libcuda exports and the plugin's release does not know, sorted. Memory that they
    /// allocate in a capped share is not counted. Empty for a driver with which the release was tested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown_functions: Vec<String>,
    /// Whether the driver may move a program's ordinary host memory to a GPU when a kernel uses it (Heterogeneous Memory
    /// Management). Memory that was moved is in no share's account; the driver moves it back when others allocate. The
    /// kernel module's parameter `uvm_disable_hmm` switches it off. Absent if the module does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heterogeneous_memory: Option<bool>,
    /// How MIG divides the GPUs. Each GPU that can be partitioned, and whose MIG profiles the driver reports, is in
    /// exactly one entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_geometries: Vec<MigGeometry>,
}

impl Inventory {
    /// An inventory of `gpus`, sorted by PCI address and counted.
    #[must_use]
    pub fn new(driver_version: String, cuda_driver_version: String, gpus: Vec<Gpu>) -> Self {
        let mut inventory = Self {
            driver_version,
            cuda_driver_version,
            ..Self::default()
        };
        inventory.extend(gpus);
        inventory
    }

    /// Adds GPUs, sorts all GPUs by PCI address and counts them.
    pub fn extend(&mut self, gpus: impl IntoIterator<Item = Gpu>) {
        let order = |gpu: &Gpu| (gpu.pci_bus_id.parse::<PciAddress>().ok(), gpu.uuid.clone());
        self.gpus.extend(gpus);
        self.gpus.sort_by_cached_key(order);
        self.gpu_count = u32::try_from(self.gpus.len()).unwrap_or(u32::MAX);
    }

    /// How MIG divides a GPU, if the driver reports it.
    #[must_use]
    pub fn mig_geometry(&self, gpu: &Gpu) -> Option<&MigGeometry> {
        self.mig_geometries
            .iter()
            .find(|geometry| geometry.gpus.contains(&gpu.uuid))
    }
}

/// One physical GPU, as NVML describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// The GPU's UUID, `GPU-…` (`nvmlDeviceGetUUID`). It identifies the GPU; all other fields may change.
    pub uuid: String,
    /// The GPU's minor number, the N of `/dev/nvidiaN` (`nvmlDeviceGetMinorNumber`). It may change with every boot.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub minor: u32,
    /// The GPU's number in NVML and `nvidia-smi` (`nvmlDeviceGetIndex`). It may change with every boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub index: Option<u32>,
    /// The product name (`nvmlDeviceGetName`).
    pub product_name: String,
    /// The brand (`nvmlDeviceGetBrand`).
    pub brand: String,
    /// The architecture (`nvmlDeviceGetArchitecture`).
    pub architecture: String,
    /// The CUDA compute capability, `major.minor` (`nvmlDeviceGetCudaComputeCapability`).
    pub cuda_compute_capability: String,
    /// The PCI address, `dddd:bb:dd.f` in lower case, as in sysfs.
    #[serde(rename = "pciBusID")]
    pub pci_bus_id: String,
    /// The PCIe root complex, `pcidddd:bb`. Absent if the kernel does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_root: Option<String>,
    /// The NUMA node. Absent if the kernel does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub numa_node: Option<u32>,
    /// The total memory, in bytes (`nvmlDeviceGetMemoryInfo_v2`, `total`).
    #[schemars(schema_with = "bytes_schema")]
    pub memory: Quantity,
    /// The memory that the driver keeps for itself, in bytes (`nvmlDeviceGetMemoryInfo_v2`, `reserved`).
    #[schemars(schema_with = "bytes_schema")]
    pub reserved_memory: Quantity,
    /// The memory of a CUDA context under this driver, in bytes: the smallest amount that a process with only a context
    /// held. Absent until the node has measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bytes_schema")]
    pub context_memory: Option<Quantity>,
    /// The number of streaming multiprocessors. Absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub multiprocessors: Option<u32>,
    /// Whether the GPU can be partitioned (`nvmlDeviceGetMigMode` is supported).
    #[serde(default)]
    pub mig_capable: bool,
    /// Whether MIG mode is on now, and whether it will be on after the GPU's next reset.
    #[serde(default)]
    pub mig_mode: MigMode,
    /// The GPU instances that Tranche did not create. Tranche offers them as they are and never removes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_instances: Vec<MigInstance>,
    /// Whether a virtual machine can get the GPU. Absent if the GPU has no IOMMU group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vfio: Option<GpuVfio>,
    /// What the driver reports about vGPU. Absent if the GPU is not a vGPU and no vGPUs can be created on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vgpu: Option<GpuVgpu>,
}

impl Gpu {
    /// Whether the GPU is a vGPU of the virtual machine that is the node.
    #[must_use]
    pub fn is_vgpu(&self) -> bool {
        let vgpu = self.vgpu.as_ref();
        vgpu.is_some_and(|vgpu| vgpu.role == VgpuRole::Guest)
    }
}

/// Whether the kernel and the IOMMU allow a virtual machine to get a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuVfio {
    /// The number of the GPU's IOMMU group.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub iommu_group: u32,
    /// Why no virtual machine can get the GPU, and what to do about it. Absent if a virtual machine can get it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
}

/// The MIG mode of a GPU (`nvmlDeviceGetMigMode`). Both fields are false for a GPU that cannot be partitioned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigMode {
    /// Whether MIG mode is on now.
    #[serde(default)]
    pub current: bool,
    /// Whether MIG mode will be on after the GPU's next reset.
    #[serde(default)]
    pub pending: bool,
}

/// The health of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// The GPU's UUID, `GPU-…`.
    pub uuid: String,
    /// The GPU's conditions. `Healthy` is `False` from the first fault until the driver asks for no recovery action and a
    /// check has passed, and `Unknown` while the node cannot watch the GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["type"],
    ))]
    pub conditions: Vec<Condition>,
    /// The taint `gpu.tranche.dev/unhealthy` of every device of the GPU. Absent while the GPU has no fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taint: Option<GpuTaint>,
}

/// The taint of the devices of a GPU that has a fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuTaint {
    /// The taint's value: the fault, for example `Xid79`.
    pub value: String,
    /// The taint's effect. A value that the controller's release does not know has the effect `NoSchedule`.
    // Any string, so that a newer plugin's word does not make an older schema refuse the status.
    #[schemars(with = "String")]
    pub effect: TaintEffect,
    /// The time from which the taint has had this effect.
    pub time_added: Time,
}

/// The effect of a taint of a device.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum TaintEffect {
    /// Pods that use the device are evicted, and no new claim gets it.
    NoExecute,
    /// No new claim gets the device. A value that this release does not know has the same effect.
    #[default]
    #[serde(other)]
    NoSchedule,
}

impl TaintEffect {
    /// As in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoExecute => "NoExecute",
            Self::NoSchedule => "NoSchedule",
        }
    }
}

/// The plugin's newest registration with the kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Registration {
    /// The number of the registration. It grows by one when the plugin registers, and when the running plugin finds
    /// that the node's ResourceSlices were deleted.
    pub epoch: i64,
    /// The plugin's version.
    pub plugin_version: String,
}

/// What the controller published for this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Published {
    /// The `epoch` of the registration for which the ResourceSlices were created.
    pub epoch: i64,
    /// The generation of the node's pool.
    pub pool_generation: i64,
    /// The names of the pool's ResourceSlices, in order.
    #[serde(default)]
    pub slices: Vec<String>,
    /// The number of ResourceSlices, for `kubectl get`'s columns.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub slice_count: u32,
    /// Why the pool is not published as planned, for example because the API server dropped fields whose feature gate
    /// is off. Empty if there is no problem.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// The settings of the SharingPolicies that the node's plugin applies, for each GPU of the inventory, in the order
    /// of their UUIDs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<PublishedGpu>,
    /// All GPUs that are not offered, or not in all tiers: those in the node's own `withheld`, and those that cannot be
    /// offered because of a SharingPolicy or the GPU's description.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withheld: Vec<WithheldGpu>,
    /// The number of GPUs in `withheld`, for `kubectl get`'s columns.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub withheld_count: u32,
}

/// The settings of the SharingPolicies that the node's plugin applies to one GPU. The plugin reads them here and does
/// not read SharingPolicies. A GPU that is not listed has the default settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedGpu {
    /// The GPU's UUID, `GPU-…`, as in the inventory.
    pub uuid: String,
    /// The SharingPolicy that applies to the GPU. Absent if no policy matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// The settings for shares in the tier `capped`.
    #[serde(default)]
    pub capped: PublishedCapped,
    /// The settings for shares in the tier `timeshared`.
    #[serde(default)]
    pub timeshared: PublishedTimeshared,
    /// The settings for the GPU's faults.
    #[serde(default)]
    pub health: PublishedHealth,
}

/// What happens to the GPU's devices when it has a fault.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedHealth {
    /// The SharingPolicy's `health.effect`. The plugin treats a value that its release does not know as `NoSchedule`.
    // Any string, as above.
    #[schemars(with = "String")]
    #[serde(default)]
    pub effect: TaintEffect,
    /// The SharingPolicy's `health.graceSeconds`. 300 if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub grace_seconds: Option<u32>,
    /// The SharingPolicy's `health.faults`. The plugin ignores a fault that its release does not know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<PublishedFault>,
}

/// The effect of one fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedFault {
    /// The fault's name.
    pub fault: String,
    /// Its effect. The plugin treats a value that its release does not know as `NoSchedule`.
    // Any string, as above.
    #[schemars(with = "String")]
    pub effect: FaultEffect,
}

/// The settings that the node's plugin applies to shares in the tier `capped`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedCapped {
    /// The SharingPolicy's `onBypass`. The plugin treats a value that its release does not know as `Report`.
    // Any string, so that a newer controller's word does not make an older schema refuse the status.
    #[schemars(with = "String")]
    #[serde(default)]
    pub on_bypass: OnBypass,
    /// The SharingPolicy's `unaccountedMemory`, in bytes. 256Mi if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unaccounted_memory: Option<Quantity>,
    /// The SharingPolicy's `lowPriorityFloor`, in percent of a share's cores. 10 if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 100))]
    pub low_priority_floor: Option<u32>,
    /// The driver's libraries that containers get in addition to `compute` and `utility`, by their names in the
    /// SharingPolicy's `driverCapabilities`. The plugin ignores a name that its release does not know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_driver_capabilities: Vec<String>,
}

/// The settings that the node's plugin applies to shares in the tier `timeshared`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedTimeshared {
    /// The SharingPolicy's `interval`. The plugin treats a value that its release does not know as `Default`.
    // Any string, as above.
    #[schemars(with = "String")]
    #[serde(default)]
    pub interval: Interval,
}
