//! Who holds how much device memory.
//!
//! `gpu.used` is the sum of all `slot.used[gpu]`, and both change under the
//! GPU's lock, a word that names its holder. A process killed with the lock in
//! hand leaves the two sums unequal by one entry; the daemon, which knows that
//! the holder is dead, takes the lock over and adds up again. So a SIGKILL at any
//! instruction loses and invents nothing.
//!
//! A driver frees a dead process's memory in the close of its files, before the
//! process is quite gone; this one's daemon a moment after. So that nobody can tell
//! the difference, whoever would make a GPU hold more than ever, or is refused, while
//! others hold some of it, first has the daemon look for the dead.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::identity;
use crate::layout::{GpuState, ORPHANED, Shared};

/// Lock value of the daemon; slots are their index + 1.
const DAEMON: u32 = u32::MAX;
/// And that of its sampler, a thread beside the one that reclaims.
const SAMPLER: u32 = DAEMON - 1;

/// How long a lock may stay with another process before the caller gives up:
/// only a holder that died while no daemon runs keeps it longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why memory is not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// The GPU has less.
    #[error("out of memory: {asked} bytes asked, {free} free")]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes free at that moment.
        free: u64,
    },
    /// The GPU's compute mode keeps this process out.
    #[error("the GPU is in compute mode {mode}, which leaves no context for this process")]
    Closed {
        /// `CUcomputemode`: 2 prohibited, 3 exclusive to a process.
        mode: u32,
    },
    /// A dead process holds the GPU's lock and no daemon takes it over.
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

/// Takes a GPU's lock for the daemon's sampler, if nobody has it.
pub(crate) fn try_lock(gpu: &GpuState) -> Option<Guard<'_>> {
    gpu.lock
        .compare_exchange(0, SAMPLER, Ordering::Acquire, Ordering::Relaxed)
        .is_ok()
        // Not then_some: a guard made and dropped would open the lock of whoever has it.
        .then(|| Guard(gpu))
}

/// Takes a GPU's lock; `owner` is who has it then.
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
    loop {
        // The holder may have been put aside by the scheduler: let it run.
        std::thread::yield_now();
        if take() {
            return Ok(Guard(gpu));
        }
        if asked.elapsed() > PATIENCE {
            return Err(ChargeError::Stuck);
        }
    }
}

/// `CU_COMPUTEMODE_PROHIBITED` and `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`.
const PROHIBITED: u32 = 2;
const EXCLUSIVE: u32 = 3;

impl Shared {
    /// Gives a context's memory of GPU `gpu` to `slot`, if the GPU's compute mode
    /// allows it one. `settle` has the daemon take back what the dead held.
    pub fn open_context(
        &self,
        slot: usize,
        gpu: usize,
        settle: impl FnOnce(),
    ) -> Result<(), ChargeError> {
        let state = &self.gpus[gpu];
        let _guard = self.lock_settled(slot, gpu, state.context_bytes, settle)?;
        let mode = state.compute_mode.load(Ordering::Relaxed);
        if mode == PROHIBITED || (mode == EXCLUSIVE && self.is_shared(slot, gpu)) {
            return Err(ChargeError::Closed { mode });
        }
        self.give(slot, gpu, state.context_bytes)
    }

    /// Gives `bytes` of GPU `gpu` to `slot`, all or nothing. `settle` has the daemon take
    /// back what the dead held.
    pub fn charge(
        &self,
        slot: usize,
        gpu: usize,
        bytes: u64,
        settle: impl FnOnce(),
    ) -> Result<(), ChargeError> {
        let _guard = self.lock_settled(slot, gpu, bytes, settle)?;
        self.give(slot, gpu, bytes)
    }

    /// Takes a GPU's lock to give `bytes`; calls `settle` before, where that would be more than ever,
    /// others than `slot` hold some, and the GPU is that large.
    fn lock_settled(
        &self,
        slot: usize,
        gpu: usize,
        bytes: u64,
        settle: impl FnOnce(),
    ) -> Result<Guard<'_>, ChargeError> {
        let state = &self.gpus[gpu];
        let guard = lock(state, owner(slot))?;
        let sum = state.used.load(Ordering::Relaxed).saturating_add(bytes);
        let is_record = sum > state.peak.load(Ordering::Relaxed);
        if !is_record || !self.is_shared(slot, gpu) || bytes > state.usable() {
            return Ok(guard);
        }
        drop(guard);
        settle();
        lock(state, owner(slot))
    }

    /// Whether others than `slot` hold memory.
    fn is_shared(&self, slot: usize, gpu: usize) -> bool {
        let held = self.slots[slot].used[gpu].load(Ordering::Relaxed);
        self.gpus[gpu].used.load(Ordering::Relaxed) > held
    }

    /// Gives, for who has the lock.
    fn give(&self, slot: usize, gpu: usize, bytes: u64) -> Result<(), ChargeError> {
        let state = &self.gpus[gpu];
        let used = state.used.load(Ordering::Relaxed);
        let free = state.usable().saturating_sub(used);
        if bytes > free {
            return Err(ChargeError::OutOfMemory { asked: bytes, free });
        }
        let held = &self.slots[slot].used[gpu];
        held.store(held.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
        state.used.store(used + bytes, Ordering::Relaxed);
        let peak = state.peak.load(Ordering::Relaxed);
        state.peak.store(peak.max(used + bytes), Ordering::Relaxed);
        Ok(())
    }

    /// Takes back `bytes` that `slot` was given.
    pub fn release(&self, slot: usize, gpu: usize, bytes: u64) -> Result<(), ChargeError> {
        let state = &self.gpus[gpu];
        let _guard = lock(state, owner(slot))?;
        let held = &self.slots[slot].used[gpu];
        // Saturating: the daemon may have reclaimed a process that lost its connection.
        let before = held.load(Ordering::Relaxed);
        let returned = bytes.min(before);
        held.store(before - returned, Ordering::Relaxed);
        let used = state.used.load(Ordering::Relaxed);
        state
            .used
            .store(used.saturating_sub(returned), Ordering::Relaxed);
        Ok(())
    }

    /// Frees a dead process's slot and all it held and had queued. Only the daemon calls this,
    /// and only when the process is gone and its files are closed.
    pub fn reclaim(&self, slot: usize) {
        self.end(slot, 0, |held| held.store(0, Ordering::Relaxed));
        for managed in &self.slots[slot].managed {
            managed.store(0, Ordering::Relaxed);
        }
    }

    /// Forgets what a process that ended had queued, and its pid. What it held stays taken: its files
    /// are open elsewhere, as the child of a fork has them. Only the daemon calls this.
    pub fn orphan(&self, slot: usize) {
        self.end(slot, ORPHANED, |_| {});
    }

    fn end(&self, slot: usize, pid: i32, release: impl Fn(&AtomicU64)) {
        let dead = &self.slots[slot];
        for (gpu, state) in self.gpus().iter().enumerate() {
            let _guard = self.take_over(state, owner(slot));
            release(&dead.used[gpu]);
            // It may have died with the lock, between its entry and the sum.
            self.add_up(gpu);
            self.forget_lane(slot, gpu);
            dead.utilization[gpu].store(0, Ordering::Relaxed);
        }
        dead.sampled.store(0, Ordering::Relaxed);
        dead.started.store(0, Ordering::Relaxed);
        dead.pid.store(pid, Ordering::Release);
    }

    /// Puts the ledger in order for a daemon that starts: its predecessor, or a
    /// process that died without one, may have left a lock.
    pub fn recover(&self) {
        for (gpu, state) in self.gpus().iter().enumerate() {
            // There is one daemon, and this is its start.
            let _guard = self.take_over(state, DAEMON);
            self.add_up(gpu);
            self.order_anew(gpu);
        }
    }

    fn add_up(&self, gpu: usize) {
        let sum = self
            .slots
            .iter()
            .map(|slot| slot.used[gpu].load(Ordering::Relaxed))
            .sum();
        self.gpus[gpu].used.store(sum, Ordering::Relaxed);
    }

    /// Takes the lock from a dead holder, or waits for a living one. What a dead one left half done is to
    /// be added up anew.
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
            // Another one may have died with it, and be next to be reclaimed.
            // The sampler is of this very process, but for the one of a daemon before this.
            let lives = if holder == SAMPLER {
                dead != DAEMON
            } else {
                self.slots.get(slot).is_some_and(identity::alive)
            };
            if holder != 0 && !lives && take(holder) {
                return Guard(state);
            }
            std::thread::yield_now();
        }
    }
}

/// Lock value of a slot.
pub(crate) fn owner(slot: usize) -> u32 {
    // MAX_PROCESSES is far below u32::MAX.
    u32::try_from(slot + 1).unwrap_or(SAMPLER - 1)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::description::MIB;
    use crate::layout::test_page;
    use proptest::prelude::*;

    fn page() -> &'static Shared {
        test_page(include_str!("../../machines/T4.toml"))
    }

    #[test]
    fn the_sampler_is_waited_for_and_one_of_an_earlier_life_is_not() {
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
    fn a_lock_that_is_not_had_is_left_alone() {
        let page = page();
        let held = lock(&page.gpus[0], owner(7)).unwrap();
        assert!(try_lock(&page.gpus[0]).is_none());
        assert_eq!(page.gpus[0].lock.load(Ordering::Relaxed), owner(7));
        drop(held);
        assert!(try_lock(&page.gpus[0]).is_some());
    }

    #[test]
    fn a_byte_too_much_is_refused_and_nothing_changes() {
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
    fn a_holder_that_died_half_way_loses_nothing() {
        let page = page();
        page.charge(0, 0, 7 * MIB, || ()).unwrap();
        page.charge(1, 0, 3 * MIB, || ()).unwrap();
        // Process 0 dies between its own entry and the sum.
        page.gpus[0].lock.store(1, Ordering::Relaxed);
        page.slots[0].used[0].fetch_add(5 * MIB, Ordering::Relaxed);
        page.reclaim(0);
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 3 * MIB);
        page.charge(1, 0, MIB, || ()).unwrap();
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 4 * MIB);
    }

    #[test]
    fn the_dead_are_looked_for_before_a_gpu_holds_more_than_ever() {
        let page = page();
        let never = || panic!("nothing to settle");
        page.charge(0, 0, 5 * MIB, never).unwrap();
        let asked = Cell::new(0);
        let settle = || {
            asked.set(asked.get() + 1);
            page.reclaim(0);
        };
        // Others hold some, and it would be more than ever.
        page.charge(1, 0, MIB, settle).unwrap();
        assert_eq!(asked.get(), 1);
        assert_eq!(page.gpus[0].peak.load(Ordering::Relaxed), 5 * MIB);
        // Nobody else does; it was more before.
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

    #[test]
    fn what_an_orphan_held_stays_taken() {
        let page = page();
        page.slots[0].pid.store(7, Ordering::Relaxed);
        page.charge(0, 0, 5 * MIB, || ()).unwrap();
        // It died with the lock.
        page.gpus[0].lock.store(1, Ordering::Relaxed);
        page.orphan(0);
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), 5 * MIB);
        assert!(!identity::alive(&page.slots[0]));
        page.charge(1, 0, MIB, || ()).unwrap();
        page.reclaim(0);
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), MIB);
    }

    #[test]
    fn the_compute_mode_says_who_may_have_a_context() {
        let page = page();
        let mode = |value| page.gpus[0].compute_mode.store(value, Ordering::Relaxed);
        mode(EXCLUSIVE);
        page.open_context(0, 0, || ()).unwrap();
        page.open_context(0, 0, || ()).unwrap();
        assert_eq!(
            page.open_context(1, 0, || ()),
            Err(ChargeError::Closed { mode: EXCLUSIVE })
        );
        mode(PROHIBITED);
        assert_eq!(
            page.open_context(0, 0, || ()),
            Err(ChargeError::Closed { mode: PROHIBITED })
        );
        mode(0);
        page.open_context(1, 0, || ()).unwrap();
    }

    #[test]
    fn two_that_died_together_do_not_block_each_other() {
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
    fn a_starting_daemon_puts_the_ledger_in_order() {
        let page = page();
        page.charge(0, 0, MIB, || ()).unwrap();
        page.gpus[0].used.store(9 * MIB, Ordering::Relaxed);
        page.gpus[0].lock.store(DAEMON, Ordering::Relaxed);
        page.recover();
        assert_eq!(page.gpus[0].used.load(Ordering::Relaxed), MIB);
        page.charge(0, 0, MIB, || ()).unwrap();
    }

    #[test]
    fn threads_never_exceed_the_gpu() {
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
        fn the_sum_is_the_sum(steps in proptest::collection::vec((0usize..4, 0u64..9000, any::<bool>()), 0..200)) {
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
