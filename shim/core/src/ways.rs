//! A row of a hash table: the words among which a key is searched.

use crate::sync::{AtomicU64, Ordering};

/// Words of a row.
pub(crate) const WAYS: usize = 8;

/// The first word for which something holds.
///
/// It is written without a loop: it is the longest part of an allocation and a free, and a loop takes twice as many
/// instructions.
#[allow(clippy::inline_always, reason = "or it is a loop again")]
#[inline(always)]
pub(crate) fn first(row: &[AtomicU64; WAYS], is_it: impl Fn(u64) -> bool) -> Option<usize> {
    let has = |way: usize| is_it(row[way].load(Ordering::Acquire));
    match () {
        () if has(0) => Some(0),
        () if has(1) => Some(1),
        () if has(2) => Some(2),
        () if has(3) => Some(3),
        () if has(4) => Some(4),
        () if has(5) => Some(5),
        () if has(6) => Some(6),
        () if has(7) => Some(7),
        () => None,
    }
}
