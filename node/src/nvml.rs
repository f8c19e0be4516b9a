//! The part of NVML that the node uses.
//!
//! [`Nvml`] and [`Driver`] are injected, so that a test can script a driver that is missing,
//! appears late or fails. [`search`] finds the real library, `library` calls it.

mod call;
mod deadline;
mod gate;
mod health;
mod kept;
mod library;
mod mig;
pub mod search;
mod session;
mod time_slice;
mod usage;

use std::path::PathBuf;

use tranche_api::gpu_node::MigMode;
use tranche_api::mig::{MigInstance, MigProfile};
use tranche_api::sharing_policy::Interval;
use tranche_api::usage::{Memory, Sensors, Utilization};
use tranche_api::vgpu::VgpuRole;
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};
use tranche_driver::health::Report;

use crate::devices::DeviceNodes;
use crate::root::{DriverRoot, RootError};

pub use deadline::{Entered, Hang, Hangs};
pub use gate::{Gate, Gated, Pass, Patient, Shut};
pub use kept::KeptNvml;
pub use session::{EVENTS, OF_SAMPLERS, Session};

/// What NVML reports about a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

/// What NVML reports about a node without its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// nvmlSystemGetDriverVersion.
    pub driver_version: String,
    /// nvmlSystemGetCudaDriverVersion_v2 as `major.minor`.
    pub cuda_driver_version: String,
    /// nvmlDeviceGetCount_v2.
    pub count: u32,
}

impl Description {
    /// Without any GPU.
    #[must_use]
    pub fn of(outline: &Outline) -> Self {
        Self {
            driver_version: outline.driver_version.clone(),
            cuda_driver_version: outline.cuda_driver_version.clone(),
            ..Self::default()
        }
    }
}

/// A GPU that NVML counts and cannot describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenGpu {
    /// Its index, as NVML counts.
    pub index: u32,
    /// Its UUID, if NVML reported it before it failed.
    pub uuid: Option<String>,
    /// The call that failed.
    pub error: NvmlError,
}

/// What NVML reports about one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuDescription {
    /// nvmlDeviceGetUUID.
    pub uuid: String,
    /// NVML's index.
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
    /// nvmlDeviceGetAttributes_v2, if the driver reports it.
    pub multiprocessors: Option<u32>,
    /// nvmlDeviceGetMigMode is supported.
    pub mig_capable: bool,
    /// nvmlDeviceGetMigMode; both off where it is not supported.
    pub mig_mode: MigMode,
    /// The profiles into which MIG can divide the GPU; empty where the driver does not report them.
    pub mig_profiles: Vec<MigProfile>,
    /// The GPU instances that exist.
    pub mig_instances: Vec<MigInstance>,
    /// nvmlDeviceGetVirtualizationMode; absent if the GPU is not used for vGPUs.
    pub vgpu_role: Option<VgpuRole>,
}

impl GpuDescription {
    /// The GPU's address as in sysfs: a GPU is function 0 of its device.
    #[must_use]
    pub fn pci_bus_id(&self) -> String {
        let (domain, bus, device) = self.pci;
        format!("{domain:04x}:{bus:02x}:{device:02x}.0")
    }
}

/// A sample of a GPU's utilization by a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessSample {
    /// The PID in the host's PID namespace.
    pub pid: u32,
    /// Its time: microseconds of a clock of the driver.
    pub at: u64,
    /// Percent of the sampling period in which a kernel of it ran (`smUtil`).
    pub percent: u32,
    /// Percent of the sampling period in which its memory was read or written (`memUtil`).
    pub copies: u32,
}

/// A process that uses a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// The PID in this process's PID namespace. NVML leaves out processes that are not in it (`_gpuConvertPid` of
    /// NVIDIA's open kernel modules), so only a process in the host's PID namespace sees all.
    pub pid: u32,
    /// Bytes, its contexts included; `None` if the driver does not report it (vGPU, MIG).
    pub bytes: Option<u64>,
}

/// Who uses a GPU, and its sensors. Values that the model or the driver does not report are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuUse {
    /// Whether it is in MIG mode.
    pub mig_mode: bool,
    /// nvmlDeviceGetMemoryInfo_v2.
    pub memory: Option<Memory>,
    /// nvmlDeviceGetUtilizationRates, of the last sampling period; GPM's metrics since the last call.
    pub utilization: Utilization,
    /// Values that belong to nobody. Rates are since the last call.
    pub sensors: Sensors,
    /// The processes that use its memory, those on partitions included.
    pub processes: Vec<ProcessMemory>,
    /// Its MIG devices.
    pub partitions: Vec<PartitionUse>,
}

/// Who uses a MIG device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionUse {
    /// `MIG-…`.
    pub uuid: String,
    /// As `1g.10gb`.
    pub profile: String,
    /// The id of its GPU instance.
    pub gpu_instance: u32,
    /// The id of its compute instance.
    pub compute_instance: u32,
    /// nvmlDeviceGetMemoryInfo_v2.
    pub memory: Option<Memory>,
    /// GPM's metrics since the last call.
    pub utilization: Utilization,
    /// The processes that use its memory.
    pub processes: Vec<ProcessMemory>,
}

/// Why NVML does not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// The root itself, or something in it.
    #[error("{0}")]
    Root(String),
    /// The library was not found.
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
    /// The library was found and cannot be used.
    #[error(
        "NVML at {path} does not start: {reason}: check that the NVIDIA kernel module is loaded (`nvidia-smi` on the node)"
    )]
    Start {
        /// The library as this process sees it.
        path: PathBuf,
        /// NVML's error.
        reason: String,
    },
    /// This process cannot reach the kernel driver.
    #[error("{0}")]
    Devices(String),
    /// `NVML_ERROR_GPU_IS_LOST`: the GPU fell off the bus or is otherwise inaccessible.
    #[error("{call}({object}): the GPU is lost")]
    GpuLost {
        /// The NVML function.
        call: &'static str,
        /// The object of the call.
        object: String,
    },
    /// A call has not returned in time. It goes on, because nothing can end it.
    #[error(
        "{call}({object}): the driver does not answer: the call hangs. It is used again when the call returns; see the kernel log \
         (`dmesg`) for the cause, then reset the GPU (`nvidia-smi --gpu-reset`) or reboot the node"
    )]
    Hangs {
        /// The NVML function.
        call: &'static str,
        /// The object of the call.
        object: String,
    },
    /// A call failed.
    #[error("{call}({object}): {reason}")]
    Call {
        /// The NVML function.
        call: &'static str,
        /// The object of the call.
        object: String,
        /// NVML's error.
        reason: String,
    },
    /// `NVML_ERROR_NOT_SUPPORTED`: the GPU, in its present mode, or the driver does not have what was asked for.
    #[error("{call}({object}): not supported")]
    NotSupported {
        /// The NVML function.
        call: &'static str,
        /// The object of the call.
        object: String,
    },
}

/// Why a GPU was not changed. Its state is as before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// `NVML_ERROR_IN_USE`: a process or another client of the driver (a monitor, say) uses the GPU or the instance. The
    /// same change can succeed later.
    #[error("{call}({object}): it is in use by another client")]
    InUse {
        /// The NVML function.
        call: &'static str,
        /// The object of the call.
        object: String,
    },
    /// `NVML_ERROR_INSUFFICIENT_RESOURCES`: slices or engines that the instance takes are not free. Also returned if an
    /// equal instance exists already.
    #[error("{call}({object}): the GPU has not enough free slices or engines")]
    InsufficientResources {
        /// The NVML function.
        call: &'static str,
        /// The object of the call.
        object: String,
    },
    /// `NVML_ERROR_RESET_REQUIRED`: MIG mode changes only with a reset of the GPU, which the driver cannot do here.
    #[error(
        "{call}({object}): MIG mode changes only with a reset of the GPU, which the driver cannot do here"
    )]
    NeedsReset {
        /// The NVML function.
        call: &'static str,
        /// The object of the call.
        object: String,
    },
    /// Anything else.
    #[error(transparent)]
    Nvml(#[from] NvmlError),
}

impl From<RootError> for NvmlError {
    fn from(e: RootError) -> Self {
        Self::Root(e.to_string())
    }
}

/// A running NVML.
pub trait Nvml: Send + Sync + std::fmt::Debug {
    /// Describes driver and GPUs as they are now. A GPU that cannot be described is listed as
    /// broken; the others are described.
    fn describe(&self) -> Result<Description, NvmlError>;

    /// [`Self::describe`] without the GPUs.
    fn outline(&self) -> Result<Outline, NvmlError> {
        let all = self.describe()?;
        Ok(Outline {
            count: u32::try_from(all.gpus.len() + all.broken.len()).unwrap_or(u32::MAX),
            driver_version: all.driver_version,
            cuda_driver_version: all.cuda_driver_version,
        })
    }

    /// [`Self::describe`] for the GPU with this index.
    fn describe_gpu(&self, index: u32) -> Result<GpuDescription, BrokenGpu> {
        let broken = |error| BrokenGpu {
            index,
            uuid: None,
            error,
        };
        let all = self.describe().map_err(broken)?;
        if let Some(gpu) = all.gpus.into_iter().find(|gpu| gpu.index == index) {
            return Ok(gpu);
        }
        let known = all.broken.into_iter().find(|gpu| gpu.index == index);
        Err(known.unwrap_or_else(|| {
            broken(NvmlError::Call {
                call: "nvmlDeviceGetHandleByIndex_v2",
                object: format!("index {index}"),
                reason: "there is no such GPU".to_owned(),
            })
        }))
    }

    /// nvmlDeviceGetMinorNumber: the N of `/dev/nvidiaN`.
    fn minor(&self, gpu_uuid: &str) -> Result<u32, NvmlError>;

    /// nvmlDeviceGetProcessUtilization: the GPU's utilization by each process, in all samples after
    /// `since`.
    fn process_utilization(
        &self,
        gpu_uuid: &str,
        since: u64,
    ) -> Result<Vec<ProcessSample>, NvmlError>;

    /// nvmlDeviceGetComputeRunningProcesses_v3 and nvmlDeviceGetGraphicsRunningProcesses_v3: the
    /// processes that use the GPU's memory, each once.
    fn processes(&self, gpu_uuid: &str) -> Result<Vec<ProcessMemory>, NvmlError>;

    /// nvmlDeviceGetMemoryInfo_v2 `used`: allocated bytes, without the driver's reserve. `None` in MIG mode: each GPU
    /// instance takes memory for itself, so the sum does not match that of the processes.
    fn used_memory(&self, gpu_uuid: &str) -> Result<Option<u64>, NvmlError>;

    /// nvmlDeviceGetUtilizationRates: percent of the last sampling period in which a kernel ran, and in which the memory was read
    /// or written.
    fn utilization_rates(&self, gpu_uuid: &str) -> Result<[u32; 2], NvmlError>;

    /// The Xids of these GPUs since the last call, with the GPUs' UUIDs (nvmlEventSetWait_v2). Xids from before the
    /// first call for a GPU are not known.
    fn xids(&self, gpus: &[&str]) -> Result<Vec<(String, u64)>, NvmlError>;

    /// What is known of the GPU's health, by nvmlDeviceGetFieldValues.
    fn health(&self, gpu_uuid: &str) -> Result<Report, NvmlError>;

    /// Who uses the GPU, and its sensors.
    fn usage(&self, gpu_uuid: &str) -> Result<GpuUse, NvmlError>;

    /// The GPU's MIG mode and instances, as they are now. A GPU without MIG has no instances.
    fn mig_state(&self, gpu_uuid: &str) -> Result<Actual, NvmlError>;

    /// Changes MIG mode or an instance, by one call of NVML, which can take seconds. Removing an instance that does not
    /// exist is not an error.
    ///
    /// Switching MIG mode can unbind and reset the GPU: its minor number and its index may change (nvml.h). If the mode
    /// cannot change at once, it does not change at a later reset either.
    fn change_mig(&self, gpu_uuid: &str, change: &Change) -> Result<(), ChangeError>;

    /// nvmlDeviceGetComputeMode.
    fn compute_mode(&self, gpu_uuid: &str) -> Result<ComputeMode, NvmlError>;

    /// nvmlDeviceSetComputeMode.
    fn set_compute_mode(&self, gpu_uuid: &str, mode: ComputeMode) -> Result<(), NvmlError>;

    /// How long a process has the GPU before the driver gives it to the next one.
    fn time_slice(&self, gpu_uuid: &str) -> Result<Interval, NvmlError>;

    /// Sets it, until the GPU is reset or its driver unloaded.
    fn set_time_slice(&self, gpu_uuid: &str, interval: Interval) -> Result<(), NvmlError>;
}

/// A source of NVML.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// Finds and starts NVML. The kernel driver cannot be unloaded until the result is dropped.
    fn open(&self) -> Result<Opened, NvmlError>;

    /// What is visible of the driver without opening it. The value changes when the driver is installed, removed or
    /// replaced.
    fn traces(&self) -> Traces;
}

/// A running NVML, and where it was found.
#[derive(Debug)]
pub struct Opened {
    /// NVML.
    pub nvml: Box<dyn Nvml>,
    /// The root that contains its library.
    pub root: DriverRoot,
    /// The driver's device nodes.
    pub nodes: DeviceNodes,
    /// Tells a [`Gate`], if there is one, that NVML is open.
    pub pass: Option<Pass>,
}

/// The driver's visible files, and the identity of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traces(pub Vec<(PathBuf, String)>);

impl Traces {
    /// Whether no kernel module of the driver is loaded.
    #[must_use]
    pub fn lack_module(&self) -> bool {
        let mut traces = self.0.iter();
        traces.any(|(path, text)| path.as_os_str() == search::VERSION && text.is_empty())
    }
}
