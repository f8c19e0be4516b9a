//! The driver's own libnvidia-ml.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enum_wrappers::device::{Brand, ComputeMode as Mode, GpuVirtualizationMode};
use nvml_wrapper::enums::device::{DeviceArchitecture, UsedGpuMemory};
use nvml_wrapper::error::NvmlError as Reason;
use nvml_wrapper::{cuda_driver_version_major, cuda_driver_version_minor};

use tranche_api::gpu_node::MigMode;
use tranche_api::sharing_policy::Interval;
use tranche_api::vgpu::VgpuRole;
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};
use tranche_driver::health::Report;
use tranche_nvml::gpm::Gpm;
use tranche_nvml::nvlink::NvLinks;
use tranche_nvml::xids::Xids;

use super::call::call;
use super::time_slice::NvidiaSmi;
use super::{
    BrokenGpu, ChangeError, Description, GpuDescription, GpuUse, Nvml, NvmlError, Outline,
    PartitionUse, ProcessMemory, ProcessSample, health, mig, usage,
};

/// NVML_DEVICE_MIG_ENABLE.
const MIG_ENABLED: u32 = 1;

/// Loads the library at `path` and starts it. Its files, `/dev/nvidiactl` and those of GPUs, are open
/// until the result is dropped. `smi` is the nvidia-smi of the same driver.
pub(super) fn open(path: &Path, smi: Option<PathBuf>) -> Result<Box<dyn Nvml>, NvmlError> {
    // NVML must start without a GPU: one may appear later.
    let nvml = nvml_wrapper::Nvml::builder()
        .lib_path(path.as_os_str())
        .flags(InitFlags::NO_GPUS)
        .init();
    match nvml {
        Ok(nvml) => {
            let nvml = Arc::new(nvml);
            Ok(Box::new(Library {
                gpm: Gpm::new(Arc::clone(&nvml)),
                nvlinks: NvLinks::new(Arc::clone(&nvml)),
                xids: Xids::new(Arc::clone(&nvml)),
                nvml,
                smi: NvidiaSmi {
                    program: smi,
                    library: path.to_owned(),
                },
            }))
        }
        Err(e) => Err(NvmlError::Start {
            path: path.to_owned(),
            reason: e.to_string(),
        }),
    }
}

#[derive(Debug)]
struct Library {
    nvml: Arc<nvml_wrapper::Nvml>,
    gpm: Gpm,
    nvlinks: NvLinks,
    xids: Xids,
    smi: NvidiaSmi,
}

impl Nvml for Library {
    fn describe(&self) -> Result<Description, NvmlError> {
        let outline = self.outline()?;
        let mut description = Description::of(&outline);
        for index in 0..outline.count {
            match self.describe_gpu(index) {
                Ok(gpu) => description.gpus.push(gpu),
                Err(broken) => description.broken.push(broken),
            }
        }
        Ok(description)
    }

    fn outline(&self) -> Result<Outline, NvmlError> {
        let driver_version = call(
            "nvmlSystemGetDriverVersion",
            "",
            self.nvml.sys_driver_version(),
        )?;
        let cuda = call(
            "nvmlSystemGetCudaDriverVersion_v2",
            "",
            self.nvml.sys_cuda_driver_version(),
        )?;
        Ok(Outline {
            driver_version,
            cuda_driver_version: format!(
                "{}.{}",
                cuda_driver_version_major(cuda),
                cuda_driver_version_minor(cuda)
            ),
            count: call("nvmlDeviceGetCount_v2", "", self.nvml.device_count())?,
        })
    }

    fn describe_gpu(&self, index: u32) -> Result<GpuDescription, BrokenGpu> {
        let mut uuid = None;
        let described = self.describe_whole(index, &mut uuid);
        described.map_err(|error| BrokenGpu { index, uuid, error })
    }

    fn minor(&self, gpu_uuid: &str) -> Result<u32, NvmlError> {
        let minor = self.device(gpu_uuid)?.minor_number();
        call("nvmlDeviceGetMinorNumber", gpu_uuid, minor)
    }

    fn process_utilization(
        &self,
        gpu_uuid: &str,
        since: u64,
    ) -> Result<Vec<ProcessSample>, NvmlError> {
        let reported = match self.device(gpu_uuid)?.process_utilization_stats(since) {
            // No process ran since then.
            Err(Reason::NotFound) => Vec::new(),
            other => call("nvmlDeviceGetProcessUtilization", gpu_uuid, other)?,
        };
        let samples = reported.into_iter().map(|sample| ProcessSample {
            pid: sample.pid,
            at: sample.timestamp,
            percent: sample.sm_util,
            copies: sample.mem_util,
        });
        // The driver fills the rest of its buffer with empty samples.
        Ok(samples.filter(|sample| sample.at > since).collect())
    }

    fn processes(&self, gpu_uuid: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
        let device = self.device(gpu_uuid)?;
        let compute = call(
            "nvmlDeviceGetComputeRunningProcesses_v3",
            gpu_uuid,
            device.running_compute_processes(),
        )?;
        let graphics = call(
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            gpu_uuid,
            device.running_graphics_processes(),
        )?;
        let mut processes: BTreeMap<u32, Option<u64>> = BTreeMap::new();
        for process in compute.into_iter().chain(graphics) {
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            // Each list has all of a process's memory.
            let known = processes.entry(process.pid).or_default();
            *known = (*known).max(bytes);
        }
        let process = |(pid, bytes)| ProcessMemory { pid, bytes };
        Ok(processes.into_iter().map(process).collect())
    }

    fn used_memory(&self, gpu_uuid: &str) -> Result<Option<u64>, NvmlError> {
        let device = self.device(gpu_uuid)?;
        if mig_mode(&device, gpu_uuid)?.is_some_and(|mode| mode.current) {
            return Ok(None);
        }
        let memory = call("nvmlDeviceGetMemoryInfo_v2", gpu_uuid, device.memory_info());
        Ok(Some(memory?.used))
    }

    fn utilization_rates(&self, gpu_uuid: &str) -> Result<[u32; 2], NvmlError> {
        let rates = self.device(gpu_uuid)?.utilization_rates();
        let rates = call("nvmlDeviceGetUtilizationRates", gpu_uuid, rates)?;
        Ok([rates.gpu, rates.memory])
    }

    fn xids(&self, gpus: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        call("nvmlEventSetWait_v2", "", self.xids.read(gpus))
    }

    fn health(&self, gpu_uuid: &str) -> Result<Report, NvmlError> {
        health::read(&self.device(gpu_uuid)?, gpu_uuid)
    }

    fn usage(&self, gpu_uuid: &str) -> Result<GpuUse, NvmlError> {
        let state = self.mig_state(gpu_uuid)?;
        let whole = self.device(gpu_uuid)?;
        let mut usage = GpuUse {
            processes: self.processes(gpu_uuid)?,
            ..usage::of_gpu(&whole, gpu_uuid, &self.gpm, &self.nvlinks)?
        };
        usage.mig_mode = state.mig_mode.current;
        let is_there = |uuid: &str, id: Option<u32>| {
            uuid != gpu_uuid || id.is_none_or(|id| state.instances.iter().any(|it| it.id == id))
        };
        self.gpm.keep(is_there);
        for instance in &state.instances {
            for compute in &instance.compute {
                // It may be removed at this moment.
                let Ok(device) = self.device(&compute.uuid) else {
                    continue;
                };
                usage.partitions.push(PartitionUse {
                    uuid: compute.uuid.clone(),
                    profile: instance.placement.profile.to_string(),
                    gpu_instance: instance.id,
                    compute_instance: compute.id,
                    memory: device.memory_info().ok().as_ref().map(usage::memory_of),
                    utilization: usage::of_instance(&whole, gpu_uuid, instance.id, &self.gpm),
                    processes: self.processes(&compute.uuid).unwrap_or_default(),
                });
            }
        }
        Ok(usage)
    }

    fn mig_state(&self, gpu_uuid: &str) -> Result<Actual, NvmlError> {
        let device = self.device(gpu_uuid)?;
        let Some(mig_mode) = mig_mode(&device, gpu_uuid)? else {
            return Ok(Actual::default());
        };
        let instances = if mig_mode.current {
            mig::instances(&self.nvml, &device, gpu_uuid)?
        } else {
            Vec::new()
        };
        Ok(Actual {
            mig_mode,
            instances,
            ..Actual::default()
        })
    }

    fn change_mig(&self, gpu_uuid: &str, change: &Change) -> Result<(), ChangeError> {
        let device = self.device(gpu_uuid)?;
        mig::change(&self.nvml, &device, gpu_uuid, change)
    }

    fn compute_mode(&self, gpu_uuid: &str) -> Result<ComputeMode, NvmlError> {
        let mode = self.device(gpu_uuid)?.compute_mode();
        Ok(match call("nvmlDeviceGetComputeMode", gpu_uuid, mode)? {
            Mode::Default => ComputeMode::Default,
            Mode::Prohibited => ComputeMode::Prohibited,
            // Drivers since CUDA 8 take EXCLUSIVE_THREAD for EXCLUSIVE_PROCESS.
            Mode::ExclusiveThread | Mode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
        })
    }

    fn set_compute_mode(&self, gpu_uuid: &str, mode: ComputeMode) -> Result<(), NvmlError> {
        let mode = match mode {
            ComputeMode::Default => Mode::Default,
            ComputeMode::Prohibited => Mode::Prohibited,
            ComputeMode::ExclusiveProcess => Mode::ExclusiveProcess,
        };
        let mut device = self.device(gpu_uuid)?;
        let set = device.set_compute_mode(mode);
        call("nvmlDeviceSetComputeMode", gpu_uuid, set)
    }

    fn time_slice(&self, gpu_uuid: &str) -> Result<Interval, NvmlError> {
        self.smi.time_slice(gpu_uuid)
    }

    fn set_time_slice(&self, gpu_uuid: &str, interval: Interval) -> Result<(), NvmlError> {
        self.smi.set_time_slice(gpu_uuid, interval)
    }
}

/// `None` for a model without MIG, and a driver that does not know it.
fn mig_mode(device: &nvml_wrapper::Device<'_>, object: &str) -> Result<Option<MigMode>, NvmlError> {
    match device.mig_mode() {
        Ok(mode) => Ok(Some(MigMode {
            current: mode.current == MIG_ENABLED,
            pending: mode.pending == MIG_ENABLED,
        })),
        Err(Reason::NotSupported | Reason::FunctionNotFound | Reason::FailedToLoadSymbol(_)) => {
            Ok(None)
        }
        Err(e) => call("nvmlDeviceGetMigMode", object, Err(e)),
    }
}

impl Library {
    fn device(&self, gpu_uuid: &str) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        let found = match self.nvml.device_by_uuid(gpu_uuid) {
            // "If any GPU has fallen off the bus": NVML may fail because of another GPU.
            Err(Reason::GpuLost) => self.search(gpu_uuid).ok_or(Reason::GpuLost),
            found => found,
        };
        call("nvmlDeviceGetHandleByUUID", gpu_uuid, found)
    }

    fn search(&self, gpu_uuid: &str) -> Option<nvml_wrapper::Device<'_>> {
        let count = self.nvml.device_count().ok()?;
        (0..count)
            .filter_map(|index| self.nvml.device_by_index(index).ok())
            .find(|device| device.uuid().is_ok_and(|uuid| uuid == gpu_uuid))
    }

    /// Sets `known` as soon as NVML reports the UUID, even if a later call fails.
    fn describe_whole(
        &self,
        index: u32,
        known: &mut Option<String>,
    ) -> Result<GpuDescription, NvmlError> {
        let object = format!("index {index}");
        let device = call(
            "nvmlDeviceGetHandleByIndex_v2",
            &object,
            self.nvml.device_by_index(index),
        )?;
        let uuid = call("nvmlDeviceGetUUID", &object, device.uuid())?;
        *known = Some(uuid.clone());
        let pci = call("nvmlDeviceGetPciInfo_v3", &uuid, device.pci_info())?;
        let memory = call("nvmlDeviceGetMemoryInfo_v2", &uuid, device.memory_info())?;
        let capability = call(
            "nvmlDeviceGetCudaComputeCapability",
            &uuid,
            device.cuda_compute_capability(),
        )?;
        let mig = mig_mode(&device, &uuid)?;
        // An unknown mode of a newer driver must not withhold the GPU.
        let mode = device.virtualization_mode().ok();
        let vgpu_role = mode.as_ref().and_then(vgpu_role);
        let (mig_profiles, mig_instances) = match mig {
            // A vGPU's driver knows the instance of the host's GPU that it uses, without a placement.
            Some(_) if vgpu_role == Some(VgpuRole::Guest) => Default::default(),
            Some(_) => mig::describe(&self.nvml, &device, &uuid)?,
            None => Default::default(),
        };
        Ok(GpuDescription {
            index,
            minor: call("nvmlDeviceGetMinorNumber", &uuid, device.minor_number())?,
            name: call("nvmlDeviceGetName", &uuid, device.name())?,
            // An unknown value of a newer driver must not withhold the GPU.
            brand: device.brand().map_or("Unknown", brand).to_owned(),
            architecture: device
                .architecture()
                .map_or("Unknown", |a| architecture(&a))
                .to_owned(),
            compute_capability: format!("{}.{}", capability.major, capability.minor),
            pci: (pci.domain, pci.bus, pci.device),
            memory_total: memory.total,
            memory_reserved: memory.reserved,
            multiprocessors: device.attributes().ok().map(|a| a.multiprocessor_count),
            mig_capable: mig.is_some(),
            mig_mode: mig.unwrap_or_default(),
            mig_profiles,
            mig_instances,
            vgpu_role,
            uuid,
        })
    }
}

fn vgpu_role(mode: &GpuVirtualizationMode) -> Option<VgpuRole> {
    match mode {
        GpuVirtualizationMode::Bare | GpuVirtualizationMode::PassThrough => None,
        GpuVirtualizationMode::Vgpu => Some(VgpuRole::Guest),
        GpuVirtualizationMode::HostVgpu => Some(VgpuRole::Host),
        GpuVirtualizationMode::HostVsga => Some(VgpuRole::SharedGraphicsHost),
    }
}

/// Spelled as in go-nvlib, which NVIDIA's own DRA driver uses.
fn brand(brand: Brand) -> &'static str {
    match brand {
        Brand::Unknown => "Unknown",
        Brand::Quadro => "Quadro",
        Brand::Tesla => "Tesla",
        Brand::NVS => "NVS",
        Brand::GRID => "Grid",
        Brand::GeForce => "GeForce",
        Brand::Titan => "Titan",
        Brand::VApps => "NvidiaVApps",
        Brand::VPC => "NvidiaVPC",
        Brand::VCS => "NvidiaVCS",
        Brand::VWS => "NvidiaVWS",
        Brand::CloudGaming | Brand::VGaming => "NvidiaCloudGaming",
        Brand::QuadroRTX => "QuadroRTX",
        Brand::NvidiaRTX => "NvidiaRTX",
        Brand::Nvidia => "Nvidia",
        Brand::GeForceRTX => "GeForceRTX",
        Brand::TitanRTX => "TitanRTX",
    }
}

/// Spelled as in go-nvlib, which NVIDIA's own DRA driver uses.
fn architecture(architecture: &DeviceArchitecture) -> &'static str {
    match architecture {
        DeviceArchitecture::Kepler => "Kepler",
        DeviceArchitecture::Maxwell => "Maxwell",
        DeviceArchitecture::Pascal => "Pascal",
        DeviceArchitecture::Volta => "Volta",
        DeviceArchitecture::Turing => "Turing",
        DeviceArchitecture::Ampere => "Ampere",
        DeviceArchitecture::Ada => "Ada Lovelace",
        DeviceArchitecture::Hopper => "Hopper",
        DeviceArchitecture::Blackwell => "Blackwell",
        DeviceArchitecture::Unknown => "Unknown",
    }
}
