//! Reconciles GPUs with what the claims that hold them want: their MIG mode, their GPU instances, their MPS daemons and
//! their compute modes.
//!
//! ```text
//!  GPU's lock ─► its record, what claims hold ─► gpu_state::next ─► write the record, or one call  ────────┐
//!                                                      ▲                                                   │
//!                                                      └─────────── the GPU as NVML sees it now ◄──────────┘
//! ```
//!
//! The state belongs to the GPU and not to a claim, so it is no step of a claim's plan. It is reconciled before the plan's
//! first step and after the last inverse. A crash between two calls needs no repair of its own: the next reconciliation finds
//! what is left to do. A claim's next call starts it, or [`Gpus::settle`] when the driver is ready.
//!
//! A GPU has one FIFO lock; claims on different GPUs do not wait for each other. NVML is open only while there is something
//! to do. On a GPU without partitions and concurrent shares there never is.

mod daemons;
mod modes;
#[cfg(test)]
mod tests;
mod time_slice;
mod vfio;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_driver::gpu_state::Obstacle;
use tranche_driver::mig::{GeometryError, Placement};
use tranche_driver::preparation::{HeldOfGpu, MigDevice, PreparationPlan, VfioGroup, held_of};
use tranche_driver::vfio::Obstacle as VfioObstacle;
use tranche_node::capabilities::CapabilityError;
use tranche_node::nvml::{ChangeError, Driver, Gate, NvmlError};
use tranche_node::vfio::{Groups, ReconcileError};

pub use vfio::OPEN_PATIENCE;

use crate::gpu::driver_state::DriverState;
use crate::gpu::load_pages::LoadPages;
use crate::gpu::mps::{Daemons, MpsError};
use crate::gpu::records::{GpuRecords, RecordError};
use crate::ledger::Ledger;
use crate::locks::Locks;

/// How soon a GPU that could not be reconciled is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// Why a GPU is not as its claims want it.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The record of Tranche's changes on it cannot be used.
    #[error(transparent)]
    GpuChanges(#[from] RecordError),
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    /// Something is in the way.
    #[error("GPU {gpu}: {obstacle}")]
    Obstacle { gpu: String, obstacle: Obstacle },
    #[error("GPU {gpu}: {error}")]
    Change { gpu: String, error: ChangeError },
    /// The driver has no node that gives access to a partition.
    #[error("GPU {gpu}: {error}")]
    Capabilities { gpu: String, error: CapabilityError },
    /// There is no driver, or it does not see the GPU.
    #[error("GPU {gpu}: the node's driver does not see it")]
    Missing { gpu: String },
    /// It cannot be partitioned, or the driver does not say how.
    #[error("GPU {gpu}: the driver does not report how MIG divides it")]
    NotDivided { gpu: String },
    /// The driver reports an invalid division of it.
    #[error("GPU {gpu}: {error}")]
    Geometry { gpu: String, error: GeometryError },
    /// It cannot be bound to VFIO, or to its driver again.
    #[error(transparent)]
    Vfio(#[from] ReconcileError),
    #[error("GPU {gpu}: {error}")]
    Mps { gpu: String, error: MpsError },
    /// Its state does not settle.
    #[error(
        "GPU {gpu}: its state keeps changing: does somebody else change its MIG mode or its GPU instances?"
    )]
    Restless { gpu: String },
}

#[derive(Debug)]
pub struct Hardware {
    pub nvml: Box<dyn Driver>,
    pub daemons: Box<dyn Daemons>,
    pub groups: Arc<dyn Groups>,
    /// Closes the NVML of those that keep it open.
    pub gate: Gate,
    /// How long a GPU that is being bound to VFIO is tried again while a process has it open: [`OPEN_PATIENCE`].
    pub open_patience: Duration,
    /// The host's `/proc`.
    pub proc: PathBuf,
}

/// The GPUs of this node.
#[derive(Debug)]
pub struct Gpus {
    records: GpuRecords,
    load_pages: LoadPages,
    ledger: Arc<Ledger>,
    hardware: Hardware,
    state: watch::Receiver<DriverState>,
    locks: Arc<Locks>,
    /// A release has left something that [`Self::settle`] takes back.
    left_over: Notify,
}

/// What a claim gets of a GPU after its reconciliation.
#[derive(Debug, Default)]
struct Reconciled {
    /// The N of `/dev/nvidiaN`, if NVML was asked.
    minor: Option<u32>,
    partitions: BTreeMap<Placement, MigDevice>,
    /// Set if the GPU is bound to VFIO.
    group: Option<VfioGroup>,
}

fn find<'a>(inventory: &'a Inventory, gpu_uuid: &str) -> Option<&'a Gpu> {
    inventory.gpus.iter().find(|gpu| gpu.uuid == gpu_uuid)
}

impl Gpus {
    /// What claims hold is read from `ledger`.
    #[must_use]
    pub fn new(
        records: GpuRecords,
        load_pages: LoadPages,
        ledger: Arc<Ledger>,
        hardware: Hardware,
        state: watch::Receiver<DriverState>,
    ) -> Self {
        Self {
            records,
            load_pages,
            ledger,
            hardware,
            state,
            locks: Arc::default(),
            left_over: Notify::new(),
        }
    }

    #[must_use]
    pub fn load_pages(&self) -> &LoadPages {
        &self.load_pages
    }

    /// What Tranche has changed, by GPU.
    #[must_use]
    pub fn records(&self) -> &GpuRecords {
        &self.records
    }

    /// Reconciles the GPUs of a plan with what it needs, beside what other claims hold of them. Returns the plan with the
    /// MIG devices that its partitions are now.
    pub fn prepare(&self, mut plan: PreparationPlan) -> Result<PreparationPlan, GpuError> {
        let devices = plan.devices.iter().filter(|device| !device.admin_access);
        let gpus: BTreeSet<String> = devices.map(|device| device.gpu_uuid.clone()).collect();
        for gpu in &gpus {
            let made = self.reconcile(gpu, held_of(gpu, [&plan]))?;
            if let Some(group) = &made.group {
                plan = plan.at_vfio(gpu, group);
            }
            plan = plan.on_gpu(gpu, made.minor, |placement| {
                made.partitions.get(&placement).cloned()
            });
        }
        Ok(plan)
    }

    /// Takes back what only this plan needed of its GPUs. If a GPU or its driver is missing, its instances are gone, and
    /// [`Self::settle`] does the rest when it returns. [`Self::settle`] also ends daemons later if the MPS supervisor does not
    /// answer; until then the GPU is given to no other tier.
    pub fn release(&self, plan: &PreparationPlan) -> Result<(), GpuError> {
        let gpus = plan.changed_gpus();
        if gpus.is_empty() {
            return Ok(());
        }
        self.ledger.begin_release(&plan.allocation.uid);
        for gpu in gpus {
            match self.reconcile(gpu, HeldOfGpu::default()) {
                Ok(_) => {}
                Err(error) if error.is_absence() => {
                    warn!(gpu, %error, "what a released claim had of a GPU is removed when the GPU is back");
                }
                Err(error @ GpuError::Mps { .. }) => {
                    warn!(gpu, %error, "the MPS daemon of released claims is ended later");
                    self.left_over.notify_one();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reconciles a GPU with what claims want, and makes what one of them needs where it is missing.
    fn reconcile(&self, gpu_uuid: &str, needs: HeldOfGpu) -> Result<Reconciled, GpuError> {
        let _lock = self.locks.blocking_lock(gpu_uuid);
        let mut record = self.records.load(gpu_uuid)?;
        let held = self.ledger.held_of(gpu_uuid);
        let to_vfio = needs.vfio || held.vfio;
        self.forget_other_boot(gpu_uuid, &mut record)?;
        if !to_vfio {
            self.leave_vfio(gpu_uuid, &mut record)?;
        }
        // A GPU that is bound to VFIO, or is being bound, has nothing else of Tranche, and its driver may not know it.
        let mut reconciled = if record.vfio.is_none() {
            self.reconcile_modes(gpu_uuid, needs, held, &mut record)?
        } else {
            Reconciled::default()
        };
        if to_vfio {
            reconciled.group = Some(self.enter_vfio(gpu_uuid, &mut record)?);
        }
        Ok(reconciled)
    }

    /// Removes what no claim holds from every GPU that Tranche has changed. Returns whether all of them are at rest.
    fn settle_all(&self) -> bool {
        let gpus = match self.records.all() {
            Ok(gpus) => gpus,
            Err(error) => {
                warn!(%error, "it is not known which GPUs Tranche has changed");
                return false;
            }
        };
        let mut at_rest = true;
        for gpu in gpus {
            if let Err(error) = self.reconcile(&gpu, HeldOfGpu::default()) {
                warn!(gpu, %error, "a GPU is not as its claims want it");
                at_rest = false;
            }
        }
        at_rest
    }

    /// Reconciles all GPUs whenever the driver is ready: a crash, or a release without the driver, may have left something.
    pub async fn settle(self: Arc<Self>, stop: CancellationToken) {
        let mut state = self.state.clone();
        loop {
            let is_ready = matches!(&*state.borrow_and_update(), DriverState::Ready(_));
            let mut again = false;
            if is_ready {
                let gpus = Arc::clone(&self);
                let settled = tokio::task::spawn_blocking(move || gpus.settle_all()).await;
                again = !settled.unwrap_or(true);
            }
            let retry = async {
                if again {
                    tokio::time::sleep(RETRY).await;
                } else {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                changed = state.changed() => if changed.is_err() { return },
                () = self.left_over.notified() => {}
                () = retry => {}
            }
        }
    }
}

impl GpuError {
    /// Whether somebody still uses what is to be changed, and may end soon.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        match self {
            Self::Change { error, .. } => matches!(error, ChangeError::InUse { .. }),
            Self::Vfio(ReconcileError::Obstacle(obstacle)) => {
                matches!(obstacle, VfioObstacle::InUse { user, .. } if !user.is_persistence_daemon())
            }
            _ => false,
        }
    }

    /// Whether the GPU or its driver is missing, and with it everything that Tranche made on the GPU.
    fn is_absence(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Vfio(ReconcileError::Obstacle(VfioObstacle::Missing(_)))
                | Self::Nvml(
                    NvmlError::NotFound { .. }
                        | NvmlError::Root(_)
                        | NvmlError::Start { .. }
                        | NvmlError::Devices(_)
                        | NvmlError::GpuLost { .. }
                )
        )
    }
}
