//! The charge of a memory pool, or of a device's graphs.
//!
//! A pool takes memory from the device in steps of its own choice and keeps it, used or not. The driver says how much it
//! has. The charge follows:
//!
//! ```text
//!  begin: reserve the allocation ─► the driver allocates ─► ask: what has the pool now? ─► finish: charge that
//! ```
//!
//! The charge is locked while it is read or written, but never while the driver is called, because a tool's callback may
//! call CUDA again. So an answer of the driver can be out of date when it is noted. The caller reads the
//! [`version`](PoolCharge::version) before it asks; the answer is refused if the version has changed since then.
//!
//! At every instant
//!
//! > charged + reserved for pending allocations ≥ what the driver has for the pool
//!
//! because a pool grows only by an allocation, and the allocation's reservation stays until the driver was asked after
//! the allocation.
//!
//! # When the driver is not asked
//!
//! It takes longer to ask than to allocate from what a pool has. So the charge may be too high by a little:
//!
//! - A small allocation takes a step from the process's spare and keeps it, if the pool is known to grow by no more than
//!   that ([`begin_unasked`](PoolCharge::begin_unasked)). A pool whose step is larger than a spare can be is asked about
//!   after every allocation.
//! - A free lowers nothing.
//!
//! Both are counted, and the driver is asked again after [`MOST_UNASKED`] bytes of them.
//!
//! A pool gives memory back when the program waits for the GPU: what is above its release threshold and is not used. So the
//! driver is asked after a wait only if the pool has a block or more of that ([`may_give`](PoolCharge::may_give)). What is
//! counted as used here is freed as soon as the program has called for it, although the stream may not have reached the
//! free yet. So the driver is asked after every wait until that is given back.
//!
//! When the cap has no room left, an allocation may [`claim`](PoolCharge::claim) what its pool has and does not use.
//! While it is pending, the charge is not lowered by what it claimed: if the pool gives that memory back to the device
//! at the same time, the allocation takes it again.

use crate::layout::MOST_SPARE;

/// The charge of one pool. All zeros means a pool without memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCharge {
    /// Bytes charged.
    charged: u64,
    /// Bytes reserved for pending allocations.
    pending: u64,
    /// Bytes of the charge that pending allocations have claimed.
    claimed: u64,
    /// Bytes of the allocations that have claimed them.
    claiming: u64,
    /// The least charge, in bytes.
    floor: u64,
    /// Bytes that are being reserved for a higher floor.
    awaited: u64,
    /// Bytes of its allocations, pending ones included, each in whole blocks.
    live: u64,
    /// The largest step by which it was seen to grow; 0 before.
    step: u64,
    /// Grows with each change that an answer must know of.
    version: u64,
    /// The number of trims in progress.
    trims: u64,
    /// Not 0 if the pool ever grew although it had room.
    grows_anyway: u64,
    /// Bytes that were allocated without asking the driver, or freed, since its last answer.
    unasked: u64,
    /// Bytes of its allocations, pending ones included, as the program asked for them.
    used: u64,
    /// Bytes that it may keep when the program waits.
    threshold: u64,
    /// Whether it is known to grow by no more than its step for an allocation of at most that.
    step_is_sure: bool,
    /// Whether it ever grew by more than was known.
    is_odd: bool,
}

/// The driver is asked after so many bytes were allocated without asking it, or freed. Where each allocation is freed, half
/// of them were allocated, which is as much as the process's spare can hold.
pub const MOST_UNASKED: u64 = 2 * MOST_SPARE;

/// The state of the charge when the driver is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    number: u64,
    unasked: u64,
}

/// What the driver has answered, in whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverAnswer {
    /// The version when the driver was asked.
    pub seen: Version,
    /// Bytes that the driver has for the pool, or the [`floor`](PoolCharge::floor) if that is more.
    pub now: u64,
    /// The least charge in bytes: [`least`](PoolCharge::least).
    pub least: u64,
}

/// Bytes that are allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// As many as the program asked for.
    pub bytes: u64,
    /// The same in whole blocks.
    pub blocks: u64,
}

/// A pending allocation, and what covers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingAllocation {
    /// What is allocated.
    size: Size,
    /// Bytes reserved for it.
    reserved: u64,
    /// Bytes of the pool's charge that it has claimed.
    claimed: u64,
}

/// The result of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedAllocation {
    /// Bytes to be given back to the share.
    pub surplus: u64,
    /// Whether all that the pool has is charged; if not, the allocation must be undone.
    pub is_covered: bool,
}

/// The charge changed since the driver was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outdated;

impl PoolCharge {
    /// Bytes charged.
    #[must_use]
    pub const fn charged(&self) -> u64 {
        self.charged
    }

    /// Bytes charged, or reserved for pending allocations.
    #[must_use]
    pub const fn covered(&self) -> u64 {
        self.charged + self.pending
    }

    /// The least charge in bytes, not in whole blocks.
    #[must_use]
    pub const fn floor(&self) -> u64 {
        self.floor
    }

    /// The floor, with what is being reserved to raise it: the caller that raises it relies on what was charged when it
    /// began.
    #[must_use]
    pub const fn least(&self) -> u64 {
        self.floor.saturating_add(self.awaited)
    }

    /// Bytes of allocations, pending ones included.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.live
    }

    /// The most by which the pool is expected to grow for an allocation of `bytes`. `unknown` is the step to assume if
    /// the pool was not seen to grow.
    #[must_use]
    pub fn growth_of(&self, bytes: u64, unknown: u64) -> u64 {
        let step = if self.step == 0 { unknown } else { self.step };
        bytes.checked_next_multiple_of(step).unwrap_or(bytes)
    }

    /// Whether the pool was seen to grow. If so, its step is known.
    #[must_use]
    pub const fn has_grown(&self) -> bool {
        self.step != 0
    }

    /// Read it before the driver is asked what the pool has.
    #[must_use]
    pub const fn version(&self) -> Version {
        Version {
            number: self.version,
            unasked: self.unasked,
        }
    }

    fn check(&self, seen: Version) -> Result<(), Outdated> {
        if seen.number == self.version {
            Ok(())
        } else {
            Err(Outdated)
        }
    }

    /// Begins an allocation for which `reserved` bytes were reserved.
    pub fn begin(&mut self, size: Size, reserved: u64) -> PendingAllocation {
        self.add(size);
        self.pending += reserved;
        PendingAllocation {
            size,
            reserved,
            claimed: 0,
        }
    }

    #[inline(never)]
    fn add(&mut self, size: Size) {
        self.live = self.live.saturating_add(size.blocks);
        self.used = self.used.saturating_add(size.bytes);
    }

    #[inline(never)]
    fn subtract(&mut self, size: Size) {
        self.live = self.live.saturating_sub(size.blocks);
        self.used = self.used.saturating_sub(size.bytes);
    }

    /// Begins an allocation after which the driver need not be asked: it ends with
    /// [`finish_unanswered`](Self::finish_unanswered). `reserve` reserves from the share, all or nothing. Returns `None` if
    /// the driver must be asked.
    #[inline]
    pub fn begin_unasked(
        &mut self,
        size: Size,
        reserve: impl FnOnce(u64) -> bool,
    ) -> Option<PendingAllocation> {
        let step = self.step;
        let is_little = size.blocks <= step && self.unasked.saturating_add(step) < MOST_UNASKED;
        (self.step_is_sure && is_little && reserve(step)).then(|| self.begin(size, step))
    }

    /// Begins an allocation without a reservation, from what the pool has and does not use. `now` and `used` are the
    /// driver's answers, asked at `seen`: freed memory may be in use until its stream reaches the free, or its graph is
    /// launched. Returns `None` if there is not enough, or if this driver's pools grow even with room.
    pub fn claim(
        &mut self,
        seen: Version,
        (now, used): (u64, u64),
        size: Size,
    ) -> Option<PendingAllocation> {
        let taken = self.live.max(used.saturating_add(self.claiming));
        let room = now.min(self.charged).saturating_sub(taken);
        if self.check(seen).is_err()
            || self.trims > 0
            || self.grows_anyway != 0
            || self.step == 0
            || room < size.blocks
        {
            return None;
        }
        self.add(size);
        let claimed = self.growth_of(size.blocks, size.blocks);
        self.claimed += claimed;
        self.claiming += size.blocks;
        Some(PendingAllocation {
            size,
            reserved: 0,
            claimed,
        })
    }

    /// Ends an allocation after the driver was asked. `block` is the least step; `reserve` reserves more from the share,
    /// all or nothing.
    pub fn finish(
        &mut self,
        allocation: PendingAllocation,
        DriverAnswer { seen, now, least }: DriverAnswer,
        block: u64,
        reserve: impl FnOnce(u64) -> bool,
    ) -> Result<FinishedAllocation, Outdated> {
        self.check(seen)?;
        self.note_answer(seen);
        self.version += 1;
        self.pending -= allocation.reserved;
        self.claimed -= allocation.claimed;
        if allocation.claimed > 0 {
            self.claiming -= allocation.size.blocks;
        }
        let mut own = allocation.reserved;
        let missing = now.saturating_sub(self.charged + self.pending + own);
        let is_covered = missing == 0 || reserve(missing);
        if missing > 0 {
            if is_covered {
                own += missing;
            }
            if allocation.claimed > 0 {
                self.grows_anyway = 1;
            } else {
                self.note_odd_growth();
            }
        }
        let growth = now.saturating_sub(self.charged);
        if growth > 0 && self.pending == 0 && self.claimed == 0 {
            let step = if growth > allocation.size.blocks {
                growth.min(MOST_STEP).next_power_of_two()
            } else {
                block
            };
            self.step = self.step.max(step);
            // A pool that had nothing cannot have given anything back meanwhile, so this is all of the growth. A larger
            // allocation may have a step of its own.
            let is_first = self.charged == 0 && allocation.size.blocks <= block;
            self.step_is_sure |= is_first && now <= self.step && !self.is_odd;
        }
        // This allocation may have used what another one claimed, and then the pool grows for that one. Other pending
        // allocations charge their own reservations.
        let needed = now.saturating_add(self.claimed);
        let surplus = if needed > self.charged {
            let taken = (needed - self.charged).min(own);
            self.charged += taken;
            own - taken
        } else {
            own + self.lower(now.max(least))
        };
        Ok(FinishedAllocation {
            surplus,
            is_covered,
        })
    }

    /// Ends an allocation after which the driver was not asked, or every answer was outdated: its whole reservation is
    /// charged until the next answer. What it claimed stays claimed.
    pub fn finish_unanswered(&mut self, allocation: PendingAllocation) {
        self.version += 1;
        self.pending -= allocation.reserved;
        self.charged += allocation.reserved;
        self.unasked = self.unasked.saturating_add(allocation.reserved);
    }

    /// Notes that an answer contains what was allocated and freed before the driver was asked.
    fn note_answer(&mut self, seen: Version) {
        self.unasked = self.unasked.saturating_sub(seen.unasked);
    }

    /// Notes that it grew by more than was known.
    fn note_odd_growth(&mut self) {
        if self.step_is_sure {
            (self.step_is_sure, self.is_odd) = (false, true);
        }
    }

    /// Lowers the charge to what `now` needs; returns what is given back.
    fn lower(&mut self, now: u64) -> u64 {
        let target = now.saturating_add(self.claimed).min(self.charged);
        let surplus = self.charged - target;
        self.charged = target;
        surplus
    }

    /// Sets the charge to what the pool has; returns what is given back to the share. `reserve` reserves as much as the
    /// share has left, up to what it is asked for.
    pub fn settle(
        &mut self,
        DriverAnswer { seen, now, least }: DriverAnswer,
        reserve: impl FnOnce(u64) -> u64,
    ) -> Result<u64, Outdated> {
        self.check(seen)?;
        self.note_answer(seen);
        let missing = now.saturating_sub(self.covered());
        let surplus = if missing > 0 {
            // It grew unnoticed. If the share has no room for that, the next allocation is refused.
            self.note_odd_growth();
            self.charged += reserve(missing);
            0
        } else {
            self.lower(now.max(least))
        };
        if surplus > 0 || missing > 0 {
            self.version += 1;
        }
        Ok(surplus)
    }

    /// Notes that an allocation was freed. Returns whether the driver must be asked.
    pub fn free(&mut self, size: Size) -> bool {
        self.subtract(size);
        self.unasked = self.unasked.saturating_add(size.blocks);
        self.unasked >= MOST_UNASKED
    }

    /// Notes how many bytes the pool may keep when the program waits.
    pub const fn set_threshold(&mut self, bytes: u64) {
        self.threshold = bytes;
    }

    /// Whether the driver must be asked after the program's next wait, because the pool may give back a block or more, or
    /// because this answer, which was just noted, is out of date already. `has` is what the driver has for the pool.
    #[must_use]
    pub fn may_give(&self, has: u64, block: u64) -> bool {
        let kept = self.used.max(self.threshold);
        let is_outdated = self.unasked > 0 || self.pending > 0 || self.claimed > 0;
        is_outdated || has.saturating_sub(kept) >= block
    }

    /// Notes that an allocation was not made.
    pub fn undo(&mut self, allocation: PendingAllocation) {
        self.subtract(allocation.size);
    }

    /// Begins a trim that gives `missing` bytes back to the device; returns how much the pool shall keep.
    pub fn begin_trim(&mut self, missing: u64) -> u64 {
        self.trims += 1;
        self.version += 1;
        self.charged.saturating_sub(missing).max(self.live)
    }

    /// Ends a trim.
    pub fn end_trim(&mut self) {
        self.trims -= 1;
        self.version += 1;
    }

    /// Begins to raise the floor by `bytes`; returns what must be reserved for this raise and for other pending ones,
    /// rounded by `to_blocks`. The floor is not higher yet, so that `settle` does not reserve for it.
    pub fn await_floor(&mut self, bytes: u64, to_blocks: impl Fn(u64) -> u64) -> u64 {
        self.version += 1;
        self.awaited = self.awaited.saturating_add(bytes);
        to_blocks(self.least()).saturating_sub(self.charged)
    }

    /// Cancels a raise that [`await_floor`](Self::await_floor) began.
    pub fn abandon_floor(&mut self, bytes: u64) {
        self.version += 1;
        self.awaited = self.awaited.saturating_sub(bytes);
    }

    /// Raises the floor by `bytes`, for which `reserved` bytes were reserved.
    pub fn begin_floor(&mut self, bytes: u64, reserved: u64) -> PendingAllocation {
        self.abandon_floor(bytes);
        self.floor = self.floor.saturating_add(bytes);
        let size = Size {
            bytes: 0,
            blocks: reserved,
        };
        self.begin(size, reserved)
    }

    /// Lowers the floor by `bytes`.
    pub fn lower_floor(&mut self, bytes: u64) {
        self.version += 1;
        self.floor = self.floor.saturating_sub(bytes);
    }
}

/// The largest step of the pools of all drivers so far, in bytes: 32 MiB.
pub const MOST_STEP: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{DriverAnswer, MOST_UNASKED, PendingAllocation, PoolCharge, Size, Version};

    const MIB: u64 = 1 << 20;
    const BLOCK: u64 = 2 * MIB;
    /// More than a pool can have in these tests without a trim.
    const LIMIT: u64 = 40 * BLOCK;

    fn answer(seen: Version, now: u64) -> DriverAnswer {
        DriverAnswer {
            seen,
            now,
            least: 0,
        }
    }

    fn size(bytes: u64) -> Size {
        Size {
            bytes,
            blocks: bytes.next_multiple_of(BLOCK),
        }
    }

    /// A pool as a driver has it, its share, and its charge.
    #[derive(Clone, Default)]
    struct World {
        charge: PoolCharge,
        step: u64,
        reserved: u64,
        used: u64,
        /// What was freed and is in use until its stream reaches the free.
        freed: u64,
        /// What the share counts.
        counted: u64,
        threshold: u64,
        /// Whether the driver is asked after a wait.
        is_watched: bool,
    }

    /// The step that a thread has reached in an allocation, an answer or a trim.
    #[derive(Clone, Copy)]
    enum Thread {
        Idle,
        Looked(Version, (u64, u64), u64),
        Begun(PendingAllocation, u64),
        Allocated(PendingAllocation, u64),
        Asked(PendingAllocation, u64, Version, Option<u64>),
        BegunUnasked(PendingAllocation, u64),
        AllocatedUnasked(PendingAllocation, u64),
        /// The driver has freed it.
        Freed(u64),
        Settling(Version, Option<u64>),
        Trimming(u64),
        Trimmed,
    }

    impl World {
        fn reserve(counted: &mut u64, least: u64, most: u64) -> Option<u64> {
            let granted = most.min(LIMIT - *counted);
            (granted >= least).then(|| {
                *counted += granted;
                granted
            })
        }

        fn allocate(&mut self, bytes: u64) {
            let missing = (self.used + bytes).saturating_sub(self.reserved);
            self.reserved += missing.next_multiple_of(self.step);
            self.used += bytes;
        }

        /// The pool gives back what is not used.
        fn trim(&mut self, keep: u64) {
            let least = self.used.max(keep).next_multiple_of(self.step);
            self.reserved = self.reserved.min(least);
        }

        fn check(&self, threads: &[Thread]) {
            assert!(
                self.reserved <= self.charge.covered(),
                "{} of {:?}",
                self.reserved,
                self.charge
            );
            assert_eq!(self.counted, self.charge.covered());
            let is_free = |thread: &Thread| matches!(thread, Thread::Freed(_));
            if !self.is_watched && !threads.iter().any(is_free) {
                let mut later = self.clone();
                later.used -= std::mem::take(&mut later.freed);
                later.trim(self.threshold);
                assert_eq!(later.reserved, self.reserved, "gives back unnoticed");
            }
        }

        /// The first step of a thread.
        fn begin(&mut self, choice: u64, bytes: u64, live: &mut Vec<u64>) -> Thread {
            match choice % 9 {
                0 | 1 => Thread::Looked(self.charge.version(), (self.reserved, self.used), bytes),
                2 | 3 => {
                    let counted = &mut self.counted;
                    let reserve = |more| Self::reserve(counted, more, more).is_some();
                    match self.charge.begin_unasked(size(bytes), reserve) {
                        Some(allocation) => {
                            self.is_watched = true;
                            Thread::BegunUnasked(allocation, bytes)
                        }
                        None => Thread::Idle,
                    }
                }
                4 => Thread::Settling(self.charge.version(), None),
                5 => Thread::Trimming(self.charge.begin_trim(bytes)),
                6 => {
                    self.trim(self.threshold);
                    self.look_after_a_wait()
                }
                7 => {
                    self.used -= std::mem::take(&mut self.freed);
                    Thread::Idle
                }
                _ => match live.pop() {
                    Some(bytes) => {
                        self.freed += bytes;
                        Thread::Freed(bytes)
                    }
                    None => Thread::Idle,
                },
            }
        }

        /// The step of a thread after it has waited for the GPU.
        fn look_after_a_wait(&self) -> Thread {
            if self.is_watched {
                Thread::Settling(self.charge.version(), None)
            } else {
                Thread::Idle
            }
        }

        /// One step of a thread.
        fn act(&mut self, thread: Thread, choice: u64, live: &mut Vec<u64>) -> Thread {
            let bytes = (choice % 5 + 1) * BLOCK;
            match thread {
                Thread::Idle => self.begin(choice, bytes, live),
                Thread::Freed(bytes) => {
                    // If nobody asks after a wait, this thread must.
                    let was_watched = std::mem::replace(&mut self.is_watched, true);
                    self.charge.free(size(bytes));
                    if was_watched {
                        Thread::Idle
                    } else {
                        Thread::Settling(self.charge.version(), None)
                    }
                }
                Thread::BegunUnasked(allocation, bytes) => {
                    self.allocate(bytes);
                    Thread::AllocatedUnasked(allocation, bytes)
                }
                Thread::AllocatedUnasked(allocation, bytes) => {
                    self.charge.finish_unanswered(allocation);
                    live.push(bytes);
                    Thread::Idle
                }
                Thread::Looked(seen, now, bytes) => {
                    let growth = self.charge.growth_of(bytes, self.step);
                    if let Some(reserved) = Self::reserve(&mut self.counted, growth, growth) {
                        self.is_watched = true;
                        Thread::Begun(self.charge.begin(size(bytes), reserved), bytes)
                    } else if let Some(allocation) = self.charge.claim(seen, now, size(bytes)) {
                        self.is_watched = true;
                        Thread::Begun(allocation, bytes)
                    } else {
                        Thread::Idle
                    }
                }
                Thread::Begun(allocation, bytes) => {
                    self.allocate(bytes);
                    Thread::Allocated(allocation, bytes)
                }
                Thread::Allocated(allocation, bytes) => {
                    Thread::Asked(allocation, bytes, self.charge.version(), None)
                }
                Thread::Asked(allocation, bytes, seen, None) => {
                    Thread::Asked(allocation, bytes, seen, Some(self.reserved))
                }
                Thread::Asked(allocation, bytes, seen, Some(now)) => {
                    let counted = &mut self.counted;
                    let reserve = |more| Self::reserve(counted, more, more).is_some();
                    match self
                        .charge
                        .finish(allocation, answer(seen, now), BLOCK, reserve)
                    {
                        Ok(finished) => {
                            assert!(finished.is_covered);
                            self.counted -= finished.surplus;
                            self.is_watched = self.charge.may_give(now, BLOCK);
                        }
                        Err(_) if choice.is_multiple_of(3) && allocation.claimed == 0 => {
                            self.charge.finish_unanswered(allocation);
                        }
                        Err(_) => return Thread::Allocated(allocation, bytes),
                    }
                    live.push(bytes);
                    Thread::Idle
                }
                Thread::Settling(seen, None) => Thread::Settling(seen, Some(self.reserved)),
                Thread::Settling(seen, Some(has)) => {
                    let settled = self
                        .charge
                        .settle(answer(seen, has), |_| unreachable!("covered"));
                    let Ok(surplus) = settled else {
                        return Thread::Settling(self.charge.version(), None);
                    };
                    self.counted -= surplus;
                    self.is_watched = self.charge.may_give(has, BLOCK);
                    Thread::Idle
                }
                Thread::Trimming(keep) => {
                    self.trim(keep);
                    Thread::Trimmed
                }
                Thread::Trimmed => {
                    self.charge.end_trim();
                    Thread::Settling(self.charge.version(), None)
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// In every order of the threads' steps, what the pool has is covered, the share never counts more than its limit,
        /// and a pool that is not watched gives nothing back.
        #[test]
        fn what_a_pool_has_is_covered(
            steps in prop::collection::vec((0usize..4, any::<u16>()), 0..400),
            step in prop::sample::select(vec![1u64, 4, 16]),
            threshold in prop::sample::select(vec![0, 8 * BLOCK, LIMIT]),
        ) {
            let mut world = World { step: step * BLOCK, threshold, ..World::default() };
            world.charge.set_threshold(threshold);
            (world.charge.step, world.charge.step_is_sure) = (world.step, true);
            let mut threads = [Thread::Idle; 4];
            let mut live = Vec::new();
            for (nth, choice) in steps {
                threads[nth] = world.act(threads[nth], u64::from(choice), &mut live);
                world.check(&threads);
            }
            // When all threads have come to rest and the program has waited, exactly what the pool has is charged.
            for thread in &mut threads {
                while !matches!(thread, Thread::Idle) {
                    *thread = world.act(*thread, 1, &mut live);
                }
            }
            world.used -= std::mem::take(&mut world.freed);
            world.trim(threshold);
            let mut thread = world.look_after_a_wait();
            while !matches!(thread, Thread::Idle) {
                thread = world.act(thread, 1, &mut live);
            }
            assert_eq!(world.charge.charged(), world.reserved);
        }
    }

    /// A driver is asked about some of many pairs of allocation and free.
    #[test]
    fn few_pairs_are_asked_about() {
        let mut charge = PoolCharge::default();
        let first = charge.begin(size(4096), BLOCK);
        let seen = charge.version();
        charge
            .finish(first, answer(seen, BLOCK), BLOCK, |_| false)
            .unwrap();
        let (mut asked, mut reserved) = (0, 0);
        for _ in 0..1000 {
            let begun = charge.begin_unasked(size(4096), |more| {
                reserved += more;
                true
            });
            charge.finish_unanswered(begun.unwrap());
            if charge.free(size(4096)) {
                asked += 1;
                let settled = charge.settle(answer(charge.version(), BLOCK), |_| unreachable!());
                assert_eq!(settled, Ok(std::mem::take(&mut reserved)));
            }
            assert!(reserved <= MOST_UNASKED / 2);
        }
        assert_eq!(asked, 125);
        assert_eq!(charge.covered(), BLOCK + reserved);
    }

    /// The step of a pool is sure if the pool had nothing before it grew for a small allocation.
    #[test]
    fn a_pool_whose_step_is_unknown_is_asked_about() {
        let grown = |bytes: u64, to: u64| {
            let mut charge = PoolCharge::default();
            let first = charge.begin(size(bytes), to);
            let seen = charge.version();
            charge
                .finish(first, answer(seen, to), BLOCK, |_| false)
                .unwrap();
            charge
        };
        let is_asked = |mut charge: PoolCharge| charge.begin_unasked(size(1), |_| true).is_none();
        assert!(is_asked(PoolCharge::default()));
        assert!(is_asked(grown(64 * MIB, 64 * MIB)));
        assert!(is_asked(grown(1, 32 * MIB)), "too much for a spare");
        assert!(!is_asked(grown(1, BLOCK)));
        assert!(is_asked(grown(3 * BLOCK, 3 * BLOCK)));
        assert!(
            is_asked(grown(3 * BLOCK, 4 * BLOCK)),
            "small ones may differ"
        );
        // It grows by more than was known.
        let mut charge = grown(1, BLOCK);
        let more = charge.begin(size(1), BLOCK);
        let seen = charge.version();
        charge
            .finish(more, answer(seen, 8 * BLOCK), BLOCK, |_| true)
            .unwrap();
        assert!(is_asked(charge));
    }

    /// A pool is asked about after a wait while it has a block above its threshold that no allocation uses.
    #[test]
    fn a_pool_with_nothing_to_give_is_not_asked_about() {
        let mut charge = PoolCharge::default();
        let first = charge.begin(size(12 * BLOCK), 16 * BLOCK);
        assert!(charge.may_give(0, BLOCK), "an allocation is pending");
        charge
            .finish(first, answer(charge.version(), 16 * BLOCK), BLOCK, |_| {
                false
            })
            .unwrap();
        assert!(charge.may_give(16 * BLOCK, BLOCK));
        assert!(charge.may_give(13 * BLOCK, BLOCK));
        assert!(!charge.may_give(13 * BLOCK - 1, BLOCK));
        charge.set_threshold(15 * BLOCK);
        assert!(charge.may_give(16 * BLOCK, BLOCK));
        charge.set_threshold(u64::MAX);
        assert!(!charge.may_give(16 * BLOCK, BLOCK));
        charge.free(size(BLOCK));
        assert!(charge.may_give(16 * BLOCK, BLOCK), "unasked");
    }

    #[test]
    fn a_full_share_uses_what_the_pool_has() {
        let mut charge = PoolCharge::default();
        let allocation = charge.begin(size(BLOCK), 32 * MIB);
        let seen = charge.version();
        let finished = charge.finish(allocation, answer(seen, 32 * MIB), BLOCK, |_| false);
        assert_eq!(finished.map(|finished| finished.surplus), Ok(0));
        let seen = charge.version();
        let allocations: Vec<_> = (0..16)
            .map_while(|_| charge.claim(seen, (32 * MIB, BLOCK), size(BLOCK)))
            .collect();
        assert_eq!(allocations.len(), 15, "one block is used");
        // Meanwhile the pool gave back all that it does not use: it stays charged.
        assert_eq!(charge.settle(answer(charge.version(), BLOCK), |_| 0), Ok(0));
        for allocation in allocations {
            let finished = charge.finish(
                allocation,
                answer(charge.version(), 32 * MIB),
                BLOCK,
                |_| false,
            );
            assert!(finished.is_ok_and(|finished| finished.is_covered));
        }
        assert_eq!(charge.charged(), 32 * MIB);
    }

    /// One allocation claims what the pool has, and another one with its own reservation uses it first.
    #[test]
    fn the_user_of_anothers_claim_leaves_its_reservation() {
        let mut charge = PoolCharge::default();
        let allocation = charge.begin(size(BLOCK), 32 * MIB);
        charge
            .finish(
                allocation,
                answer(charge.version(), 32 * MIB),
                BLOCK,
                |_| false,
            )
            .unwrap();
        let claim = charge
            .claim(charge.version(), (32 * MIB, BLOCK), size(15 * BLOCK))
            .unwrap();
        let other = charge.begin(size(BLOCK), 32 * MIB);
        charge
            .finish(other, answer(charge.version(), 32 * MIB), BLOCK, |_| false)
            .unwrap();
        assert_eq!(charge.covered(), 64 * MIB);
        let finished = charge.finish(claim, answer(charge.version(), 64 * MIB), BLOCK, |_| false);
        assert!(finished.is_ok_and(|finished| finished.is_covered));
    }

    #[test]
    fn a_pool_that_grows_although_it_has_room_is_not_trusted_again() {
        let mut charge = PoolCharge::default();
        let allocation = charge.begin(size(BLOCK), 32 * MIB);
        charge
            .finish(
                allocation,
                answer(charge.version(), 32 * MIB),
                BLOCK,
                |_| false,
            )
            .unwrap();
        let allocation = charge
            .claim(charge.version(), (32 * MIB, BLOCK), size(BLOCK))
            .unwrap();
        let finished = charge
            .finish(
                allocation,
                answer(charge.version(), 64 * MIB),
                BLOCK,
                |_| false,
            )
            .unwrap();
        assert!(!finished.is_covered);
        charge.undo(allocation);
        assert_eq!(
            charge.claim(charge.version(), (32 * MIB, BLOCK), size(BLOCK)),
            None
        );
    }

    /// Memory that is freed in stream order, or by a graph that was not launched yet, is in use.
    #[test]
    fn what_the_driver_says_is_used_is_not_claimed() {
        let mut charge = PoolCharge::default();
        let allocation = charge.begin(size(32 * MIB), 32 * MIB);
        charge
            .finish(
                allocation,
                answer(charge.version(), 32 * MIB),
                BLOCK,
                |_| false,
            )
            .unwrap();
        charge.free(size(32 * MIB));
        let seen = charge.version();
        assert_eq!(charge.claim(seen, (32 * MIB, 32 * MIB), size(BLOCK)), None);
        assert!(
            charge
                .claim(seen, (32 * MIB, 28 * MIB), size(BLOCK))
                .is_some()
        );
        // The driver may or may not have served that claim already.
        assert_eq!(
            charge.claim(seen, (32 * MIB, 28 * MIB), size(2 * BLOCK)),
            None
        );
        assert!(
            charge
                .claim(seen, (32 * MIB, 28 * MIB), size(BLOCK))
                .is_some()
        );
    }

    /// While a higher floor is being reserved for, `settle` neither reserves for it nor gives back what the raise relies
    /// on.
    #[test]
    fn a_floor_is_not_charged_before_it_is_reserved_for() {
        let to_blocks = |bytes: u64| bytes.next_multiple_of(BLOCK);
        let answer = |charge: &PoolCharge, now: u64| DriverAnswer {
            seen: charge.version(),
            now: to_blocks(now.max(charge.floor())),
            least: to_blocks(charge.least()),
        };
        let mut charge = PoolCharge::default();
        assert_eq!(charge.await_floor(3 * MIB, to_blocks), 2 * BLOCK);
        // A second raise may rely on the rest of the first one's block only.
        assert_eq!(charge.await_floor(MIB, to_blocks), 2 * BLOCK);
        charge.abandon_floor(MIB);
        let settled = charge.settle(answer(&charge, 0), |_| unreachable!("not reserved for"));
        assert_eq!(settled, Ok(0));
        let allocation = charge.begin_floor(3 * MIB, 2 * BLOCK);
        charge
            .finish(allocation, answer(&charge, 0), BLOCK, |_| false)
            .unwrap();
        assert_eq!(charge.charged(), 2 * BLOCK);
        // What the driver has for graphs is charged; a part of it will be the floor and is not given back.
        assert_eq!(
            charge.settle(answer(&charge, 6 * BLOCK), |more| more),
            Ok(0)
        );
        assert_eq!(charge.await_floor(5 * MIB, to_blocks), 0);
        assert_eq!(charge.settle(answer(&charge, 0), |_| 0), Ok(2 * BLOCK));
        let allocation = charge.begin_floor(5 * MIB, 0);
        let finished = charge.finish(allocation, answer(&charge, 0), BLOCK, |_| false);
        assert!(finished.is_ok_and(|finished| finished.is_covered));
        assert_eq!(charge.charged(), 4 * BLOCK);
        charge.lower_floor(8 * MIB);
        assert_eq!(charge.settle(answer(&charge, 0), |_| 0), Ok(4 * BLOCK));
    }
}
