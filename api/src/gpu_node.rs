//! `GpuNode`: what a node's hardware and driver can do, as its plugin reads it from NVML.
//!
//! Cluster-scoped, named after the node and owned by it. Two writers share the status, each with its own field manager:
//! the plugin writes `inventory`, `withheld` and `registration`, the controller `published`, and each its own
//! `conditions`. The hardware's part contains no policy; `published.gpus` returns to the node what it needs of the
//! policies.
//!
//! The types can hold everything that the schema accepts: one object that cannot be decoded would blind a watch to all
//! nodes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mig::{MigGeometry, MigInstance};
use crate::pci_address::PciAddress;
use crate::quantity::{Quantity, bytes_schema};
use crate::sharing_policy::{Interval, OnBypass};
use crate::vgpu::{GpuVgpu, VgpuRole};
use crate::withheld::WithheldGpu;

/// Nothing to configure: the object only reports.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpu.tranche.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    shortname = "gn",
    status = "GpuNodeStatus",
    derive = "PartialEq",
    doc = "What a node's GPUs and their driver can do, and what the cluster was told of it.",
    printcolumn = r#"{"name": "GPUs", "type": "integer", "jsonPath": ".status.inventory.gpuCount"}"#,
    printcolumn = r#"{"name": "Product", "type": "string", "jsonPath": ".status.inventory.gpus[0].productName"}"#,
    printcolumn = r#"{"name": "Driver", "type": "string", "jsonPath": ".status.inventory.driverVersion"}"#,
    printcolumn = r#"{"name": "Epoch", "type": "integer", "jsonPath": ".status.registration.epoch"}"#,
    printcolumn = r#"{"name": "Withheld", "type": "integer", "jsonPath": ".status.published.withheldCount"}"#,
    printcolumn = r#"{"name": "Slices", "type": "integer", "jsonPath": ".status.published.sliceCount"}"#,
    printcolumn = r#"{"name": "Problem", "type": "string", "jsonPath": ".status.published.problem"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
pub struct GpuNodeSpec {}

/// What the node has, and how far the cluster knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeStatus {
    /// The hardware and driver, written by the node's plugin. Missing while there is no driver to work
    /// with: the condition `DriverReady` says why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inventory: Option<Inventory>,
    /// GPUs that the node found must not be offered, and why, written by the node's plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub withheld: Vec<WithheldGpu>,
    /// The plugin's newest registration with the kubelet, written by the node's plugin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registration: Option<Registration>,
    /// The ResourceSlices that stand for this node, written by the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
    /// `DriverReady`, `SoleProvider` and `ClaimsKnown`, written by the node's plugin, and `AllOffered`,
    /// written by the controller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["type"],
    ))]
    pub conditions: Vec<Condition>,
}

/// The GPUs of a node and the driver that serves them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// Version of the kernel driver, for example `535.261.03`.
    pub driver_version: String,
    /// Newest CUDA version that the driver serves, `major.minor`.
    pub cuda_driver_version: String,
    /// The GPUs, by PCI address.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// How many GPUs there are, for people: printed columns cannot count.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub gpu_count: u32,
    /// Functions that the driver's libcuda exports and the plugin's release does not know, sorted;
    /// what they take of a capped share is not counted. Empty for a driver that it was tested with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown_functions: Vec<String>,
    /// How MIG divides the GPUs that can be partitioned and whose driver reports it; each of them once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_geometries: Vec<MigGeometry>,
}

impl Inventory {
    /// An inventory of `gpus`, put in the order of their PCI addresses and counted.
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

    /// Adds GPUs, puts all in the order of their PCI addresses and counts them.
    pub fn extend(&mut self, gpus: impl IntoIterator<Item = Gpu>) {
        let order = |gpu: &Gpu| (gpu.pci_bus_id.parse::<PciAddress>().ok(), gpu.uuid.clone());
        self.gpus.extend(gpus);
        self.gpus.sort_by_cached_key(order);
        self.gpu_count = u32::try_from(self.gpus.len()).unwrap_or(u32::MAX);
    }

    /// How MIG divides a GPU, where the driver reports it.
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
    /// `GPU-…` (`nvmlDeviceGetUUID`): what the GPU is known by; all else may change.
    pub uuid: String,
    /// The N of `/dev/nvidiaN` (`nvmlDeviceGetMinorNumber`): it may change with every boot.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub minor: u32,
    /// Its number in NVML and `nvidia-smi` (`nvmlDeviceGetIndex`): it may change with every boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub index: Option<u32>,
    /// `nvmlDeviceGetName`.
    pub product_name: String,
    /// `nvmlDeviceGetBrand`.
    pub brand: String,
    /// `nvmlDeviceGetArchitecture`.
    pub architecture: String,
    /// `nvmlDeviceGetCudaComputeCapability`, `major.minor`.
    pub cuda_compute_capability: String,
    /// `dddd:bb:dd.f`, lower case, as in sysfs.
    #[serde(rename = "pciBusID")]
    pub pci_bus_id: String,
    /// `pcidddd:bb`, where the kernel tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_root: Option<String>,
    /// Where the kernel tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub numa_node: Option<u32>,
    /// Total memory, bytes (`nvmlDeviceGetMemoryInfo_v2`, `total`).
    #[schemars(schema_with = "bytes_schema")]
    pub memory: Quantity,
    /// Memory that the driver keeps for itself, bytes (`nvmlDeviceGetMemoryInfo_v2`, `reserved`).
    #[schemars(schema_with = "bytes_schema")]
    pub reserved_memory: Quantity,
    /// Memory that a CUDA context takes under this driver, bytes, where the node has measured it: the
    /// least that a process with nothing but a context held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bytes_schema")]
    pub context_memory: Option<Quantity>,
    /// Streaming multiprocessors, where the driver tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub multiprocessors: Option<u32>,
    /// Whether the GPU can be partitioned (`nvmlDeviceGetMigMode` is supported).
    #[serde(default)]
    pub mig_capable: bool,
    /// Whether MIG mode is on now, and whether it will be after the next reset of the GPU.
    #[serde(default)]
    pub mig_mode: MigMode,
    /// GPU instances that Tranche did not make: it offers them as they are, and never removes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_instances: Vec<MigInstance>,
    /// Whether a virtual machine can get the GPU; absent where it has no IOMMU group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vfio: Option<GpuVfio>,
    /// What the driver says of vGPU; absent where the GPU is no vGPU and none can be made of it.
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

/// What the kernel and its IOMMU say about giving a GPU to a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuVfio {
    /// The GPU's IOMMU group.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub iommu_group: u32,
    /// Why no virtual machine can get the GPU, and what to do about it; absent where one can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
}

/// `nvmlDeviceGetMigMode`. Both are false on a GPU that cannot be partitioned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigMode {
    /// The mode in which the GPU is.
    #[serde(default)]
    pub current: bool,
    /// The mode in which the GPU will be after its next reset.
    #[serde(default)]
    pub pending: bool,
}

/// The plugin's newest registration with the kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Registration {
    /// Grows by one with every registration and with every wipe that the live plugin saw.
    pub epoch: i64,
    /// Version of the plugin.
    pub plugin_version: String,
}

/// What the controller published for this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Published {
    /// The registration for which the slices were created.
    pub epoch: i64,
    /// The pool's generation.
    pub pool_generation: i64,
    /// Names of the slices of the pool, in order.
    #[serde(default)]
    pub slices: Vec<String>,
    /// How many slices there are, for people: printed columns cannot count.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub slice_count: u32,
    /// Why the pool is not published as wanted (a feature gate that dropped fields, say), empty
    /// when it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
    /// What the policies ask of the node itself, for each GPU of the inventory, by UUID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<PublishedGpu>,
    /// All that the node has and that is not offered: what the node withholds, and what a
    /// SharingPolicy or the GPU's description rules out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withheld: Vec<WithheldGpu>,
    /// How many GPUs `withheld` speaks of, for people: printed columns cannot count.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub withheld_count: u32,
}

/// What the policies ask of the node itself for one GPU. The plugin reads it here and knows no
/// SharingPolicy. For a GPU that is not listed the defaults hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedGpu {
    /// `GPU-…`, as in the inventory.
    pub uuid: String,
    /// The SharingPolicy that holds for the GPU, absent where none matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// For shares in the tier `capped`.
    #[serde(default)]
    pub capped: PublishedCapped,
    /// For shares in the tier `timeshared`.
    #[serde(default)]
    pub timeshared: PublishedTimeshared,
}

/// What a policy asks of the node for shares in the tier `capped`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedCapped {
    /// As in the SharingPolicy. A word that the plugin's release does not know means `Report`.
    // Any string, so that a newer controller's word does not make an older schema refuse the status.
    #[schemars(with = "String")]
    #[serde(default)]
    pub on_bypass: OnBypass,
    /// Of the driver's libraries, those that containers get beside `compute` and `utility`: names of the
    /// SharingPolicy's `driverCapabilities`. A name that the plugin's release does not know is left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_driver_capabilities: Vec<String>,
}

/// What a policy asks of the node for shares in the tier `timeshared`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedTimeshared {
    /// As in the SharingPolicy. A word that the plugin's release does not know means `Default`.
    // Any string, as above.
    #[schemars(with = "String")]
    #[serde(default)]
    pub interval: Interval,
}
