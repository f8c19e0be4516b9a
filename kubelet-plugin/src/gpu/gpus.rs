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
//! A GPU has one FIFO lock; claims on different GPUs do not wait for each other. A claim that waits for the lock holds no thread:
//! a call of a driver, an MPS daemon or the kernel may take a minute, and each GPU takes one thread for that at most. NVML is open only while there is something to do. On a GPU without partitions
//! and concurrent shares there never is.

mod daemons;
mod left_over;
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
use tranche_node::nvml::{ChangeError, Driver, Gate, Hangs, NvmlError};
use tranche_node::vfio::{Groups, ReconcileError};

pub use vfio::OPEN_PATIENCE;

use self::left_over::LeftOvers;

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
    #[error("the plugin is stopping: the next plugin takes over")]
    Stopping,
}

#[derive(Debug)]
pub struct Hardware {
    pub nvml: Box<dyn Driver>,
    pub daemons: Box<dyn Daemons>,
    pub groups: Arc<dyn Groups>,
    /// Which calls do not return.
    pub hangs: Hangs,
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
    /// What released claims have left.
    left_over: LeftOvers,
    /// A release has left something that [`Self::settle`] takes back.
    must_settle: Notify,
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

/// The GPUs of a plan, each once, without those that the claim only observes.
fn own_gpus(plan: &PreparationPlan) -> BTreeSet<String> {
    let devices = plan.devices.iter().filter(|device| !device.admin_access);
    devices.map(|device| device.gpu_uuid.clone()).collect()
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
            left_over: LeftOvers::default(),
            must_settle: Notify::new(),
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

    /// Whether the plan's GPUs are as it needs them, and nobody changes them now. Reads only the disk.
    pub fn are_at_rest_for(&self, plan: &PreparationPlan) -> Result<bool, GpuError> {
        let nothing = HeldOfGpu::default();
        for gpu in own_gpus(plan) {
            let is_at_rest = held_of(&gpu, [plan]) == nothing
                && self.ledger.held_of(&gpu) == nothing
                && self.ledger.time_slices(&gpu).is_empty()
                && !self.locks.is_in_use(&gpu)
                && self.records.load(&gpu)?.is_empty();
            if !is_at_rest {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reconciles the GPUs of a plan with what it needs, beside what other claims hold of them. Returns the plan with the
    /// MIG devices that its partitions are now.
    pub async fn prepare(
        self: &Arc<Self>,
        mut plan: PreparationPlan,
    ) -> Result<PreparationPlan, GpuError> {
        for gpu in &own_gpus(&plan) {
            let made = self.reconcile(gpu, held_of(gpu, [&plan])).await?;
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
    /// [`Self::settle`] does the rest when it returns. [`Self::settle`] also does it later if the MPS supervisor or the driver does not
    /// answer; until then the GPU is withheld.
    pub async fn release(self: &Arc<Self>, plan: &PreparationPlan) -> Result<(), GpuError> {
        let gpus = plan.changed_gpus();
        if gpus.is_empty() {
            return Ok(());
        }
        self.ledger.begin_release(&plan.allocation.uid);
        for gpu in gpus {
            match self.take_back(gpu).await {
                Ok(()) => {}
                Err(error) if error.is_absence() => {
                    warn!(gpu, %error, "what a released claim had of a GPU is removed when the GPU is back");
                }
                Err(error @ GpuError::Mps { .. }) => {
                    warn!(gpu, %error, "the MPS daemon of released claims is ended later");
                    self.must_settle.notify_one();
                }
                Err(error) if error.is_hang() => {
                    warn!(gpu, %error, "what a released claim had of a GPU is removed when its driver answers");
                    self.must_settle.notify_one();
                }
                Err(error) => {
                    self.must_settle.notify_one();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Removes what no claim holds from a GPU. As long as that fails, the GPU is withheld.
    async fn take_back(self: &Arc<Self>, gpu_uuid: &str) -> Result<(), GpuError> {
        let result = self.reconcile(gpu_uuid, HeldOfGpu::default()).await;
        self.left_over.note(gpu_uuid, result.as_ref().err());
        result.map(drop)
    }

    /// Reconciles a GPU with what claims want, and makes what one of them needs where it is missing. If the caller gives up,
    /// the thread still comes to its end, and keeps the lock until then.
    async fn reconcile(
        self: &Arc<Self>,
        gpu_uuid: &str,
        needs: HeldOfGpu,
    ) -> Result<Reconciled, GpuError> {
        let lock = self.locks.lock(gpu_uuid).await;
        let (this, gpu) = (Arc::clone(self), gpu_uuid.to_owned());
        let work = tokio::task::spawn_blocking(move || {
            let reconciled = this.reconcile_locked(&gpu, needs);
            drop(lock);
            reconciled
        });
        // Fails only at shutdown, when the runtime accepts no more blocking work.
        work.await.unwrap_or(Err(GpuError::Stopping))
    }

    /// Reconciles a GPU, whose lock the caller holds.
    fn reconcile_locked(&self, gpu_uuid: &str, needs: HeldOfGpu) -> Result<Reconciled, GpuError> {
        let mut record = self.records.renew(gpu_uuid)?;
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
    async fn settle_all(self: &Arc<Self>) -> bool {
        let this = Arc::clone(self);
        let Ok(changed) = tokio::task::spawn_blocking(move || this.records.all()).await else {
            return true;
        };
        let gpus = match changed {
            Ok(gpus) => gpus,
            Err(error) => {
                warn!(%error, "it is not known which GPUs Tranche has changed");
                return false;
            }
        };
        let settled = gpus.iter().map(|gpu| async move {
            let failed = self.take_back(gpu).await.err();
            if let Some(error) = &failed {
                warn!(gpu, %error, "a GPU is not as its claims want it");
            }
            failed.is_none()
        });
        let at_rest = futures::future::join_all(settled).await;
        at_rest.into_iter().all(|is_at_rest| is_at_rest)
    }

    /// Reconciles all GPUs whenever the driver is ready: a crash, or a release without the driver, may have left something.
    pub async fn settle(self: Arc<Self>, stop: CancellationToken) {
        let mut state = self.state.clone();
        loop {
            let is_ready = matches!(&*state.borrow_and_update(), DriverState::Ready(_));
            let mut again = false;
            if is_ready {
                again = tokio::select! {
                    () = stop.cancelled() => return,
                    are_at_rest = self.settle_all() => !are_at_rest,
                };
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
                () = self.must_settle.notified() => {}
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

    /// Whether a call of the driver does not return.
    const fn is_hang(&self) -> bool {
        matches!(
            self,
            Self::Nvml(NvmlError::Hangs { .. })
                | Self::Change {
                    error: ChangeError::Nvml(NvmlError::Hangs { .. }),
                    ..
                }
        )
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
