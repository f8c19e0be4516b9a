//! Spares: giving, taking and collecting them.
//!
//! The page's word `spares` says which slots may have a spare, so that a refusal or a query of the free memory need not
//! visit all slots. It has a bit for each group of slots, or says that a collection is in progress, or that no process has
//! a spare.
//!
//! ```text
//!    ┌────────────────────── give: the bit of the group ◄─────────────────────────┐
//!    ▼                                                                            │
//!  groups ───── collect ─────► a collection, by number ── all visited ─────► no spares
//!    ▲                                      │
//!    └─────────── give: all groups ─────────┘
//! ```
//!
//! A process that gives a spare changes its slot's word first and then `spares`, if its group's bit is not set. A
//! collection first takes the groups out of `spares`, then visits their slots, and then writes that there are no spares if
//! its number is still there. So a spare is never overlooked once `give` has returned:
//!
//! - If the process saw the bit set, a collection that takes the bit out afterwards visits the slot. A visit and a gift
//!   are both atomic changes of the slot's word, even if there is nothing to take: if the visit comes first, the process
//!   sees the collection's number, or a later value.
//! - If the process set the bit, it replaced the number of the collection, which then does not write that there are no
//!   spares.
//! - A collection that is in progress, or was killed, may have visited nothing: the next one visits all slots.

use super::{Account, Slot, SlotIndex};
use crate::layout::{Charge, NO_SPARES, SLOTS};
use crate::sync::{Ordering, fence};

/// The number of groups; each has a bit.
const GROUPS: usize = 32;

/// Slots of a group.
const GROUP: usize = SLOTS / GROUPS;

const ALL: u64 = (1 << GROUPS) - 1;

/// The word `spares`, of any content: groups in the low 32 bits, [`NO_SPARES`], and above it the number of a collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spares(u64);

impl Spares {
    /// The number of the collection that the process of slot `at` began as its change `begun`. Never 0, apart from the flag.
    const fn collection(at: usize, begun: u64) -> Self {
        let number = begun << SLOTS.trailing_zeros() | at as u64;
        Self((number << 1 | 1) << (NO_SPARES.trailing_zeros() + 1))
    }

    /// Whether no process has a spare.
    pub(super) const fn is_none(self) -> bool {
        self.0 & NO_SPARES != 0
    }

    /// The groups with slots that may have one.
    const fn groups(self) -> u64 {
        if self.is_none() {
            0
        } else if self.0 > ALL {
            // A collection that may have visited none of them.
            ALL
        } else {
            self.0
        }
    }

    /// The same with the group of a slot.
    const fn with(self, at: usize) -> Self {
        Self(self.groups() | 1 << (at / GROUP % GROUPS))
    }
}

impl<const N: usize> Account<N> {
    pub(super) fn spares(&self) -> Spares {
        Spares(self.spares.load(Ordering::Acquire))
    }

    /// Turns `bytes` that the slot's process holds into its spare, at most all that it holds; returns how many they were,
    /// or `None` if they are too many for a spare.
    #[inline]
    pub(super) fn give(&self, at: SlotIndex, slot: &Slot, bytes: u64) -> Option<u64> {
        let before = slot.change(|charge| charge.give(bytes.min(charge.used())))?;
        // Read first: writing to it would cost the other processes its cache line.
        let spares = self.spares();
        if spares.with(at.0) != spares {
            self.set_group(at);
        }
        Some(bytes.min(before.used()))
    }

    #[cold]
    #[inline(never)]
    fn set_group(&self, at: SlotIndex) {
        let mut found = self.spares();
        while let Err(now) = self.spares.compare_exchange_weak(
            found.0,
            found.with(at.0).0,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            found = Spares(now);
        }
    }

    /// Takes all spares back, for the process of the slot `own`.
    #[cold]
    #[inline(never)]
    pub(super) fn collect(&self, at: SlotIndex, own: &Slot) {
        // A repair waits for the end of the collection, as for the process's other changes.
        let begun = own.begun.fetch_add(1, Ordering::AcqRel);
        let collection = Spares::collection(at.0, begun);
        let groups = Spares(self.spares.swap(collection.0, Ordering::AcqRel)).groups();
        // A process that marks its slot after the marks were read here sees the number when it gives.
        fence(Ordering::SeqCst);
        self.each_of(groups, |slot| {
            if let Some(before) = slot.change(|charge| Some(charge.without_spare()))
                && before.spare() > 0
            {
                self.used.fetch_sub(before.spare(), Ordering::AcqRel);
            }
        });
        own.ended.fetch_add(1, Ordering::Release);
        // Keeps the number, so that a process that reads the word twice notices a change in between.
        let _ = self.spares.compare_exchange(
            collection.0,
            collection.0 | NO_SPARES,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }

    /// Bytes of all spares.
    pub(super) fn spare(&self) -> u64 {
        let mut sum = 0u64;
        self.each_of(self.spares().groups(), |slot| {
            sum = sum.saturating_add(slot.charge().spare());
        });
        sum
    }

    /// Visits the marked slots of some groups.
    #[inline]
    fn each_of(&self, groups: u64, mut visit: impl FnMut(&Slot)) {
        let mut groups = groups;
        while groups != 0 {
            let first = groups.trailing_zeros() as usize * GROUP;
            groups &= groups - 1;
            let mut marks = self.taken_word(first / 64) >> (first % 64) & ((1 << GROUP) - 1);
            while marks != 0 {
                if let Some(slot) = self.slots.get(first + marks.trailing_zeros() as usize) {
                    visit(slot);
                }
                marks &= marks - 1;
            }
        }
    }
}

impl Slot {
    pub(super) fn charge(&self) -> Charge {
        Charge(self.charge.load(Ordering::Acquire))
    }

    /// Changes the charge in one step, if `to` returns one; returns what it was.
    #[inline]
    pub(super) fn change(&self, to: impl Fn(Charge) -> Option<Charge>) -> Option<Charge> {
        let mut found = self.charge.load(Ordering::Relaxed);
        loop {
            let new = to(Charge(found))?;
            match self.charge.compare_exchange_weak(
                found,
                new.0,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(Charge(found)),
                Err(now) => found = now,
            }
        }
    }

    /// Takes `bytes` of the spare, if it has so much.
    #[inline]
    pub(super) fn take(&self, bytes: u64) -> bool {
        self.change(|charge| charge.take(bytes)).is_some()
    }
}
