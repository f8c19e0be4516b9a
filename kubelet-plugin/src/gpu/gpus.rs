//! Brings GPUs to the state that the claims that hold them want: their MIG mode, their GPU instances, their MPS daemons and
//! their compute modes.
//!
//! ```text
//!  GPU's lock ─► its record, what claims hold ─► gpu_state::next ─► write the record, or one call  ────────┐
//!                                                      ▲                                                   │
//!                                                      └─────────── the GPU as NVML sees it now ◄──────────┘
//! ```
//!
//! The state belongs to the GPU and not to a claim, so it is no step of a claim's plan. It is brought about before the plan's
//! first step and after the last inverse. A crash between two calls needs no repair of its own: whoever comes next asks what
//! is left to do. That is a claim's next call, or [`Gpus::settle`] when the driver is ready.
//!
//! A GPU has one FIFO lock; claims on different GPUs do not wait for each other. NVML is open only while there is something
//! to do, which a GPU without partitions and concurrent shares never has.

mod daemons;
#[cfg(test)]
mod tests;
mod time_slice;
mod vfio;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_driver::gpu_state::{
    Actual, Change, ComputeMode, Daemon, Next, Obstacle, Partition, Place, Record, Served, Wanted,
    WantedDaemon, next,
};
use tranche_driver::mig::{Geometry, GeometryError};
use tranche_driver::preparation::{HeldOfGpu, MigDevice, PreparationPlan, VfioGroup, held_of};
use tranche_driver::vfio::Obstacle as VfioObstacle;
use tranche_node::capabilities::{CapabilityError, of_partition};
use tranche_node::nvml::{ChangeError, Driver, Gate, Nvml, NvmlError, Opened};
use tranche_node::vfio::{BringError, Groups};

pub use vfio::OPEN_PATIENCE;

use crate::gpu::driver_state::DriverState;
use crate::gpu::mps::{Daemons, MpsError};
use crate::gpu::records::{GpuRecords, RecordError};
use crate::ledger::Ledger;
use crate::locks::Locks;

/// Most steps from any state to any other: a few per instance, and a GPU has at most 7 instances before and after.
const MOST_STEPS: usize = 200;
/// How long a change is tried again while the GPU or the instance is in use: a driver frees what an ended process had a moment
/// after its end.
const IN_USE_PATIENCE: Duration = Duration::from_secs(3);
/// The pause between two such attempts.
const IN_USE_PAUSE: Duration = Duration::from_millis(50);
/// How soon a GPU that could not be brought to rest is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// Why a GPU is not as its claims want it.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// What Tranche changed on it is not known.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The driver.
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    /// Something is in the way.
    #[error("GPU {gpu}: {obstacle}")]
    Obstacle {
        /// The GPU.
        gpu: String,
        /// What.
        obstacle: Obstacle,
    },
    /// A change failed.
    #[error("GPU {gpu}: {error}")]
    Change {
        /// The GPU.
        gpu: String,
        /// Why.
        error: ChangeError,
    },
    /// The driver has no node that gives access to a partition.
    #[error("GPU {gpu}: {error}")]
    Capabilities {
        /// The GPU.
        gpu: String,
        /// Why.
        error: CapabilityError,
    },
    /// There is no driver, or it does not see the GPU.
    #[error("GPU {gpu}: the node's driver does not see it")]
    Missing {
        /// The GPU.
        gpu: String,
    },
    /// It cannot be partitioned, or the driver does not say how.
    #[error("GPU {gpu}: the driver does not report how MIG divides it")]
    NotDivided {
        /// The GPU.
        gpu: String,
    },
    /// What the driver reports of its division is invalid.
    #[error("GPU {gpu}: {error}")]
    Geometry {
        /// The GPU.
        gpu: String,
        /// Why.
        error: GeometryError,
    },
    /// Its way to VFIO or back.
    #[error(transparent)]
    Vfio(#[from] BringError),
    /// Its MPS daemon.
    #[error("GPU {gpu}: {error}")]
    Mps {
        /// The GPU.
        gpu: String,
        /// Why.
        error: MpsError,
    },
    /// It does not come to rest.
    #[error(
        "GPU {gpu}: its state keeps changing: does somebody else change its MIG mode or its GPU instances?"
    )]
    Restless {
        /// The GPU.
        gpu: String,
    },
}

/// What changes GPUs.
#[derive(Debug)]
pub struct Hardware {
    /// Their driver.
    pub nvml: Box<dyn Driver>,
    /// The MPS supervisor.
    pub daemons: Box<dyn Daemons>,
    /// Their IOMMU groups.
    pub groups: Arc<dyn Groups>,
    /// Closes the NVML of those that keep it open.
    pub gate: Gate,
    /// How long a GPU that goes to VFIO is tried again while a process has it open: [`OPEN_PATIENCE`].
    pub open_patience: Duration,
    /// The host's `/proc`.
    pub proc: PathBuf,
}

/// The GPUs of this node.
#[derive(Debug)]
pub struct Gpus {
    records: GpuRecords,
    ledger: Arc<Ledger>,
    hardware: Hardware,
    state: watch::Receiver<DriverState>,
    locks: Arc<Locks>,
    /// A release has left something that [`Self::settle`] takes back.
    left_over: Notify,
}

/// What a claim gets of a GPU that was brought to the wanted state.
#[derive(Debug, Default)]
struct Brought {
    /// The N of `/dev/nvidiaN`, where NVML was asked.
    minor: Option<u32>,
    partitions: BTreeMap<Place, MigDevice>,
    /// Where the GPU is at VFIO.
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
        ledger: Arc<Ledger>,
        hardware: Hardware,
        state: watch::Receiver<DriverState>,
    ) -> Self {
        Self {
            records,
            ledger,
            hardware,
            state,
            locks: Arc::default(),
            left_over: Notify::new(),
        }
    }

    /// What Tranche has changed, by GPU.
    #[must_use]
    pub fn records(&self) -> &GpuRecords {
        &self.records
    }

    /// Brings the GPUs of a plan to the state that it needs, beside what other claims hold of them. Returns the plan with the
    /// MIG devices that its partitions are now.
    pub fn prepare(&self, mut plan: PreparationPlan) -> Result<PreparationPlan, GpuError> {
        let devices = plan.devices.iter().filter(|device| !device.admin_access);
        let gpus: BTreeSet<String> = devices.map(|device| device.gpu_uuid.clone()).collect();
        for gpu in &gpus {
            let made = self.bring(gpu, held_of(gpu, [&plan]))?;
            if let Some(group) = &made.group {
                plan = plan.at_vfio(gpu, group);
            }
            plan = plan.on_gpu(gpu, made.minor, |place| {
                made.partitions.get(&place).cloned()
            });
        }
        Ok(plan)
    }

    /// Takes back what only this plan needed of its GPUs. Where a GPU or its driver is missing there is nothing to take back
    /// now: its instances are gone, and [`Self::settle`] does the rest when it returns. So it does where the MPS supervisor
    /// does not answer: until then the GPU is given to no other tier.
    pub fn release(&self, plan: &PreparationPlan) -> Result<(), GpuError> {
        let gpus = plan.changed_gpus();
        if gpus.is_empty() {
            return Ok(());
        }
        self.ledger.begin_release(&plan.allocation.uid);
        for gpu in gpus {
            match self.bring(gpu, HeldOfGpu::default()) {
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

    /// Brings a GPU to the state that claims want, and makes what one of them needs where it is missing.
    fn bring(&self, gpu_uuid: &str, needs: HeldOfGpu) -> Result<Brought, GpuError> {
        let _lock = self.locks.blocking_lock(gpu_uuid);
        let mut record = self.records.load(gpu_uuid)?;
        let held = self.ledger.held_of(gpu_uuid);
        let to_vfio = needs.vfio || held.vfio;
        self.forget_other_boot(gpu_uuid, &mut record)?;
        if !to_vfio {
            self.leave_vfio(gpu_uuid, &mut record)?;
        }
        // A GPU that is at VFIO, or on its way, has nothing else of Tranche, and its driver may not know it.
        let mut brought = if record.vfio.is_none() {
            self.bring_modes(gpu_uuid, needs, held, &mut record)?
        } else {
            Brought::default()
        };
        if to_vfio {
            brought.group = Some(self.enter_vfio(gpu_uuid, &mut record)?);
        }
        Ok(brought)
    }

    /// Brings what the driver and the MPS supervisor know of a GPU, whose lock the caller holds, to the state that claims want.
    fn bring_modes(
        &self,
        gpu_uuid: &str,
        needs: HeldOfGpu,
        held: HeldOfGpu,
        record: &mut Record,
    ) -> Result<Brought, GpuError> {
        self.bring_time_slice(gpu_uuid, record)?;
        let new_daemon = needs.mps && record.mps.is_none();
        let recorded: BTreeSet<Place> =
            record.partition_daemons.iter().map(|it| it.place).collect();
        let new_daemon = new_daemon || !needs.partition_daemons.is_subset(&recorded);
        let wanted = wanted(needs, held);
        if wanted == Wanted::default() && record.is_empty() {
            return Ok(Brought::default());
        }
        let geometry = match self.geometry(gpu_uuid) {
            Ok(geometry) => Some(geometry),
            Err(error) if error.is_absence() || !wanted.held.is_empty() => return Err(error),
            Err(_) => None,
        };
        let of_daemon = |error| GpuError::Mps {
            gpu: gpu_uuid.to_owned(),
            error,
        };
        if new_daemon {
            // Before anything is changed: without a supervisor nobody could take it back for other tiers.
            self.hardware.daemons.list().map_err(of_daemon)?;
        }
        let opened = self.hardware.nvml.open()?;
        let has_mps = wanted.mps != WantedDaemon::None
            || !wanted.partition_daemons.is_empty()
            || record.mps.is_some();
        let mut daemon = Daemon::Unknown;
        let mut partition_daemons = BTreeMap::new();
        let mut stuck = None;
        // What was seen of the GPU, as long as nothing was changed on it since: NVML takes a hundred calls to tell.
        let mut seen = None;
        for _ in 0..MOST_STEPS {
            let actual = Actual {
                daemon,
                partition_daemons: partition_daemons.clone(),
                ..match seen.take() {
                    Some(seen) => seen,
                    None => see(&*opened.nvml, gpu_uuid, has_mps)?,
                }
            };
            let next = next(&wanted, record, &actual, geometry.as_ref());
            let next = next.map_err(|obstacle| match stuck.take() {
                // What is in the way is the partition that could not be removed.
                Some(error) => of_daemon(error),
                None => GpuError::Obstacle {
                    gpu: gpu_uuid.to_owned(),
                    obstacle,
                },
            })?;
            match next {
                Next::Write(changed) => {
                    self.records.write(gpu_uuid, &changed)?;
                    *record = changed;
                    seen = Some(actual);
                }
                Next::Change(change) => change_gpu(&*opened.nvml, gpu_uuid, change)?,
                Next::SetComputeMode(mode) => {
                    info!(gpu = gpu_uuid, ?mode, "setting the GPU's compute mode");
                    opened.nvml.set_compute_mode(gpu_uuid, mode)?;
                }
                Next::EnsureDaemon(Served::Gpu) => {
                    self.hardware.daemons.ensure(gpu_uuid).map_err(of_daemon)?;
                    daemon = Daemon::Ready;
                }
                Next::EndDaemon(Served::Gpu) => {
                    self.hardware.daemons.end(gpu_uuid).map_err(of_daemon)?;
                    daemon = Daemon::Ended;
                }
                Next::EnsureDaemon(Served::Partition(mig_uuid)) => {
                    // The daemon's server opens the partition's nodes.
                    self.brought(&opened, gpu_uuid, partition(&actual, &mig_uuid))?;
                    self.hardware.daemons.ensure(&mig_uuid).map_err(of_daemon)?;
                    partition_daemons.insert(mig_uuid, Daemon::Ready);
                }
                Next::EndDaemon(Served::Partition(mig_uuid)) => {
                    let ended = match self.hardware.daemons.end(&mig_uuid) {
                        Ok(()) => Daemon::Ended,
                        Err(error) => {
                            warn!(gpu = gpu_uuid, mig_uuid, %error, "the MPS daemon of a partition does not end, and the partition stays");
                            stuck = Some(error);
                            Daemon::Stuck
                        }
                    };
                    partition_daemons.insert(mig_uuid, ended);
                }
                Next::Done(partitions) => {
                    return match stuck {
                        // Who needs other partitions of the GPU does not wait for this one.
                        Some(error) if wanted.make.is_empty() => Err(of_daemon(error)),
                        _ => self.brought(&opened, gpu_uuid, partitions),
                    };
                }
            }
        }
        Err(GpuError::Restless {
            gpu: gpu_uuid.to_owned(),
        })
    }

    /// How MIG divides the GPU.
    fn geometry(&self, gpu_uuid: &str) -> Result<Geometry, GpuError> {
        let name = || gpu_uuid.to_owned();
        let DriverState::Ready(ready) = &*self.state.borrow() else {
            return Err(GpuError::Missing { gpu: name() });
        };
        let gpu =
            find(&ready.inventory, gpu_uuid).ok_or_else(|| GpuError::Missing { gpu: name() })?;
        let described = ready.inventory.mig_geometry(gpu);
        let described = described.ok_or_else(|| GpuError::NotDivided { gpu: name() })?;
        Geometry::read(described).map_err(|error| GpuError::Geometry { gpu: name(), error })
    }

    /// The partitions as MIG devices, whose device nodes exist.
    fn brought(
        &self,
        opened: &Opened,
        gpu_uuid: &str,
        partitions: BTreeMap<Place, Partition>,
    ) -> Result<Brought, GpuError> {
        if partitions.is_empty() {
            return Ok(Brought::default());
        }
        // A switch of MIG mode may have changed the minor number.
        let minor = opened.nvml.minor(gpu_uuid)?;
        let root = opened.nodes.root().path();
        let one = |(place, partition): (Place, Partition)| {
            let failed = |error| GpuError::Capabilities {
                gpu: gpu_uuid.to_owned(),
                error,
            };
            let nodes = of_partition(
                &self.hardware.proc,
                root,
                minor,
                partition.instance,
                partition.compute,
            );
            let nodes = nodes.map_err(failed)?;
            nodes
                .iter()
                .try_for_each(|node| node.make(root))
                .map_err(failed)?;
            let device = MigDevice {
                uuid: partition.uuid,
                gpu_instance: partition.instance,
                compute_instance: partition.compute,
                capabilities: nodes.map(|node| node.minor),
            };
            Ok((place, device))
        };
        Ok(Brought {
            minor: Some(minor),
            partitions: partitions
                .into_iter()
                .map(one)
                .collect::<Result<_, GpuError>>()?,
            group: None,
        })
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
            if let Err(error) = self.bring(&gpu, HeldOfGpu::default()) {
                warn!(gpu, %error, "a GPU is not as its claims want it");
                at_rest = false;
            }
        }
        at_rest
    }

    /// Brings all GPUs to rest whenever the driver is ready: a crash, or a release without the driver, may have left something.
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

/// How a GPU is to be for a claim that needs this of it, beside what is held of it.
fn wanted(needs: HeldOfGpu, held: HeldOfGpu) -> Wanted {
    let held_daemons = held.partition_daemons.into_iter();
    let held_daemons = held_daemons.map(|place| (place, WantedDaemon::Held));
    let needed_daemons = needs.partition_daemons.into_iter();
    let needed_daemons = needed_daemons.map(|place| (place, WantedDaemon::Ready));
    Wanted {
        held: held.partitions,
        make: needs.partitions,
        mps: match (needs.mps, held.mps) {
            (true, _) => WantedDaemon::Ready,
            (false, true) => WantedDaemon::Held,
            (false, false) => WantedDaemon::None,
        },
        // The later ones replace the earlier ones.
        partition_daemons: held_daemons.chain(needed_daemons).collect(),
    }
}

/// The partition that is the MIG device with this UUID.
fn partition(actual: &Actual, mig_uuid: &str) -> BTreeMap<Place, Partition> {
    let instances = actual.instances.iter();
    let devices = instances.flat_map(|it| it.compute.iter().map(move |compute| (it, compute)));
    let devices = devices.filter(|(_, compute)| compute.uuid == mig_uuid);
    let device = devices.map(|(instance, compute)| {
        let partition = Partition {
            instance: instance.id,
            compute: compute.id,
            uuid: compute.uuid.clone(),
        };
        (instance.place, partition)
    });
    device.collect()
}

/// A GPU as NVML sees it now.
fn see(nvml: &dyn Nvml, gpu_uuid: &str, has_mps: bool) -> Result<Actual, NvmlError> {
    Ok(Actual {
        // Not every GPU that can be partitioned has to have compute modes.
        compute_mode: if has_mps {
            nvml.compute_mode(gpu_uuid)?
        } else {
            ComputeMode::default()
        },
        ..nvml.mig_state(gpu_uuid)?
    })
}

/// Makes a change, again while the GPU or the instance is in use.
fn change_gpu(nvml: &dyn Nvml, gpu_uuid: &str, change: Change) -> Result<(), GpuError> {
    info!(gpu = gpu_uuid, ?change, "changing the GPU");
    let deadline = Instant::now() + IN_USE_PATIENCE;
    loop {
        match nvml.change_mig(gpu_uuid, &change) {
            Err(ChangeError::InUse { .. }) if Instant::now() < deadline => {
                std::thread::sleep(IN_USE_PAUSE);
            }
            result => {
                return result.map_err(|error| GpuError::Change {
                    gpu: gpu_uuid.to_owned(),
                    error,
                });
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
            Self::Vfio(BringError::Obstacle(obstacle)) => {
                matches!(obstacle, VfioObstacle::InUse { user, .. } if !user.is_persistence_daemon())
            }
            _ => false,
        }
    }

    /// Whether the GPU or its driver is not there, and so nothing of what Tranche made on it either.
    fn is_absence(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Vfio(BringError::Obstacle(VfioObstacle::Missing(_)))
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
