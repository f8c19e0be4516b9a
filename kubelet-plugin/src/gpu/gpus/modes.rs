//! Reconciles what the driver and the MPS supervisor know of a GPU with what claims want: MIG mode, GPU instances, MPS daemons
//! and compute mode.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tracing::{info, warn};
use tranche_driver::gpu_state::{
    Actual, Change, ComputeMode, Daemon, GpuChanges, Next, Partition, Served, Wanted, WantedDaemon,
    next,
};
use tranche_driver::mig::{Geometry, Placement};
use tranche_driver::preparation::{HeldOfGpu, MigDevice};
use tranche_node::capabilities::of_partition;
use tranche_node::nvml::{ChangeError, Nvml, NvmlError, Opened};

use super::{GpuError, Gpus, Reconciled, find};
use crate::gpu::driver_state::DriverState;
use crate::gpu::mps::MpsError;

/// The most steps from any state to any other: a few per instance, and a GPU has at most 7 instances before and after.
const MOST_STEPS: usize = 200;
/// How long a change is tried again while the GPU or the instance is in use: a driver frees what a process had a moment after the
/// process has ended.
const IN_USE_PATIENCE: Duration = Duration::from_secs(3);
/// The pause between two such attempts.
const IN_USE_PAUSE: Duration = Duration::from_millis(50);

impl Gpus {
    /// Reconciles the modes of a GPU, whose lock the caller holds.
    pub(super) fn reconcile_modes(
        &self,
        gpu_uuid: &str,
        needs: HeldOfGpu,
        held: HeldOfGpu,
        record: &mut GpuChanges,
    ) -> Result<Reconciled, GpuError> {
        self.reconcile_time_slice(gpu_uuid, record)?;
        let new_daemon = needs_new_daemon(&needs, record);
        let wanted = wanted(needs, held);
        if wanted == Wanted::default() && record.is_empty() {
            return Ok(Reconciled::default());
        }
        let geometry = match geometry(self, gpu_uuid) {
            Ok(geometry) => Some(geometry),
            Err(error) if error.is_absence() || !wanted.held.is_empty() => return Err(error),
            Err(_) => None,
        };
        if new_daemon {
            // This comes before any change: without a supervisor the change could not be undone for other tiers.
            let listed = self.hardware.daemons.list();
            listed.map_err(|error| of_daemon(gpu_uuid, error))?;
        }
        let reconciliation = Reconciliation {
            gpus: self,
            gpu_uuid,
            wanted,
            geometry,
            opened: self.hardware.nvml.open()?,
            daemon: Daemon::Unknown,
            partition_daemons: BTreeMap::new(),
            stuck: None,
        };
        reconciliation.run(record)
    }
}

/// The steps of one GPU.
struct Reconciliation<'a> {
    gpus: &'a Gpus,
    gpu_uuid: &'a str,
    wanted: Wanted,
    /// How MIG divides the GPU, if it does.
    geometry: Option<Geometry>,
    opened: Opened,
    /// The GPU's MPS daemon, after the steps so far.
    daemon: Daemon,
    /// The MPS daemons of its partitions, by the UUIDs of their MIG devices.
    partition_daemons: BTreeMap<String, Daemon>,
    /// Why the last of them could not be ended.
    stuck: Option<MpsError>,
}

impl Reconciliation<'_> {
    fn run(mut self, record: &mut GpuChanges) -> Result<Reconciled, GpuError> {
        let has_mps = self.wanted.mps != WantedDaemon::None
            || !self.wanted.partition_daemons.is_empty()
            || record.mps.is_some();
        // The GPU's state, until it is changed: reading it takes a hundred calls of NVML.
        let mut seen = None;
        for _ in 0..MOST_STEPS {
            let of_gpu = match seen.take() {
                Some(seen) => seen,
                None => read_state(&*self.opened.nvml, self.gpu_uuid, has_mps)?,
            };
            let actual = Actual {
                daemon: self.daemon,
                partition_daemons: self.partition_daemons.clone(),
                ..of_gpu
            };
            match self.next(record, &actual)? {
                Next::Write(changed) => {
                    self.gpus.records.write(self.gpu_uuid, &changed)?;
                    *record = changed;
                    seen = Some(actual);
                }
                Next::Change(change) => change_gpu(&*self.opened.nvml, self.gpu_uuid, change)?,
                Next::SetComputeMode(mode) => {
                    info!(gpu = self.gpu_uuid, ?mode, "setting the GPU's compute mode");
                    self.opened.nvml.set_compute_mode(self.gpu_uuid, mode)?;
                }
                Next::EnsureDaemon(served) => self.ensure_daemon(served, &actual)?,
                Next::EndDaemon(served) => self.end_daemon(served)?,
                Next::Done(partitions) => {
                    return match self.stuck.take() {
                        // A claim that needs other partitions of the GPU does not wait for this one.
                        Some(error) if self.wanted.make.is_empty() => Err(self.of_daemon(error)),
                        _ => self.devices(partitions),
                    };
                }
            }
        }
        Err(GpuError::Restless {
            gpu: self.gpu_uuid.to_owned(),
        })
    }

    fn next(&mut self, record: &GpuChanges, actual: &Actual) -> Result<Next, GpuError> {
        let next = next(&self.wanted, record, actual, self.geometry.as_ref());
        next.map_err(|obstacle| match self.stuck.take() {
            // The partition that could not be removed is in the way.
            Some(error) => self.of_daemon(error),
            None => GpuError::Obstacle {
                gpu: self.gpu_uuid.to_owned(),
                obstacle,
            },
        })
    }

    fn ensure_daemon(&mut self, served: Served, actual: &Actual) -> Result<(), GpuError> {
        let daemons = &self.gpus.hardware.daemons;
        match served {
            Served::Gpu => {
                let ensured = daemons.ensure(self.gpu_uuid);
                ensured.map_err(|error| self.of_daemon(error))?;
                self.daemon = Daemon::Ready;
            }
            Served::Partition(mig_uuid) => {
                // The daemon's server opens the partition's nodes.
                self.devices(partition(actual, &mig_uuid))?;
                let ensured = daemons.ensure(&mig_uuid);
                ensured.map_err(|error| self.of_daemon(error))?;
                self.partition_daemons.insert(mig_uuid, Daemon::Ready);
            }
        }
        Ok(())
    }

    fn end_daemon(&mut self, served: Served) -> Result<(), GpuError> {
        let daemons = &self.gpus.hardware.daemons;
        match served {
            Served::Gpu => {
                let ended = daemons.end(self.gpu_uuid);
                ended.map_err(|error| self.of_daemon(error))?;
                self.daemon = Daemon::Ended;
            }
            Served::Partition(mig_uuid) => {
                let ended = match daemons.end(&mig_uuid) {
                    Ok(()) => Daemon::Ended,
                    Err(error) => {
                        warn!(gpu = self.gpu_uuid, mig_uuid, %error, "the MPS daemon of a partition does not end, and the partition stays");
                        self.stuck = Some(error);
                        Daemon::Stuck
                    }
                };
                self.partition_daemons.insert(mig_uuid, ended);
            }
        }
        Ok(())
    }

    fn of_daemon(&self, error: MpsError) -> GpuError {
        of_daemon(self.gpu_uuid, error)
    }

    /// The partitions as MIG devices, whose device nodes exist.
    fn devices(&self, partitions: BTreeMap<Placement, Partition>) -> Result<Reconciled, GpuError> {
        let (gpu_uuid, opened) = (self.gpu_uuid, &self.opened);
        if partitions.is_empty() {
            return Ok(Reconciled::default());
        }
        // A switch of MIG mode may have changed the minor number.
        let minor = opened.nvml.minor(gpu_uuid)?;
        let root = opened.nodes.root().path();
        let one = |(placement, partition): (Placement, Partition)| {
            let failed = |error| GpuError::Capabilities {
                gpu: gpu_uuid.to_owned(),
                error,
            };
            let nodes = of_partition(
                &self.gpus.hardware.proc,
                root,
                minor,
                partition.instance,
                partition.compute,
            )
            .map_err(failed)?;
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
            Ok((placement, device))
        };
        Ok(Reconciled {
            minor: Some(minor),
            partitions: partitions
                .into_iter()
                .map(one)
                .collect::<Result<_, GpuError>>()?,
            group: None,
        })
    }
}

fn of_daemon(gpu_uuid: &str, error: MpsError) -> GpuError {
    GpuError::Mps {
        gpu: gpu_uuid.to_owned(),
        error,
    }
}

/// Whether a daemon is needed that Tranche has not started.
fn needs_new_daemon(needs: &HeldOfGpu, record: &GpuChanges) -> bool {
    let recorded: BTreeSet<Placement> = record
        .partition_daemons
        .iter()
        .map(|it| it.placement)
        .collect();
    (needs.mps && record.mps.is_none()) || !needs.partition_daemons.is_subset(&recorded)
}

/// How MIG divides the GPU.
fn geometry(gpus: &Gpus, gpu_uuid: &str) -> Result<Geometry, GpuError> {
    let name = || gpu_uuid.to_owned();
    let DriverState::Ready(ready) = &*gpus.state.borrow() else {
        return Err(GpuError::Missing { gpu: name() });
    };
    let gpu = find(&ready.inventory, gpu_uuid).ok_or_else(|| GpuError::Missing { gpu: name() })?;
    let described = ready
        .inventory
        .mig_geometry(gpu)
        .ok_or_else(|| GpuError::NotDivided { gpu: name() })?;
    Geometry::read(described).map_err(|error| GpuError::Geometry { gpu: name(), error })
}

/// The wanted state of a GPU: what a claim needs of it, beside what claims hold of it.
fn wanted(needs: HeldOfGpu, held: HeldOfGpu) -> Wanted {
    let held_daemons = held
        .partition_daemons
        .into_iter()
        .map(|placement| (placement, WantedDaemon::Held));
    let needed_daemons = needs
        .partition_daemons
        .into_iter()
        .map(|placement| (placement, WantedDaemon::Ready));
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
fn partition(actual: &Actual, mig_uuid: &str) -> BTreeMap<Placement, Partition> {
    actual
        .instances
        .iter()
        .flat_map(|it| it.compute.iter().map(move |compute| (it, compute)))
        .filter(|(_, compute)| compute.uuid == mig_uuid)
        .map(|(instance, compute)| {
            let partition = Partition {
                instance: instance.id,
                compute: compute.id,
                uuid: compute.uuid.clone(),
            };
            (instance.placement, partition)
        })
        .collect()
}

/// A GPU as NVML sees it now.
fn read_state(nvml: &dyn Nvml, gpu_uuid: &str, has_mps: bool) -> Result<Actual, NvmlError> {
    Ok(Actual {
        // A GPU that can be partitioned may have no compute modes.
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
