//! What a pair of events adds to the measured time of a launch.
//!
//! A launch alone between two events is measured with more than its kernel takes: after the first event, the GPU waits until
//! the host has launched the kernel, and the events take time too. For a kernel of 10 µs that is a large part. A series of
//! launches between two events has it only once:
//!
//! ```text
//!  one launch    event ··· kernel · event              measured: kernel + overhead
//!  a series      event ··· kernel kernel kernel · event     measured: kernels + overhead
//! ```
//!
//! So the difference between what the launches of a series were measured to take alone and what the series took, by
//! launch, is the overhead. Both may be too long: other processes' work may be in them, and in a series the GPU may wait for the
//! program. So the overhead is the median of the last [`KEPT`] differences.

use crate::sync::{AtomicU64, Ordering};

/// The largest overhead that is assumed, in nanoseconds: on an H100, a launch takes 4 to 5 µs.
pub const MOST_NANOS: u64 = 10_000;

/// The fewest launches of a series that is believed.
pub const FEWEST: u64 = 8;

/// The differences that are kept.
const KEPT: usize = 7;

/// The overhead of a process's measurements. All zeros means none.
#[derive(Debug)]
pub struct Overhead {
    nanos: AtomicU64,
    series: AtomicU64,
    /// The last differences, in nanoseconds.
    found: [AtomicU64; KEPT],
}

impl Overhead {
    /// None yet.
    #[must_use]
    pub fn none() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            nanos: zero(),
            series: zero(),
            found: core::array::from_fn(|_| zero()),
        }
    }

    /// What a launch took that was measured alone. Never less than a quarter, because the overhead is not the same for all
    /// kernels.
    #[must_use]
    pub fn without(&self, measured: u64) -> u64 {
        measured
            .saturating_sub(self.nanos.load(Ordering::Relaxed))
            .max(measured / 4)
    }

    /// What a launch of `nanos` would take alone between two events.
    #[must_use]
    pub fn with(&self, nanos: u64) -> u64 {
        nanos.saturating_add(self.nanos.load(Ordering::Relaxed))
    }

    /// Whether enough series were measured.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.series.load(Ordering::Relaxed) >= KEPT as u64
    }

    /// Notes that a series of `launches`, which were priced at `prices` together, took `nanos`.
    pub fn note(&self, launches: u64, prices: u64, nanos: u64) {
        if launches < FEWEST {
            return;
        }
        // The prices are without the present overhead.
        let overhead = self.nanos.load(Ordering::Relaxed);
        let alone = prices.saturating_add(overhead * launches);
        let found = (alone.saturating_sub(nanos) / launches).min(MOST_NANOS);
        let nth = self.series.fetch_add(1, Ordering::Relaxed);
        #[expect(clippy::cast_possible_truncation, reason = "an index")]
        self.found[nth as usize % KEPT].store(found, Ordering::Relaxed);
        // Places that were never used have 0: the first differences count little.
        let mut kept: [u64; KEPT] =
            core::array::from_fn(|place| self.found[place].load(Ordering::Relaxed));
        kept.sort_unstable();
        self.nanos.store(kept[KEPT / 2], Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{FEWEST, KEPT, MOST_NANOS, Overhead};

    const LAUNCHES: u64 = 16;

    /// Series of launches of `kernel` nanoseconds, for which the program keeps the GPU waiting for `waits`.
    fn measure(overhead: &Overhead, kernel: u64, adds: u64, waits: u64) {
        let price = overhead.without(kernel + adds);
        overhead.note(LAUNCHES, price * LAUNCHES, kernel * LAUNCHES + adds + waits);
    }

    #[test]
    fn it_is_what_a_series_has_once() {
        let overhead = Overhead::none();
        assert_eq!(overhead.without(14_000), 14_000);
        assert!(!overhead.is_known());
        for nth in 0..3 * KEPT {
            // Now and then, the GPU waits for the program.
            measure(
                &overhead,
                10_000,
                4_000,
                if nth % 3 == 1 { 50_000 } else { 0 },
            );
        }
        assert!(overhead.is_known());
        let price = overhead.without(14_000);
        assert!((10_000..10_300).contains(&price), "{price}");
        // Other kernels have the same overhead, but no launch is free.
        assert!((50_000..50_300).contains(&overhead.without(54_000)));
        assert_eq!(overhead.without(4_000), 1_000);
    }

    #[test]
    fn a_few_wrong_prices_change_nothing() {
        let overhead = Overhead::none();
        for nth in 0..3 * KEPT {
            let wrong = if nth % 3 == 1 { 1_000_000 } else { 0 };
            overhead.note(LAUNCHES, LAUNCHES * 10_000 + wrong, LAUNCHES * 10_000);
        }
        assert_eq!(overhead.without(10_000), 10_000);
    }

    #[test]
    fn an_overhead_that_is_gone_is_forgotten() {
        let overhead = Overhead::none();
        for _ in 0..KEPT {
            measure(&overhead, 10_000, 4_000, 0);
        }
        for _ in 0..KEPT {
            measure(&overhead, 10_000, 0, 0);
        }
        assert_eq!(overhead.without(10_000), 10_000);
    }

    #[test]
    fn wrong_numbers_have_bounds() {
        let overhead = Overhead::none();
        for _ in 0..KEPT {
            overhead.note(FEWEST - 1, u64::MAX, 0);
        }
        assert_eq!(overhead.without(14_000), 14_000, "too few launches");
        for _ in 0..KEPT {
            overhead.note(LAUNCHES, u64::MAX, 0);
        }
        assert_eq!(overhead.without(1_000_000), 1_000_000 - MOST_NANOS);
        for _ in 0..KEPT {
            overhead.note(LAUNCHES, 0, u64::MAX);
        }
        assert_eq!(overhead.without(14_000), 14_000);
    }
}
