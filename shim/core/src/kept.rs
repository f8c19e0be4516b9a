//! What the driver keeps for a memory pool, or for a device's graphs, and what of it is charged.
//!
//! A pool takes memory from the device in pieces of its own choice (steps) and keeps it, used or not. The driver
//! says how much that is. What is charged follows:
//!
//! ```text
//!  begin: reserve the allocation ─► the driver allocates ─► ask: what has the pool now? ─► arrive: charge that
//! ```
//!
//! The books are locked while they are read or written, never while the driver is called: a tool's callback may come
//! back in. So an answer of the driver can be out of date when it is noted. Who asks takes the [`version`](Kept::version)
//! of the books first; the answer is refused if anything was noted since then that it cannot include.
//!
//! At every instant
//!
//! > charged + reserved for allocations on their way ≥ what the driver has for the pool
//!
//! because a pool grows only by an allocation, and the allocation's reservation stays until the driver was asked after it
//! was noted.
//!
//! Where the cap has no room left, an allocation may [`claim`](Kept::claim) what its pool has and does not use.
//! While it is on its way, the charge is not lowered by what it claimed: if the pool gives that back to the device
//! at the same time, the allocation takes it again.

/// The books of one pool. All zeros is a pool without memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Bytes charged for it.
    charged: u64,
    /// Bytes reserved for allocations on their way.
    pending: u64,
    /// Bytes of the charge that allocations on their way have claimed.
    claimed: u64,
    /// Bytes of these allocations themselves.
    claiming: u64,
    /// Bytes that it is charged at least.
    floor: u64,
    /// Bytes that are still being reserved for a higher floor.
    awaited: u64,
    /// Bytes of its allocations, those on their way included, each in whole blocks.
    live: u64,
    /// What it grows by, as far as it was seen to; 0 before.
    step: u64,
    /// Grows with each change that an answer must know of.
    version: u64,
    /// Trims under way.
    trims: u64,
    /// Not 0 once it grew although there was room.
    grows_anyway: u64,
}

/// The state of the books when the driver is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version(u64);

/// What the driver has answered, in whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// When it began.
    pub seen: Version,
    /// Bytes that the driver has for the pool, or the [`floor`](Kept::floor) where that is more.
    pub now: u64,
    /// Bytes below which the charge does not go: [`least`](Kept::least).
    pub least: u64,
}

/// An allocation on its way, and what covers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnItsWay {
    /// Bytes of its own, in whole blocks.
    bytes: u64,
    /// Bytes reserved for it.
    reserved: u64,
    /// Bytes of the pool's charge that it has claimed.
    claimed: u64,
}

/// The result of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Bytes to be given back to the share.
    pub surplus: u64,
    /// Whether all that the pool has is charged; if not, the allocation must be undone.
    pub is_covered: bool,
}

/// Something was noted since the driver was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outdated;

impl Kept {
    /// Bytes charged.
    #[must_use]
    pub const fn charged(&self) -> u64 {
        self.charged
    }

    /// Bytes charged, or reserved for allocations on their way.
    #[must_use]
    pub const fn covered(&self) -> u64 {
        self.charged + self.pending
    }

    /// Bytes that it is charged at least, not in whole blocks.
    #[must_use]
    pub const fn floor(&self) -> u64 {
        self.floor
    }

    /// The same with what is still being reserved for a higher floor: whoever raises it counts on what was charged when
    /// it began.
    #[must_use]
    pub const fn least(&self) -> u64 {
        self.floor.saturating_add(self.awaited)
    }

    /// Bytes of allocations, those on their way included.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.live
    }

    /// What an allocation of `bytes` is expected to make the pool grow by, at most; `unknown` is the step of a pool
    /// that was not seen to grow.
    #[must_use]
    pub fn growth_of(&self, bytes: u64, unknown: u64) -> u64 {
        let step = if self.step == 0 { unknown } else { self.step };
        bytes.checked_next_multiple_of(step).unwrap_or(bytes)
    }

    /// Whether the pool was seen to grow, so that its step is known.
    #[must_use]
    pub const fn has_grown(&self) -> bool {
        self.step != 0
    }

    /// To be remembered before the driver is asked what the pool has.
    #[must_use]
    pub const fn version(&self) -> Version {
        Version(self.version)
    }

    fn check(&self, seen: Version) -> Result<(), Outdated> {
        if seen.0 == self.version {
            Ok(())
        } else {
            Err(Outdated)
        }
    }

    /// An allocation of `bytes` (whole blocks) begins for which `reserved` bytes were reserved.
    pub fn begin(&mut self, bytes: u64, reserved: u64) -> OnItsWay {
        self.live = self.live.saturating_add(bytes);
        self.pending += reserved;
        OnItsWay {
            bytes,
            reserved,
            claimed: 0,
        }
    }

    /// The same without a reservation: from what the pool has and does not use. `now` and `used` are what the driver
    /// said of both, asked at `seen`: what was freed may be in use until a stream gets there, or a graph is launched.
    /// `None` where there is not enough, or where this driver's pools grow all the same.
    pub fn claim(
        &mut self,
        seen: Version,
        (now, used): (u64, u64),
        bytes: u64,
    ) -> Option<OnItsWay> {
        let taken = self.live.max(used.saturating_add(self.claiming));
        let room = now.min(self.charged).saturating_sub(taken);
        if self.check(seen).is_err()
            || self.trims > 0
            || self.grows_anyway != 0
            || self.step == 0
            || room < bytes
        {
            return None;
        }
        self.live = self.live.saturating_add(bytes);
        let claimed = self.growth_of(bytes, bytes);
        self.claimed += claimed;
        self.claiming += bytes;
        Some(OnItsWay {
            bytes,
            reserved: 0,
            claimed,
        })
    }

    /// Ends an allocation after the driver was asked. `block` is the least step; `reserve` gets more from the share, all
    /// or nothing.
    pub fn arrive(
        &mut self,
        way: OnItsWay,
        Answer { seen, now, least }: Answer,
        block: u64,
        reserve: impl FnOnce(u64) -> bool,
    ) -> Result<Arrived, Outdated> {
        self.check(seen)?;
        self.version += 1;
        self.pending -= way.reserved;
        self.claimed -= way.claimed;
        if way.claimed > 0 {
            self.claiming -= way.bytes;
        }
        let mut own = way.reserved;
        let missing = now.saturating_sub(self.charged + self.pending + own);
        let is_covered = missing == 0 || reserve(missing);
        if missing > 0 {
            if is_covered {
                own += missing;
            }
            if way.claimed > 0 {
                self.grows_anyway = 1;
            }
        }
        let growth = now.saturating_sub(self.charged);
        if growth > 0 && self.pending == 0 && self.claimed == 0 {
            let step = if growth > way.bytes {
                growth.min(MOST_STEP).next_power_of_two()
            } else {
                block
            };
            self.step = self.step.max(step);
        }
        // This allocation may have used what another has claimed, which makes the pool grow instead. What others on
        // their way have reserved is theirs to charge.
        let needed = now.saturating_add(self.claimed);
        let surplus = if needed > self.charged {
            let taken = (needed - self.charged).min(own);
            self.charged += taken;
            own - taken
        } else {
            own + self.lower(now.max(least))
        };
        Ok(Arrived {
            surplus,
            is_covered,
        })
    }

    /// Ends an allocation where every answer was outdated: all that was reserved for it is charged, until the next
    /// answer. What it claimed stays claimed.
    pub fn arrive_unseen(&mut self, way: OnItsWay) {
        self.version += 1;
        self.pending -= way.reserved;
        self.charged += way.reserved;
    }

    /// The charge, no higher than `now` needs it; returns what is given back.
    fn lower(&mut self, now: u64) -> u64 {
        let target = now.saturating_add(self.claimed).min(self.charged);
        let surplus = self.charged - target;
        self.charged = target;
        surplus
    }

    /// Brings the charge to what the pool has. Returns what is given back to the share. `reserve` gets as much as there
    /// is of what it asks for.
    pub fn settle(
        &mut self,
        Answer { seen, now, least }: Answer,
        reserve: impl FnOnce(u64) -> u64,
    ) -> Result<u64, Outdated> {
        self.check(seen)?;
        let missing = now.saturating_sub(self.covered());
        let surplus = if missing > 0 {
            // It grew and nobody saw it. Where there is no room for it, the next allocation finds none.
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

    /// Allocations of `bytes` were freed, or never made.
    pub fn free(&mut self, bytes: u64) {
        self.live = self.live.saturating_sub(bytes);
    }

    /// An allocation that was not made.
    pub fn undo(&mut self, way: OnItsWay) {
        self.free(way.bytes);
    }

    /// The pool is to give `missing` bytes back to the device: how much it is to keep.
    pub fn begin_trim(&mut self, missing: u64) -> u64 {
        self.trims += 1;
        self.version += 1;
        self.charged.saturating_sub(missing).max(self.live)
    }

    /// It has.
    pub fn end_trim(&mut self) {
        self.trims -= 1;
        self.version += 1;
    }

    /// The floor is to be `bytes` higher: returns what is missing for that and for others that are on their way, where
    /// `to_blocks` rounds. It is not higher yet, so that nobody who settles takes what is left in the share for it.
    pub fn await_floor(&mut self, bytes: u64, to_blocks: impl Fn(u64) -> u64) -> u64 {
        self.version += 1;
        self.awaited = self.awaited.saturating_add(bytes);
        to_blocks(self.least()).saturating_sub(self.charged)
    }

    /// It is not to be higher after all.
    pub fn abandon_floor(&mut self, bytes: u64) {
        self.version += 1;
        self.awaited = self.awaited.saturating_sub(bytes);
    }

    /// The floor is `bytes` higher from now on, for which `reserved` bytes were reserved.
    pub fn begin_floor(&mut self, bytes: u64, reserved: u64) -> OnItsWay {
        self.abandon_floor(bytes);
        self.floor = self.floor.saturating_add(bytes);
        self.begin(reserved, reserved)
    }

    /// It is charged at least `bytes` less from now on.
    pub fn lower_floor(&mut self, bytes: u64) {
        self.version += 1;
        self.floor = self.floor.saturating_sub(bytes);
    }
}

/// What pools of all drivers so far grow by at most beyond what is asked, in bytes: 32 MiB.
pub const MOST_STEP: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{Answer, Kept, OnItsWay, Version};

    const MIB: u64 = 1 << 20;
    const BLOCK: u64 = 2 * MIB;
    /// More than a pool can have in these tests without a trim.
    const LIMIT: u64 = 40 * BLOCK;

    fn answer(seen: Version, now: u64) -> Answer {
        Answer {
            seen,
            now,
            least: 0,
        }
    }

    /// A pool as a driver has it, its share, and the books of it.
    #[derive(Default)]
    struct World {
        kept: Kept,
        step: u64,
        reserved: u64,
        used: u64,
        /// What was freed and is in use until a stream gets there.
        freed: u64,
        /// Of the share.
        counted: u64,
    }

    /// How far a thread is with an allocation, an answer or a trim.
    #[derive(Clone, Copy)]
    enum Thread {
        Idle,
        Looked(Version, (u64, u64), u64),
        Begun(OnItsWay, u64),
        Allocated(OnItsWay, u64),
        Asked(OnItsWay, u64, Version, Option<u64>),
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

        fn check(&self) {
            assert!(
                self.reserved <= self.kept.covered(),
                "{} of {:?}",
                self.reserved,
                self.kept
            );
            assert_eq!(self.counted, self.kept.covered());
        }

        /// One step of a thread.
        fn act(&mut self, thread: Thread, choice: u64, live: &mut Vec<u64>) -> Thread {
            let bytes = (choice % 5 + 1) * BLOCK;
            match thread {
                Thread::Idle => match choice % 7 {
                    0..=2 => Thread::Looked(self.kept.version(), (self.reserved, self.used), bytes),
                    3 => Thread::Settling(self.kept.version(), None),
                    4 => Thread::Trimming(self.kept.begin_trim(bytes)),
                    5 => {
                        self.used -= std::mem::take(&mut self.freed);
                        self.trim(0);
                        Thread::Idle
                    }
                    _ => {
                        if let Some(bytes) = live.pop() {
                            self.freed += bytes;
                            if choice.is_multiple_of(2) {
                                self.used -= std::mem::take(&mut self.freed);
                            }
                            self.kept.free(bytes);
                        }
                        Thread::Idle
                    }
                },
                Thread::Looked(seen, now, bytes) => {
                    let growth = self.kept.growth_of(bytes, self.step);
                    if let Some(reserved) = Self::reserve(&mut self.counted, growth, growth) {
                        Thread::Begun(self.kept.begin(bytes, reserved), bytes)
                    } else if let Some(way) = self.kept.claim(seen, now, bytes) {
                        Thread::Begun(way, bytes)
                    } else {
                        Thread::Idle
                    }
                }
                Thread::Begun(way, bytes) => {
                    self.allocate(bytes);
                    Thread::Allocated(way, bytes)
                }
                Thread::Allocated(way, bytes) => {
                    Thread::Asked(way, bytes, self.kept.version(), None)
                }
                Thread::Asked(way, bytes, seen, None) => {
                    Thread::Asked(way, bytes, seen, Some(self.reserved))
                }
                Thread::Asked(way, bytes, seen, Some(now)) => {
                    let counted = &mut self.counted;
                    let reserve = |more| Self::reserve(counted, more, more).is_some();
                    match self.kept.arrive(way, answer(seen, now), BLOCK, reserve) {
                        Ok(arrived) => {
                            assert!(arrived.is_covered);
                            self.counted -= arrived.surplus;
                        }
                        Err(_) if choice.is_multiple_of(3) && way.claimed == 0 => {
                            self.kept.arrive_unseen(way);
                        }
                        Err(_) => return Thread::Allocated(way, bytes),
                    }
                    live.push(bytes);
                    Thread::Idle
                }
                Thread::Settling(seen, None) => Thread::Settling(seen, Some(self.reserved)),
                Thread::Settling(seen, Some(now)) => {
                    if let Ok(surplus) = self
                        .kept
                        .settle(answer(seen, now), |_| unreachable!("covered"))
                    {
                        self.counted -= surplus;
                    }
                    Thread::Idle
                }
                Thread::Trimming(keep) => {
                    self.trim(keep);
                    Thread::Trimmed
                }
                Thread::Trimmed => {
                    self.kept.end_trim();
                    Thread::Idle
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Whatever threads do in whatever order: what the pool has is covered, and the share never counts past
        /// its limit.
        #[test]
        fn what_a_pool_has_is_covered(
            steps in prop::collection::vec((0usize..4, any::<u16>()), 0..400),
            step in prop::sample::select(vec![1u64, 4, 16]),
        ) {
            let mut world = World { step: step * BLOCK, ..World::default() };
            world.kept.step = world.step;
            let mut threads = [Thread::Idle; 4];
            let mut live = Vec::new();
            for (nth, choice) in steps {
                threads[nth] = world.act(threads[nth], u64::from(choice), &mut live);
                world.check();
            }
        }
    }

    #[test]
    fn a_full_share_uses_what_the_pool_has() {
        let mut kept = Kept::default();
        let way = kept.begin(BLOCK, 32 * MIB);
        let seen = kept.version();
        let arrived = kept.arrive(way, answer(seen, 32 * MIB), BLOCK, |_| false);
        assert_eq!(arrived.map(|arrived| arrived.surplus), Ok(0));
        let seen = kept.version();
        let ways: Vec<_> = (0..16)
            .map_while(|_| kept.claim(seen, (32 * MIB, BLOCK), BLOCK))
            .collect();
        assert_eq!(ways.len(), 15, "one block is used");
        // Meanwhile the pool gave all back that it does not use: it is charged all the same.
        assert_eq!(kept.settle(answer(kept.version(), BLOCK), |_| 0), Ok(0));
        for way in ways {
            let arrived = kept.arrive(way, answer(kept.version(), 32 * MIB), BLOCK, |_| false);
            assert!(arrived.is_ok_and(|arrived| arrived.is_covered));
        }
        assert_eq!(kept.charged(), 32 * MIB);
    }

    /// One allocation claims what the pool has, and another, with a reservation of its own, gets there first.
    #[test]
    fn who_uses_what_another_has_claimed_leaves_its_reservation() {
        let mut kept = Kept::default();
        let way = kept.begin(BLOCK, 32 * MIB);
        kept.arrive(way, answer(kept.version(), 32 * MIB), BLOCK, |_| false)
            .unwrap();
        let claim = kept
            .claim(kept.version(), (32 * MIB, BLOCK), 15 * BLOCK)
            .unwrap();
        let other = kept.begin(BLOCK, 32 * MIB);
        kept.arrive(other, answer(kept.version(), 32 * MIB), BLOCK, |_| false)
            .unwrap();
        assert_eq!(kept.covered(), 64 * MIB);
        let arrived = kept.arrive(claim, answer(kept.version(), 64 * MIB), BLOCK, |_| false);
        assert!(arrived.is_ok_and(|arrived| arrived.is_covered));
    }

    #[test]
    fn a_pool_that_grows_although_it_has_room_is_not_trusted_again() {
        let mut kept = Kept::default();
        let way = kept.begin(BLOCK, 32 * MIB);
        kept.arrive(way, answer(kept.version(), 32 * MIB), BLOCK, |_| false)
            .unwrap();
        let way = kept
            .claim(kept.version(), (32 * MIB, BLOCK), BLOCK)
            .unwrap();
        let arrived = kept
            .arrive(way, answer(kept.version(), 64 * MIB), BLOCK, |_| false)
            .unwrap();
        assert!(!arrived.is_covered);
        kept.undo(way);
        assert_eq!(kept.claim(kept.version(), (32 * MIB, BLOCK), BLOCK), None);
    }

    /// Freed in a stream's order, or by a graph that is still to be launched.
    #[test]
    fn what_the_driver_says_is_used_is_not_claimed() {
        let mut kept = Kept::default();
        let way = kept.begin(32 * MIB, 32 * MIB);
        kept.arrive(way, answer(kept.version(), 32 * MIB), BLOCK, |_| false)
            .unwrap();
        kept.free(32 * MIB);
        let seen = kept.version();
        assert_eq!(kept.claim(seen, (32 * MIB, 32 * MIB), BLOCK), None);
        assert!(kept.claim(seen, (32 * MIB, 28 * MIB), BLOCK).is_some());
        // The driver may have served that one already, or not.
        assert_eq!(kept.claim(seen, (32 * MIB, 28 * MIB), 2 * BLOCK), None);
        assert!(kept.claim(seen, (32 * MIB, 28 * MIB), BLOCK).is_some());
    }

    /// Whoever settles while a higher floor is reserved for neither takes that from the share nor gives back what the
    /// raise counts on.
    #[test]
    fn a_floor_is_not_charged_before_it_is_reserved_for() {
        let to_blocks = |bytes: u64| bytes.next_multiple_of(BLOCK);
        let answer = |kept: &Kept, now: u64| Answer {
            seen: kept.version(),
            now: to_blocks(now.max(kept.floor())),
            least: to_blocks(kept.least()),
        };
        let mut kept = Kept::default();
        assert_eq!(kept.await_floor(3 * MIB, to_blocks), 2 * BLOCK);
        // Another counts on nothing that the first needs, but on the rest of its block.
        assert_eq!(kept.await_floor(MIB, to_blocks), 2 * BLOCK);
        kept.abandon_floor(MIB);
        let settled = kept.settle(answer(&kept, 0), |_| unreachable!("not reserved for"));
        assert_eq!(settled, Ok(0));
        let way = kept.begin_floor(3 * MIB, 2 * BLOCK);
        kept.arrive(way, answer(&kept, 0), BLOCK, |_| false)
            .unwrap();
        assert_eq!(kept.charged(), 2 * BLOCK);
        // What the driver has for graphs is charged; part of it is a floor, soon, and is not given back.
        assert_eq!(kept.settle(answer(&kept, 6 * BLOCK), |more| more), Ok(0));
        assert_eq!(kept.await_floor(5 * MIB, to_blocks), 0);
        assert_eq!(kept.settle(answer(&kept, 0), |_| 0), Ok(2 * BLOCK));
        let way = kept.begin_floor(5 * MIB, 0);
        let arrived = kept.arrive(way, answer(&kept, 0), BLOCK, |_| false);
        assert!(arrived.is_ok_and(|arrived| arrived.is_covered));
        assert_eq!(kept.charged(), 4 * BLOCK);
        kept.lower_floor(8 * MIB);
        assert_eq!(kept.settle(answer(&kept, 0), |_| 0), Ok(4 * BLOCK));
    }
}
