//! The names that appear in API objects.

/// The DRA driver's name, as in `spec.driver` of a ResourceSlice.
pub const DRIVER: &str = "gpu.tranche.dev";
/// The API group of our custom resources and claim parameters.
pub const GROUP: &str = "gpu.tranche.dev";
/// The API version of our custom resources and claim parameters.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of everything in [`GROUP`].
pub const API_VERSION: &str = "gpu.tranche.dev/v1alpha1";

/// Whether a DeviceClass has a name in this driver's domain, such as `capped.gpu.tranche.dev`. An administrator's own
/// class for devices of this driver is recognized only by such a name.
#[must_use]
pub fn is_class(name: &str) -> bool {
    name.strip_suffix(DRIVER)
        .is_some_and(|tier| tier.ends_with('.'))
}

/// The attribute `isolation` of capped shares of a GPU whose memory is oversubscribed, and the first word of their
/// DeviceClass.
pub const OVERSUBSCRIBED: &str = "oversubscribed";

/// The annotation that protects an idle claim or pod, with the value [`KEEP`].
pub const IDLE_ANNOTATION: &str = "gpu.tranche.dev/idle";
/// The only value of [`IDLE_ANNOTATION`] that has an effect.
pub const KEEP: &str = "keep";

/// The labels by which the chart marks the node plugins' pods.
pub const PLUGIN_PODS: &str =
    "app.kubernetes.io/name=tranche,app.kubernetes.io/component=node-plugin";

/// The pool of a node. It is not the bare node name, because two drivers with the same pool name
/// would collide in the scheduler's caches.
#[must_use]
pub fn pool(node: &str) -> String {
    format!("{node}/gpu")
}

/// The node of a pool of this driver; `None` for any other pool.
#[must_use]
pub fn own_node(pool: &str) -> Option<&str> {
    pool.strip_suffix("/gpu")
}

/// The node of a pool of this driver; the pool's own name for any other pool.
#[must_use]
pub fn node_of(pool: &str) -> &str {
    own_node(pool).unwrap_or(pool)
}

/// A name with its meaning, for the reference page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: &'static str,
    /// The type of its value.
    pub kind: &'static str,
    /// An example of a value.
    pub example: &'static str,
    /// Its meaning.
    pub meaning: &'static str,
}

/// Declares names with their documentation, and the table of them.
macro_rules! vocabulary {
    ($(#[doc = $table:literal])* $ALL:ident; $($NAME:ident = $name:literal, $kind:literal, $example:literal: $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $NAME: &str = $name;)*
        $(#[doc = $table])*
        pub const $ALL: &[$crate::names::Entry] = &[
            $($crate::names::Entry { name: $name, kind: $kind, example: $example, meaning: $meaning },)*
        ];
    };
}

/// Capacities of a device (unqualified: the driver's own domain).
pub mod capacity {
    vocabulary! {
        /// All of them.
        ALL;
        MEMORY = "memory", "bytes", "78Gi": "Device memory. Of a shareable device the memory of all shares together, without the driver's reserve and without what the policy keeps free for CUDA contexts; of an exclusive device the total.";
        CORES = "cores", "percent", "100": "Time of the streaming multiprocessors, 1 to 100.";
        CONTEXT_MEMORY = "contextMemory", "bytes", "8Gi": "Memory for the shares' CUDA contexts; every share takes the size of one context, in addition to its `memory`. Missing if the policy's `contextMemory` is 0.";
        SHARERS = "sharers", "count", "16": "Places for shares; every share takes one.";
        ANTI_AFFINITY = "antiAffinity", "count", "1": "Of the shares that ask for 1 of it, a GPU has at most one: they are on different GPUs. A share that does not ask takes none.";
        MULTIPROCESSORS = "multiprocessors", "count", "16": "A partition's streaming multiprocessors.";
        COPY_ENGINES = "copyEngines", "count", "1": "A partition's copy engines.";
        DECODERS = "decoders", "count", "1": "A partition's video decoders.";
        ENCODERS = "encoders", "count", "0": "A partition's video encoders.";
        JPEG_ENGINES = "jpegEngines", "count", "1": "A partition's JPEG engines.";
        OFA_ENGINES = "ofaEngines", "count", "0": "A partition's engines for optical flow.";
    }
}

/// Attributes of a device. Those that NVIDIA's driver has too have the same spelling.
pub mod attribute {
    vocabulary! {
        /// All of them.
        ALL;
        TYPE = "type", "string", "gpu": "`gpu`; for a partition `mig`.";
        UUID = "uuid", "string", "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d": "The GPU's UUID as NVML prints it; of a partition that an administrator made, the MIG device's; of one that is made for a claim, its GPU's.";
        PARENT_UUID = "parentUUID", "string", "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d": "Of a partition: its GPU's UUID.";
        PROFILE = "profile", "string", "1g.10gb": "Of a partition: its MIG profile.";
        MINOR = "minor", "int", "0": "The current N of `/dev/nvidiaN`; it may change with every boot.";
        INDEX = "index", "int", "0": "The GPU's current number in NVML and `nvidia-smi`, counted with those that virtual machines have; it may change with every boot.";
        PRODUCT_NAME = "productName", "string", "NVIDIA H100 80GB HBM3": "The product's name as NVML prints it.";
        BRAND = "brand", "string", "Nvidia": "The brand as NVML names it.";
        ARCHITECTURE = "architecture", "string", "Hopper": "The architecture as NVML names it.";
        CUDA_COMPUTE_CAPABILITY = "cudaComputeCapability", "version", "9.0.0": "The CUDA compute capability.";
        DRIVER_VERSION = "driverVersion", "version", "535.261.3": "The kernel driver's version, without leading zeros.";
        CUDA_DRIVER_VERSION = "cudaDriverVersion", "version", "12.2.0": "The newest CUDA version that the driver supports.";
        PCI_BUS_ID = "resource.kubernetes.io/pciBusID", "string", "0000:17:00.0": "The PCI address.";
        PCIE_ROOT = "resource.kubernetes.io/pcieRoot", "string", "pci0000:16": "The PCIe root complex, if the kernel reports it.";
        NUMA_NODE = "resource.kubernetes.io/numaNode", "int", "0": "The NUMA node, if the kernel reports it.";
        IOMMU_GROUP = "iommuGroup", "int", "17": "Of a GPU that is offered to virtual machines: the number of its IOMMU group, which goes to the virtual machine as a whole; it may change with every boot.";
        ISOLATION = "isolation", "string", "capped": "The tier's name; `oversubscribed` for capped shares of a GPU whose memory is oversubscribed.";
        ISOLATION_LEVEL = "isolationLevel", "int", "3": "The tier's rank, 1 (weakest) to 6.";
        MEMORY_OVERSUBSCRIPTION = "memoryOversubscription", "int", "200": "Of a device whose memory is oversubscribed: how much memory its shares have together, in percent of what the GPU has for them.";
        MEMORY_ISOLATION = "memoryIsolation", "string", "software": "What limits the neighbours' memory: `hardware`, `software` or `none`.";
        COMPUTE_ISOLATION = "computeIsolation", "string", "software": "What limits the neighbours' compute: `hardware`, `software` or `none`.";
        UNTESTED_DRIVER = "untestedDriver", "bool", "false": "Whether the node's driver has functions that this release does not know (the GpuNode's `unknownFunctions`): memory that they allocate in a capped share is not counted.";
        FAULT_ISOLATION = "faultIsolation", "string", "software": "What isolates from the neighbours' faults: `hardware`, `software` (separate processes on a shared GPU) or `none`.";
    }
}

/// Taints of a device.
pub mod taint {
    vocabulary! {
        /// All of them.
        ALL;
        WITHDRAWN = "gpu.tranche.dev/withdrawn", "NoSchedule", "": "The device is no longer offered but still allocated; it is removed after its last claim.";
        CORDONED = "gpu.tranche.dev/cordoned", "NoSchedule", "": "`kubectl tranche cordon` keeps new claims off the GPU or the node, by a DeviceTaintRule; the slices do not have this taint.";
        UNHEALTHY = "gpu.tranche.dev/unhealthy", "NoSchedule or NoExecute", "Xid79": "The GPU has a fault, which is the taint's value. It gets the effect `NoExecute` if the SharingPolicy's `health` says so.";
        UNTESTED_DRIVER = "gpu.tranche.dev/untested-driver", "NoSchedule", "": "The node's driver has functions that this release does not know (`untestedDriver`), and the SharingPolicy's `capped.untestedDriver` is `Taint`.";
    }
}
