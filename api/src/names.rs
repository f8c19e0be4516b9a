//! Every name that appears in an API object, spelled once.

/// The DRA driver's name, as in `spec.driver` of a ResourceSlice.
pub const DRIVER: &str = "gpu.tranche.dev";
/// The API group of our custom resources and claim parameters.
pub const GROUP: &str = "gpu.tranche.dev";
/// The API version of our custom resources and claim parameters.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of everything in [`GROUP`].
pub const API_VERSION: &str = "gpu.tranche.dev/v1alpha1";

/// The annotation of a ResourceSlice that carries back the epoch for which it was published.
pub const EPOCH_ANNOTATION: &str = "gpu.tranche.dev/epoch";

/// The pool of a node. Not the bare node name: two drivers that both used it would collide in
/// the scheduler's caches.
#[must_use]
pub fn pool(node: &str) -> String {
    format!("{node}/gpu")
}

/// Capacities of a shareable device (unqualified: the driver's own domain).
pub mod capacity {
    /// Usable device memory, bytes.
    pub const MEMORY: &str = "memory";
    /// Share of SM time, percent, 1-100.
    pub const CORES: &str = "cores";
    /// Places for shares; every share takes one.
    pub const SHARERS: &str = "sharers";
}

/// Attributes of a device. Those that NVIDIA's driver has are spelled as it spells them.
pub mod attribute {
    /// `gpu` or, for a partition, `mig`.
    pub const TYPE: &str = "type";
    /// The GPU's UUID as NVML prints it, `GPU-…`.
    pub const UUID: &str = "uuid";
    /// Product name as NVML prints it.
    pub const PRODUCT_NAME: &str = "productName";
    /// Brand as NVML names it, for example `Nvidia`.
    pub const BRAND: &str = "brand";
    /// Architecture, for example `Hopper`.
    pub const ARCHITECTURE: &str = "architecture";
    /// CUDA compute capability as a semantic version, for example `9.0.0`.
    pub const CUDA_COMPUTE_CAPABILITY: &str = "cudaComputeCapability";
    /// The kernel driver's version.
    pub const DRIVER_VERSION: &str = "driverVersion";
    /// The newest CUDA version the driver serves.
    pub const CUDA_DRIVER_VERSION: &str = "cudaDriverVersion";
    /// PCI address, `dddd:bb:dd.f`.
    pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
    /// PCIe root complex, `pci dddd:bb`.
    pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
    /// NUMA node.
    pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
    /// The tier's name.
    pub const ISOLATION: &str = "isolation";
    /// The tier's rank, 1 (weakest) to 6.
    pub const ISOLATION_LEVEL: &str = "isolationLevel";
    /// What keeps the neighbours' memory away: `hardware`, `software` or `none`.
    pub const MEMORY_ISOLATION: &str = "memoryIsolation";
    /// What keeps the neighbours' compute away: `hardware`, `software` or `none`.
    pub const COMPUTE_ISOLATION: &str = "computeIsolation";
    /// What keeps the neighbours' faults away: `hardware`, `software` or `none`.
    pub const FAULT_ISOLATION: &str = "faultIsolation";
}
