//! Which of the driver's blocks hold small allocations, and how many.
//!
//! The driver allocates a GPU's memory in blocks (2 MiB) and puts several small allocations into one.
//! So a small allocation takes a new block or nothing. A block is charged while it contains an
//! allocation. An allocation's address determines its block.
//!
//! ```text
//!  reserve a block ─► driver ─► enter(address's block) ── first there ──► the block is charged
//!                                                  └── not the first ──► give the reservation back
//!                     driver frees ─► leave(block) ── last there ──► give the block's charge back
//! ```
//!
//! A block whose last allocation is freed while another one is made in it stays charged, in any
//! order of the two: the new allocation has its own reservation until it has entered.
//!
//! Each block has a word in one of two rows of eight. As in [`crate::table`], there is no lock and no
//! waiting, and every operation takes constant time. Two threads may both be the first in a block, in two
//! words: then the block is charged twice until one word is empty again, but never less than once. The second
//! rows are read only if one was ever needed.

use crate::sync::{AtomicU64, Ordering};
use crate::ways::{WAYS, first};

/// The low bits of a word count the allocations in a block. The block's number is above.
const COUNT_BITS: u32 = 20;
const COUNT: u64 = (1 << COUNT_BITS) - 1;

/// Both rows of a block are full, or it has a million allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlocksFull;

/// The blocks. All zeros means no blocks.
#[repr(C)]
#[derive(Debug)]
pub struct Blocks<const N: usize = 8192> {
    /// Not 0 once any block is in its second row.
    seconds: AtomicU64,
    rows: [[AtomicU64; WAYS]; N],
}

impl<const N: usize> Blocks<N> {
    /// Adds an allocation in block `number`, less than 2⁴⁴; returns whether it is the first there.
    pub fn enter(&self, number: u64) -> Result<bool, BlocksFull> {
        let first = self.row(number, 0);
        if let Some(joined) = join(first, number) {
            return joined;
        }
        if self.seconds.load(Ordering::Acquire) == 0 && begin(first, number) {
            return Ok(true);
        }
        self.enter_second(number)
    }

    /// Adds an allocation in a block that may be in its second row, or must go there.
    #[cold]
    #[inline(never)]
    fn enter_second(&self, number: u64) -> Result<bool, BlocksFull> {
        let [first, second] = [0, 1].map(|nth| self.row(number, nth));
        if self.seconds.load(Ordering::Acquire) != 0
            && let Some(joined) = join(second, number)
        {
            return joined;
        }
        if begin(first, number) {
            return Ok(true);
        }
        self.seconds.store(1, Ordering::Release);
        if begin(second, number) {
            return Ok(true);
        }
        Err(BlocksFull)
    }

    /// Removes an allocation in a block; returns whether it was the last there.
    pub fn leave(&self, number: u64) -> bool {
        // Most blocks are in their first row.
        leave(self.row(number, 0), number)
            .unwrap_or_else(|| leave(self.row(number, 1), number).unwrap_or(false))
    }

    /// Removes an allocation in a block if it is the last there; returns whether it was. If so, the caller owns the
    /// block's charge.
    pub fn leave_if_last(&self, number: u64) -> bool {
        let none = number << COUNT_BITS;
        let leave = |word: &AtomicU64| {
            word.compare_exchange(none | 1, none, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        (0..2).any(|nth| self.row(number, nth).iter().any(leave))
    }

    /// The first or the second row of a block.
    #[inline]
    fn row(&self, number: u64, nth: u32) -> &[AtomicU64; WAYS] {
        let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bits = if nth == 0 { hash >> 40 } else { hash >> 16 };
        #[expect(clippy::cast_possible_truncation, reason = "its low bits")]
        let at = bits as usize & 0xff_ffff;
        &self.rows[at % N]
    }
}

/// Changes the word of a block in a row, if `to` returns another; `None` if the block is not in the row.
#[inline]
fn change(
    row: &[AtomicU64; WAYS],
    number: u64,
    to: impl Fn(u64) -> Option<u64>,
) -> Option<Result<u64, BlocksFull>> {
    // A word of the block, with an allocation, is larger by less than the largest count.
    let least = number << COUNT_BITS | 1;
    let has = |found: u64| found.wrapping_sub(least) < COUNT;
    while let Some(way) = first(row, has) {
        let word = &row[way];
        let mut found = word.load(Ordering::Relaxed);
        while has(found) {
            let Some(new) = to(found) else {
                return Some(Err(BlocksFull));
            };
            match word.compare_exchange_weak(found, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(Ok(found)),
                Err(now) => found = now,
            }
        }
    }
    None
}

/// Counts one more allocation in a block of a row; `None` if the row does not have the block.
#[inline]
fn join(row: &[AtomicU64; WAYS], number: u64) -> Option<Result<bool, BlocksFull>> {
    let joined = change(row, number, |found| {
        (found & COUNT != COUNT).then_some(found + 1)
    })?;
    Some(joined.map(|_| false))
}

/// Counts one allocation less in a block, and whether it was the last; `None` if the row has not the block.
#[inline]
fn leave(row: &[AtomicU64; WAYS], number: u64) -> Option<bool> {
    let left = change(row, number, |found| Some(found - 1))?;
    left.ok().map(|found| found & COUNT == 1)
}

/// Gives an empty word of a row to a block with one allocation, if there is one.
#[inline]
fn begin(row: &[AtomicU64; WAYS], number: u64) -> bool {
    let new = number << COUNT_BITS | 1;
    let is_empty = |found: u64| found & COUNT == 0;
    while let Some(way) = first(row, is_empty) {
        let word = &row[way];
        let found = word.load(Ordering::Relaxed);
        let claimed = is_empty(found)
            && word
                .compare_exchange(found, new, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if claimed {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{Blocks, BlocksFull};
    use crate::sync::AtomicU64;

    #[allow(
        clippy::unnecessary_box_returns,
        reason = "half a megabyte in the product's size"
    )]
    fn fresh<const N: usize>() -> Box<Blocks<N>> {
        let row = |_| core::array::from_fn(|_| AtomicU64::new(0));
        Box::new(Blocks {
            seconds: AtomicU64::new(0),
            rows: core::array::from_fn(row),
        })
    }

    #[test]
    fn the_first_and_the_last_are_told() {
        let blocks = fresh::<4>();
        assert_eq!(blocks.enter(7), Ok(true));
        assert_eq!(blocks.enter(7), Ok(false));
        assert_eq!(blocks.enter(8), Ok(true));
        assert!(!blocks.leave(7));
        assert!(blocks.leave(7));
        assert!(!blocks.leave(7), "nothing is left there");
        assert!(blocks.leave(8));
    }

    #[test]
    fn an_allocation_alone_in_its_block_can_leave() {
        let blocks = fresh::<4>();
        assert!(!blocks.leave_if_last(7), "nothing is there");
        assert_eq!(blocks.enter(7), Ok(true));
        assert_eq!(blocks.enter(7), Ok(false));
        assert!(!blocks.leave_if_last(7), "two are there");
        assert!(!blocks.leave(7));
        assert!(blocks.leave_if_last(7));
        assert_eq!(blocks.enter(7), Ok(true));
    }

    #[test]
    fn full_rows_say_so_and_keep_what_they_have() {
        let blocks = fresh::<1>();
        let entered = (0..20).filter(|&n| blocks.enter(n) == Ok(true)).count();
        assert_eq!(entered, 8);
        assert_eq!(blocks.enter(20), Err(BlocksFull));
        assert!((0..8).all(|n| blocks.leave(n)));
        assert_eq!(blocks.enter(20), Ok(true));
    }

    /// With any number of threads, as many are first in a block as are last.
    #[test]
    fn a_block_has_as_many_firsts_as_lasts() {
        use core::sync::atomic::{AtomicI64, Ordering};
        let blocks = fresh::<2>();
        let charged = AtomicI64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for nth in 0..20_000u64 {
                        let block = nth % 3;
                        if blocks.enter(block).unwrap() {
                            charged.fetch_add(1, Ordering::Relaxed);
                        }
                        if blocks.leave(block) {
                            charged.fetch_sub(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(charged.into_inner(), 0);
    }

    proptest! {
        #[test]
        fn it_counts_like_a_map(acts in prop::collection::vec((any::<bool>(), 0u64..12), 0..300)) {
            let blocks = fresh::<8>();
            let mut map = BTreeMap::<u64, u32>::new();
            for (enters, block) in acts {
                let count = map.entry(block).or_default();
                if enters {
                    prop_assert_eq!(blocks.enter(block), Ok(*count == 0));
                    *count += 1;
                } else {
                    prop_assert_eq!(blocks.leave(block), *count == 1);
                    *count = count.saturating_sub(1);
                }
            }
        }
    }
}
