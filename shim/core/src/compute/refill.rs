//! The node's grant of GPU time to a share, and its layout in the cap page.
//!
//! From byte [`OFFSET`] of the cap page on, outside of its checksum:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | `turn`: how often the node has written; 0 for never |
//! | 64 | 48 | what it wrote when `turn` became even: the six words of a [`Refill`] |
//! | 128 | 48 | the same, when it became odd |
//!
//! A node of an older version writes five words: then the sixth is 0.
//!
//! The node writes the copy that is not in use, then `turn`. A reader that finds `turn` unchanged
//! after it read a copy has read it completely; a node that dies in between has changed nothing.
//! Readers never wait.

use super::{PERCENT, WHOLE, part};
use crate::sync::{AtomicU64, Ordering};

/// The offset of the refill in the cap page.
pub const OFFSET: usize = 1024;

/// Bytes of one copy.
pub const COPY_LEN: usize = 48;

/// A grant of GPU time over time. All zeros is the grant before the node's first write: the share's
/// cores, and unscaled prices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Refill {
    /// When it begins, `CLOCK_MONOTONIC` in nanoseconds.
    pub since: u64,
    /// Nanoseconds of GPU time granted until then, in the share's life.
    pub base: u64,
    /// The rate from then on, in millionths of the GPU's time.
    pub rate: u64,
    /// When `rate` ends, so that a share has only its cores if the node dies.
    pub until: u64,
    /// The scale of prices, in millionths; 0 for 1,000,000.
    pub scale: u64,
    /// Until when prices may only fall, `CLOCK_MONOTONIC` in nanoseconds: NVML reports that the GPU works no longer for
    /// the share than it pays, so a measurement above a price is one with other processes' work in it.
    pub falls_until: u64,
}

impl Refill {
    /// Nanoseconds of GPU time granted by `now` to a share of `cores` percent.
    #[must_use]
    pub fn granted(&self, cores: u8, now: u64) -> u64 {
        let (fast, slow) = match now.checked_sub(self.since) {
            None => (0, 0),
            Some(whole) => {
                let fast = whole.min(self.until.saturating_sub(self.since));
                (fast, whole - fast)
            }
        };
        self.base
            .saturating_add(part(fast, self.rate))
            .saturating_add(part(slow, u64::from(cores) * PERCENT))
    }

    /// The rate at `now`, in millionths of the GPU's time.
    #[must_use]
    pub fn rate(&self, cores: u8, now: u64) -> u64 {
        if now < self.until {
            self.rate
        } else {
            u64::from(cores) * PERCENT
        }
    }

    /// The scaled price of `nanos`.
    #[must_use]
    pub fn scaled(&self, nanos: u64) -> u64 {
        match self.scale {
            0 | WHOLE => nanos,
            scale => part(nanos, scale),
        }
    }

    /// Whether prices may rise at `now`.
    #[must_use]
    pub const fn may_rise(&self, now: u64) -> bool {
        now >= self.falls_until
    }

    /// The refill that continues this one from `now` on, at `rate` until `until`, at a new `scale`.
    #[must_use]
    pub fn then(&self, cores: u8, now: u64, rate: u64, until: u64, scale: u64) -> Self {
        Self {
            since: now,
            base: self.granted(cores, now),
            rate,
            until,
            scale,
            falls_until: self.falls_until,
        }
    }

    /// The bytes of a copy.
    #[must_use]
    pub fn encode(&self) -> [u8; COPY_LEN] {
        let mut bytes = [0; COPY_LEN];
        let words = [
            self.since,
            self.base,
            self.rate,
            self.until,
            self.scale,
            self.falls_until,
        ];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a cap page's bytes: its `turn`, and the refill that is in use.
    #[must_use]
    pub fn decode(page: &[u8; crate::cap::LEN]) -> (u64, Self) {
        let word = |at: usize| crate::cap::get_u64(page, at);
        let turn = word(OFFSET);
        let at = OFFSET + offset_of_turn(turn);
        let refill = if turn == 0 {
            Self::default()
        } else {
            Self {
                since: word(at),
                base: word(at + 8),
                rate: word(at + 16),
                until: word(at + 24),
                scale: word(at + 32),
                falls_until: word(at + 40),
            }
        };
        (turn, refill)
    }
}

/// The position of the copy of a `turn`, from [`OFFSET`] on.
#[must_use]
pub const fn offset_of_turn(turn: u64) -> usize {
    if turn.is_multiple_of(2) { 64 } else { 128 }
}

/// The refill as live memory, from byte [`OFFSET`] of a mapped cap page on.
#[repr(C)]
#[derive(Debug)]
pub struct RefillPage {
    turn: AtomicU64,
    _pad: [u64; 7],
    copies: [Written; 2],
}

#[repr(C)]
#[derive(Debug)]
struct Written {
    since: AtomicU64,
    base: AtomicU64,
    rate: AtomicU64,
    until: AtomicU64,
    scale: AtomicU64,
    falls_until: AtomicU64,
    _pad: [u64; 2],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<RefillPage>() == 192);

/// How often a reader retries when the node has just written. The node writes ten times a second.
const TRIES: usize = 4;

impl RefillPage {
    /// The current grant; `None` if every attempt met a write.
    pub fn read(&self) -> Option<Refill> {
        for _ in 0..TRIES {
            let turn = self.turn.load(Ordering::Acquire);
            if turn == 0 {
                return Some(Refill::default());
            }
            let copy = &self.copies[usize::from(!turn.is_multiple_of(2))];
            let refill = Refill {
                since: copy.since.load(Ordering::Acquire),
                base: copy.base.load(Ordering::Acquire),
                rate: copy.rate.load(Ordering::Acquire),
                until: copy.until.load(Ordering::Acquire),
                scale: copy.scale.load(Ordering::Acquire),
                falls_until: copy.falls_until.load(Ordering::Acquire),
            };
            if self.turn.load(Ordering::Relaxed) == turn {
                return Some(refill);
            }
        }
        None
    }
}

#[cfg(any(test, loom))]
pub(crate) mod testing {
    use super::{Refill, RefillPage, Written};
    use crate::sync::{AtomicU64, Ordering};

    fn zero() -> AtomicU64 {
        AtomicU64::new(0)
    }

    impl RefillPage {
        pub(crate) fn fresh() -> Self {
            let copy = || Written {
                since: zero(),
                base: zero(),
                rate: zero(),
                until: zero(),
                scale: zero(),
                falls_until: zero(),
                _pad: [0; 2],
            };
            Self {
                turn: zero(),
                _pad: [0; 7],
                copies: [copy(), copy()],
            }
        }

        /// As the node writes, a word at a time.
        pub(crate) fn write(&self, refill: &Refill) {
            let turn = self.turn.load(Ordering::Relaxed) + 1;
            let copy = &self.copies[usize::from(!turn.is_multiple_of(2))];
            for (word, value) in [
                (&copy.since, refill.since),
                (&copy.base, refill.base),
                (&copy.rate, refill.rate),
                (&copy.until, refill.until),
                (&copy.scale, refill.scale),
                (&copy.falls_until, refill.falls_until),
            ] {
                word.store(value, Ordering::Release);
            }
            self.turn.store(turn, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{COPY_LEN, OFFSET, Refill, RefillPage, offset_of_turn};
    use crate::compute::WHOLE;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_silent_node_leaves_the_cores() {
        let silent = Refill::default();
        assert_eq!(silent.granted(25, 4 * SECOND), SECOND);
        assert_eq!(silent.rate(25, 4 * SECOND), 250_000);
        assert_eq!(silent.scaled(123), 123);
    }

    #[test]
    fn a_dead_nodes_rate_ends() {
        let refill = Refill::default().then(25, 4 * SECOND, WHOLE, 5 * SECOND, 0);
        assert_eq!(refill.granted(25, 5 * SECOND), 2 * SECOND);
        assert_eq!(refill.granted(25, 9 * SECOND), 3 * SECOND);
        assert_eq!(refill.rate(25, 9 * SECOND), 250_000);
        assert_eq!(refill.granted(25, 0), SECOND, "a clock that goes back");
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let mut page = [0u8; crate::cap::LEN];
        assert_eq!(Refill::decode(&page), (0, Refill::default()));
        let refill = Refill {
            since: 1,
            base: 2,
            rate: 3,
            until: 4,
            scale: 5,
            falls_until: 6,
        };
        for turn in [1u64, 2] {
            let at = OFFSET + offset_of_turn(turn);
            page[at..at + COPY_LEN].copy_from_slice(&refill.encode());
            page[OFFSET..OFFSET + 8].copy_from_slice(&turn.to_le_bytes());
            assert_eq!(Refill::decode(&page), (turn, refill));
        }
        let live = RefillPage::fresh();
        assert_eq!(live.read(), Some(Refill::default()));
        live.write(&refill);
        assert_eq!(live.read(), Some(refill));
    }

    proptest! {
        /// Grants only grow, for any words, and do not jump at a new write.
        #[test]
        fn grants_grow_without_jumps(
            since: u64, base in 0..u64::MAX / 4, rate in 0..100 * WHOLE, until: u64,
            cores in 1u8..=100, at: u64, later in 0..SECOND, next in 0..WHOLE,
        ) {
            let refill = Refill { since, base, rate, until, ..Refill::default() };
            let (now, then) = (refill.granted(cores, at), refill.granted(cores, at.saturating_add(later)));
            prop_assert!(now <= then);
            prop_assert!(then - now <= 101 * later + 2);
            let continued = refill.then(cores, at, next, at.saturating_add(1), 0);
            prop_assert_eq!(continued.granted(cores, at), now);
        }
    }
}
