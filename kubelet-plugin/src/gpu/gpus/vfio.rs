//! Binds a GPU to VFIO, and gives it back to its driver.

use std::time::{Duration, Instant};

use tracing::{info, warn};
use tranche_api::PciAddress;
use tranche_api::gpu_node::Gpu;
use tranche_driver::gpu_state::{AtVfio, GpuChanges};
use tranche_driver::preparation::VfioGroup;
use tranche_driver::vfio::{self, VFIO_DRIVER};
use tranche_node::vfio::{ReconcileError, reconcile};

use super::{GpuError, Gpus, find};
use crate::gpu::driver_state::DriverState;

/// How long a GPU is tried again while a process has it open: the parts of this plugin that keep NVML open close it within 2 s.
pub const OPEN_PATIENCE: Duration = Duration::from_secs(5);
/// How long the change may take: several writes, of which each waits up to a minute for its effect.
const CHANGE: Duration = Duration::from_mins(3);
/// How long a GPU that came back waits for those parts of this plugin that keep NVML open.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// The pause between two such attempts.
const OPEN_PAUSE: Duration = Duration::from_millis(200);

impl Gpus {
    /// Forgets that a GPU, whose lock the caller holds, was at VFIO in another boot: its driver has it again.
    pub(super) fn forget_other_boot(
        &self,
        gpu_uuid: &str,
        record: &mut GpuChanges,
    ) -> Result<(), GpuError> {
        let Some(at) = &record.vfio else {
            return Ok(());
        };
        let boot = self.hardware.groups.boot().map_err(ReconcileError::Vfio)?;
        if at.drivers.boot != boot {
            self.write_vfio(gpu_uuid, record, None)?;
        }
        Ok(())
    }

    /// Binds a GPU, whose lock the caller holds, to VFIO with its whole IOMMU group, or continues where an earlier call ended.
    pub(super) fn enter_vfio(
        &self,
        gpu_uuid: &str,
        record: &mut GpuChanges,
    ) -> Result<VfioGroup, GpuError> {
        let described = match &record.vfio {
            Some(at) => (**at).clone(),
            None => self.described(gpu_uuid)?,
        };
        let actual = self.reconcile_vfio(gpu_uuid, true, &described, record)?;
        let bound = actual
            .functions
            .iter()
            .filter(|it| it.driver.as_deref() == Some(VFIO_DRIVER));
        Ok(VfioGroup {
            functions: bound.map(|it| it.address.to_string()).collect(),
            nodes: self
                .hardware
                .groups
                .nodes(&actual)
                .map_err(ReconcileError::Vfio)?,
        })
    }

    /// Gives a GPU, whose lock the caller holds, back to the driver that it had.
    pub(super) fn leave_vfio(
        &self,
        gpu_uuid: &str,
        record: &mut GpuChanges,
    ) -> Result<(), GpuError> {
        if let Some(at) = record.vfio.clone() {
            self.reconcile_vfio(gpu_uuid, false, &at, record)?;
        }
        Ok(())
    }

    fn reconcile_vfio(
        &self,
        gpu_uuid: &str,
        wanted: bool,
        described: &AtVfio,
        record: &mut GpuChanges,
    ) -> Result<vfio::Actual, GpuError> {
        info!(gpu = gpu_uuid, wanted, "changing the GPU's kernel driver");
        let address: PciAddress =
            described
                .gpu
                .pci_bus_id
                .parse()
                .map_err(|_| GpuError::Missing {
                    gpu: gpu_uuid.to_owned(),
                })?;
        let what = "the change of its kernel driver";
        let _entered = self.hardware.hangs.enter(gpu_uuid, what, CHANGE);
        let shut = self.hardware.gate.shut();
        let deadline = Instant::now() + self.hardware.open_patience;
        loop {
            let before = record.vfio.as_ref().map(|at| at.drivers.clone());
            let at = (address, Some(described.gpu.minor));
            let mut write = |drivers: Option<&vfio::VfioRecord>| {
                let at = drivers.map(|drivers| AtVfio {
                    drivers: drivers.clone(),
                    ..described.clone()
                });
                self.write_vfio(gpu_uuid, record, at)
            };
            match reconcile(&*self.hardware.groups, at, wanted, before, &mut write) {
                Err(error) if error.is_in_use() && Instant::now() < deadline => {
                    std::thread::sleep(OPEN_PAUSE);
                }
                result => {
                    // An NVML from before would not see this GPU, nor would any other that is opened beside it.
                    if result.is_ok() && !wanted && !shut.wait_for_closed(CLOSE_PATIENCE) {
                        warn!(
                            gpu = gpu_uuid,
                            "NVML was not closed: the GPU is seen again within a minute"
                        );
                    }
                    return result;
                }
            }
        }
    }

    /// Makes or removes the record of a GPU at VFIO.
    fn write_vfio(
        &self,
        gpu_uuid: &str,
        record: &mut GpuChanges,
        at: Option<AtVfio>,
    ) -> Result<(), GpuError> {
        let mut new = record.clone();
        new.vfio = at.map(Box::new);
        self.records.write(gpu_uuid, &new)?;
        *record = new;
        Ok(())
    }

    /// The GPU as its driver describes it now, before it leaves it.
    fn described(&self, gpu_uuid: &str) -> Result<AtVfio, GpuError> {
        let missing = || GpuError::Missing {
            gpu: gpu_uuid.to_owned(),
        };
        let DriverState::Ready(ready) = self.state.borrow().clone() else {
            return Err(missing());
        };
        let known = find(&ready.inventory, gpu_uuid).ok_or_else(missing)?;
        let geometry = ready.inventory.mig_geometry(known);
        // The inventory may be older than a change of the order of GPUs.
        let present = self.hardware.nvml.open()?.nvml.describe()?.gpus;
        let now = present
            .iter()
            .find(|it| it.uuid == gpu_uuid)
            .ok_or_else(missing)?;
        Ok(AtVfio {
            drivers: vfio::VfioRecord::default(),
            gpu: Gpu {
                minor: now.minor,
                pci_bus_id: now.pci_bus_id(),
                ..known.clone()
            },
            mig_profiles: geometry.map(|it| it.profiles.clone()).unwrap_or_default(),
        })
    }
}
