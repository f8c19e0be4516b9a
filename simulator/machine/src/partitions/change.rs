//! Creation and destruction of MIG instances, and the entry of processes.
//!
//! Instances change under the GPU's lock. Only the daemon creates and destroys them. A process enters a compute instance
//! under the same lock, so that an instance is never destroyed while a process enters it.

use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use super::state::Partition;
use crate::identity;
use crate::layout::{GpuState, Shared};
use crate::ledger::{Guard, lock, owner};
use crate::mig::rules;
use crate::mig::words::ComputeInstance;

/// Why an instance is not created, destroyed or entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InstanceError {
    /// The GPU is not in MIG mode, or its model has no such profile.
    #[error("the GPU is not in MIG mode or has no such profile")]
    NotSupported,
    /// There is no such instance.
    #[error("no such instance")]
    NotFound,
    /// There is no such placement.
    #[error("no such placement")]
    Invalid,
    /// Slices or engines are taken.
    #[error("slices or engines are taken")]
    InsufficientResources,
    /// It has a process or a compute instance in it.
    #[error("in use")]
    InUse,
    /// A process that has ended holds the GPU's lock, and no daemon takes it over.
    #[error("the GPU's lock is taken")]
    Stuck,
}

impl Shared {
    /// Locks a GPU. For the daemon.
    fn locked(&self, gpu: usize) -> Result<(&GpuState, Guard<'_>), InstanceError> {
        let state = self.gpus().get(gpu).ok_or(InstanceError::NotFound)?;
        Ok((state, self.daemon_lock(gpu)))
    }

    /// Creates a GPU instance with the profile `kind`, at `start` or where the driver chooses; returns its id. For the daemon.
    pub fn create_gpu_instance(
        &self,
        gpu: usize,
        kind: u32,
        start: Option<u32>,
    ) -> Result<u32, InstanceError> {
        let (state, _guard) = self.locked(gpu)?;
        let model = state.model().ok_or(InstanceError::NotSupported)?;
        if !state.is_partitioned() {
            return Err(InstanceError::NotSupported);
        }
        let profile = model.profile(kind).ok_or(InstanceError::NotSupported)?;
        let placed = state.placed();
        let start = match start {
            Some(start) if !profile.starts.contains(&start) => return Err(InstanceError::Invalid),
            Some(start) => Some(start).filter(|it| rules::fits(model, &placed, profile, *it)),
            None => rules::choose(model, &placed, profile),
        }
        .ok_or(InstanceError::InsufficientResources)?;
        let id = profile.instance_id(model.whole(), start);
        let it = &state.instances[id as usize];
        it.kind.store(kind, Ordering::Relaxed);
        it.start.store(start, Ordering::Relaxed);
        it.used.store(0, Ordering::Relaxed);
        it.peak.store(0, Ordering::Relaxed);
        it.serial.store(self.next_serial(), Ordering::Release);
        Ok(id)
    }

    /// Destroys a GPU instance that has no compute instance. For the daemon.
    pub fn destroy_gpu_instance(&self, gpu: usize, id: u32) -> Result<(), InstanceError> {
        let (state, _guard) = self.locked(gpu)?;
        let found = state.gpu_instance(id as usize);
        let instance = found.ok_or(InstanceError::NotFound)?;
        if !state.compute_instances(instance).is_empty() || instance.used > 0 {
            return Err(InstanceError::InUse);
        }
        state.instances[id as usize]
            .serial
            .store(0, Ordering::Release);
        Ok(())
    }

    /// Creates a compute instance with the profile `kind` in a GPU instance; returns its id. For the daemon.
    pub fn create_compute_instance(
        &self,
        gpu: usize,
        instance: u32,
        kind: u32,
        start: Option<u32>,
    ) -> Result<u32, InstanceError> {
        let (state, _guard) = self.locked(gpu)?;
        let model = state.model().ok_or(InstanceError::NotSupported)?;
        let found = state.gpu_instance(instance as usize);
        let of = found.ok_or(InstanceError::NotFound)?;
        let profile = model
            .compute_profiles(of.profile)
            .into_iter()
            .find(|profile| profile.kind == kind)
            .ok_or(InstanceError::NotSupported)?;
        if start.is_some_and(|start| profile.starts().all(|it| it != start)) {
            return Err(InstanceError::Invalid);
        }
        let start = state
            .free_compute_placements(of, &profile)
            .into_iter()
            .find(|it| start.is_none_or(|start| start == *it))
            .ok_or(InstanceError::InsufficientResources)?;
        let words = &state.instances[instance as usize].compute;
        let is_free = |it: &ComputeInstance| it.serial.load(Ordering::Relaxed) == 0;
        let id = words
            .iter()
            .position(is_free)
            .ok_or(InstanceError::InsufficientResources)?;
        let it = &words[id];
        let serial = self.next_serial();
        let uuid = mig_uuid(&state.uuid, instance, serial);
        for (word, bytes) in it.uuid.iter().zip(uuid.chunks_exact(8)) {
            let bytes = bytes.try_into().unwrap_or_default();
            word.store(u64::from_be_bytes(bytes), Ordering::Relaxed);
        }
        it.kind.store(kind, Ordering::Relaxed);
        it.start.store(start, Ordering::Relaxed);
        it.turns.clear();
        it.serial.store(serial, Ordering::Release);
        u32::try_from(id).map_err(|_| InstanceError::InsufficientResources)
    }

    /// Destroys a compute instance that no process uses. For the daemon.
    pub fn destroy_compute_instance(
        &self,
        gpu: usize,
        instance: u32,
        compute: u32,
    ) -> Result<(), InstanceError> {
        let (state, _guard) = self.locked(gpu)?;
        let found = state.gpu_instance(instance as usize);
        let of = found.ok_or(InstanceError::NotFound)?;
        let found = state.compute_instance(of, compute as usize);
        let it = found.ok_or(InstanceError::NotFound)?;
        let place = Partition {
            gpu,
            instance: instance as usize,
            compute: compute as usize,
        };
        if self
            .slots
            .iter()
            .any(|slot| slot.partition() == Some(place))
        {
            return Err(InstanceError::InUse);
        }
        let words = &state.instances[place.instance].compute[place.compute];
        words.serial.store(0, Ordering::Release);
        let slices = state.model().map_or(1, |model| model.whole().slices);
        // The time that its kernels ran on the GPU stays counted.
        state
            .turns
            .add_ran(words.turns.ran() * u64::from(it.profile.slices) / u64::from(slices));
        Ok(())
    }

    /// Puts process `slot` into the compute instance with this serial number.
    pub fn enter_partition(
        &self,
        slot: usize,
        place: Partition,
        serial: u64,
    ) -> Result<(), InstanceError> {
        let state = self.gpus().get(place.gpu).ok_or(InstanceError::NotFound)?;
        let _guard = lock(state, owner(slot)).map_err(|_| InstanceError::Stuck)?;
        let of = state.gpu_instance(place.instance);
        let it = of.and_then(|of| state.compute_instance(of, place.compute));
        if it.is_none_or(|it| it.serial != serial) {
            return Err(InstanceError::NotFound);
        }
        self.slots[slot]
            .partition
            .store(place.word(), Ordering::Relaxed);
        Ok(())
    }

    /// Resets a GPU that no process uses: destroys its instances and applies a pending MIG mode. For the daemon.
    pub fn reset_gpu(&self, gpu: usize) -> Result<(), InstanceError> {
        let (state, _guard) = self.locked(gpu)?;
        let is_used = state.used.load(Ordering::Relaxed) > 0;
        if is_used
            || self
                .slots
                .iter()
                .any(|slot| slot.partition_on(gpu).is_some())
        {
            return Err(InstanceError::InUse);
        }
        for instance in &state.instances {
            for compute in &instance.compute {
                compute.serial.store(0, Ordering::Release);
            }
            instance.serial.store(0, Ordering::Release);
        }
        state.time_slice.store(0, Ordering::Relaxed);
        // A row that could not be remapped stays so.
        state.recovery_action.store(0, Ordering::Relaxed);
        state.remap_pending.store(0, Ordering::Relaxed);
        for counter in &state.nvlink {
            counter.store(0, Ordering::Relaxed);
        }
        state.apply_pending_mig_mode();
        Ok(())
    }

    /// Applies a pending MIG mode, if the GPU needs no reset for that and nothing uses it. For the daemon.
    pub fn apply_idle_mig_mode(&self, gpu: usize) {
        let state = &self.gpus[gpu];
        if state.mig_needs_reset == 0 && !self.keeps_mig_mode(gpu) {
            state.apply_pending_mig_mode();
        }
    }

    /// Whether a process is in a partition of the GPU or holds its memory, or the GPU has instances.
    #[must_use]
    pub fn keeps_mig_mode(&self, gpu: usize) -> bool {
        let state = &self.gpus[gpu];
        state.used.load(Ordering::Relaxed) > 0 || !state.gpu_instances().is_empty()
    }

    fn next_serial(&self) -> u64 {
        self.header.instances.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// The UUID of a new compute instance, in the form that drivers use (version 5).
fn mig_uuid(gpu: &[u8; 16], instance: u32, serial: u64) -> [u8; 16] {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanos = now.map_or(0, |now| now.as_nanos());
    let mut seed = gpu.to_vec();
    seed.extend(nanos.to_le_bytes());
    seed.extend(serial.to_le_bytes());
    let mut uuid = identity::gpu_uuid(&seed, instance);
    uuid[6] = uuid[6] & 0x0f | 0x50;
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::MIB;
    use crate::layout::test_page;
    use crate::ledger::ChargeError;

    fn page() -> &'static Shared {
        let page = test_page(include_str!("../../../machines/H100-80.toml"));
        page.gpus[0].mig_mode.store(1, Ordering::Relaxed);
        page
    }

    /// Creates a GPU instance and a compute instance of all of it; returns the partition.
    fn make(page: &Shared, kind: u32) -> Partition {
        let instance = page.create_gpu_instance(0, kind, None).unwrap();
        let of = page.gpus[0].gpu_instance(instance as usize).unwrap();
        let profiles = page.gpus[0].model().unwrap().compute_profiles(of.profile);
        let whole = profiles.last().unwrap().kind;
        let compute = page
            .create_compute_instance(0, instance, whole, None)
            .unwrap();
        Partition {
            gpu: 0,
            instance: instance as usize,
            compute: compute as usize,
        }
    }

    fn enter(page: &Shared, slot: usize, place: Partition) {
        let of = page.gpus[0].gpu_instance(place.instance).unwrap();
        let it = page.gpus[0].compute_instance(of, place.compute).unwrap();
        page.slots[slot].pid.store(1, Ordering::Relaxed);
        page.enter_partition(slot, place, it.serial).unwrap();
    }

    #[test]
    fn instances_are_created_and_destroyed_in_order() {
        let page = page();
        let gpu = &page.gpus[0];
        let place = make(page, 2);
        assert_eq!((place.instance, place.compute), (2, 0));
        let instance = 2;
        assert_eq!(
            page.destroy_gpu_instance(0, instance),
            Err(InstanceError::InUse)
        );
        let first = gpu.mig_devices()[0].uuid;
        page.destroy_compute_instance(0, instance, 0).unwrap();
        assert_eq!(
            page.destroy_compute_instance(0, instance, 0),
            Err(InstanceError::NotFound)
        );
        page.create_compute_instance(0, instance, 2, None).unwrap();
        assert_ne!(
            gpu.mig_devices()[0].uuid,
            first,
            "a UUID is never used again"
        );
        assert_eq!(
            page.create_compute_instance(0, instance, 0, None),
            Err(InstanceError::InsufficientResources)
        );
        page.destroy_compute_instance(0, instance, 0).unwrap();
        for expected in 0..3 {
            let made = page.create_compute_instance(0, instance, 0, None);
            assert_eq!(made, Ok(expected));
        }
        assert_eq!(gpu.mig_devices().len(), 3);
        for compute in 0..3 {
            page.destroy_compute_instance(0, instance, compute).unwrap();
        }
        page.destroy_gpu_instance(0, instance).unwrap();
        assert!(gpu.gpu_instances().is_empty());
    }

    #[test]
    fn placements_are_checked() {
        let page = page();
        let create = |kind, start| page.create_gpu_instance(0, kind, start);
        assert_eq!(create(2, Some(1)), Err(InstanceError::Invalid));
        assert_eq!(create(2, Some(0)), Ok(1));
        assert_eq!(
            create(0, Some(3)),
            Err(InstanceError::InsufficientResources)
        );
        assert_eq!(create(0, Some(4)), Ok(11));
        assert_eq!(create(12, None), Err(InstanceError::NotSupported));
        page.gpus[0].mig_mode.store(0, Ordering::Relaxed);
        assert_eq!(create(0, None), Err(InstanceError::NotSupported));
    }

    #[test]
    fn a_partition_has_memory_of_its_own() {
        let page = page();
        let (small, large) = (make(page, 0), make(page, 2));
        enter(page, 0, small);
        enter(page, 1, large);
        let all = 9_984 * MIB;
        page.charge(0, 0, all, || ()).unwrap();
        assert_eq!(
            page.charge(0, 0, 1, || ()),
            Err(ChargeError::OutOfMemory { asked: 1, free: 0 })
        );
        page.charge(1, 0, 40_448 * MIB, || ()).unwrap();
        let used = |it: Partition| page.gpus[0].gpu_instance(it.instance).unwrap().used;
        assert_eq!((used(small), used(large)), (all, 40_448 * MIB));
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 50_432 * MIB);
        let instance = u32::try_from(small.instance).unwrap();
        assert_eq!(
            page.destroy_compute_instance(0, instance, 0),
            Err(InstanceError::InUse)
        );
        page.reclaim(0);
        assert_eq!((used(small), used(large)), (0, 40_448 * MIB));
        page.destroy_compute_instance(0, instance, 0).unwrap();
        page.recover();
        assert_eq!(used(large), 40_448 * MIB);
        page.release(1, 0, MIB).unwrap();
        assert_eq!(used(large), 40_447 * MIB);
    }

    #[test]
    fn a_partition_has_time_of_its_own() {
        const LONG: u64 = 10_000_000;
        let page = page();
        let (one, other) = (make(page, 0), make(page, 0));
        enter(page, 0, one);
        enter(page, 1, other);
        enter(page, 2, other);
        for slot in 0..3 {
            page.launch(slot, 0, LONG, 1000).unwrap();
        }
        assert_eq!(page.expected(0, 0, LONG, 1000), Ok(1000 + LONG), "alone");
        let last = [1, 2].map(|slot| page.expected(slot, 0, LONG, 1000).unwrap());
        assert_eq!(last.into_iter().max(), Some(1000 + 2 * LONG), "they share");
        page.advance_all(1000 + LONG);
        assert_eq!(
            (page.ran(0, 0), page.ran(1, 0) + page.ran(2, 0)),
            (LONG, LONG)
        );
        // Two of seven compute slices ran.
        assert_eq!(page.gpus[0].ran(), 2 * (LONG / 7));
        // The process that ended leaves the others their turns.
        page.reclaim(1);
        let left = LONG - page.ran(2, 0);
        assert_eq!(
            page.expected(2, 0, LONG, 1000 + LONG),
            Ok(1000 + LONG + left)
        );
    }

    #[test]
    fn a_process_cannot_enter_what_was_destroyed() {
        let page = page();
        let place = make(page, 0);
        let serial = page.gpus[0].mig_devices()[0].serial;
        let instance = u32::try_from(place.instance).unwrap();
        page.destroy_compute_instance(0, instance, 0).unwrap();
        page.create_compute_instance(0, instance, 0, None).unwrap();
        assert_eq!(
            page.enter_partition(0, place, serial),
            Err(InstanceError::NotFound)
        );
        assert_eq!(page.slots[0].partition(), None);
    }
}
