//! The account page as live memory, shared by all processes of a share.
//!
//! One number decides: `used`. A process reserves before it calls the driver, and returns the
//! reservation when the driver refuses or has freed:
//!
//! ```text
//!            reserve                    driver call                    release
//!   used + n ≤ limit ? ──yes──► used += n, charged += n ──► allocated ──► freed ──► charged −= n, used −= n
//!          └──no──► out of memory
//! ```
//!
//! So in every interleaving of any processes, no more is allocated than was reserved, and no more
//! is reserved than the limit.
//!
//! # Why a crash at any point is safe
//!
//! A process may be killed between any two instructions. Then `used` must never be *less* than what
//! living processes hold. Each process counts its part of `used` in its slot as `charged`, and
//!
//! > **used ≥ the sum of `charged` over all slots, at every instant**
//!
//! because every increase goes to `used` first and to `charged` second, and every decrease to
//! `charged` first and to `used` second; and *charged ≥ what the process holds*, because it is
//! raised before the driver call that allocates and lowered after the one that frees.
//!
//! - Killed between the two steps: `used` stays too high by that change. Safe, and repaired, below.
//! - Killed elsewhere: its slot records exactly its part of `used`.
//! - Its slot is not changed while the driver may still have its memory: the process holds two kernel
//!   locks on it. The first is dropped with its address space; Linux closes the files of a dead
//!   process in the reverse of the order in which the process released them, so this is after the
//!   driver's files were closed, which is when the driver frees. The second is dropped with a
//!   descriptor, which children inherit as they inherit the driver's files: the memory of a dead
//!   parent is not free before they have ended too. A process that gets both locks may
//!   [`reclaim`](Account::reclaim): `charged` is swapped with 0 first, then `used` lowered by it. A
//!   reclaimer killed in between leaves `used` too high: safe again, and no second reclaimer can
//!   subtract the same charge twice.
//!
//! The surplus that such kills leave, `used − Σ charged`, does not change by completed changes,
//! which change both sides alike. [`repair`](Account::repair) measures it at an instant without a
//! change in progress and subtracts it, in one atomic step. It recognizes such an instant by `begun`
//! and `ended`, which enclose every change of a slot: `ended` read first and equal to `begun` for
//! all slots, and `begun` and the set of slots unchanged after all was read, means that no change
//! overlapped the reading. Two repairers would subtract the same surplus twice: a kernel lock admits
//! one. One that is killed has either subtracted or not.
//!
//! Nothing here waits long for another process: a stopped process (SIGSTOP, a debugger) delays another one by a
//! millisecond while it reclaims, and can prevent a repair.
//!
//! # Spares
//!
//! A process that frees a little keeps the reservation for its next allocation, as its spare. Then
//! neither of the two changes `used`. The spare is a part of `charged` and in the same word, so one
//! atomic step moves bytes between the two, and a crash at any point is as safe as without spares.
//!
//! ```text
//!          ┌───────── charged ─────────┐
//!          in use ──── give: freed ───► spare ──── collect: charged −= n, used −= n ───► free for all
//!                 ◄─ take: allocated ──       (by any process of the share)
//! ```
//!
//! A spare is free memory: before a process is refused, it collects all spares and tries again.
//! A collection may reach a slot late, even after the slot's process has ended and another one has it: it
//! compares and exchanges the word, which always says how much is spare.

use crate::layout::{
    BITMAP_WORDS, Charge, MOST_CHARGED, NO_SPARES, RECLAIM_LOCK, REPAIR_LOCK, SLOTS, files_lock,
    slot_lock,
};
use crate::sync::{AtomicU64, Ordering, fence};

mod spares;

/// The live account page, with the layout of [`crate::layout`]: to be mapped from a checked file.
#[repr(C)]
#[derive(Debug)]
pub struct Account<const N: usize = SLOTS> {
    identity: [u64; 16],
    used: AtomicU64,
    peak: AtomicU64,
    _pad0: [u64; 14],
    refused: AtomicU64,
    _pad1: [u64; 15],
    pub(crate) position: AtomicU64,
    pub(crate) spent: AtomicU64,
    pub(crate) carried: AtomicU64,
    _pad2: [u64; 5],
    past: Launches,
    _pad3: [u64; 5],
    taken: [AtomicU64; BITMAP_WORDS],
    spares: AtomicU64,
    _pad4: [u64; 512 - 65 - BITMAP_WORDS],
    slots: [Slot; N],
}

/// Statistics of launches: of one process in its slot, of ended processes in the header.
#[repr(C)]
#[derive(Debug)]
struct Launches {
    count: AtomicU64,
    throttled: AtomicU64,
    last: AtomicU64,
}

#[repr(C)]
#[derive(Debug)]
struct Slot {
    begun: AtomicU64,
    ended: AtomicU64,
    charge: AtomicU64,
    refused: AtomicU64,
    pid: AtomicU64,
    launches: Launches,
    _pad: [u64; 8],
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};

    use crate::layout;
    assert!(size_of::<Account>() == layout::LEN);
    assert!(size_of::<Slot>() == layout::SLOT_LEN);
    assert!(offset_of!(Account, used) == layout::USED);
    assert!(offset_of!(Account, peak) == layout::AT_PEAK);
    assert!(offset_of!(Account, refused) == layout::AT_REFUSED);
    assert!(offset_of!(Account, position) == layout::AT_POSITION);
    assert!(offset_of!(Account, spent) == layout::AT_SPENT);
    assert!(offset_of!(Account, carried) == layout::AT_CARRIED);
    assert!(offset_of!(Account, past) == layout::AT_PAST);
    assert!(offset_of!(Account, taken) == layout::AT_TAKEN);
    assert!(offset_of!(Account, spares) == layout::AT_SPARES);
    assert!(offset_of!(Account, slots) == layout::HEADER_LEN);
    assert!(offset_of!(Slot, begun) == layout::SLOT_BEGUN);
    assert!(offset_of!(Slot, ended) == layout::SLOT_ENDED);
    assert!(offset_of!(Slot, charge) == layout::SLOT_CHARGE);
    assert!(offset_of!(Slot, launches) == layout::SLOT_LAUNCHES);
    assert!(offset_of!(Launches, throttled) == layout::LAUNCHES_THROTTLED);
    assert!(offset_of!(Launches, last) == layout::LAUNCHES_LAST);
};

/// The kernel's locks on bytes of the account file, as one open file description sees them. Locks
/// of the same process through another description count as foreign.
pub trait Locks {
    /// Takes the write lock on byte `at` if it is free; never waits.
    fn try_lock(&self, at: u64) -> bool;
    /// Takes the write lock on byte `at`, and waits a short time for it; false if it is still taken then.
    fn lock_soon(&self, at: u64) -> bool;
    /// Releases the lock on byte `at`.
    fn unlock(&self, at: u64);
}

/// Takes both locks of a slot without a living owner; neither if it has one.
fn lock_slot(at: usize, memory: &impl Locks, files: &impl Locks) -> bool {
    if !memory.try_lock(slot_lock(at)) {
        return false;
    }
    let is_free = files.try_lock(files_lock(at));
    if !is_free {
        memory.unlock(slot_lock(at));
    }
    is_free
}

/// The error that all [`SLOTS`] belong to living processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccountFull;

/// A process's slot in an account, from [`Account::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotIndex(usize);

impl<const N: usize> Account<N> {
    /// Takes a slot for the calling process, which owns it until the last reference to each of the
    /// descriptions `memory` and `files` (which may be the same) is gone. `start` spreads the
    /// search; any number.
    pub fn join(
        &self,
        memory: &impl Locks,
        files: &impl Locks,
        pid: u64,
        start: usize,
    ) -> Result<SlotIndex, AccountFull> {
        // First the slots without a mark, because most slots with one have an owner. Then all.
        for marked_too in [false, true] {
            for nth in 0..N {
                let at = (start % N + nth) % N;
                if self.is_taken(at) != marked_too || !lock_slot(at, memory, files) {
                    continue;
                }
                let Some(slot) = self.slots.get(at) else {
                    continue;
                };
                // Its last owner may have died without a reclaim since then.
                self.settle(slot);
                slot.pid.store(pid, Ordering::Relaxed);
                self.mark(at, true);
                return Ok(SlotIndex(at));
            }
        }
        Err(AccountFull)
    }

    /// Bytes that all processes together hold or have reserved, without their spares.
    pub fn used(&self) -> u64 {
        let spare = self.spare();
        self.used.load(Ordering::Relaxed).saturating_sub(spare)
    }

    /// Bytes that one slot's process holds or has reserved, without its spare.
    pub fn charged(&self, slot: SlotIndex) -> u64 {
        self.slots
            .get(slot.0)
            .map_or(0, |slot| slot.charge().used())
    }

    /// The processes that hold a slot, and dead ones whose slot was not reclaimed yet: PID, as each
    /// process wrote it, and bytes charged without its spare.
    pub fn processes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.taken_slots()
            .map(|(_, slot)| (slot.pid.load(Ordering::Relaxed), slot.charge().used()))
    }

    /// Reserves as much as `limit` leaves, but no less than `least` and no more than `most` bytes;
    /// returns how much that is, or `None` if less than `least` is left. Spares count as left.
    pub fn reserve(&self, at: SlotIndex, least: u64, most: u64, limit: u64) -> Option<u64> {
        if self.take_spare(at, most) {
            return Some(most);
        }
        let slot = self.slots.get(at.0)?;
        let limit = limit.min(MOST_CHARGED);
        if least > limit {
            return None;
        }
        let mut collections = 0;
        loop {
            let spares = self.spares();
            let left = limit.saturating_sub(self.used.load(Ordering::Acquire));
            if left < most {
                // Unless no process had a spare when `used` was read, this process collects.
                let is_all = spares.is_none() && self.spares() == spares;
                if !is_all && collections < COLLECTIONS {
                    collections += 1;
                    self.collect(at, slot);
                    continue;
                }
                // Full: refuses without a write to memory that other processes read.
                if left < least {
                    return None;
                }
            }
            let least = if left < most { least } else { most };
            if let Some(granted) = self.grant(slot, least, most, limit) {
                return Some(granted);
            }
        }
    }

    /// Reserves `bytes` from the spare of the slot's process; returns whether the spare was large enough. It is the fast
    /// part of [`reserve`](Self::reserve).
    #[inline]
    pub fn take_spare(&self, slot: SlotIndex, bytes: u64) -> bool {
        self.slots.get(slot.0).is_some_and(|slot| slot.take(bytes))
    }

    /// Raises `used` and the slot's charge by as much as `limit` leaves, from `least` to `most`.
    fn grant(&self, slot: &Slot, least: u64, most: u64, limit: u64) -> Option<u64> {
        slot.begun.fetch_add(1, Ordering::AcqRel);
        let mut used = self.used.load(Ordering::Relaxed);
        let granted = loop {
            let granted = most.min(limit.saturating_sub(used));
            if granted < least {
                break None;
            }
            match self.used.compare_exchange_weak(
                used,
                used + granted,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => break Some(granted),
                Err(now) => used = now,
            }
        };
        if let Some(granted) = granted {
            slot.charge.fetch_add(granted, Ordering::AcqRel);
            if used + granted > self.peak.load(Ordering::Relaxed) {
                self.peak.fetch_max(used + granted, Ordering::Relaxed);
            }
        }
        slot.ended.fetch_add(1, Ordering::Release);
        granted
    }

    /// Releases `bytes`, at most what the slot's process holds; returns how much that was. A small amount
    /// becomes the process's spare.
    #[inline]
    pub fn release(&self, at: SlotIndex, bytes: u64) -> u64 {
        let Some(slot) = self.slots.get(at.0) else {
            return 0;
        };
        self.give(at, slot, bytes)
            .unwrap_or_else(|| self.release_to_share(slot, bytes))
    }

    #[inline(never)]
    fn release_to_share(&self, slot: &Slot, bytes: u64) -> u64 {
        slot.begun.fetch_add(1, Ordering::AcqRel);
        let released = slot
            .change(|charge| Some(charge.without(bytes.min(charge.used()))))
            .map_or(0, |before| bytes.min(before.used()));
        self.used.fetch_sub(released, Ordering::AcqRel);
        slot.ended.fetch_add(1, Ordering::Release);
        released
    }

    /// Counts an allocation that the cap refused to the slot's process.
    pub fn note_refusal(&self, slot: SlotIndex) {
        if let Some(slot) = self.slots.get(slot.0) {
            slot.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The share's position in its grant of GPU time, and the estimated GPU time of its launches,
    /// both in nanoseconds.
    pub fn compute(&self) -> (u64, u64) {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        (word(&self.position), word(&self.spent))
    }

    /// Counts `count` launches of the slot's process, the last of them at `now`, which were delayed
    /// for `throttled` nanoseconds in all. `now` is `CLOCK_MONOTONIC` in nanoseconds.
    pub fn note_launches(&self, slot: SlotIndex, count: u64, throttled: u64, now: u64) {
        if let Some(slot) = self.slots.get(slot.0) {
            slot.launches.add(count, throttled, now);
        }
    }

    /// Gives back the charges of processes that have ended; returns the number of slots that were reclaimed.
    /// `locks` is a description that holds no slot.
    ///
    /// Who needs room calls this before it is refused. Of two at once, the second would pass over the slots whose charges
    /// the first is giving back, and be refused though there is room: so it waits for the first. A stopped one is waited
    /// for only a short time.
    pub fn reclaim(&self, locks: &impl Locks) -> usize {
        let is_alone = locks.lock_soon(RECLAIM_LOCK);
        let reclaimed = self.reclaim_slots(locks);
        if is_alone {
            locks.unlock(RECLAIM_LOCK);
        }
        reclaimed
    }

    fn reclaim_slots(&self, locks: &impl Locks) -> usize {
        let mut reclaimed = 0;
        for (at, slot) in self.taken_slots() {
            if !lock_slot(at, locks, locks) {
                continue;
            }
            self.settle(slot);
            self.mark(at, false);
            locks.unlock(files_lock(at));
            locks.unlock(slot_lock(at));
            reclaimed += 1;
        }
        reclaimed
    }

    /// Subtracts from `used` what killed processes left between their two steps; returns how much
    /// that was. Returns 0 if there is always a change in progress or another process repairs.
    pub fn repair(&self, locks: &impl Locks) -> u64 {
        if !locks.try_lock(REPAIR_LOCK) {
            return 0;
        }
        let mut surplus = 0;
        for _ in 0..REPAIR_TRIES {
            if let Some(found) = self.surplus() {
                surplus = found;
                break;
            }
        }
        if surplus > 0 {
            self.used.fetch_sub(surplus, Ordering::AcqRel);
        }
        locks.unlock(REPAIR_LOCK);
        surplus
    }

    /// `used − Σ charged` at an instant without a change in progress; `None` if there was one.
    fn surplus(&self) -> Option<u64> {
        let taken: [u64; BITMAP_WORDS] = core::array::from_fn(|word| self.taken_word(word));
        let sum = |field| self.sum(&taken, field);
        // A slot's `begun` is never behind its `ended`, and both only grow: equal sums, in this
        // order of reading, mean that they were equal slot by slot.
        let ended = sum(|slot| slot.ended.load(Ordering::Acquire));
        let begun = sum(|slot| slot.begun.load(Ordering::Acquire));
        if begun != ended {
            return None;
        }
        let used = self.used.load(Ordering::Acquire);
        let charged = sum(|slot| slot.charge().bytes());
        let unchanged = sum(|slot| slot.begun.load(Ordering::Acquire)) == begun
            && taken
                .iter()
                .enumerate()
                .all(|(word, &bits)| bits == self.taken_word(word));
        unchanged.then(|| used.wrapping_sub(charged))
    }

    /// The sum of a field of some slots.
    #[inline(never)]
    fn sum(&self, of: &[u64; BITMAP_WORDS], field: fn(&Slot) -> u64) -> u64 {
        let mut sum = 0u64;
        for (word, &bits) in of.iter().enumerate() {
            for at in places(word, bits) {
                sum = sum.wrapping_add(self.slots.get(at).map_or(0, field));
            }
        }
        sum
    }

    /// Returns the charge of a slot whose lock the caller holds and whose owner is gone.
    fn settle(&self, slot: &Slot) {
        let begun = slot.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let charge = Charge(slot.charge.swap(0, Ordering::AcqRel));
        self.used.fetch_sub(charge.bytes(), Ordering::AcqRel);
        self.refused
            .fetch_add(slot.refused.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        slot.launches.retire_to(&self.past);
        // Also closes a change that its owner began and never ended.
        slot.ended.store(begun, Ordering::Release);
    }

    /// The slots that are marked as taken, with their indexes.
    fn taken_slots(&self) -> impl Iterator<Item = (usize, &Slot)> {
        (0..N.div_ceil(64))
            .flat_map(|word| places(word, self.taken_word(word)))
            .filter_map(|at| Some((at, self.slots.get(at)?)))
    }

    fn is_taken(&self, at: usize) -> bool {
        self.taken_word(at / 64) >> (at % 64) & 1 == 1
    }

    fn taken_word(&self, word: usize) -> u64 {
        self.taken
            .get(word)
            .map_or(0, |bits| bits.load(Ordering::Acquire))
    }

    fn mark(&self, at: usize, taken: bool) {
        if let Some(word) = self.taken.get(at / 64) {
            let bit = 1 << (at % 64);
            if taken {
                word.fetch_or(bit, Ordering::AcqRel);
                // If a collection does not see the mark, it began earlier, and the slot's owner sees it.
                fence(Ordering::SeqCst);
            } else {
                word.fetch_and(!bit, Ordering::AcqRel);
            }
        }
    }
}

/// The indexes of the bits that are set in the `word`th word.
fn places(word: usize, bits: u64) -> impl Iterator<Item = usize> {
    let mut rest = bits;
    core::iter::from_fn(move || {
        let next = rest.trailing_zeros() as usize;
        rest &= rest.checked_sub(1)?;
        Some(word * 64 + next)
    })
}

impl Launches {
    fn add(&self, count: u64, throttled: u64, last: u64) {
        self.count.fetch_add(count, Ordering::Relaxed);
        if throttled > 0 {
            self.throttled.fetch_add(throttled, Ordering::Relaxed);
        }
        self.last.fetch_max(last, Ordering::Relaxed);
    }

    /// Adds a dead process's statistics to `past`; a kill in between loses some of them.
    fn retire_to(&self, past: &Self) {
        let take = |word: &AtomicU64| word.swap(0, Ordering::Relaxed);
        past.add(take(&self.count), take(&self.throttled), take(&self.last));
    }

    fn none() -> Self {
        Self {
            count: AtomicU64::new(0),
            throttled: AtomicU64::new(0),
            last: AtomicU64::new(0),
        }
    }
}

/// The most collections of one reservation. A further one is needed only if a process gave a spare during the
/// one before.
const COLLECTIONS: u32 = if cfg!(any(loom, kani)) { 2 } else { 64 };

/// The number of attempts of [`Account::repair`]. A change takes some tens of nanoseconds, and an
/// attempt about as long per process, so that a few attempts find a gap.
const REPAIR_TRIES: usize = if cfg!(loom) { 1 } else { 64 };

impl<const N: usize> Account<N> {
    /// A new account in ordinary memory, for simulations.
    #[must_use]
    pub fn empty() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            identity: [0; 16],
            used: zero(),
            peak: zero(),
            _pad0: [0; 14],
            refused: zero(),
            _pad1: [0; 15],
            position: zero(),
            spent: zero(),
            carried: zero(),
            _pad2: [0; 5],
            past: Launches::none(),
            _pad3: [0; 5],
            taken: core::array::from_fn(|_| zero()),
            spares: AtomicU64::new(NO_SPARES),
            _pad4: [0; 512 - 65 - BITMAP_WORDS],
            slots: core::array::from_fn(|_| Slot {
                begun: zero(),
                ended: zero(),
                charge: zero(),
                refused: zero(),
                pid: zero(),
                launches: Launches::none(),
                _pad: [0; 8],
            }),
        }
    }

    #[cfg(any(test, loom))]
    fn fresh() -> std::boxed::Box<Self> {
        std::boxed::Box::new(Self::empty())
    }
}

#[cfg(test)]
mod tests;

#[cfg(loom)]
mod model;

#[cfg(kani)]
mod proofs;
