//! What belongs to a GPU and not to one claim: its MIG mode, its GPU instances, its MPS daemon and its compute mode.
//!
//! ```text
//!  claims that are held ─► Wanted ─┐
//!  the GPU's record ───────────────┼─► next ─► write the record, or change the GPU, or done
//!  the GPU as NVML sees it ────────┘     ▲                    │
//!                                        └──── read again ◄───┘
//! ```
//!
//! [`next`] is called again after each step, with the GPU's new state. So a crash, a reboot or an administrator may
//! interrupt at any step: the state alone decides the next one.
//!
//! **Who owns an instance.** The [`GpuChanges`] is written before an instance is created, while its placement is free, and
//! again with the instance's id. An instance that the record does not name belongs to somebody else: Tranche never
//! removes it and creates nothing that overlaps with it (the record of an earlier boot names none). If it is exactly the wanted partition, with one compute
//! instance that has all of it, Tranche uses it as it is.
//!
//! **MIG mode** is switched on for the first partition. If Tranche switched it on, it is switched off after the last
//! one, unless somebody else has created instances meanwhile: then it stays on, and is theirs from then on.
//!
//! **The MPS daemon** serves all concurrent shares of the GPU. Before it starts, the compute mode becomes `EXCLUSIVE_PROCESS`, as
//! NVIDIA's MPS documentation recommends: then no process has a context beside the daemon's server. After the last share the daemon
//! ends, and the compute mode is what it was before, unless somebody else has changed it meanwhile. A partition with concurrent
//! shares has a daemon of its own, see [`PartitionDaemon`].
//!
//! The length of **time slices** does not depend on the rest, and has its own function, [`next_time_slice`]. The way to
//! **VFIO** has one, too, [`vfio::next`]: it begins when everything else is as it was before Tranche changed it.

mod partition_daemon;
mod time_slice;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tranche_api::gpu_node::{Gpu, MigMode};
use tranche_api::mig::MigProfile;

pub use partition_daemon::PartitionDaemon;
pub use time_slice::{ChangedTimeSlice, NextTimeSlice, next_time_slice};

use crate::mig::{Geometry, Placement, Slices};
use crate::vfio;

/// How a GPU is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The partitions that claims hold: they stay.
    pub held: BTreeSet<Placement>,
    /// Those of them that are created if they are missing. They belong to one claim, so that a problem with another
    /// claim's partition does not fail this one.
    pub make: BTreeSet<Placement>,
    /// Whether claims hold concurrent shares of the whole GPU.
    pub mps: WantedDaemon,
    /// The held partitions that serve concurrent shares.
    pub partition_daemons: BTreeMap<Placement, WantedDaemon>,
}

/// Whether an MPS daemon serves the GPU, or a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WantedDaemon {
    /// No claim has a concurrent share.
    #[default]
    None,
    /// Claims have concurrent shares, but not the one that is prepared now: the daemon stays, and need not answer.
    Held,
    /// The claim that is prepared now needs it: it must answer.
    Ready,
}

/// `nvmlComputeMode_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeMode {
    /// Any number of processes may have contexts.
    #[default]
    Default,
    /// No process may have one.
    Prohibited,
    /// One process at a time may, or the clients of one MPS daemon.
    ExclusiveProcess,
}

/// What is known of an MPS daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Daemon {
    /// Nothing.
    #[default]
    Unknown,
    /// It answers.
    Ready,
    /// It has ended.
    Ended,
    /// It should end, but its supervisor does not end it now. Only for a partition: the GPU's other partitions do not
    /// wait for it.
    Stuck,
}

/// What Tranche has changed on a GPU, or is about to change. It is durable; a GPU without a record has not been changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuChanges {
    /// Whether Tranche has switched MIG mode on, or is about to.
    #[serde(default)]
    pub switched_mig_on: bool,
    /// The GPU instances of Tranche.
    #[serde(default)]
    pub instances: Vec<Owned>,
    /// The MPS daemon of Tranche, where it exists or is about to be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<OwnedDaemon>,
    /// The MPS daemons of Tranche for partitions that exist or are about to be started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partition_daemons: Vec<PartitionDaemon>,
    /// The length of time slices that Tranche has set, or is about to set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<ChangedTimeSlice>,
    /// Present while the GPU is bound to VFIO, or on its way there or back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vfio: Option<Box<AtVfio>>,
}

/// A GPU that is bound to VFIO. NVIDIA's driver does not know it, so this is its only description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AtVfio {
    /// The drivers that the functions of its IOMMU group had before.
    pub drivers: vfio::VfioRecord,
    /// The GPU as its driver described it before.
    pub gpu: Gpu,
    /// The profiles into which MIG can divide it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_profiles: Vec<MigProfile>,
}

/// An MPS daemon of Tranche.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnedDaemon {
    /// The compute mode before it.
    pub compute_mode_before: ComputeMode,
}

/// A GPU instance of Tranche.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owned {
    /// Where it is.
    #[serde(rename = "place")]
    pub placement: Placement,
    /// Its id; absent until it was created and read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u32>,
}

/// The state of a GPU, as NVML reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actual {
    /// Its MIG mode.
    pub mig_mode: MigMode,
    /// Its GPU instances.
    pub instances: Vec<Instance>,
    /// Its compute mode.
    pub compute_mode: ComputeMode,
    /// Its MPS daemon.
    pub daemon: Daemon,
    /// The MPS daemons of its partitions, by the UUID of the MIG device. The state of others is unknown.
    pub partition_daemons: BTreeMap<String, Daemon>,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Its id on the GPU.
    pub id: u32,
    /// Where it is.
    pub placement: Placement,
    /// Its compute instances.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeInstance {
    /// Its id in its GPU instance.
    pub id: u32,
    /// The UUID of the MIG device that it is.
    pub uuid: String,
    /// Compute slices.
    pub slices: u32,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Write this record, durably.
    Write(GpuChanges),
    /// Change the GPU.
    Change(Change),
    /// Set the compute mode.
    SetComputeMode(ComputeMode),
    /// Ask the supervisor to start the MPS daemon, if there is none, and to check that it answers.
    EnsureDaemon(Served),
    /// Ask the supervisor to end the MPS daemon.
    EndDaemon(Served),
    /// The GPU is as wanted: the partitions to create, by placement.
    Done(BTreeMap<Placement, Partition>),
}

/// What an MPS daemon serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// The whole GPU.
    Gpu,
    /// The MIG device with this UUID.
    Partition(String),
}

/// A partition that is ready for its claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// The GPU instance's id.
    pub instance: u32,
    /// The compute instance's id in it.
    pub compute: u32,
    /// The UUID of the MIG device.
    pub uuid: String,
}

/// One change of a GPU by one NVML call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Switch MIG mode.
    SwitchMigMode {
        /// On or off.
        on: bool,
    },
    /// Make a GPU instance.
    CreateInstance(Placement),
    /// Make the compute instance that has all of a GPU instance.
    CreateComputeInstance {
        /// The GPU instance's id.
        instance: u32,
    },
    /// Remove a compute instance.
    DestroyComputeInstance {
        /// The GPU instance's id.
        instance: u32,
        /// The compute instance's id.
        compute: u32,
    },
    /// Remove a GPU instance without compute instances.
    DestroyInstance {
        /// Its id.
        instance: u32,
    },
}

/// Why a GPU cannot be as wanted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The model has no such partition.
    #[error("the GPU has no {0}: delete the claim's pods to have another partition allocated")]
    NoSuchPartition(Placement),
    /// The partitions of other claims are in the way.
    #[error(
        "the partitions of other claims leave no room for {0}: delete the claim's pods to have another partition allocated"
    )]
    NoRoom(Placement),
    /// An instance of somebody else is in the way.
    #[error(
        "the GPU instance {id} ({other}), which Tranche did not make, takes slices or engines that the wanted {wanted} needs: remove it (`nvidia-smi mig -dci -gi {id}`, `nvidia-smi mig -dgi -gi {id}`), or delete the claim's pods to have another partition allocated"
    )]
    Foreign {
        /// The wanted partition.
        wanted: Placement,
        /// Where the other is.
        other: Placement,
        /// The other's id.
        id: u32,
    },
    /// Somebody has divided an instance of Tranche.
    #[error(
        "the GPU instance {id} ({placement}) has compute instances that Tranche did not make: remove them (`nvidia-smi mig -dci -gi {id}`)"
    )]
    Divided {
        /// Where it is.
        placement: Placement,
        /// Its id.
        id: u32,
    },
    /// MIG mode changes at the GPU's next reset.
    #[error(
        "MIG mode changes only with a reset of the GPU: reset it while nothing uses it (`nvidia-smi --gpu-reset`)"
    )]
    NeedsReset,
    /// An administrator keeps all programs from the GPU.
    #[error(
        "its compute mode is PROHIBITED, which keeps every program from it: change it (`nvidia-smi -c DEFAULT`)"
    )]
    Prohibited,
}

/// The next step that reconciles the GPU with what is wanted. `geometry` says how MIG divides it, if it has MIG.
pub fn next(
    wanted: &Wanted,
    record: &GpuChanges,
    actual: &Actual,
    geometry: Option<&Geometry>,
) -> Result<Next, Obstacle> {
    if let Some(record) = record.corrected(wanted, actual) {
        return Ok(Next::Write(record));
    }
    if let Some(next) = partition_daemon::without(wanted, record, actual) {
        return Ok(next);
    }
    if let Some(change) = removal(wanted, record, actual) {
        return Ok(Next::Change(change));
    }
    if wanted.mps == WantedDaemon::None
        && let Some(daemon) = record.mps
    {
        return Ok(without_daemon(daemon, record, actual));
    }
    for placement in &wanted.make {
        let geometry = geometry.ok_or(Obstacle::NoSuchPartition(*placement))?;
        if let Some(next) = towards(*placement, record, actual, geometry)? {
            return Ok(next);
        }
    }
    // A partition whose daemon does not end is still there.
    let is_divided = !wanted.held.is_empty() || !record.partition_daemons.is_empty();
    if !is_divided && record.switched_mig_on {
        return restore_mode(record, actual);
    }
    if wanted.mps == WantedDaemon::Ready
        && !is_divided
        && let Some(next) = with_daemon(record, actual)?
    {
        return Ok(next);
    }
    if let Some(next) = partition_daemon::with(wanted, record, actual)? {
        return Ok(next);
    }
    let done = wanted.make.iter().filter_map(|placement| {
        let instance = actual.at(*placement)?;
        let [compute] = &instance.compute[..] else {
            return None;
        };
        let partition = Partition {
            instance: instance.id,
            compute: compute.id,
            uuid: compute.uuid.clone(),
        };
        Some((*placement, partition))
    });
    Ok(Next::Done(done.collect()))
}

impl Actual {
    /// The instance at a placement.
    fn at(&self, placement: Placement) -> Option<&Instance> {
        self.instances.iter().find(|it| it.placement == placement)
    }
}

impl GpuChanges {
    /// Whether the record is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What is left of it after a boot, which removes GPU instances, ends daemons, and resets compute mode and time slices. What is
    /// on the GPU then is of somebody else, even where an instance has the placement and the id of one of ours. MIG mode
    /// survives a boot on some models.
    #[must_use]
    pub fn after_a_boot(self) -> Self {
        Self {
            switched_mig_on: self.switched_mig_on,
            vfio: self.vfio,
            ..Self::default()
        }
    }

    /// Adds the content of another record.
    pub fn add(&mut self, other: Self) {
        self.switched_mig_on |= other.switched_mig_on;
        self.instances.extend(other.instances);
        self.mps = self.mps.or(other.mps);
        self.partition_daemons.extend(other.partition_daemons);
        self.time_slice = self.time_slice.or(other.time_slice);
        self.vfio = self.vfio.take().or(other.vfio);
    }

    /// The instance of Tranche at a placement, if it exists.
    fn instance<'a>(&self, placement: Placement, actual: &'a Actual) -> Option<&'a Instance> {
        actual.at(placement).filter(|instance| self.owns(instance))
    }

    fn owns(&self, instance: &Instance) -> bool {
        let mut owned = self.instances.iter();
        owned.any(|it| it.placement == instance.placement && it.id == Some(instance.id))
    }

    /// The record that matches the GPU's state, if it differs: with the ids of instances that were created, and without
    /// instances that are gone.
    fn corrected(&self, wanted: &Wanted, actual: &Actual) -> Option<Self> {
        let mut corrected = self.clone();
        corrected.instances.retain(|owned| match owned.id {
            // A reboot or an administrator has removed it. An instance that is there now belongs to somebody else.
            Some(id) => actual.at(owned.placement).is_some_and(|it| it.id == id),
            None => wanted.held.contains(&owned.placement) || actual.at(owned.placement).is_some(),
        });
        for owned in &mut corrected.instances {
            // It was created, but its id was not written.
            owned.id = owned.id.or_else(|| Some(actual.at(owned.placement)?.id));
        }
        (corrected != *self).then_some(corrected)
    }
}

/// The step that removes something of ours that is not wanted and that no MPS daemon serves.
fn removal(wanted: &Wanted, record: &GpuChanges, actual: &Actual) -> Option<Change> {
    let mut ours = actual.instances.iter().filter(|it| record.owns(it));
    let instance =
        ours.find(|it| !wanted.held.contains(&it.placement) && !record.has_daemon(it.placement))?;
    Some(match instance.compute.first() {
        Some(compute) => Change::DestroyComputeInstance {
            instance: instance.id,
            compute: compute.id,
        },
        None => Change::DestroyInstance {
            instance: instance.id,
        },
    })
}

/// The next step for one partition; `None` if it is ready.
fn towards(
    placement: Placement,
    record: &GpuChanges,
    actual: &Actual,
    geometry: &Geometry,
) -> Result<Option<Next>, Obstacle> {
    let partition = geometry
        .partition(placement)
        .ok_or(Obstacle::NoSuchPartition(placement))?;
    if let Some(instance) = record.instance(placement, actual) {
        return match &instance.compute[..] {
            [] => Ok(Some(Next::Change(Change::CreateComputeInstance {
                instance: instance.id,
            }))),
            [only] if only.slices == partition.slices.compute => Ok(None),
            _ => Err(Obstacle::Divided {
                placement,
                id: instance.id,
            }),
        };
    }
    let is_whole = |it: &Instance| matches!(&it.compute[..], [only] if only.slices == partition.slices.compute);
    if actual.at(placement).is_some_and(is_whole) {
        // Somebody else created it.
        return Ok(None);
    }
    if let Some(obstacle) = in_the_way(placement, record, actual, geometry) {
        return Err(obstacle);
    }
    if !actual.mig_mode.current {
        return switch_on(record, actual).map(Some);
    }
    if record
        .instances
        .iter()
        .any(|owned| owned.placement == placement)
    {
        return Ok(Some(Next::Change(Change::CreateInstance(placement))));
    }
    let mut record = record.clone();
    record.instances.push(Owned {
        placement,
        id: None,
    });
    Ok(Some(Next::Write(record)))
}

/// The reason why a partition cannot be created: instances take slices or engines that it needs.
fn in_the_way(
    placement: Placement,
    record: &GpuChanges,
    actual: &Actual,
    geometry: &Geometry,
) -> Option<Obstacle> {
    // Those of others last, so that the error names the one that takes too much.
    let (ours, others): (Vec<_>, Vec<_>) = actual.instances.iter().partition(|it| record.owns(it));
    let take =
        |left: Slices, placement: Placement| left.less(geometry.partition(placement)?.slices);
    let mut left = take(geometry.whole, placement);
    for instance in ours {
        left = left.and_then(|left| take(left, instance.placement));
    }
    let Some(mut left) = left else {
        return Some(Obstacle::NoRoom(placement));
    };
    for other in others {
        match take(left, other.placement) {
            Some(less) => left = less,
            None => {
                return Some(Obstacle::Foreign {
                    wanted: placement,
                    other: other.placement,
                    id: other.id,
                });
            }
        }
    }
    None
}

fn switch_on(record: &GpuChanges, actual: &Actual) -> Result<Next, Obstacle> {
    if actual.mig_mode.pending {
        return Err(Obstacle::NeedsReset);
    }
    if record.switched_mig_on {
        return Ok(Next::Change(Change::SwitchMigMode { on: true }));
    }
    Ok(Next::Write(GpuChanges {
        switched_mig_on: true,
        ..record.clone()
    }))
}

/// Switches MIG mode off again, unless somebody else uses it.
fn restore_mode(record: &GpuChanges, actual: &Actual) -> Result<Next, Obstacle> {
    let is_used = !actual.instances.is_empty();
    if actual.mig_mode.current && !is_used {
        if !actual.mig_mode.pending {
            return Err(Obstacle::NeedsReset);
        }
        return Ok(Next::Change(Change::SwitchMigMode { on: false }));
    }
    Ok(Next::Write(GpuChanges {
        switched_mig_on: false,
        ..record.clone()
    }))
}

/// The next step to start an MPS daemon; `None` if it answers.
fn with_daemon(record: &GpuChanges, actual: &Actual) -> Result<Option<Next>, Obstacle> {
    if actual.compute_mode == ComputeMode::Prohibited {
        return Err(Obstacle::Prohibited);
    }
    if record.mps.is_none() {
        return Ok(Some(Next::Write(GpuChanges {
            mps: Some(OwnedDaemon {
                compute_mode_before: actual.compute_mode,
            }),
            ..record.clone()
        })));
    }
    // Before the daemon starts: from then on its server is the only process with contexts.
    if actual.compute_mode != ComputeMode::ExclusiveProcess {
        return Ok(Some(Next::SetComputeMode(ComputeMode::ExclusiveProcess)));
    }
    Ok((actual.daemon != Daemon::Ready).then_some(Next::EnsureDaemon(Served::Gpu)))
}

/// The next step to end an MPS daemon of Tranche.
fn without_daemon(daemon: OwnedDaemon, record: &GpuChanges, actual: &Actual) -> Next {
    if actual.daemon != Daemon::Ended {
        return Next::EndDaemon(Served::Gpu);
    }
    let before = daemon.compute_mode_before;
    // Any other mode was set by somebody else, or by a reboot.
    let is_ours = actual.compute_mode == ComputeMode::ExclusiveProcess;
    if is_ours && before != ComputeMode::ExclusiveProcess {
        return Next::SetComputeMode(before);
    }
    Next::Write(GpuChanges {
        mps: None,
        ..record.clone()
    })
}

#[cfg(test)]
mod tests;
