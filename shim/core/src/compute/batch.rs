//! The part of a share's grant that a process has taken in advance to pay for launches.
//!
//! One word: nanoseconds left in the lower 40 bits, launches since the last check of the share in
//! the upper 24. A process has several, so that its threads do not wait for each other's cache
//! line.

use crate::sync::{AtomicU64, Ordering};

/// One batch. All zeros means an empty one.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Batch(AtomicU64);

/// How much is taken at a time, in nanoseconds of GPU time. For each launching thread, a share may have paid this
/// much more than its processes have launched.
pub const BATCH_NANOS: u64 = 1_000_000;

/// The number of launches after which a process checks its share again, in any case.
pub const BATCH_LAUNCHES: u64 = 256;

/// What a share has to pay for a launch, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// The part of the price that the batch did not have.
    pub rest: u64,
    /// What the batch takes in advance, for the next launches.
    pub ahead: u64,
}

const LAUNCH: u64 = 1 << 40;
const NANOS: u64 = LAUNCH - 1;

impl Batch {
    /// An empty one.
    #[cfg(not(any(test, loom)))]
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Pays for one launch if there is enough and no check is due.
    #[inline]
    pub fn pay(&self, price: u64) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & NANOS < price || word >= LAUNCH * BATCH_LAUNCHES {
                return false;
            }
            let next = word + LAUNCH - price;
            match self
                .0
                .compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Counts one launch that costs nothing, if no check is due. Uses no locked instruction: concurrent
    /// threads may lose some of their launches, and an amount that was added meanwhile.
    #[inline]
    pub fn count(&self) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        let counts = word < LAUNCH * BATCH_LAUNCHES;
        if counts {
            self.0.store(word + LAUNCH, Ordering::Relaxed);
        }
        counts
    }

    /// Adds what was taken; returns the launches paid since the last time.
    pub fn fill(&self, nanos: u64) -> u64 {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let next = (word & NANOS).saturating_add(nanos).min(NANOS);
            match self
                .0
                .compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return word / LAUNCH,
                Err(now) => word = now,
            }
        }
    }

    /// Pays what it can of a launch that costs `price`; returns what the share has to pay. `any` is any number.
    ///
    /// It is refilled only when it is empty: so it holds at most [`BATCH_NANOS`] for each of the threads that use it,
    /// however often their launches have to read the share's grant.
    pub fn pay_part(&self, price: u64, any: u64) -> Due {
        let rest = price - self.take(price);
        let ahead = match rest {
            // Varies, because otherwise always the same launch of a loop would be measured.
            1..BATCH_NANOS => BATCH_NANOS / 2 + any % (BATCH_NANOS / 2),
            _ => 0,
        };
        Due { rest, ahead }
    }

    /// Returns `nanos` that were paid; returns how much of it is more than it may hold.
    #[must_use]
    pub fn give(&self, nanos: u64) -> u64 {
        let room = BATCH_NANOS.saturating_sub(self.0.load(Ordering::Relaxed) & NANOS);
        let given = nanos.min(room);
        self.0.fetch_add(given, Ordering::Relaxed);
        nanos - given
    }

    /// Takes at most `nanos`; returns how much there was.
    pub fn take(&self, nanos: u64) -> u64 {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let taken = nanos.min(word & NANOS);
            match self.0.compare_exchange_weak(
                word,
                word - taken,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return taken,
                Err(now) => word = now,
            }
        }
    }
}

#[cfg(not(any(test, loom)))]
impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(any(test, loom))]
impl Batch {
    pub(crate) fn fresh() -> Self {
        Self(AtomicU64::new(0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{BATCH_LAUNCHES, BATCH_NANOS, Batch, NANOS};

    #[test]
    fn it_pays_until_it_is_empty() {
        let batch = Batch::fresh();
        assert!(!batch.pay(1));
        assert!(batch.pay(0));
        assert_eq!(batch.fill(10), 1);
        assert!(batch.pay(4) && batch.pay(6) && !batch.pay(1));
        assert_eq!(batch.fill(5), 2);
        assert_eq!((batch.take(3), batch.take(3)), (3, 2));
    }

    #[test]
    fn what_costs_nothing_is_counted_too() {
        let batch = Batch::fresh();
        assert_eq!(
            (0..1000).filter(|_| batch.count()).count() as u64,
            BATCH_LAUNCHES
        );
        assert_eq!(batch.fill(0), BATCH_LAUNCHES);
        assert!(batch.count());
    }

    proptest! {
        /// Whatever launches cost, fail and find the fast way: what the share paid is what the launches cost, and at most
        /// one batch more.
        #[test]
        fn a_thread_is_never_ahead_by_more_than_a_batch(
            launches in proptest::collection::vec((1_000..2_000_000_000_u64, 0..4_u8, any::<u64>()), 1..300),
        ) {
            let batch = Batch::fresh();
            let (mut paid, mut cost) = (0, 0);
            for (price, kind, any) in launches {
                // Kernels of 1 to 100 µs, with one of up to 2 s now and then.
                let price = if any % 16 == 0 { price } else { 1_000 + price % 100_000 };
                if kind == 3 && batch.pay(price) {
                    cost += price;
                    continue;
                }
                let due = batch.pay_part(price, any);
                batch.fill(due.ahead);
                paid += due.rest + due.ahead;
                cost += price;
                if kind == 2 {
                    // The driver refused it.
                    paid -= batch.give(price);
                    cost -= price;
                }
                prop_assert!((cost..=cost + BATCH_NANOS).contains(&paid), "{paid} for {cost}");
            }
        }
    }

    #[test]
    fn a_check_is_due_after_so_many_launches() {
        let batch = Batch::fresh();
        batch.fill(u64::MAX);
        assert_eq!(
            (0..1000).filter(|_| batch.pay(1)).count() as u64,
            BATCH_LAUNCHES
        );
        assert_eq!(batch.fill(0), BATCH_LAUNCHES);
        assert_eq!(batch.take(u64::MAX), NANOS - BATCH_LAUNCHES);
    }
}
