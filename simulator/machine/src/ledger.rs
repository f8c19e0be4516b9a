//! How much device memory each process holds.
//!
//! `gpu.used` is the sum of all `slot.used[gpu]`. Both change under the GPU's lock, a word that names its holder. A process
//! that is killed while it holds the lock may leave a sum that is wrong by one entry. The daemon knows that the holder has
//! ended, takes the lock over and recomputes the sum. So a SIGKILL at any instruction neither loses nor creates memory.
//!
//! A real driver frees a process's memory while it closes the process's files, before the process has ended. This daemon
//! does so a moment later. Programs must not see the difference. So a charge that would raise `gpu.used` to a new peak,
//! while other processes hold memory, first has the daemon free the memory of processes that have ended.
//!
//! Managed memory can be evicted: a charge that finds no room moves managed memory of other processes to the host, as the
//! UVM driver does (`uvm_pmm_gpu_pma_evict_pages` in NVIDIA's open kernel modules). A process whose memory was moved
//! notices it when it uses the memory again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::description::MIB;
use crate::layout::{GpuState, ORPHANED, ProcessSlot, Shared};
use crate::mig::capability::GPU_INSTANCES;

/// The daemon's lock value. A slot's is its index + 1.
const DAEMON: u32 = u32::MAX;
/// The lock value of the daemon's sampler.
const SAMPLER: u32 = DAEMON - 1;

/// How long a caller waits for a lock. A lock is only held longer if its holder has ended and no daemon runs.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a caller asks for a lock at least.
const FEWEST_TURNS: u64 = 100_000;

/// Why a charge fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// The GPU has less free memory.
    #[error("out of memory: {asked} bytes asked, {free} free")]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes free at that moment.
        free: u64,
    },
    /// The GPU's compute mode allows this process no context.
    #[error("the GPU's compute mode {mode} allows this process no context")]
    Closed {
        /// `CUcomputemode`: 2 prohibited, 3 exclusive to a process.
        mode: u32,
    },
    /// A process that has ended holds the GPU's lock, and no daemon takes it over.
    #[error(
        "the GPU's ledger is locked by a process that does not answer; is nvidia-sim-persistenced running?"
    )]
    Stuck,
}

pub(crate) struct Guard<'a>(&'a GpuState);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.lock.store(0, Ordering::Release);
    }
}

/// Takes a GPU's lock for the daemon's sampler, if it is free.
pub(crate) fn try_lock(gpu: &GpuState) -> Option<Guard<'_>> {
    gpu.lock
        .compare_exchange(0, SAMPLER, Ordering::Acquire, Ordering::Relaxed)
        .is_ok()
        // `then_some` would always create a guard, and dropping it would release another holder's lock.
        .then(|| Guard(gpu))
}

/// Takes a GPU's lock for `owner`.
pub(crate) fn lock(gpu: &GpuState, owner: u32) -> Result<Guard<'_>, ChargeError> {
    let take = || {
        gpu.lock
            .compare_exchange_weak(0, owner, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    };
    for _ in 0..128 {
        if take() {
            return Ok(Guard(gpu));
        }
        std::hint::spin_loop();
    }
    let asked = Instant::now();
    // Turns count, too: if the machine stood still, the holder had no time to release the lock.
    for turn in 0_u64.. {
        // The scheduler may have stopped the holder: let it run.
        std::thread::yield_now();
        if take() {
            return Ok(Guard(gpu));
        }
        if turn > FEWEST_TURNS && asked.elapsed() > PATIENCE {
            break;
        }
    }
    Err(ChargeError::Stuck)
}

/// `CU_COMPUTEMODE_PROHIBITED` and `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`.
const PROHIBITED: u32 = 2;
const EXCLUSIVE: u32 = 3;

impl Shared {
    /// Charges a context's memory on GPU `gpu` to `slot`, if the GPU's compute mode allows a context. `reclaim` makes the
    /// daemon free the memory of processes that have ended.
    pub fn open_context(
        &self,
        slot: usize,
        gpu: usize,
        reclaim: impl Fn(),
    ) -> Result<(), ChargeError> {
        let state = &self.gpus[gpu];
        let bytes = self.context_bytes(slot, gpu);
        if state.compute_mode.load(Ordering::Relaxed) == EXCLUSIVE && self.is_taken(slot, gpu) {
            // The other process may have ended.
            reclaim();
        }
        let _guard = self.lock_reclaimed(slot, gpu, bytes, reclaim)?;
        let mode = state.compute_mode.load(Ordering::Relaxed);
        if mode == PROHIBITED || (mode == EXCLUSIVE && self.is_taken(slot, gpu)) {
            return Err(ChargeError::Closed { mode });
        }
        self.add_charge(slot, gpu, bytes)
    }

    /// Whether another process has memory of the GPU. Clients of MPS count as one process: their server. (Clients of a daemon
    /// that died have lost their contexts, so daemons are not distinguished.)
    fn is_taken(&self, slot: usize, gpu: usize) -> bool {
        let is_client = |slot: &ProcessSlot| slot.mps_daemon.load(Ordering::Acquire) != 0;
        let own = is_client(&self.slots[slot]);
        let mut others = self.slots.iter().enumerate();
        others.any(|(at, other)| {
            let is_fellow = own && is_client(other);
            at != slot && !is_fellow && other.used[gpu].load(Ordering::Relaxed) > 0
        })
    }

    /// Charges `bytes` of GPU `gpu` to `slot`, all or nothing. `reclaim` makes the daemon free the memory of processes that
    /// have ended.
    pub fn charge(
        &self,
        slot: usize,
        gpu: usize,
        bytes: u64,
        reclaim: impl Fn(),
    ) -> Result<(), ChargeError> {
        let _guard = self.lock_reclaimed(slot, gpu, bytes, reclaim)?;
        self.add_charge(slot, gpu, bytes)
    }

    /// Charges `bytes` of managed memory that moves to GPU `gpu`, all or nothing.
    pub fn charge_managed(
        &self,
        slot: usize,
        gpu: usize,
        bytes: u64,
        reclaim: impl Fn(),
    ) -> Result<(), ChargeError> {
        let _guard = self.lock_reclaimed(slot, gpu, bytes, reclaim)?;
        self.add_charge(slot, gpu, bytes)?;
        self.slots[slot].managed[gpu].fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Ends a charge of `bytes` of managed memory, or of the part that is still on the GPU.
    pub fn release_managed(&self, slot: usize, gpu: usize, bytes: u64) -> Result<(), ChargeError> {
        let _guard = lock(&self.gpus[gpu], owner(slot))?;
        self.move_to_host(slot, gpu, bytes);
        Ok(())
    }

    /// Moves managed memory of a slot to the host, at most `most` bytes; returns how much that was. The caller has the GPU's
    /// lock.
    fn move_to_host(&self, slot: usize, gpu: usize, most: u64) -> u64 {
        let managed = &self.slots[slot].managed[gpu];
        let before = managed.load(Ordering::Relaxed);
        let moved = most.min(before);
        managed.store(before - moved, Ordering::Relaxed);
        self.lower(slot, gpu, moved);
        moved
    }

    /// Moves managed memory of other processes to the host, until `missing` bytes have been moved. The caller has the GPU's
    /// lock.
    fn evict(&self, slot: usize, gpu: usize, mut missing: u64) {
        let instance = |slot: usize| self.slots[slot].partition_on(gpu).map(|it| it.instance);
        for other in 0..self.slots.len() {
            if missing == 0 {
                return;
            }
            if other != slot && instance(other) == instance(slot) {
                missing -= self.move_to_host(other, gpu, missing);
            }
        }
    }

    /// Takes a GPU's lock to charge `bytes`. If that would be a new peak, other slots hold memory, and the GPU is large
    /// enough, calls `reclaim` first, and ensures that nothing is charged between it and the lock: otherwise another process
    /// could end after it, and its memory would still be in the sum. The real driver frees the memory of a process before
    /// other processes can see that it has ended.
    fn lock_reclaimed(
        &self,
        slot: usize,
        gpu: usize,
        bytes: u64,
        reclaim: impl Fn(),
    ) -> Result<Guard<'_>, ChargeError> {
        let state = &self.gpus[gpu];
        let mut reclaimed = None;
        loop {
            let guard = lock(state, owner(slot))?;
            let is_record = self.accounts(slot, gpu).any(|(used, peak)| {
                let sum = used.load(Ordering::Relaxed).saturating_add(bytes);
                sum > peak.load(Ordering::Relaxed)
            });
            let charges = state.charges.load(Ordering::Relaxed);
            let is_reclaimed = reclaimed == Some(charges);
            if !is_record
                || is_reclaimed
                || !self.is_shared(slot, gpu)
                || bytes > self.room(slot, gpu).1
            {
                return Ok(guard);
            }
            drop(guard);
            reclaimed = Some(charges);
            reclaim();
        }
    }

    /// The sums that count the memory of process `slot`, with their peaks: the GPU's, and its GPU instance's.
    fn accounts(&self, slot: usize, gpu: usize) -> impl Iterator<Item = (&AtomicU64, &AtomicU64)> {
        let state = &self.gpus[gpu];
        let place = self.slots[slot].partition_on(gpu);
        let partition = place.map(|place| {
            let instance = &state.instances[place.instance];
            (&instance.used, &instance.peak)
        });
        std::iter::once((&state.used, &state.peak)).chain(partition)
    }

    /// The limit of the memory of process `slot`: the sum that it applies to, and its largest value.
    fn room(&self, slot: usize, gpu: usize) -> (&AtomicU64, u64) {
        let state = &self.gpus[gpu];
        match self.slots[slot].partition_on(gpu) {
            Some(place) => {
                let instance = &state.instances[place.instance];
                (&instance.used, state.partition_memory(place.instance))
            }
            None => (&state.used, state.usable()),
        }
    }

    /// Bytes that a context of process `slot` takes: in a partition the part for its multiprocessors, in whole blocks of
    /// 2 MiB.
    #[must_use]
    pub fn context_bytes(&self, slot: usize, gpu: usize) -> u64 {
        let state = &self.gpus[gpu];
        let Some(place) = self.slots[slot].partition_on(gpu) else {
            return state.context_bytes;
        };
        let part = u64::from(state.partition_multiprocessors(place));
        let bytes = state.context_bytes * part / u64::from(state.multiprocessors.max(1));
        bytes.next_multiple_of(2 * MIB)
    }

    /// Whether other slots than `slot` hold memory in the same GPU or partition.
    fn is_shared(&self, slot: usize, gpu: usize) -> bool {
        let held = self.slots[slot].used[gpu].load(Ordering::Relaxed);
        self.room(slot, gpu).0.load(Ordering::Relaxed) > held
    }

    /// Adds a charge. The caller has the GPU's lock.
    fn add_charge(&self, slot: usize, gpu: usize, bytes: u64) -> Result<(), ChargeError> {
        let state = &self.gpus[gpu];
        let (used, room) = self.room(slot, gpu);
        let read_free = || room.saturating_sub(used.load(Ordering::Relaxed));
        if bytes > read_free() && bytes <= room {
            self.evict(slot, gpu, bytes - read_free());
        }
        let free = read_free();
        if bytes > free {
            return Err(ChargeError::OutOfMemory { asked: bytes, free });
        }
        let held = &self.slots[slot].used[gpu];
        held.store(held.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
        for (used, peak) in self.accounts(slot, gpu) {
            let sum = used.load(Ordering::Relaxed) + bytes;
            used.store(sum, Ordering::Relaxed);
            peak.fetch_max(sum, Ordering::Relaxed);
        }
        state.charges.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Ends a charge of `bytes` to `slot`.
    pub fn release(&self, slot: usize, gpu: usize, bytes: u64) -> Result<(), ChargeError> {
        let _guard = lock(&self.gpus[gpu], owner(slot))?;
        self.lower(slot, gpu, bytes);
        Ok(())
    }

    /// Lowers the memory that a slot holds. The caller has the GPU's lock.
    fn lower(&self, slot: usize, gpu: usize, bytes: u64) {
        let held = &self.slots[slot].used[gpu];
        // Saturating: the daemon may have reclaimed a process whose connection has ended.
        let before = held.load(Ordering::Relaxed);
        let returned = bytes.min(before);
        held.store(before - returned, Ordering::Relaxed);
        for (used, _) in self.accounts(slot, gpu) {
            let sum = used.load(Ordering::Relaxed);
            used.store(sum.saturating_sub(returned), Ordering::Relaxed);
        }
    }

    /// Frees the slot of a process that has ended, with its memory and its queued kernels. Only the daemon calls this, after
    /// the process has ended and its files are closed.
    pub fn reclaim(&self, slot: usize) {
        self.end(slot, 0, |held| held.store(0, Ordering::Relaxed));
        for managed in &self.slots[slot].managed {
            managed.store(0, Ordering::Relaxed);
        }
    }

    /// Removes the queued kernels and the pid of a process that has ended. Its memory stays charged: another process, such as
    /// the child of a fork, has its files open. Only the daemon calls this.
    pub fn orphan(&self, slot: usize) {
        self.end(slot, ORPHANED, |_| {});
    }

    fn end(&self, slot: usize, pid: i32, release: impl Fn(&AtomicU64)) {
        let dead = &self.slots[slot];
        for (gpu, state) in self.gpus().iter().enumerate() {
            let _guard = self.take_over(state, owner(slot));
            release(&dead.used[gpu]);
            // It may have ended with the lock, between the write of its entry and that of the sum.
            self.recompute_used(gpu);
            self.reset_lane(slot, gpu);
            dead.utilization[gpu].store(0, Ordering::Relaxed);
        }
        dead.sampled.store(0, Ordering::Relaxed);
        dead.started.store(0, Ordering::Relaxed);
        if pid == 0 {
            dead.leave_partition();
            dead.forget_faults();
        }
        dead.pid.store(pid, Ordering::Release);
    }

    /// Repairs the ledger for a daemon that starts: an earlier daemon, or a process that ended while no daemon ran, may have
    /// left a lock.
    pub fn recover(&self) {
        for (gpu, state) in self.gpus().iter().enumerate() {
            // There is only one daemon, which starts now, so no daemon holds the lock.
            let _guard = self.take_over(state, DAEMON);
            self.recompute_used(gpu);
            self.rebuild_ring(gpu);
        }
    }

    fn recompute_used(&self, gpu: usize) {
        let mut sum = 0;
        let mut of_instances = [0; GPU_INSTANCES];
        for slot in &self.slots {
            let used = slot.used[gpu].load(Ordering::Relaxed);
            sum += used;
            if let Some(place) = slot.partition_on(gpu) {
                of_instances[place.instance] += used;
            }
        }
        let state = &self.gpus[gpu];
        state.used.store(sum, Ordering::Relaxed);
        for (instance, sum) in state.instances.iter().zip(of_instances) {
            instance.used.store(sum, Ordering::Relaxed);
        }
    }

    /// Takes the GPU's lock for a change by the daemon.
    pub(crate) fn daemon_lock(&self, gpu: usize) -> Guard<'_> {
        let guard = self.take_over(&self.gpus[gpu], 0);
        // The former holder may have ended.
        self.recompute_used(gpu);
        guard
    }

    /// Takes the lock from a holder that has ended, or waits for one that runs. The caller then recomputes the sum, which the
    /// holder may have left incomplete.
    fn take_over<'a>(&self, state: &'a GpuState, dead: u32) -> Guard<'a> {
        let take = |from| {
            state
                .lock
                .compare_exchange(from, DAEMON, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        };
        loop {
            if take(0) || take(dead) {
                return Guard(state);
            }
            let holder = state.lock.load(Ordering::Relaxed);
            let slot = (holder as usize).wrapping_sub(1);
            // The holder may be another process that has ended and is reclaimed next. A sampler is of this process, except
            // at the start of a daemon, when it was an earlier daemon's.
            let lives = if holder == SAMPLER {
                dead != DAEMON
            } else {
                self.slots.get(slot).is_some_and(ProcessSlot::is_alive)
            };
            if holder != 0 && !lives && take(holder) {
                return Guard(state);
            }
            std::thread::yield_now();
        }
    }
}

/// The lock value of a slot.
pub(crate) fn owner(slot: usize) -> u32 {
    // MAX_PROCESSES is far below u32::MAX.
    u32::try_from(slot + 1).unwrap_or(SAMPLER - 1)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::layout::test_page;
    use proptest::prelude::*;

    fn page() -> &'static Shared {
        test_page(include_str!("../../machines/T4.toml"))
    }

    #[test]
    fn the_daemon_waits_for_its_own_sampler_only() {
        let page = page();
        let sampling = try_lock(&page.gpus[0]).unwrap();
        std::thread::scope(|scope| {
            let reclaiming = scope.spawn(|| page.reclaim(0));
            for _ in 0..1000 {
                std::thread::yield_now();
                assert_eq!(page.gpus[0].lock.load(Ordering::Relaxed), SAMPLER);
            }
            assert!(!reclaiming.is_finished());
            drop(sampling);
        });
        std::mem::forget(try_lock(&page.gpus[0]).unwrap());
        page.recover();
        assert_eq!(page.gpus[0].lock.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_failed_try_lock_leaves_the_lock_alone() {
        let page = page();
        let held = lock(&page.gpus[0], owner(7)).unwrap();
        assert!(try_lock(&page.gpus[0]).is_none());
        assert_eq!(page.gpus[0].lock.load(Ordering::Relaxed), owner(7));
        drop(held);
        assert!(try_lock(&page.gpus[0]).is_some());
    }

    #[test]
    fn a_charge_of_a_byte_too_much_changes_nothing() {
        let page = page();
        let all = page.gpus[0].usable();
        page.charge(0, 0, all - 1, || ()).unwrap();
        assert_eq!(
            page.charge(1, 0, 2, || ()),
            Err(ChargeError::OutOfMemory { asked: 2, free: 1 })
        );
        assert_eq!(page.slots[1].used[0].load(Ordering::Relaxed), 0);
        page.charge(1, 0, 1, || ()).unwrap();
        assert_eq!(page.gpus[0].free(), 0);
    }

    #[test]
    fn managed_memory_of_others_gives_way() {
        let page = page();
        let all = page.gpus[0].usable();
        page.charge_managed(0, 0, all - 2 * MIB, || ()).unwrap();
        page.charge(1, 0, 5 * MIB, || ()).unwrap();
        let held = |slot: usize| page.slots[slot].used[0].load(Ordering::Relaxed);
        let managed = |slot: usize| page.slots[slot].managed[0].load(Ordering::Relaxed);
        assert_eq!((held(0), managed(0)), (all - 5 * MIB, all - 5 * MIB));
        assert_eq!((held(1), page.gpus[0].free()), (5 * MIB, 0));
        // Managed memory moves managed memory away, too, and never other memory.
        page.charge_managed(2, 0, all - 5 * MIB, || ()).unwrap();
        assert_eq!((managed(0), managed(2)), (0, all - 5 * MIB));
        assert!(page.charge_managed(0, 0, all - 4 * MIB, || ()).is_err());
        // What it believed to have there is no longer its own.
        page.release_managed(0, 0, all - 2 * MIB).unwrap();
        page.release_managed(2, 0, all).unwrap();
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 5 * MIB);
    }

    #[test]
    fn a_process_that_ends_with_the_lock_loses_no_memory() {
        let page = page();
        page.charge(0, 0, 7 * MIB, || ()).unwrap();
        page.charge(1, 0, 3 * MIB, || ()).unwrap();
        // Process 0 ends between the write of its entry and that of the sum.
        page.gpus[0].lock.store(1, Ordering::Relaxed);
        page.slots[0].used[0].fetch_add(5 * MIB, Ordering::Relaxed);
        page.reclaim(0);
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 3 * MIB);
        page.charge(1, 0, MIB, || ()).unwrap();
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 4 * MIB);
    }

    #[test]
    fn ended_processes_are_reclaimed_before_a_new_peak() {
        let page = page();
        let never = || panic!("there is nothing to reclaim");
        page.charge(0, 0, 5 * MIB, never).unwrap();
        let asked = Cell::new(0);
        let reclaim = || {
            asked.set(asked.get() + 1);
            page.reclaim(0);
        };
        // Another process holds memory, and it would be a new peak.
        page.charge(1, 0, MIB, reclaim).unwrap();
        assert_eq!(asked.get(), 1);
        assert_eq!(page.gpus[0].peak.load(Ordering::Relaxed), 5 * MIB);
        // No other process holds memory; the peak was higher.
        page.charge(1, 0, 5 * MIB, never).unwrap();
        page.charge(2, 0, MIB, || ()).unwrap();
        page.release(1, 0, MIB).unwrap();
        page.charge(2, 0, MIB, never).unwrap();
        let all = page.gpus[0].usable();
        assert!(page.charge(2, 0, all + 1, never).is_err());
        let refused = page.charge(2, 0, all, || page.reclaim(1));
        assert!(refused.is_err());
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 2 * MIB);
    }

    /// A process ends after the daemon was asked, and another one is charged for its memory meanwhile.
    #[test]
    fn a_process_that_ends_after_the_request_is_not_in_the_peak() {
        let page = page();
        page.charge(0, 0, 5 * MIB, || ()).unwrap();
        page.charge(2, 0, 5 * MIB, || ()).unwrap();
        page.release(2, 0, 5 * MIB).unwrap();
        let asked = Cell::new(0);
        let reclaim = || {
            asked.set(asked.get() + 1);
            if asked.get() == 1 {
                // Slot 0 ends now. 5 MiB more are no new peak.
                page.charge(2, 0, 5 * MIB, || panic!("no new peak"))
                    .unwrap();
            } else {
                page.reclaim(0);
            }
        };
        page.charge(1, 0, 6 * MIB, reclaim).unwrap();
        assert_eq!(asked.get(), 2);
        assert_eq!(page.gpus[0].peak.load(Ordering::Relaxed), 11 * MIB);
    }

    #[test]
    fn an_orphans_memory_stays_charged() {
        let page = page();
        page.slots[0].pid.store(7, Ordering::Relaxed);
        page.charge(0, 0, 5 * MIB, || ()).unwrap();
        // It ended with the lock.
        page.gpus[0].lock.store(1, Ordering::Relaxed);
        page.orphan(0);
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 5 * MIB);
        assert!(!page.slots[0].is_alive());
        page.charge(1, 0, MIB, || ()).unwrap();
        page.reclaim(0);
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), MIB);
    }

    #[test]
    fn the_compute_mode_decides_which_process_may_have_a_context() {
        let page = page();
        let mode = |value| page.gpus[0].compute_mode.store(value, Ordering::Relaxed);
        mode(EXCLUSIVE);
        page.open_context(0, 0, || ()).unwrap();
        page.open_context(0, 0, || ()).unwrap();
        assert_eq!(
            page.open_context(1, 0, || ()),
            Err(ChargeError::Closed { mode: EXCLUSIVE })
        );
        page.join_mps(1, 7);
        assert_eq!(
            page.open_context(1, 0, || ()),
            Err(ChargeError::Closed { mode: EXCLUSIVE })
        );
        page.join_mps(0, 7);
        page.open_context(1, 0, || ()).unwrap();
        mode(PROHIBITED);
        assert_eq!(
            page.open_context(0, 0, || ()),
            Err(ChargeError::Closed { mode: PROHIBITED })
        );
        mode(0);
        page.open_context(1, 0, || ()).unwrap();
    }

    #[test]
    fn two_processes_that_ended_do_not_block_each_other() {
        let page = page();
        page.charge(0, 0, MIB, || ()).unwrap();
        page.charge(1, 0, MIB, || ()).unwrap();
        // Process 1 has the lock; process 0 is reclaimed first.
        page.gpus[0].lock.store(2, Ordering::Relaxed);
        page.reclaim(0);
        page.reclaim(1);
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 0);
        assert_eq!(page.gpus[0].lock.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_starting_daemon_repairs_the_ledger() {
        let page = page();
        page.charge(0, 0, MIB, || ()).unwrap();
        page.gpus[0].used.store(9 * MIB, Ordering::Relaxed);
        page.gpus[0].lock.store(DAEMON, Ordering::Relaxed);
        page.recover();
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), MIB);
        page.charge(0, 0, MIB, || ()).unwrap();
    }

    #[test]
    fn threads_together_never_exceed_the_gpu() {
        let page = page();
        let usable = page.gpus[0].usable();
        std::thread::scope(|scope| {
            for slot in 0..4 {
                scope.spawn(move || {
                    let mut held = 0;
                    for step in 0..20_000u64 {
                        let bytes = (step % 97) * 64 * MIB;
                        if page.charge(slot, 0, bytes, || ()).is_ok() {
                            held += bytes;
                        }
                        assert!(page.gpus[0].used.load(Ordering::Relaxed) <= usable);
                        if step % 3 == 0 {
                            page.release(slot, 0, held).unwrap();
                            held = 0;
                        }
                    }
                    page.release(slot, 0, held).unwrap();
                });
            }
        });
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 0);
    }

    proptest! {
        #[test]
        fn used_is_the_sum_of_the_slots(steps in proptest::collection::vec((0usize..4, 0u64..9000, any::<bool>()), 0..200)) {
            let page = page();
            let mut held = [0u64; 4];
            for (slot, mib, take) in steps {
                let bytes = mib * MIB;
                if take {
                    let fits = held.iter().sum::<u64>() + bytes <= page.gpus[0].usable();
                    prop_assert_eq!(page.charge(slot, 0, bytes, || ()).is_ok(), fits);
                    if fits { held[slot] += bytes; }
                } else {
                    page.release(slot, 0, bytes).unwrap();
                    held[slot] = held[slot].saturating_sub(bytes);
                }
                prop_assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), held.iter().sum::<u64>());
            }
        }
    }
}
