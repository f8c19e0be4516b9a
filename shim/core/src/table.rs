//! The charge of each device pointer of this process.
//!
//! A fixed array of buckets; a pointer is in one of two. An entry is looked up, put in and taken out in
//! constant time, without a lock and without waiting. So any thread may use the table, also in a signal
//! handler and in the child of a fork, whose table is empty (the kernel wipes its memory).
//!
//! An entry is *taken out before* the driver frees and *put in after* the driver allocated. The
//! driver reuses an address only after it was freed, so a new pointer never meets an entry of an earlier
//! allocation, and two threads that free and allocate the same address each act on their own charge. If the
//! driver refuses to free, the entry is put back.
//!
//! A small first tier keeps the memory of ordinary processes small; the second is touched only when
//! both buckets of the first are full. Buckets that were never used are not searched: most processes use only
//! a pointer's first bucket.

use crate::sync::{AtomicU64, Ordering};
use crate::ways::{WAYS, first};

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Bytes charged, less than 2⁴⁸.
    pub bytes: u64,
    /// Which of the process's devices was charged.
    pub device: u8,
    /// The context with which the memory is freed: its handle, and above it ([`stamped`]) how many contexts had ended.
    pub context: u64,
}

/// The bits below hold a context's handle, which is an address of user space.
const STAMP_SHIFT: u32 = 48;

/// A context's handle, with the number of contexts that had ended when something was allocated in it.
///
/// A driver reuses the handle of a context that has ended. The number distinguishes allocations of the earlier context
/// from those of the new one.
#[must_use]
pub const fn stamped(context: u64, ended: u64) -> u64 {
    context | ended << STAMP_SHIFT
}

/// The context's handle in a stamped one.
#[must_use]
pub const fn unstamped(context: u64) -> u64 {
    context & ((1 << STAMP_SHIFT) - 1)
}

/// How many ended contexts a stamp can distinguish, in either direction.
const STAMPS: u64 = 1 << (u64::BITS - STAMP_SHIFT - 1);

/// After so many ended contexts [`Table::keep_stamps`] is due.
pub const STAMPS_KEPT: u64 = STAMPS / 4;

/// How many contexts ended between two stamps; more than [`STAMPS`] if the first is the younger one.
const fn age(stamp: u64, ended: u64) -> u64 {
    ended.wrapping_sub(stamp) & (2 * STAMPS - 1)
}

/// Both buckets of both tiers are full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull;

/// The number of buckets in which a pointer may be.
const BUCKETS: usize = 4;
const BYTES_BITS: u32 = 48;

/// Most bytes an entry can hold.
pub const MAX_BYTES: u64 = (1 << BYTES_BITS) - 1;

#[repr(C)]
#[derive(Debug)]
struct Bucket {
    /// 0: free. Set first when an entry is put in, and cleared last when it is taken out.
    keys: [AtomicU64; WAYS],
    /// Bytes + 1 in the low 48 bits, device above; 0: no entry yet, or no longer. Set last and cleared first.
    values: [AtomicU64; WAYS],
    contexts: [AtomicU64; WAYS],
}

/// The table: `SMALL` buckets, then `LARGE` more. All-zero memory is an empty one.
#[repr(C)]
#[derive(Debug)]
pub struct Table<const SMALL: usize = 8192, const LARGE: usize = 131_072> {
    /// How many of a pointer's four buckets, beyond the first in the order of search, were ever used for any
    /// pointer. Raised before an entry is made there.
    beyond: AtomicU64,
    small: [Bucket; SMALL],
    large: [Bucket; LARGE],
}

impl<const SMALL: usize, const LARGE: usize> Table<SMALL, LARGE> {
    /// Enters a pointer (not 0). Returns an earlier entry of the pointer that was not taken out, which
    /// happens only if a program frees a pointer twice at the same time.
    pub fn put(&self, pointer: u64, entry: Entry) -> Result<Option<Entry>, TableFull> {
        let value =
            (entry.bytes.min(MAX_BYTES) + 1).min(MAX_BYTES) | u64::from(entry.device) << BYTES_BITS;
        let hash = hash(pointer);
        let bucket = self.bucket(hash, 0);
        let is_new = self.depth() == 1 && bucket.way_of(pointer).is_none();
        let former = if is_new { None } else { self.take(pointer) };
        if !bucket.enter(pointer, value, entry.context) {
            self.put_beyond(pointer, hash, value, entry.context)?;
        }
        Ok(former)
    }

    /// Enters a pointer whose first bucket is full.
    #[cold]
    #[inline(never)]
    fn put_beyond(
        &self,
        pointer: u64,
        hash: u64,
        value: u64,
        context: u64,
    ) -> Result<(), TableFull> {
        for nth in 0..BUCKETS {
            if nth >= self.depth() {
                self.beyond.fetch_max(nth as u64, Ordering::Release);
            }
            if self.bucket(hash, nth).enter(pointer, value, context) {
                return Ok(());
            }
        }
        Err(TableFull)
    }

    /// Takes a pointer's entry out; `None` for a pointer that was never entered, or that another
    /// thread is taking out.
    pub fn take(&self, pointer: u64) -> Option<Entry> {
        let first = self.bucket(hash(pointer), 0);
        match first.way_of(pointer) {
            Some(way) => match first.take(way, |key, _| key == pointer) {
                Some((_, entry)) => Some(entry),
                None => self.take_beyond(pointer),
            },
            None if self.depth() == 1 => None,
            None => self.take_beyond(pointer),
        }
    }

    /// Takes out an entry that was not in its first place.
    #[cold]
    #[inline(never)]
    fn take_beyond(&self, pointer: u64) -> Option<Entry> {
        self.find(pointer, |bucket, way| {
            let (_, entry) = bucket.take(way, |key, _| key == pointer)?;
            Some(entry)
        })
    }

    /// A pointer's entry, which stays.
    #[inline(never)]
    pub fn get(&self, pointer: u64) -> Option<Entry> {
        self.find(pointer, |bucket, way| {
            let value = bucket.values[way].load(Ordering::Acquire);
            let entry = Entry::of(value, bucket.contexts[way].load(Ordering::Relaxed));
            (value != 0 && bucket.keys[way].load(Ordering::Acquire) == pointer).then_some(entry)
        })
    }

    /// The result of `read` for the first place that has the pointer.
    #[inline]
    fn find(&self, pointer: u64, read: impl Fn(&Bucket, usize) -> Option<Entry>) -> Option<Entry> {
        let hash = hash(pointer);
        for nth in 0..self.depth() {
            let bucket = self.bucket(hash, nth);
            for way in 0..WAYS {
                if bucket.keys[way].load(Ordering::Acquire) == pointer
                    && let Some(entry) = read(bucket, way)
                {
                    return Some(entry);
                }
            }
        }
        None
    }

    /// Takes out all entries of a context with a stamp of at most `ended`, and calls `each` with every pointer and its
    /// entry: the driver freed them with the context.
    pub fn take_context(&self, context: u64, ended: u64, each: &mut dyn FnMut(u64, Entry)) {
        let large = if self.depth() > 2 {
            &self.large[..]
        } else {
            &[]
        };
        let goes =
            |found: u64| unstamped(found) == context && age(found >> STAMP_SHIFT, ended) < STAMPS;
        for bucket in self.small.iter().chain(large) {
            for way in 0..WAYS {
                let found = bucket.contexts[way].load(Ordering::Relaxed);
                if goes(found) {
                    if let Some((pointer, entry)) = bucket.take(way, |_, found| goes(found)) {
                        each(pointer, entry);
                    }
                } else {
                    bucket.keep_stamp(way, found, ended);
                }
            }
        }
    }

    /// Makes old stamps younger. Must be called each time that [`STAMPS_KEPT`] more contexts have ended.
    #[cold]
    pub fn keep_stamps(&self, ended: u64) {
        // This is no context's handle.
        self.take_context(1 << (STAMP_SHIFT - 1), ended, &mut |_, _| ());
    }

    /// How many of a pointer's buckets may have it, 1 to [`BUCKETS`].
    #[expect(clippy::cast_possible_truncation, reason = "at most 3")]
    #[inline]
    fn depth(&self) -> usize {
        1 + self.beyond.load(Ordering::Acquire) as usize
    }

    /// The `nth` of the buckets that a pointer may be in, in the order in which they are tried.
    #[inline]
    fn bucket(&self, hash: u64, nth: usize) -> &Bucket {
        let bits = if nth.is_multiple_of(2) {
            (hash >> 40) as usize
        } else {
            (hash >> 16) as usize & 0xff_ffff
        };
        if nth < 2 {
            &self.small[bits % SMALL]
        } else {
            &self.large[bits % LARGE]
        }
    }
}

/// Fibonacci hashing; allocations are aligned, so that the low bits alone say little.
#[inline]
fn hash(pointer: u64) -> u64 {
    pointer.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Bucket {
    /// The first way that has a key; free ways have the key 0.
    #[inline]
    fn way_of(&self, key: u64) -> Option<usize> {
        first(&self.keys, |found| found == key)
    }

    /// Enters a pointer, if a way is free.
    #[inline]
    fn enter(&self, pointer: u64, value: u64, context: u64) -> bool {
        while let Some(way) = self.way_of(0) {
            let claimed =
                self.keys[way].compare_exchange(0, pointer, Ordering::AcqRel, Ordering::Relaxed);
            if claimed.is_ok() {
                self.contexts[way].store(context, Ordering::Relaxed);
                self.values[way].store(value, Ordering::Release);
                return true;
            }
        }
        false
    }

    /// Makes an old stamp younger, so that it is never taken for a future one.
    fn keep_stamp(&self, way: usize, found: u64, ended: u64) {
        let old = age(found >> STAMP_SHIFT, ended);
        if (STAMPS / 2..STAMPS).contains(&old) && unstamped(found) > u64::from(u16::MAX) {
            let younger = stamped(unstamped(found), ended.wrapping_sub(STAMPS / 4));
            // If it fails, another entry with its own stamp took the place.
            let _ = self.contexts[way].compare_exchange(
                found,
                younger,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
    }

    /// Takes an entry out if it is still the one that was found: until its value is swapped
    /// out, another thread may take it and reuse its place.
    fn take(&self, way: usize, is_it: impl Fn(u64, u64) -> bool) -> Option<(u64, Entry)> {
        let value = self.values[way].swap(0, Ordering::AcqRel);
        if value == 0 {
            return None;
        }
        let (pointer, context) = (
            self.keys[way].load(Ordering::Relaxed),
            self.contexts[way].load(Ordering::Relaxed),
        );
        if !is_it(pointer, context) {
            self.values[way].store(value, Ordering::Release);
            return None;
        }
        self.keys[way].store(0, Ordering::Release);
        Some((pointer, Entry::of(value, context)))
    }
}

impl Entry {
    fn of(value: u64, context: u64) -> Self {
        Self {
            bytes: (value & MAX_BYTES).saturating_sub(1),
            #[expect(clippy::cast_possible_truncation, reason = "put from 8 bits")]
            device: (value >> BYTES_BITS) as u8,
            context,
        }
    }
}

#[cfg(any(test, loom))]
impl<const SMALL: usize, const LARGE: usize> Table<SMALL, LARGE> {
    /// A table in ordinary memory.
    #[allow(
        clippy::unnecessary_box_returns,
        reason = "a megabyte in the product's size"
    )]
    fn fresh() -> std::boxed::Box<Self> {
        let bucket = |_| Bucket {
            keys: core::array::from_fn(|_| AtomicU64::new(0)),
            values: core::array::from_fn(|_| AtomicU64::new(0)),
            contexts: core::array::from_fn(|_| AtomicU64::new(0)),
        };
        std::boxed::Box::new(Self {
            beyond: AtomicU64::new(0),
            small: core::array::from_fn(bucket),
            large: core::array::from_fn(bucket),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{Entry, Table, TableFull, stamped};

    type Small = Table<2, 4>;

    fn entry(bytes: u64) -> Entry {
        Entry {
            bytes,
            device: 3,
            context: 0x7000,
        }
    }

    #[test]
    fn an_unknown_pointer_has_no_entry() {
        let table = Small::fresh();
        assert_eq!(table.take(0x1000), None);
        table.put(0x1000, entry(1)).unwrap();
        assert_eq!(
            (table.get(0x1000), table.get(0x2000)),
            (Some(entry(1)), None)
        );
        assert_eq!(table.take(0x2000), None);
        assert_eq!(table.take(0x1000), Some(entry(1)));
        assert_eq!(table.take(0x1000), None);
    }

    #[test]
    fn a_full_table_says_so_and_keeps_what_it_has() {
        let table = Small::fresh();
        let mut kept = Vec::new();
        for pointer in (1..100u64).map(|nth| nth << 21) {
            match table.put(pointer, entry(pointer)) {
                Ok(former) => {
                    assert_eq!(former, None);
                    kept.push(pointer);
                }
                Err(TableFull) => break,
            }
        }
        assert!(kept.len() >= 24, "{} of 48 ways used", kept.len());
        for pointer in kept {
            assert_eq!(table.take(pointer), Some(entry(pointer)));
        }
    }

    /// The first tier holds two allocations per bucket as a driver places them: 16,384 in the
    /// product, here on a smaller scale.
    #[test]
    fn ordinary_programs_stay_in_the_first_tier() {
        let table = Table::<512, 1>::fresh();
        for stride in [256u64, 4096, 2 << 20] {
            let base = 0x7f00_0000_0000u64;
            for nth in 0..1024 {
                table.put(base + nth * stride, entry(stride)).unwrap();
            }
            assert!(table.depth() <= 2, "stride {stride}");
            for nth in 0..1024 {
                assert_eq!(table.take(base + nth * stride), Some(entry(stride)));
            }
        }
    }

    /// The driver reuses a context's handle before the former context's entries are taken out.
    #[test]
    fn an_ended_context_takes_no_entry_of_a_later_one() {
        const CONTEXT: u64 = 0x7f00_1234_5000;
        let table = Small::fresh();
        let mut ended = 0u64;
        // More contexts than there are stamps; one context lives through all of them.
        let old = Entry {
            context: stamped(0x7f00_0000_1000, 0),
            ..entry(1)
        };
        table.put(0x1000, old).unwrap();
        for nth in 0..70_000u64 {
            let make = |bytes, ended| Entry {
                context: stamped(CONTEXT, ended),
                ..entry(bytes)
            };
            table.put(0x2000, make(2, ended)).unwrap();
            let before = ended;
            ended += 1;
            table.put(0x3000, make(3, ended)).unwrap();
            let mut taken = Vec::new();
            table.take_context(CONTEXT, before, &mut |pointer, _| taken.push(pointer));
            assert_eq!(taken, [0x2000], "the {nth}th");
            assert!(table.take(0x3000).is_some());
        }
        let mut taken = Vec::new();
        table.take_context(0x7f00_0000_1000, ended, &mut |pointer, _| {
            taken.push(pointer);
        });
        assert_eq!(taken, [0x1000]);
    }

    proptest! {
        #[test]
        fn it_remembers_like_a_map(
            acts in prop::collection::vec((0u8..4, 1u64..40, any::<u8>(), 0u64..3), 0..200),
        ) {
            let table = Small::fresh();
            let mut map = BTreeMap::new();
            for (act, pointer, device, context) in acts {
                match act {
                    0 | 1 => {
                        let entry = Entry { bytes: pointer * 7, device, context };
                        match table.put(pointer, entry) {
                            Ok(former) => prop_assert_eq!(former, map.insert(pointer, entry)),
                            // What was there before is gone: the caller refuses the allocation.
                            Err(TableFull) => { map.remove(&pointer); }
                        }
                    }
                    2 => {
                        prop_assert_eq!(table.get(pointer), map.get(&pointer).copied());
                        prop_assert_eq!(table.take(pointer), map.remove(&pointer));
                    }
                    _ => {
                        let mut taken = Vec::new();
                        table.take_context(context, 0, &mut |_, entry| taken.push(entry.bytes));
                        let mut gone = Vec::new();
                        map.retain(|_, entry| {
                            if entry.context == context { gone.push(entry.bytes); }
                            entry.context != context
                        });
                        taken.sort_unstable();
                        gone.sort_unstable();
                        prop_assert_eq!(taken, gone);
                    }
                }
            }
        }
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};
    use loom::thread;

    use super::{Entry, Table};

    /// One thread frees a pointer and, with the driver's consent, another gets the same address:
    /// each finds its own charge.
    #[test]
    fn a_reused_address_keeps_its_own_charge() {
        loom::model(|| {
            let table = Arc::new(Table::<1, 1>::fresh());
            // The driver: whether the address is free.
            let free = Arc::new(AtomicU64::new(0));
            let entry = |bytes| Entry {
                bytes,
                device: 0,
                context: 1,
            };
            table.put(64, entry(5)).unwrap();
            let other = {
                let (table, free) = (Arc::clone(&table), Arc::clone(&free));
                thread::spawn(move || {
                    if free.swap(0, Ordering::AcqRel) == 1 {
                        assert_eq!(table.put(64, entry(9)), Ok(None));
                        assert_eq!(table.take(64), Some(entry(9)));
                    }
                })
            };
            assert_eq!(table.take(64), Some(entry(5)));
            free.store(1, Ordering::Release);
            other.join().unwrap();
        });
    }

    /// A pointer freed twice at once is given back once.
    #[test]
    fn a_double_free_takes_one_charge() {
        loom::model(|| {
            let table = Arc::new(Table::<1, 1>::fresh());
            let entry = Entry {
                bytes: 5,
                device: 0,
                context: 1,
            };
            table.put(64, entry).unwrap();
            let twin = {
                let table = Arc::clone(&table);
                thread::spawn(move || table.take(64).is_some())
            };
            let here = table.take(64).is_some();
            assert!(here ^ twin.join().unwrap());
        });
    }
}
