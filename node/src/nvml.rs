//! NVML, as much of it as the plugin asks: what GPUs there are.
//!
//! [`Nvml`] and [`Driver`] are injected, so that a test can script a driver that is missing, comes
//! up late or fails. [`search`] finds the real one, `library` is it.

mod library;
pub mod search;

use std::path::PathBuf;

use tranche_api::gpu_node::MigMode;

use crate::devices::DeviceNodes;
use crate::root::{DriverRoot, RootError};

/// What NVML says of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// nvmlSystemGetDriverVersion.
    pub driver_version: String,
    /// nvmlSystemGetCudaDriverVersion_v2 as `major.minor`.
    pub cuda_driver_version: String,
    /// The GPUs that could be described, in NVML's order.
    pub gpus: Vec<GpuDescription>,
    /// GPUs that NVML counts and cannot describe (fallen off the bus, say).
    pub broken: Vec<BrokenGpu>,
}

/// A GPU that NVML counts and cannot describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenGpu {
    /// Its index, as NVML counts.
    pub index: u32,
    /// Its UUID, where NVML told it before it failed.
    pub uuid: Option<String>,
    /// The call that failed.
    pub error: NvmlError,
}

/// What NVML says of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuDescription {
    /// nvmlDeviceGetUUID.
    pub uuid: String,
    /// The index under which NVML counts it.
    pub index: u32,
    /// nvmlDeviceGetMinorNumber.
    pub minor: u32,
    /// nvmlDeviceGetName.
    pub name: String,
    /// nvmlDeviceGetBrand.
    pub brand: String,
    /// nvmlDeviceGetArchitecture.
    pub architecture: String,
    /// nvmlDeviceGetCudaComputeCapability, `major.minor`.
    pub compute_capability: String,
    /// nvmlDeviceGetPciInfo: domain, bus and device.
    pub pci: (u32, u32, u32),
    /// nvmlDeviceGetMemoryInfo_v2 `total`, bytes.
    pub memory_total: u64,
    /// nvmlDeviceGetMemoryInfo_v2 `reserved`, bytes.
    pub memory_reserved: u64,
    /// nvmlDeviceGetAttributes_v2, where the driver tells it.
    pub multiprocessors: Option<u32>,
    /// nvmlDeviceGetMigMode is supported.
    pub mig_capable: bool,
    /// nvmlDeviceGetMigMode; both off where it is not supported.
    pub mig_mode: MigMode,
    /// The largest `sliceCount` that nvmlDeviceGetGpuInstanceProfileInfo tells, if it tells one.
    pub mig_compute_slices: Option<u32>,
}

/// A sample of what a GPU worked for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessSample {
    /// The process, as the host counts.
    pub pid: u32,
    /// When: microseconds of a clock of the driver's.
    pub at: u64,
    /// Percent of the sampling period.
    pub percent: u32,
}

/// A process that uses a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// The process, as this process's PID namespace counts. NVML leaves out those that it does not have
    /// (`_gpuConvertPid` of NVIDIA's open kernel modules), so only the host's own has all.
    pub pid: u32,
    /// Bytes, its contexts included; `None` where the driver cannot say (vGPU, MIG).
    pub bytes: Option<u64>,
}

/// Why NVML does not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// The root itself, or something in it.
    #[error("{0}")]
    Root(String),
    /// There is no library.
    #[error(
        "no NVML: found no libnvidia-ml.so.1 in {searched} under driver root {roots}: install the \
         NVIDIA driver on this node, or point the chart value `nodePlugin.driverRoot` at its root"
    )]
    NotFound {
        /// The roots that were searched, as the host sees them, joined.
        roots: String,
        /// The folders, joined.
        searched: String,
    },
    /// There is one, and it cannot be used.
    #[error(
        "NVML at {path} does not start: {reason}: see that the NVIDIA kernel module is loaded (`nvidia-smi` on the node)"
    )]
    Start {
        /// The library as this process sees it.
        path: PathBuf,
        /// In NVML's words.
        reason: String,
    },
    /// This process has no way to the kernel driver.
    #[error("{0}")]
    Devices(String),
    /// `NVML_ERROR_GPU_IS_LOST`: the GPU fell off the bus or is otherwise inaccessible.
    #[error("{call}({object}): the GPU is lost")]
    GpuLost {
        /// The NVML function.
        call: &'static str,
        /// On what.
        object: String,
    },
    /// A call failed.
    #[error("{call}({object}): {reason}")]
    Call {
        /// The NVML function.
        call: &'static str,
        /// On what.
        object: String,
        /// In NVML's words.
        reason: String,
    },
}

impl From<RootError> for NvmlError {
    fn from(e: RootError) -> Self {
        Self::Root(e.to_string())
    }
}

/// A running NVML.
pub trait Nvml: Send + Sync + std::fmt::Debug {
    /// Describes driver and GPUs as they are now. A GPU that cannot be described is listed as
    /// broken; the others are not held up by it.
    fn describe(&self) -> Result<Description, NvmlError>;

    /// nvmlDeviceGetUtilizationRates `gpu`: percent of the last sampling period in which a kernel ran.
    fn utilization(&self, gpu_uuid: &str) -> Result<u32, NvmlError>;

    /// nvmlDeviceGetProcessUtilization: what of its time the GPU worked for which process, in all
    /// samples after `since`.
    fn process_utilization(
        &self,
        gpu_uuid: &str,
        since: u64,
    ) -> Result<Vec<ProcessSample>, NvmlError>;

    /// nvmlDeviceGetComputeRunningProcesses_v3 and nvmlDeviceGetGraphicsRunningProcesses_v3: who uses
    /// the GPU's memory, each process once.
    fn processes(&self, gpu_uuid: &str) -> Result<Vec<ProcessMemory>, NvmlError>;

    /// nvmlDeviceGetMemoryInfo_v2 `used`: bytes that are allocated, without what the driver reserves.
    fn used_memory(&self, gpu_uuid: &str) -> Result<u64, NvmlError>;
}

/// A place where NVML may be found.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// Finds and starts NVML. The kernel driver cannot be unloaded until the result is dropped.
    fn open(&self) -> Result<Opened, NvmlError>;

    /// What can be seen of the driver without opening it. Another value than before says that it came,
    /// went or changed.
    fn traces(&self) -> Traces;
}

/// A running NVML, and where it was found.
#[derive(Debug)]
pub struct Opened {
    /// NVML.
    pub nvml: Box<dyn Nvml>,
    /// The root that its library lies in.
    pub root: DriverRoot,
    /// The driver's device nodes.
    pub nodes: DeviceNodes,
}

/// Files by which a driver shows, and what identifies each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traces(pub Vec<(PathBuf, String)>);
