//! Every name that appears in an API object, spelled once.

/// The DRA driver's name, as in `spec.driver` of a ResourceSlice.
pub const DRIVER: &str = "gpu.tranche.dev";
/// The API group of our custom resources and claim parameters.
pub const GROUP: &str = "gpu.tranche.dev";
/// The API version of our custom resources and claim parameters.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of everything in [`GROUP`].
pub const API_VERSION: &str = "gpu.tranche.dev/v1alpha1";

/// The pool of a node. Not the bare node name: two drivers that both used it would collide in
/// the scheduler's caches.
#[must_use]
pub fn pool(node: &str) -> String {
    format!("{node}/gpu")
}

/// A name and what it stands for, for the reference page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: &'static str,
    /// The type of its value.
    pub kind: &'static str,
    /// A value as it may be found.
    pub example: &'static str,
    /// What it stands for.
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
        MEMORY = "memory", "bytes", "78Gi": "Device memory. Of a shareable device what all shares can have together, less what the driver reserves and the policy keeps free for CUDA contexts; of an exclusive device the total.";
        CORES = "cores", "percent", "100": "Time of the streaming multiprocessors, 1 to 100.";
        CONTEXT_MEMORY = "contextMemory", "bytes", "8Gi": "Memory for the shares' CUDA contexts; every share takes what one context does, beside its `memory`. Missing where the policy says that contexts take none.";
        SHARERS = "sharers", "count", "16": "Places for shares; every share takes one.";
    }
}

/// Attributes of a device. Those that NVIDIA's driver has are spelled as it spells them.
pub mod attribute {
    vocabulary! {
        /// All of them.
        ALL;
        TYPE = "type", "string", "gpu": "`gpu`; for a partition `mig`.";
        UUID = "uuid", "string", "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d": "The GPU's UUID as NVML prints it.";
        MINOR = "minor", "int", "0": "The N of `/dev/nvidiaN` as it is now: it may change with every boot.";
        INDEX = "index", "int", "0": "The GPU's number in NVML and `nvidia-smi` as it is now: it may change with every boot.";
        PRODUCT_NAME = "productName", "string", "NVIDIA H100 80GB HBM3": "The product's name as NVML prints it.";
        BRAND = "brand", "string", "Nvidia": "The brand as NVML names it.";
        ARCHITECTURE = "architecture", "string", "Hopper": "The architecture as NVML names it.";
        CUDA_COMPUTE_CAPABILITY = "cudaComputeCapability", "version", "9.0.0": "The CUDA compute capability.";
        DRIVER_VERSION = "driverVersion", "version", "535.261.3": "The kernel driver's version, without leading zeros.";
        CUDA_DRIVER_VERSION = "cudaDriverVersion", "version", "12.2.0": "The newest CUDA version that the driver serves.";
        PCI_BUS_ID = "resource.kubernetes.io/pciBusID", "string", "0000:17:00.0": "The PCI address.";
        PCIE_ROOT = "resource.kubernetes.io/pcieRoot", "string", "pci0000:16": "The PCIe root complex, where the kernel tells it.";
        NUMA_NODE = "resource.kubernetes.io/numaNode", "int", "0": "The NUMA node, where the kernel tells it.";
        ISOLATION = "isolation", "string", "capped": "The tier's name.";
        ISOLATION_LEVEL = "isolationLevel", "int", "3": "The tier's rank, 1 (weakest) to 6.";
        MEMORY_ISOLATION = "memoryIsolation", "string", "software": "What keeps the neighbours' memory use away: `hardware`, `software` or `none`.";
        COMPUTE_ISOLATION = "computeIsolation", "string", "software": "What keeps the neighbours' compute use away: `hardware`, `software` or `none`.";
        UNTESTED_DRIVER = "untestedDriver", "bool", "false": "Whether the node's driver has functions that this release does not know (the GpuNode's `unknownFunctions`): what they take of a capped share is not counted.";
        FAULT_ISOLATION = "faultIsolation", "string", "software": "What keeps the neighbours' faults away: `hardware`, `software` (an own process on a shared GPU) or `none`.";
    }
}

/// Taints of a device.
pub mod taint {
    vocabulary! {
        /// All of them.
        ALL;
        WITHDRAWN = "gpu.tranche.dev/withdrawn", "NoSchedule", "": "The device is no longer offered but still allocated; it is removed after its last claim.";
        UNTESTED_DRIVER = "gpu.tranche.dev/untested-driver", "NoSchedule", "": "The node's driver has functions that this release does not know (`untestedDriver`), and the SharingPolicy's `capped.untestedDriver` is `Taint`.";
    }
}
