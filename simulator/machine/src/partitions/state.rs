//! The MIG instances of the shared page, as they are at one moment. [`super::change`] creates and destroys them.

use std::sync::atomic::Ordering;

use crate::description::{MAX_GPUS, MIB};
use crate::layout::{GpuState, ProcessSlot};
use crate::mig::capability::{COMPUTE_INSTANCES, GPU_INSTANCES};
use crate::mig::model::{ComputeProfile, GpuProfile, Model};
use crate::mig::rules::{self, Placed};
use crate::turns::Turns;

/// A GPU instance as it was at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuInstanceView {
    pub id: u32,
    /// A number that no other instance has or had.
    pub serial: u64,
    pub profile: &'static GpuProfile,
    /// The first of its places.
    pub start: u32,
    /// Bytes that its processes hold.
    pub used: u64,
}

/// A compute instance as it was at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeInstanceView {
    pub gpu_instance: GpuInstanceView,
    /// Its id in the GPU instance.
    pub id: u32,
    /// A number that no other instance has or had.
    pub serial: u64,
    pub profile: ComputeProfile,
    /// The first of its compute slices.
    pub start: u32,
    pub uuid: [u8; 16],
}

/// Where a process runs on a GPU in MIG mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// Index of the GPU.
    pub gpu: usize,
    /// Id of the GPU instance.
    pub instance: usize,
    /// Id of the compute instance.
    pub compute: usize,
}

impl Partition {
    pub(super) fn word(self) -> u32 {
        // Each is far below 256.
        let byte = |number: usize| u32::try_from(number).unwrap_or(0) & 0xff;
        1 << 24 | byte(self.gpu) << 16 | byte(self.instance) << 8 | byte(self.compute)
    }

    fn of_word(word: u32) -> Option<Self> {
        let byte = |shift: u32| (word >> shift & 0xff) as usize;
        let it = Self {
            gpu: byte(16),
            instance: byte(8),
            compute: byte(0),
        };
        let is_valid =
            it.gpu < MAX_GPUS && it.instance < GPU_INSTANCES && it.compute < COMPUTE_INSTANCES;
        (word != 0 && is_valid).then_some(it)
    }
}

impl ProcessSlot {
    /// The partition in which the process runs.
    #[must_use]
    pub fn partition(&self) -> Option<Partition> {
        Partition::of_word(self.partition.load(Ordering::Relaxed))
    }

    /// Its partition on GPU `gpu`.
    #[must_use]
    pub fn partition_on(&self, gpu: usize) -> Option<Partition> {
        self.partition().filter(|it| it.gpu == gpu)
    }

    pub(crate) fn leave_partition(&self) {
        self.partition.store(0, Ordering::Relaxed);
    }
}

impl GpuState {
    /// The GPU's MIG geometry; `None` if it has no MIG modes.
    #[must_use]
    pub fn model(&self) -> Option<&'static Model> {
        Model::of_number(self.mig_model)
    }

    /// Its GPU instances, by id.
    #[must_use]
    pub fn gpu_instances(&self) -> Vec<GpuInstanceView> {
        (0..GPU_INSTANCES)
            .filter_map(|id| self.gpu_instance(id))
            .collect()
    }

    #[must_use]
    pub fn gpu_instance(&self, id: usize) -> Option<GpuInstanceView> {
        let it = self.instances.get(id)?;
        let serial = it.serial.load(Ordering::Acquire);
        if serial == 0 {
            return None;
        }
        Some(GpuInstanceView {
            id: u32::try_from(id).ok()?,
            serial,
            profile: self.model()?.profile(it.kind.load(Ordering::Relaxed))?,
            start: it.start.load(Ordering::Relaxed),
            used: it.used.load(Ordering::Relaxed),
        })
    }

    /// The compute instances of a GPU instance, by id.
    #[must_use]
    pub fn compute_instances(&self, of: GpuInstanceView) -> Vec<ComputeInstanceView> {
        (0..COMPUTE_INSTANCES)
            .filter_map(|id| self.compute_instance(of, id))
            .collect()
    }

    /// A compute instance of a GPU instance.
    #[must_use]
    pub fn compute_instance(&self, of: GpuInstanceView, id: usize) -> Option<ComputeInstanceView> {
        let it = self.instances.get(of.id as usize)?.compute.get(id)?;
        let serial = it.serial.load(Ordering::Acquire);
        if serial == 0 {
            return None;
        }
        let kind = it.kind.load(Ordering::Relaxed);
        let profiles = self.model()?.compute_profiles(of.profile);
        let mut uuid = [0; 16];
        for (bytes, word) in uuid.chunks_exact_mut(8).zip(&it.uuid) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_be_bytes());
        }
        Some(ComputeInstanceView {
            gpu_instance: of,
            id: u32::try_from(id).ok()?,
            serial,
            profile: profiles.into_iter().find(|profile| profile.kind == kind)?,
            start: it.start.load(Ordering::Relaxed),
            uuid,
        })
    }

    /// All compute instances: the GPU's MIG devices, in NVML's order.
    #[must_use]
    pub fn mig_devices(&self) -> Vec<ComputeInstanceView> {
        self.gpu_instances()
            .into_iter()
            .flat_map(|of| self.compute_instances(of))
            .collect()
    }

    pub(super) fn apply_pending_mig_mode(&self) {
        let pending = self.mig_pending.load(Ordering::Relaxed);
        self.mig_mode.store(pending, Ordering::Relaxed);
    }

    /// Whether a pending MIG mode takes effect by itself when nothing uses the GPU any more: since Hopper. An earlier GPU
    /// needs a reset, which the driver attempts once, when the mode is set.
    #[must_use]
    pub fn switches_mig_mode_when_idle(&self) -> bool {
        const HOPPER: u32 = 9;
        self.architecture >= HOPPER
    }

    /// The turns of a partition.
    pub(crate) fn partition_turns(&self, of: Partition) -> &Turns {
        &self.instances[of.instance].compute[of.compute].turns
    }

    /// The compute slices and the turns of every compute instance.
    pub(crate) fn compute_slices(&self) -> impl Iterator<Item = (u64, &Turns)> {
        self.mig_devices().into_iter().map(|it| {
            let instance = &self.instances[it.gpu_instance.id as usize];
            let turns = &instance.compute[it.id as usize].turns;
            (u64::from(it.profile.slices), turns)
        })
    }

    /// Bytes that the processes of a GPU instance together can have.
    #[must_use]
    pub fn partition_memory(&self, instance: usize) -> u64 {
        let it = self.gpu_instance(instance);
        it.map_or(0, |it| it.profile.memory_mib * MIB)
    }

    /// Multiprocessors of a compute instance.
    #[must_use]
    pub fn partition_multiprocessors(&self, of: Partition) -> u32 {
        self.gpu_instance(of.instance)
            .and_then(|instance| self.compute_instance(instance, of.compute))
            .map_or(0, |it| it.profile.multiprocessors)
    }

    pub(super) fn placed(&self) -> Vec<Placed> {
        let instances = self.gpu_instances();
        instances.iter().map(|it| (it.profile, it.start)).collect()
    }

    /// The placements that are free for a GPU instance profile, in ascending order.
    #[must_use]
    pub fn free_placements(&self, profile: &'static GpuProfile) -> Vec<u32> {
        let Some(model) = self.model() else {
            return Vec::new();
        };
        let placed = self.placed();
        let mut starts = profile.starts.to_vec();
        starts.sort_unstable();
        starts.retain(|start| rules::fits(model, &placed, profile, *start));
        starts
    }

    /// How many more GPU instances of a profile can be made.
    #[must_use]
    pub fn remaining(&self, profile: &'static GpuProfile) -> u32 {
        let model = self.model();
        model.map_or(0, |model| rules::remaining(model, &self.placed(), profile))
    }

    fn compute_placed(&self, of: GpuInstanceView) -> Vec<(u32, u32)> {
        let instances = self.compute_instances(of);
        instances
            .iter()
            .map(|it| (it.start, it.profile.slices))
            .collect()
    }

    /// The placements that are free for a compute instance profile, in ascending order.
    #[must_use]
    pub fn free_compute_placements(
        &self,
        of: GpuInstanceView,
        profile: &ComputeProfile,
    ) -> Vec<u32> {
        let placed = self.compute_placed(of);
        let fits = |start: &u32| rules::compute_fits(&placed, profile, *start);
        profile.starts().filter(fits).collect()
    }
}
