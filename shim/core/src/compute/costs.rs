//! What launches take, by their shape: learned from those that were measured.
//!
//! A shape is a kernel with its grid and block, or a graph that can be launched; a hash of both is
//! its key. Its price is the least that it took in the last [`WINDOW`] to twice as many measurements:
//! a single measurement can only be too long, by what other processes ran in between.
//!
//! A launch of a shape that was never measured pays a provisional price: its kernel's with another
//! grid, or [`UNKNOWN_NANOS`]. The shape keeps count of these, and its first measurement says how
//! much was wrong with all of them together.
//!
//! All of it is one process's, without locks: two threads that write at once lose a measurement.

use crate::sync::{AtomicU64, Ordering};

/// Shapes that are known at a time; beyond, a new one takes another's place.
pub const SHAPES: usize = 2048;

/// The price of what nothing is known of, in nanoseconds.
pub const UNKNOWN_NANOS: u64 = 50_000;

/// Measurements after which the older ones are forgotten.
pub const WINDOW: u64 = 8;

/// Measurements that a price needs to be trusted.
const ENOUGH: u64 = 4;

/// Places in which a shape may lie.
const PROBES: usize = 4;

const TRUSTED: u64 = 1 << 63;
/// In `measured`: never held back.
const EXEMPT: u64 = 1 << 63;
const PRICE: u64 = (1 << 40) - 1;

/// The shapes. All zeros is none.
#[repr(C)]
#[derive(Debug)]
pub struct Costs<const N: usize = SHAPES> {
    shapes: [Shape; N],
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Shape {
    /// 0 for none.
    key: AtomicU64,
    /// In nanoseconds, and whether it is trusted; 0 for none.
    price: AtomicU64,
    /// Measurements so far, and whether the kernel is never held back.
    measured: AtomicU64,
    /// The least of this window, + 1; 0 for none.
    least: AtomicU64,
    /// The least of the window before, + 1; 0 for none.
    before: AtomicU64,
    /// Launches that paid a provisional price, and what they paid.
    provisional: AtomicU64,
    provisional_nanos: AtomicU64,
    /// What such a launch pays.
    guess: AtomicU64,
}

/// What a launch pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Price {
    /// This, known well.
    Trusted(u64),
    /// This, but measure it.
    Measured(u64),
    /// Nothing was measured; so many have launched.
    Provisional {
        /// What it pays.
        nanos: u64,
        /// Launches of the shape before it.
        launched: u64,
    },
}

impl Price {
    /// In nanoseconds.
    #[must_use]
    pub const fn nanos(self) -> u64 {
        match self {
            Self::Trusted(nanos) | Self::Measured(nanos) | Self::Provisional { nanos, .. } => nanos,
        }
    }
}

/// The key of a shape: of a function or graph, and up to three pairs of numbers. Never 0.
#[inline]
#[must_use]
pub const fn key(object: u64, numbers: [u64; 3]) -> u64 {
    // Not a loop, which would have the numbers in memory.
    let [one, two, three] = numbers;
    stir(stir(stir(object, one), two), three) | 1 << 63
}

#[inline]
const fn stir(hash: u64, number: u64) -> u64 {
    let hash = (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ hash >> 32
}

impl<const N: usize> Costs<N> {
    /// No shapes. The shim maps zeros instead.
    #[must_use]
    pub fn empty() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            shapes: core::array::from_fn(|_| Shape {
                key: zero(),
                price: zero(),
                measured: zero(),
                least: zero(),
                before: zero(),
                provisional: zero(),
                provisional_nanos: zero(),
                guess: zero(),
            }),
        }
    }

    /// The price of a shape that is known well.
    #[inline]
    pub fn trusted(&self, key: u64) -> Option<u64> {
        let price = self.find(key)?.price.load(Ordering::Relaxed);
        (price & TRUSTED != 0).then_some(price & PRICE)
    }

    /// The price of a launch of shape `key`, whose kernel is `kernel` (a shape too, 0 for none).
    /// Counts it where the price is provisional.
    pub fn price(&self, key: u64, kernel: u64) -> Price {
        let shape = self.find_or_make(key, kernel);
        let price = shape.price.load(Ordering::Relaxed);
        if price & TRUSTED != 0 {
            return Price::Trusted(price & PRICE);
        }
        if price != 0 {
            return Price::Measured(price);
        }
        let nanos = shape.guess.load(Ordering::Relaxed).min(PRICE);
        shape.provisional_nanos.fetch_add(nanos, Ordering::Relaxed);
        let launched = shape.provisional.fetch_add(1, Ordering::Relaxed);
        Price::Provisional { nanos, launched }
    }

    /// Marks a kernel that must never be held back.
    pub fn exempt(&self, kernel: u64) {
        self.find_or_make(kernel, 0)
            .measured
            .fetch_or(EXEMPT, Ordering::Relaxed);
    }

    /// Whether a kernel is never held back.
    #[must_use]
    pub fn is_exempt(&self, kernel: u64) -> bool {
        self.find(kernel).is_some_and(Shape::is_exempt)
    }

    /// How many launches of a shape that was never measured there were; `None` if it was.
    #[must_use]
    pub fn unmeasured(&self, key: u64) -> Option<u64> {
        match self.find(key) {
            None => Some(0),
            Some(shape) if shape.price.load(Ordering::Relaxed) == 0 => {
                Some(shape.provisional.load(Ordering::Relaxed))
            }
            Some(_) => None,
        }
    }

    /// Raises what launches of an unmeasured shape pay: one of them has run for so long already.
    pub fn at_least(&self, key: u64, nanos: u64) {
        if let Some(shape) = self.find(key) {
            shape.guess.fetch_max(nanos, Ordering::Relaxed);
        }
    }

    /// Notes that a launch of shape `key` took `nanos`. Returns how much more (or less) the launches
    /// with a provisional price should have paid.
    pub fn note(&self, key: u64, kernel: u64, nanos: u64) -> i64 {
        if kernel != 0 && kernel != key {
            self.find_or_make(kernel, 0).learn(nanos);
        }
        let shape = self.find_or_make(key, kernel);
        shape.learn(nanos);
        let price = shape.price.load(Ordering::Relaxed) & PRICE;
        let launches = shape.provisional.swap(0, Ordering::Relaxed);
        let paid = shape.provisional_nanos.swap(0, Ordering::Relaxed);
        let owed = price.saturating_mul(launches);
        i64::try_from(owed)
            .unwrap_or(i64::MAX)
            .saturating_sub(i64::try_from(paid).unwrap_or(i64::MAX))
    }

    /// Forgets what a shape takes: its graph is another one now.
    pub fn forget(&self, key: u64) {
        if let Some(shape) = self.find(key) {
            shape.become_new(key, UNKNOWN_NANOS);
        }
    }

    #[inline]
    fn find(&self, key: u64) -> Option<&Shape> {
        (0..PROBES)
            .map(|probe| &self.shapes[place::<N>(key, probe)])
            .find(|shape| shape.key.load(Ordering::Relaxed) == key)
    }

    fn find_or_make(&self, key: u64, kernel: u64) -> &Shape {
        if let Some(shape) = self.find(key) {
            return shape;
        }
        let guess = match self.find(kernel) {
            Some(kernel) => kernel.price.load(Ordering::Relaxed) & PRICE,
            None => 0,
        };
        let guess = if guess == 0 { UNKNOWN_NANOS } else { guess };
        let free = (0..PROBES)
            .map(|probe| &self.shapes[place::<N>(key, probe)])
            .find(|shape| shape.key.load(Ordering::Relaxed) == 0);
        // Full: one of its places, by other bits of the key than those that chose them; not one of a
        // kernel that must never wait, whose name is looked up only once, unless all of them are.
        let first = (key >> 60) as usize;
        let mut others =
            (0..PROBES).map(|probe| &self.shapes[place::<N>(key, (first + probe) % PROBES)]);
        let shape = free
            .or_else(|| others.find(|shape| !shape.is_exempt()))
            .unwrap_or_else(|| &self.shapes[place::<N>(key, first % PROBES)]);
        shape.become_new(key, guess);
        shape
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "an index")]
const fn place<const N: usize>(key: u64, probe: usize) -> usize {
    (key as usize).wrapping_add(probe) % N
}

impl Shape {
    fn is_exempt(&self) -> bool {
        self.measured.load(Ordering::Relaxed) & EXEMPT != 0
    }

    fn become_new(&self, key: u64, guess: u64) {
        for word in [
            &self.price,
            &self.least,
            &self.before,
            &self.provisional,
            &self.provisional_nanos,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        let exempt = if self.key.load(Ordering::Relaxed) == key {
            self.measured.load(Ordering::Relaxed) & EXEMPT
        } else {
            0
        };
        self.measured.store(exempt, Ordering::Relaxed);
        self.guess.store(guess, Ordering::Relaxed);
        self.key.store(key, Ordering::Relaxed);
    }

    fn learn(&self, nanos: u64) {
        let nanos = nanos.clamp(1, PRICE - 1);
        let nth = self.measured.fetch_add(1, Ordering::Relaxed) & !EXEMPT;
        if nth.is_multiple_of(WINDOW) {
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
        let price = if before == 0 {
            least
        } else {
            least.min(before)
        } - 1;
        let trust = if nth + 1 >= ENOUGH { TRUSTED } else { 0 };
        self.price.store(price | trust, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{Costs, Price, UNKNOWN_NANOS, key};

    fn costs<const N: usize>() -> Costs<N> {
        Costs::empty()
    }

    const SHAPE: u64 = key(1, [2, 3, 4]);
    const KERNEL: u64 = key(1, [0, 0, 0]);

    #[test]
    fn the_first_measurement_settles_what_was_paid_before() {
        let costs = costs::<64>();
        for launched in 0..3 {
            assert_eq!(
                costs.price(SHAPE, KERNEL),
                Price::Provisional {
                    nanos: UNKNOWN_NANOS,
                    launched
                }
            );
        }
        assert_eq!(costs.unmeasured(SHAPE), Some(3));
        assert_eq!(costs.note(SHAPE, KERNEL, 60_000), 30_000);
        assert_eq!(costs.price(SHAPE, KERNEL), Price::Measured(60_000));
        assert_eq!(costs.unmeasured(SHAPE), None);
        assert_eq!(costs.note(SHAPE, KERNEL, 70_000), 0);
        // Another grid of the kernel starts with what is known of it.
        let other = key(1, [2, 3, 5]);
        assert_eq!(costs.price(other, KERNEL).nanos(), 60_000);
        assert_eq!(costs.note(other, KERNEL, 20_000), -40_000);
    }

    #[test]
    fn a_price_is_the_least_of_a_window() {
        let costs = costs::<64>();
        for nanos in [500, 100, 900, 300] {
            costs.note(SHAPE, 0, nanos);
        }
        assert_eq!(costs.trusted(SHAPE), Some(100));
        // It takes longer from now on: forgotten after two windows at most.
        for _ in 0..16 {
            costs.note(SHAPE, 0, 1000);
        }
        assert_eq!(costs.trusted(SHAPE), Some(1000));
        costs.note(SHAPE, 0, 0);
        assert_eq!(costs.trusted(SHAPE), Some(1), "a launch is never free");
    }

    #[test]
    fn what_runs_long_raises_the_guess() {
        let costs = costs::<64>();
        costs.price(SHAPE, 0);
        costs.at_least(SHAPE, 5_000_000);
        assert_eq!(costs.price(SHAPE, 0).nanos(), 5_000_000);
        assert_eq!(costs.note(SHAPE, 0, 6_000_000), 12_000_000 - 5_050_000);
    }

    #[test]
    fn a_forgotten_shape_is_new() {
        let costs = costs::<64>();
        costs.note(SHAPE, 0, 7);
        costs.forget(SHAPE);
        assert_eq!(
            costs.price(SHAPE, 0),
            Price::Provisional {
                nanos: UNKNOWN_NANOS,
                launched: 0
            }
        );
    }

    #[test]
    fn an_exempt_kernel_stays_so() {
        let costs = costs::<64>();
        costs.exempt(KERNEL);
        for _ in 0..20 {
            costs.note(SHAPE, KERNEL, 7);
        }
        costs.forget(KERNEL);
        assert!(costs.is_exempt(KERNEL) && !costs.is_exempt(SHAPE));
        assert_eq!(costs.trusted(SHAPE), Some(7));
    }

    #[test]
    fn no_other_shape_takes_the_place_of_an_exempt_kernel() {
        let costs = costs::<4>();
        costs.exempt(KERNEL);
        for number in 0..100 {
            costs.note(key(number, [0; 3]), 0, 10);
        }
        assert!(costs.is_exempt(KERNEL));
    }

    #[test]
    fn more_shapes_than_places_are_lived_with() {
        let costs = costs::<4>();
        for number in 0..100 {
            costs.price(key(number, [0; 3]), 0);
            costs.note(key(number, [0; 3]), 0, 10 + number);
        }
        assert_eq!(costs.price(key(99, [0; 3]), 0).nanos(), 109);
        assert_ne!(key(0, [0; 3]), 0);
    }
}
