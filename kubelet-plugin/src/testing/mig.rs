//! A driver whose changes of GPUs are calls of the plugin's file system, so that a plugin that dies there changes nothing,
//! and whose kernel module writes the files of capabilities.

use std::path::PathBuf;
use std::sync::Arc;

use tranche_api::sharing_policy::Interval;
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};
use tranche_driver::health::Report;
use tranche_node::nvml::{
    ChangeError, Description, Driver, GpuUse, Nvml, NvmlError, Opened, ProcessMemory,
    ProcessSample, Traces,
};
use tranche_node::testing::MigGpus;

use crate::host::fs::Fs;

#[derive(Clone, Debug)]
pub struct MortalDriver {
    /// The GPUs, which outlive a plugin.
    pub gpus: MigGpus,
    pub fs: Arc<dyn Fs>,
    /// The host's `/proc`.
    pub proc: PathBuf,
}

impl MortalDriver {
    /// An error once the plugin is dead.
    fn is_alive(&self, gpu_uuid: &str) -> Result<(), NvmlError> {
        let alive = self.fs.create_dir(&self.proc);
        alive.map_err(|error| NvmlError::Call {
            call: "scripted",
            object: gpu_uuid.into(),
            reason: error.to_string(),
        })
    }

    /// The files of all instances of a GPU.
    fn write_capabilities(&self, gpu: &str) {
        let description = self.gpus.describe().unwrap();
        let gpu = description.gpus.iter().find(|it| it.uuid == gpu).unwrap();
        let minor = gpu.minor;
        let in_proc = format!("driver/nvidia/capabilities/gpu{minor}/mig");
        let folder = self.proc.join(in_proc);
        let _ = std::fs::remove_dir_all(&folder);
        for instance in self.gpus.mig_state(&gpu.uuid).unwrap().instances {
            let gi = folder.join(format!("gi{}", instance.id));
            let of_compute = instance.compute.iter();
            let folders = of_compute.map(|it| gi.join(format!("ci{}", it.id)));
            let first = 100 * (minor + 1) + 10 * instance.id;
            for (at, folder) in (first..).zip([gi.clone()].into_iter().chain(folders)) {
                std::fs::create_dir_all(&folder).unwrap();
                let text =
                    format!("DeviceFileMinor: {at}\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
                std::fs::write(folder.join("access"), text).unwrap();
            }
        }
        let devices = "Character devices:\n235 nvidia-caps\n";
        // Others may be reading it.
        let new = self.proc.join(format!("devices.{minor}"));
        std::fs::write(&new, devices).unwrap();
        std::fs::rename(new, self.proc.join("devices")).unwrap();
    }
}

impl Driver for MortalDriver {
    fn open(&self) -> Result<Opened, NvmlError> {
        Ok(Opened {
            nvml: Box::new(self.clone()),
            ..self.gpus.open()?
        })
    }

    fn traces(&self) -> Traces {
        Traces::default()
    }
}

impl Nvml for MortalDriver {
    fn describe(&self) -> Result<Description, NvmlError> {
        self.gpus.describe()
    }

    fn minor(&self, gpu_uuid: &str) -> Result<u32, NvmlError> {
        self.gpus.minor(gpu_uuid)
    }

    fn process_utilization(
        &self,
        gpu_uuid: &str,
        since: u64,
    ) -> Result<Vec<ProcessSample>, NvmlError> {
        self.gpus.process_utilization(gpu_uuid, since)
    }

    fn processes(&self, gpu_uuid: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
        self.gpus.processes(gpu_uuid)
    }

    fn used_memory(&self, gpu_uuid: &str) -> Result<Option<u64>, NvmlError> {
        self.gpus.used_memory(gpu_uuid)
    }

    fn utilization_rates(&self, gpu_uuid: &str) -> Result<[u32; 2], NvmlError> {
        self.gpus.utilization_rates(gpu_uuid)
    }

    fn xids(&self, gpus: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        self.gpus.xids(gpus)
    }

    fn health(&self, gpu_uuid: &str) -> Result<Report, NvmlError> {
        self.gpus.health(gpu_uuid)
    }

    fn usage(&self, gpu_uuid: &str) -> Result<GpuUse, NvmlError> {
        self.gpus.usage(gpu_uuid)
    }

    fn mig_state(&self, gpu_uuid: &str) -> Result<Actual, NvmlError> {
        self.gpus.mig_state(gpu_uuid)
    }

    fn change_mig(&self, gpu_uuid: &str, change: &Change) -> Result<(), ChangeError> {
        self.is_alive(gpu_uuid)?;
        self.gpus.change_mig(gpu_uuid, change)?;
        self.write_capabilities(gpu_uuid);
        Ok(())
    }

    fn compute_mode(&self, gpu_uuid: &str) -> Result<ComputeMode, NvmlError> {
        self.gpus.compute_mode(gpu_uuid)
    }

    fn set_compute_mode(&self, gpu_uuid: &str, mode: ComputeMode) -> Result<(), NvmlError> {
        self.is_alive(gpu_uuid)?;
        self.gpus.set_compute_mode(gpu_uuid, mode)
    }

    fn time_slice(&self, gpu_uuid: &str) -> Result<Interval, NvmlError> {
        self.gpus.time_slice(gpu_uuid)
    }

    fn set_time_slice(&self, gpu_uuid: &str, interval: Interval) -> Result<(), NvmlError> {
        self.is_alive(gpu_uuid)?;
        self.gpus.set_time_slice(gpu_uuid, interval)
    }
}
