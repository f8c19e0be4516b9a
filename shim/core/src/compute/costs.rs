//! The GPU time of launches by their shape, from measured launches.
//!
//! A shape is a kernel with its grid and block, or a graph that can be launched; a hash of both is
//! its key. Its price is the smallest measurement, because a measurement can only be too long: other processes' work may be
//! in it. Older measurements than the last [`WINDOW`] to twice as many are forgotten, unless the node has
//! found that the share's prices are high enough ([`Refill::falls_until`](super::Refill)). So neighbours that come
//! later, and are in every measurement of a long kernel from then on, change no price.
//!
//! A launch of a shape that was never measured pays a provisional price: the predicted time of its kernel
//! with that grid ([`Kernels`]), or [`UNKNOWN_NANOS`]. The shape counts such launches, and its first
//! measurement corrects all of them together. Those that are not measured are counted by the kernel, and corrected when sizes near
//! theirs were measured.
//!
//! It belongs to one process and has no locks: two threads that write at once lose a measurement.

use super::kernels::{KERNELS, Kernels, update};
use super::overhead::{FEWEST, Overhead};
use crate::sync::{AtomicU64, Ordering};

/// The number of known shapes; when it is full, a new one replaces another.
pub const SHAPES: usize = 8192;

/// The price of an unknown kernel, in nanoseconds.
pub const UNKNOWN_NANOS: u64 = 50_000;

/// Measurements after which the older ones are forgotten.
pub const WINDOW: u64 = 8;

/// The longest that a launch waits for its kernel's first measurement, in nanoseconds: the measured
/// launch may wait for something that this thread does next.
pub const HOLD_NANOS: u64 = 5_000_000;

/// The longest that all launches of a kernel wait for it, in nanoseconds.
pub const HOLDS_NANOS: u64 = 50_000_000;

/// The launches of a kernel that may be in progress while it has no measurement.
const UNMEASURED: u64 = 2;

/// The measurements that a trusted price needs.
const ENOUGH: u64 = 4;

/// The places where a shape can be stored.
const PROBES: usize = 4;

const TRUSTED: u64 = 1 << 63;
const PRICE: u64 = (1 << 40) - 1;

/// The shapes. All zeros means none.
#[repr(C)]
#[derive(Debug)]
pub struct Costs<const N: usize = SHAPES, const M: usize = KERNELS> {
    shapes: [ShapeCost; N],
    kernels: Kernels<M>,
    overhead: Overhead,
}

/// The properties of a launch on which its price depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The key of the kernel with its grid and block, or of the graph.
    pub key: u64,
    /// The key of the kernel alone, or of the graph.
    pub kernel: u64,
    /// Threads of the grid; for a graph, always the same number.
    pub work: u64,
}

/// Launches between two events, which follow each other in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchSeries {
    /// How many.
    pub launches: u64,
    /// The sum of their prices, in nanoseconds.
    pub prices: u64,
    /// The shape of all of them, if they have the same.
    pub shape: Option<Shape>,
}

/// The data of a shape.
#[repr(C, align(64))]
#[derive(Debug)]
struct ShapeCost {
    /// 0 for none.
    key: AtomicU64,
    /// In nanoseconds, and whether it is trusted; 0 for none.
    price: AtomicU64,
    /// Measurements so far.
    measured: AtomicU64,
    /// The smallest measurement since the window began, + 1; 0 for none.
    least: AtomicU64,
    /// The smallest measurement of the window before, + 1; 0 for none.
    before: AtomicU64,
    /// Launches that paid a provisional price, and the sum that they paid.
    provisional: AtomicU64,
    provisional_nanos: AtomicU64,
    /// How long one of these has run so far, in nanoseconds.
    running: AtomicU64,
}

/// The price of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Price {
    /// A trusted price.
    Trusted(u64),
    /// A price; measure this launch.
    Measured(u64),
    /// A provisional price, from the kernel's other grids or the default; the first measurement
    /// corrects it.
    Provisional(u64),
}

impl Price {
    /// In nanoseconds.
    #[must_use]
    pub const fn nanos(self) -> u64 {
        match self {
            Self::Trusted(nanos) | Self::Measured(nanos) | Self::Provisional(nanos) => nanos,
        }
    }
}

/// The key of a shape: of a function or graph, and up to three pairs of numbers. Never 0.
#[inline]
#[must_use]
pub const fn key(object: u64, numbers: [u64; 3]) -> u64 {
    // Handles that are near each other differ in the same few bits as grids do.
    let object = object.wrapping_mul(0xd6e8_feb8_6659_fd93);
    // Not a loop, so that the numbers stay in registers.
    let [one, two, three] = numbers;
    stir(stir(stir(object, one), two), three) | 1 << 63
}

#[inline]
const fn stir(hash: u64, number: u64) -> u64 {
    let hash = (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ hash >> 32
}

impl<const N: usize, const M: usize> Costs<N, M> {
    /// No shapes. The shim maps zeros instead.
    #[must_use]
    pub fn empty() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            shapes: core::array::from_fn(|_| ShapeCost {
                key: zero(),
                price: zero(),
                measured: zero(),
                least: zero(),
                before: zero(),
                provisional: zero(),
                provisional_nanos: zero(),
                running: zero(),
            }),
            kernels: Kernels::empty(),
            overhead: Overhead::none(),
        }
    }

    /// The trusted price of a shape.
    #[inline]
    pub fn trusted(&self, key: u64) -> Option<u64> {
        let price = self.find(key)?.price.load(Ordering::Relaxed);
        (price & TRUSTED != 0).then_some(price & PRICE)
    }

    /// The price of a launch. If the price is provisional, counts the launch.
    pub fn price(&self, shape: &Shape) -> Price {
        let known = self.find_or_make(shape);
        let price = known.price.load(Ordering::Relaxed);
        if price & TRUSTED != 0 {
            return Price::Trusted(price & PRICE);
        }
        if price != 0 {
            return Price::Measured(price);
        }
        self.kernels.count(shape.kernel);
        let running = known.running.load(Ordering::Relaxed);
        let nanos = self.predict(shape).max(running).min(PRICE);
        known.provisional_nanos.fetch_add(nanos, Ordering::Relaxed);
        known.provisional.fetch_add(1, Ordering::Relaxed);
        Price::Provisional(nanos)
    }

    /// Notes that a launch which paid the provisional price `nanos` is not measured: measurements of the kernel's other launches
    /// correct it, because its shape may never come again.
    pub fn note_unmeasured(&self, shape: &Shape, nanos: u64) {
        let Some(known) = self.find(shape.key) else {
            return;
        };
        let less = |number: u64| move |now: u64| now.checked_sub(number);
        if update(&known.provisional, less(1)) && update(&known.provisional_nanos, less(nanos)) {
            self.kernels
                .note_unmeasured(shape.kernel, shape.work, nanos);
        }
    }

    /// Marks a kernel that must never wait, or takes the mark away.
    pub fn set_exempt(&self, kernel: u64, is_exempt: bool) {
        self.kernels.set_exempt(kernel, is_exempt);
    }

    /// Whether a kernel never waits.
    #[must_use]
    pub fn is_exempt(&self, kernel: u64) -> bool {
        self.kernels.is_exempt(kernel)
    }

    /// The longest that a launch waits for a measurement of its kernel, in nanoseconds: [`HOLD_NANOS`] if
    /// [`UNMEASURED`] launches of the kernel, with any grids, are in progress and none was measured, until its launches
    /// have waited for [`HOLDS_NANOS`] in all; otherwise 0.
    #[must_use]
    pub fn hold(&self, shape: &Shape) -> u64 {
        if self.kernels.unmeasured(shape.kernel) < UNMEASURED {
            return 0;
        }
        HOLDS_NANOS
            .saturating_sub(self.kernels.waited(shape.kernel))
            .min(HOLD_NANOS)
    }

    /// Records such a wait.
    pub fn note_hold(&self, shape: &Shape, nanos: u64) {
        self.kernels.note_wait(shape.kernel, nanos);
    }

    /// Raises the provisional price of a shape, and of a kernel without a measurement, because a launch has run for `nanos`
    /// so far.
    pub fn at_least(&self, shape: &Shape, nanos: u64) {
        if let Some(known) = self.find(shape.key) {
            known.running.fetch_max(nanos, Ordering::Relaxed);
        }
        self.kernels.note_running(shape.kernel, nanos);
    }

    /// Records that a launch took `nanos` between two events. The price may rise only if `may_rise`. Returns how much more
    /// (or less) the launches of the shape with a provisional price should have paid.
    pub fn note(&self, shape: &Shape, nanos: u64, may_rise: bool) -> i64 {
        let net = self.overhead.without(nanos);
        self.kernels.learn(shape.kernel, shape.work, net, may_rise);
        let known = self.find_or_make(shape);
        known.learn(nanos, may_rise, &self.overhead);
        let price = known.price.load(Ordering::Relaxed) & PRICE;
        let launches = known.provisional.swap(0, Ordering::Relaxed);
        let paid = known.provisional_nanos.swap(0, Ordering::Relaxed);
        let owed = price.saturating_mul(launches);
        i64::try_from(owed)
            .unwrap_or(i64::MAX)
            .saturating_sub(i64::try_from(paid).unwrap_or(i64::MAX))
            .saturating_add(self.kernels.settle(shape.kernel))
    }

    /// Records that a series of launches took `nanos` between two events. Returns the same as [`note`](Self::note).
    pub fn note_series(&self, series: &LaunchSeries, nanos: u64, may_rise: bool) -> i64 {
        self.overhead.note(series.launches, series.prices, nanos);
        match &series.shape {
            Some(shape) if series.launches >= FEWEST => {
                let alone = self.overhead.with(nanos / series.launches);
                self.note(shape, alone, may_rise)
            }
            _ => 0,
        }
    }

    /// Whether it is known how much events add to a measurement.
    #[must_use]
    pub fn knows_overhead(&self) -> bool {
        self.overhead.is_known()
    }

    /// Makes a graph's price provisional because the graph was updated; it is assumed to take as
    /// long as before. Its next measurement corrects the launches until then.
    pub fn forget(&self, shape: &Shape) {
        if let Some(known) = self.find(shape.key) {
            known.begin_anew();
        }
    }

    fn predict(&self, shape: &Shape) -> u64 {
        self.kernels
            .predict(shape.kernel, shape.work)
            .unwrap_or_else(|| UNKNOWN_NANOS.max(self.kernels.running(shape.kernel)))
    }

    #[inline]
    fn find(&self, key: u64) -> Option<&ShapeCost> {
        (0..PROBES)
            .map(|probe| &self.shapes[place::<N>(key, probe)])
            .find(|known| known.key.load(Ordering::Relaxed) == key)
    }

    fn find_or_make(&self, shape: &Shape) -> &ShapeCost {
        let key = shape.key;
        if let Some(known) = self.find(key) {
            return known;
        }
        let free = (0..PROBES)
            .map(|probe| &self.shapes[place::<N>(key, probe)])
            .find(|known| known.key.load(Ordering::Relaxed) == 0);
        // Full: replaces one of its places, chosen by other bits of the key.
        let known =
            free.unwrap_or_else(|| &self.shapes[place::<N>(key, (key >> 60) as usize % PROBES)]);
        known.become_new(key);
        known
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "an index")]
const fn place<const N: usize>(key: u64, probe: usize) -> usize {
    (key as usize).wrapping_add(probe) % N
}

impl ShapeCost {
    fn become_new(&self, key: u64) {
        self.provisional.store(0, Ordering::Relaxed);
        self.provisional_nanos.store(0, Ordering::Relaxed);
        self.begin_anew();
        self.key.store(key, Ordering::Relaxed);
    }

    fn begin_anew(&self) {
        for word in [
            &self.price,
            &self.measured,
            &self.least,
            &self.before,
            &self.running,
        ] {
            word.store(0, Ordering::Relaxed);
        }
    }

    fn learn(&self, nanos: u64, may_rise: bool, overhead: &Overhead) {
        let nanos = nanos.clamp(1, PRICE - 1);
        let nth = self.measured.fetch_add(1, Ordering::Relaxed);
        if nth.is_multiple_of(WINDOW) && may_rise {
            let least = self.least.swap(0, Ordering::Relaxed);
            self.before.store(least, Ordering::Relaxed);
        }
        let (least, before) = (
            self.least.load(Ordering::Relaxed),
            self.before.load(Ordering::Relaxed),
        );
        let smaller = |a: u64, b: u64| if a == 0 || b < a { b } else { a };
        let least = smaller(least, nanos + 1);
        self.least.store(least, Ordering::Relaxed);
        let least = if before == 0 {
            least
        } else {
            least.min(before)
        };
        let price = overhead.without(least - 1).max(1);
        let trust = if nth + 1 >= ENOUGH { TRUSTED } else { 0 };
        self.price.store(price | trust, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{Costs, HOLD_NANOS, HOLDS_NANOS, LaunchSeries, Price, Shape, UNKNOWN_NANOS, key};

    fn costs<const N: usize>() -> Costs<N, 16> {
        Costs::empty()
    }

    const KERNEL: u64 = key(1, [0, 0, 0]);

    const fn shape(threads: u64) -> Shape {
        Shape {
            key: key(1, [threads, 3, 4]),
            kernel: KERNEL,
            work: threads,
        }
    }

    const SHAPE: Shape = shape(100);

    /// Handles are addresses, often near each other.
    #[test]
    fn kernels_with_other_grids_have_other_keys() {
        let mut keys = HashSet::new();
        for handle in (0..64).map(|nth| 0x7f12_3456_0000 + nth * 64) {
            for [x, y] in [[1, 1], [1, 65], [2, 129], [64, 64], [65, 1], [128, 4032]] {
                assert!(keys.insert(key(handle, [x << 32 | y, 1 << 32 | 32, 1 << 32 | 1])));
            }
        }
    }

    #[test]
    fn the_first_measurement_settles_what_was_paid_before() {
        let costs = costs::<64>();
        for _ in 0..3 {
            assert_eq!(costs.price(&SHAPE), Price::Provisional(UNKNOWN_NANOS));
        }
        assert_eq!(costs.note(&SHAPE, 60_000, true), 30_000);
        assert_eq!(costs.price(&SHAPE), Price::Measured(60_000));
        assert_eq!(costs.note(&SHAPE, 70_000, true), 0);
        // Another grid of the kernel starts with its prediction.
        let larger = shape(200);
        assert!(costs.price(&larger).nanos() > 110_000);
        let paid = costs.note(&larger, 100_000, true);
        assert!((-30_000..-10_000).contains(&paid), "{paid}");
    }

    /// Only a kernel without a measurement waits, and only for a limited time.
    #[test]
    fn a_known_kernel_with_a_new_grid_is_not_held_back() {
        let costs = costs::<64>();
        assert_eq!(costs.hold(&SHAPE), 0);
        for launched in 1..=3 {
            costs.price(&SHAPE);
            let hold = if launched < 2 { 0 } else { HOLD_NANOS };
            assert_eq!(costs.hold(&SHAPE), hold, "{launched}");
        }
        costs.note_hold(&SHAPE, HOLDS_NANOS - 200);
        let other = shape(7);
        costs.price(&other);
        costs.price(&other);
        assert_eq!(costs.hold(&other), 200, "of the kernel, not of the shape");
        assert_eq!(
            costs.hold(&shape(8)),
            200,
            "a shape that was never launched, too"
        );
        costs.note_hold(&other, 300);
        assert_eq!(costs.hold(&SHAPE), 0);
        // Another kernel, measured with one grid, never waits with any grid.
        let of = |kernel: u64, threads| Shape {
            key: key(kernel, [threads, 0, 0]),
            kernel: key(kernel, [0; 3]),
            work: threads,
        };
        costs.note(&of(2, 10), 1000, true);
        for threads in 11..200 {
            for _ in 0..5 {
                assert!(matches!(
                    costs.price(&of(2, threads)),
                    Price::Provisional(_)
                ));
                assert_eq!(costs.hold(&of(2, threads)), 0);
            }
        }
    }

    #[test]
    fn a_price_is_the_least_of_a_window() {
        let costs = costs::<64>();
        for nanos in [500, 100, 900, 300] {
            costs.note(&SHAPE, nanos, true);
        }
        assert_eq!(costs.trusted(SHAPE.key), Some(100));
        // It takes longer from now on: the old price is dropped after at most two windows.
        for _ in 0..16 {
            costs.note(&SHAPE, 1000, true);
        }
        assert_eq!(costs.trusted(SHAPE.key), Some(1000));
        costs.note(&SHAPE, 0, true);
        assert_eq!(costs.trusted(SHAPE.key), Some(1), "a launch is never free");
    }

    /// Neighbours that come later are in every measurement of a long kernel.
    #[test]
    fn a_price_that_is_high_enough_only_falls() {
        let costs = costs::<64>();
        for _ in 0..5 {
            costs.note(&SHAPE, 500, true);
        }
        for _ in 0..100 {
            costs.note(&SHAPE, 2000, false);
        }
        assert_eq!(costs.trusted(SHAPE.key), Some(500));
        costs.note(&SHAPE, 400, false);
        assert_eq!(costs.trusted(SHAPE.key), Some(400));
        for _ in 0..16 {
            costs.note(&SHAPE, 2000, true);
        }
        assert_eq!(costs.trusted(SHAPE.key), Some(2000));
    }

    #[test]
    fn a_series_says_what_events_add() {
        let costs = costs::<64>();
        let mixed = |launches, prices| LaunchSeries {
            launches,
            prices,
            shape: None,
        };
        for _ in 0..4 {
            costs.note(&SHAPE, 14_000, true);
        }
        for _ in 0..4 {
            let price = costs.trusted(SHAPE.key).unwrap();
            costs.note_series(&mixed(16, 16 * price), 164_000, true);
            costs.note(&SHAPE, 14_000, true);
        }
        assert_eq!(costs.trusted(SHAPE.key), Some(10_250));
        // Launches of one shape give its price, too.
        let same = LaunchSeries {
            shape: Some(SHAPE),
            ..mixed(16, 16 * 10_250)
        };
        costs.note_series(&same, 160_000, true);
        assert_eq!(costs.trusted(SHAPE.key), Some(10_000));
        assert!(!costs.knows_overhead());
    }

    /// Shapes that never come again, more than can be measured.
    #[test]
    fn a_launch_without_a_measurement_is_corrected_by_others() {
        let costs = costs::<64>();
        costs.note(&shape(32), 1_000, true);
        let mut paid = 0;
        for threads in [90_000, 100_000, 110_000] {
            let price = costs.price(&shape(threads)).nanos();
            costs.note_unmeasured(&shape(threads), price);
            paid += price;
        }
        let measured = shape(95_000);
        paid += costs.price(&measured).nanos();
        let owed = costs.note(&measured, 950_000, true);
        let whole = 3_950_000 - i64::try_from(paid).unwrap();
        assert!((owed - whole).abs() < 100_000, "{owed} of {whole}");
        // It is not corrected twice.
        assert_eq!(costs.note(&shape(90_000), 900_000, true), 0);
    }

    #[test]
    fn what_runs_long_raises_the_guess() {
        let costs = costs::<64>();
        costs.price(&SHAPE);
        costs.at_least(&SHAPE, 5_000_000);
        assert_eq!(costs.price(&SHAPE).nanos(), 5_000_000);
        assert_eq!(costs.price(&shape(3)).nanos(), 5_000_000, "with any grid");
        assert_eq!(costs.note(&SHAPE, 6_000_000, true), 12_000_000 - 5_050_000);
    }

    /// A graph that is updated before each launch is also charged its real time.
    #[test]
    fn a_graph_that_is_updated_is_assumed_to_take_what_it_took() {
        let costs = costs::<64>();
        let graph = Shape {
            key: KERNEL,
            kernel: KERNEL,
            work: 1,
        };
        costs.price(&graph);
        costs.forget(&graph);
        assert_eq!(costs.price(&graph), Price::Provisional(UNKNOWN_NANOS));
        assert_eq!(costs.note(&graph, 90_000, true), 80_000, "both launches");
        costs.forget(&graph);
        assert_eq!(costs.price(&graph), Price::Provisional(90_000));
        costs.price(&graph);
        assert_eq!(costs.hold(&graph), 0);
    }

    #[test]
    fn an_exempt_kernel_stays_so() {
        let costs = costs::<64>();
        costs.set_exempt(KERNEL, true);
        for _ in 0..20 {
            costs.note(&SHAPE, 7, true);
        }
        costs.forget(&SHAPE);
        assert!(costs.is_exempt(KERNEL) && !costs.is_exempt(SHAPE.key));
        // Another graph has the handle now.
        costs.set_exempt(KERNEL, false);
        assert!(!costs.is_exempt(KERNEL));
    }

    #[test]
    fn more_shapes_than_places_are_tolerated() {
        let costs = costs::<4>();
        for number in 0..100 {
            let shape = Shape {
                key: key(number, [0; 3]),
                kernel: key(number, [1; 3]),
                work: 1,
            };
            costs.price(&shape);
            costs.note(&shape, 10 + number, true);
            assert_eq!(costs.price(&shape).nanos(), 10 + number);
            assert_ne!(shape.key, 0);
        }
    }
}
