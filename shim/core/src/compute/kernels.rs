//! Measurements of a kernel, or of a graph, with any grid: the time of its smallest and of its largest
//! measured launch, from which the time of other sizes is estimated.
//!
//! ```text
//!  nanoseconds
//!     │            ╱─ a shape that was never launched before: on the line through both,
//!     │        ● ─      and at most BOUND times, or one BOUND-th of, what the nearer one took
//!     │   ● ─
//!     └────────────── threads of the grid
//! ```
//!
//! So a program whose shapes are always new (sequences of any length) pays about the right price,
//! without a wait for each shape's first measurement.
//!
//! It belongs to one process and has no locks: two threads that write at once lose a measurement.

use crate::sync::{AtomicU64, Ordering};

/// The number of known kernels; when it is full, a new one replaces another.
pub const KERNELS: usize = 8192;

/// A prediction for a size that is not between two measured ones is at most this factor above or below the nearest measurement.
pub const BOUND: f32 = 8.0;

/// The places where a kernel can be stored.
const PROBES: usize = 4;

/// The weight of a measurement that is longer than earlier ones, because neighbours may have caused
/// it.
const LONGER: f32 = 1.0 / 8.0;

/// The kernels. All zeros means none.
#[repr(C)]
#[derive(Debug)]
pub struct Kernels<const N: usize = KERNELS> {
    kernels: [Kernel; N],
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Kernel {
    /// 0 for none.
    key: AtomicU64,
    /// [`Point`]s; both are the same if only one size was measured.
    small: AtomicU64,
    large: AtomicU64,
    /// Nanoseconds that launches waited for its first measurement; or [`EXEMPT`].
    waited: AtomicU64,
    /// Launches before its first measurement.
    unmeasured: AtomicU64,
    /// How long one of these has run so far, in nanoseconds.
    running: AtomicU64,
    /// Launches that paid a prediction and were not measured: how many, in the upper [`LAUNCH`], and their threads.
    unsettled: AtomicU64,
    /// What they paid, in nanoseconds.
    unsettled_nanos: AtomicU64,
}

/// One launch in `unsettled`.
const LAUNCH: u64 = 1 << 48;

/// In `waited`: never waits.
const EXEMPT: u64 = 1 << 63;

/// A measured launch: one word, so that its two numbers belong together. 0 means none.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    work: f32,
    nanos: f32,
}

impl Point {
    fn of(both: u64) -> Option<Self> {
        #[expect(clippy::cast_possible_truncation, reason = "two halves")]
        let (work, nanos) = (
            f32::from_bits((both >> 32) as u32),
            f32::from_bits(both as u32),
        );
        (both != 0).then_some(Self { work, nanos })
    }

    fn word(self) -> u64 {
        u64::from(self.work.to_bits()) << 32 | u64::from(self.nanos.to_bits())
    }

    /// The same work with the measurement `nanos`, which may be longer than before if it `may_rise`.
    fn again(self, nanos: f32, may_rise: bool) -> Self {
        let weight = match (nanos > self.nanos, may_rise) {
            (false, _) => 1.0,
            (true, true) => LONGER,
            (true, false) => 0.0,
        };
        Self {
            nanos: self.nanos + (nanos - self.nanos) * weight,
            ..self
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a prediction")]
fn rough(number: u64) -> f32 {
    number.max(1) as f32
}

impl<const N: usize> Kernels<N> {
    /// No kernels. The shim maps zeros instead.
    #[must_use]
    pub fn empty() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            kernels: core::array::from_fn(|_| Kernel {
                key: zero(),
                small: zero(),
                large: zero(),
                waited: zero(),
                unmeasured: zero(),
                running: zero(),
                unsettled: zero(),
                unsettled_nanos: zero(),
            }),
        }
    }

    /// The estimated time of a launch of `work` threads, in nanoseconds; `None` without any measurement.
    #[must_use]
    pub fn predict(&self, key: u64, work: u64) -> Option<u64> {
        let kernel = self.find(key)?;
        let point = |word: &AtomicU64| Point::of(word.load(Ordering::Relaxed));
        let (small, large) = (point(&kernel.small)?, point(&kernel.large)?);
        let work = rough(work);
        let nearest = if work - small.work < large.work - work {
            small
        } else {
            large
        };
        // More threads take no less time, and no more than in proportion: what says otherwise is noise, and a size that
        // is far away would multiply it.
        let in_proportion = nearest.nanos / nearest.work;
        let slope = if large.work > small.work {
            ((large.nanos - small.nanos) / (large.work - small.work)).clamp(0.0, in_proportion)
        } else {
            in_proportion
        };
        let nanos = nearest.nanos + slope * (work - nearest.work);
        // Between two measurements, the line does not lead far away.
        let is_between = (small.work..=large.work).contains(&work);
        let bound = if is_between { f32::INFINITY } else { BOUND };
        let bounded = nanos.clamp(nearest.nanos / bound, nearest.nanos * bound);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates"
        )]
        let nanos = bounded as u64;
        Some(nanos.max(1))
    }

    /// Counts a launch, if its kernel has no measurement.
    pub fn count(&self, key: u64) {
        let kernel = self.find_or_make(key);
        if kernel.small.load(Ordering::Relaxed) == 0 {
            kernel.unmeasured.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The launches of a kernel so far, if it has no measurement; otherwise 0.
    #[must_use]
    pub fn unmeasured(&self, key: u64) -> u64 {
        self.find(key)
            .map_or(0, |kernel| kernel.unmeasured.load(Ordering::Relaxed))
    }

    /// Notes that a launch has run for `nanos` so far.
    pub fn note_running(&self, key: u64, nanos: u64) {
        if let Some(kernel) = self.find(key) {
            kernel.running.fetch_max(nanos, Ordering::Relaxed);
        }
    }

    /// The longest that a launch was seen to run before the kernel's first measurement, in nanoseconds.
    #[must_use]
    pub fn running(&self, key: u64) -> u64 {
        self.find(key)
            .map_or(0, |kernel| kernel.running.load(Ordering::Relaxed))
    }

    /// Records that a launch of `work` threads took `nanos`. What such a launch took before may rise only if `may_rise`.
    pub fn learn(&self, key: u64, work: u64, nanos: u64, may_rise: bool) {
        let kernel = self.find_or_make(key);
        kernel.unmeasured.store(0, Ordering::Relaxed);
        let new = Point {
            work: rough(work),
            nanos: rough(nanos),
        };
        for (word, is_further) in [
            (&kernel.small, new_is_smaller as fn(Point, Point) -> bool),
            (&kernel.large, |new, old| new_is_smaller(old, new)),
        ] {
            let next = match Point::of(word.load(Ordering::Relaxed)) {
                None => new,
                Some(old) if is_further(new, old) => new,
                Some(old) if old.work.to_bits() == new.work.to_bits() => {
                    old.again(new.nanos, may_rise)
                }
                Some(_) => continue,
            };
            word.store(next.word(), Ordering::Relaxed);
        }
    }

    /// Notes a launch of `work` threads that paid `nanos`, a prediction, and is not measured.
    pub fn note_unmeasured(&self, key: u64, work: u64, nanos: u64) {
        let kernel = self.find_or_make(key);
        let add = |unsettled: u64| {
            let threads = (unsettled % LAUNCH).checked_add(work)?;
            (threads < LAUNCH && unsettled / LAUNCH < u64::from(u16::MAX))
                .then(|| unsettled / LAUNCH * LAUNCH + LAUNCH + threads)
        };
        if update(&kernel.unsettled, add) {
            kernel.unsettled_nanos.fetch_add(nanos, Ordering::Relaxed);
        }
    }

    /// How much more (or less) the launches without a measurement should have paid, in nanoseconds, by what is known now. They
    /// wait until sizes near theirs were measured.
    pub fn settle(&self, key: u64) -> i64 {
        let Some(kernel) = self.find(key) else {
            return 0;
        };
        let unsettled = kernel.unsettled.load(Ordering::Relaxed);
        let point = |word: &AtomicU64| Point::of(word.load(Ordering::Relaxed));
        let (Some(small), Some(large)) = (point(&kernel.small), point(&kernel.large)) else {
            return 0;
        };
        let (launches, threads) = (unsettled / LAUNCH, unsettled % LAUNCH);
        if launches == 0 {
            return 0;
        }
        // By their mean, because predictions follow a line.
        let mean = threads / launches;
        let is_near = (small.work / 2.0..=large.work * 2.0).contains(&rough(mean));
        if !is_near || !update(&kernel.unsettled, |now| (now == unsettled).then_some(0)) {
            return 0;
        }
        let paid = kernel.unsettled_nanos.swap(0, Ordering::Relaxed);
        let owed = self.predict(key, mean).unwrap_or(0) * launches;
        i64::try_from(owed).unwrap_or(i64::MAX) - i64::try_from(paid).unwrap_or(i64::MAX)
    }

    /// Marks a kernel that must never wait, or takes the mark away.
    pub fn set_exempt(&self, key: u64, is_exempt: bool) {
        if is_exempt {
            let kernel = self.find_or_make(key);
            kernel.waited.fetch_or(EXEMPT, Ordering::Relaxed);
        } else if let Some(kernel) = self.find(key) {
            kernel.waited.fetch_and(!EXEMPT, Ordering::Relaxed);
        }
    }

    /// Whether a kernel never waits.
    #[must_use]
    pub fn is_exempt(&self, key: u64) -> bool {
        self.find(key).is_some_and(Kernel::is_exempt)
    }

    /// Nanoseconds that launches waited for a kernel's first measurement.
    #[must_use]
    pub fn waited(&self, key: u64) -> u64 {
        self.find(key)
            .map_or(0, |kernel| kernel.waited.load(Ordering::Relaxed) & !EXEMPT)
    }

    /// Adds to the time that launches waited for a kernel's first measurement.
    pub fn note_wait(&self, key: u64, nanos: u64) {
        let nanos = nanos.min(EXEMPT / 4);
        let kernel = self.find_or_make(key);
        if kernel.waited.load(Ordering::Relaxed) & !EXEMPT < EXEMPT / 2 {
            kernel.waited.fetch_add(nanos, Ordering::Relaxed);
        }
    }

    fn find(&self, key: u64) -> Option<&Kernel> {
        (0..PROBES)
            .map(|probe| &self.kernels[place::<N>(key, probe)])
            .find(|kernel| kernel.key.load(Ordering::Relaxed) == key)
    }

    fn find_or_make(&self, key: u64) -> &Kernel {
        if let Some(kernel) = self.find(key) {
            return kernel;
        }
        // Chosen by other bits of the key than its places.
        let first = (key >> 60) as usize;
        let places =
            || (0..PROBES).map(|probe| &self.kernels[place::<N>(key, (first + probe) % PROBES)]);
        // Does not replace a kernel that must never wait, because its name is looked up only once,
        // unless all are such kernels.
        let kernel = places()
            .find(|kernel| kernel.key.load(Ordering::Relaxed) == 0)
            .or_else(|| places().find(|kernel| !kernel.is_exempt()))
            .unwrap_or_else(|| &self.kernels[place::<N>(key, first % PROBES)]);
        for word in [
            &kernel.small,
            &kernel.large,
            &kernel.waited,
            &kernel.unmeasured,
            &kernel.running,
            &kernel.unsettled,
            &kernel.unsettled_nanos,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        kernel.key.store(key, Ordering::Relaxed);
        kernel
    }
}

/// Changes a word, unless `to` returns `None`; returns whether it did.
pub(super) fn update(word: &AtomicU64, to: impl Fn(u64) -> Option<u64>) -> bool {
    let mut now = word.load(Ordering::Relaxed);
    while let Some(next) = to(now) {
        match word.compare_exchange_weak(now, next, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(other) => now = other,
        }
    }
    false
}

fn new_is_smaller(new: Point, old: Point) -> bool {
    new.work < old.work
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "an index")]
const fn place<const N: usize>(key: u64, probe: usize) -> usize {
    (key as usize).wrapping_add(probe) % N
}

impl Kernel {
    fn is_exempt(&self) -> bool {
        self.waited.load(Ordering::Relaxed) & EXEMPT != 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Kernels;

    const KERNEL: u64 = 7 | 1 << 63;

    #[test]
    fn a_new_size_costs_by_the_line_through_what_was_measured() {
        let kernels: Kernels<16> = Kernels::empty();
        assert_eq!(kernels.predict(KERNEL, 100), None);
        kernels.learn(KERNEL, 1000, 10_000, true);
        // In proportion, within the bound.
        assert_eq!(kernels.predict(KERNEL, 2000), Some(20_000));
        assert_eq!(kernels.predict(KERNEL, 1_000_000), Some(80_000));
        assert_eq!(kernels.predict(KERNEL, 1), Some(1250));
        // 5 µs for every launch, and 5 ns for each thread.
        kernels.learn(KERNEL, 3000, 20_000, true);
        for (work, nanos) in [
            (1000, 10_000),
            (2000, 15_000),
            (3000, 20_000),
            (7000, 40_000),
        ] {
            assert_eq!(kernels.predict(KERNEL, work), Some(nanos), "{work}");
        }
        assert_eq!(kernels.predict(8 | 1 << 63, 2000), None);
    }

    /// Sizes between a small and a large one may be nearer to the small one, and take much longer.
    #[test]
    fn between_two_measurements_the_line_holds() {
        let kernels: Kernels<16> = Kernels::empty();
        kernels.learn(KERNEL, 1, 40_000, true);
        kernels.learn(KERNEL, 4001, 4_040_000, true);
        for (work, nanos) in [(2, 41_000), (1001, 1_040_000), (3001, 3_040_000)] {
            assert_eq!(kernels.predict(KERNEL, work), Some(nanos), "{work}");
        }
    }

    /// Many launches may pass before a size near theirs was measured.
    #[test]
    fn launches_without_a_measurement_are_settled_by_others() {
        let kernels: Kernels<16> = Kernels::empty();
        kernels.learn(KERNEL, 1000, 10_000, true);
        for work in [90_000, 100_000, 110_000] {
            kernels.note_unmeasured(KERNEL, work, 80_000);
        }
        assert_eq!(kernels.settle(KERNEL), 0, "no size near theirs");
        kernels.learn(KERNEL, 80_000, 800_000, true);
        assert_eq!(kernels.settle(KERNEL), 3_000_000 - 240_000);
        assert_eq!(kernels.settle(KERNEL), 0, "once");
        // Their number is bounded.
        for _ in 0..100_000 {
            kernels.note_unmeasured(KERNEL, 1000, 0);
        }
        assert_eq!(kernels.settle(KERNEL), 65_535 * 10_000);
        kernels.note_unmeasured(KERNEL, u64::MAX, 7);
        assert_eq!(kernels.settle(KERNEL), 0);
    }

    #[test]
    fn a_measurement_that_is_longer_counts_little() {
        let kernels: Kernels<16> = Kernels::empty();
        kernels.learn(KERNEL, 1000, 10_000, true);
        kernels.learn(KERNEL, 1000, 90_000, false);
        assert_eq!(kernels.predict(KERNEL, 1000), Some(10_000));
        kernels.learn(KERNEL, 1000, 90_000, true);
        assert_eq!(kernels.predict(KERNEL, 1000), Some(20_000));
        for _ in 0..100 {
            kernels.learn(KERNEL, 1000, 90_000, true);
        }
        assert!(kernels.predict(KERNEL, 1000).unwrap() > 89_000);
        kernels.learn(KERNEL, 1000, 10_000, true);
        assert_eq!(kernels.predict(KERNEL, 1000), Some(10_000));
    }

    #[test]
    fn no_other_kernel_takes_the_place_of_an_exempt_one() {
        let kernels: Kernels<4> = Kernels::empty();
        kernels.set_exempt(KERNEL, true);
        for number in 100..200u64 {
            kernels.learn(number << 60 | number, 1, 10, true);
            kernels.note_wait(number << 60 | number, 5);
        }
        assert!(kernels.is_exempt(KERNEL));
        kernels.note_wait(KERNEL, 3);
        assert_eq!(
            (kernels.waited(KERNEL), kernels.is_exempt(KERNEL)),
            (3, true)
        );
    }

    proptest! {
        /// After any measurements, a prediction is near a measured number of nanoseconds.
        #[test]
        fn a_prediction_is_bounded(
            measured in proptest::collection::vec((1u64.., 1..1u64 << 40), 1..20), work: u64,
        ) {
            let kernels: Kernels<4> = Kernels::empty();
            for (work, nanos) in &measured {
                kernels.learn(KERNEL, *work, *nanos, true);
            }
            let least = measured.iter().map(|(_, nanos)| *nanos).min().unwrap();
            let most = measured.iter().map(|(_, nanos)| *nanos).max().unwrap();
            let predicted = kernels.predict(KERNEL, work).unwrap();
            prop_assert!(predicted >= least / 9 && predicted <= most * 9, "{predicted}");
        }
    }
}
