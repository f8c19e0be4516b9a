//! Limits the rate of an expensive action: bursts are allowed, a sustained rate is limited.

use crate::sync::{AtomicU64, Ordering};

/// Admits [`BURST`](Self::BURST) at once, and one per [`INTERVAL`](Self::INTERVAL) in the long run.
/// All zeros is a fresh one.
#[repr(transparent)]
#[derive(Debug)]
pub struct Pace {
    /// When the next action would be due if all had been one per interval, in nanoseconds.
    due: AtomicU64,
}

impl Pace {
    /// Nanoseconds from one to the next, under pressure: a millisecond.
    pub const INTERVAL: u64 = 1_000_000;

    /// How many are admitted at once.
    pub const BURST: u64 = 16;

    /// A fresh limiter.
    #[must_use]
    #[cfg(not(any(test, loom)))]
    pub const fn new() -> Self {
        Self {
            due: AtomicU64::new(0),
        }
    }

    /// Whether an action is allowed now, by a monotonic clock in nanoseconds.
    pub fn admit(&self, now: u64) -> bool {
        let latest = now.saturating_add((Self::BURST - 1) * Self::INTERVAL);
        let mut due = self.due.load(Ordering::Relaxed);
        while due <= latest {
            let next = due.max(now).saturating_add(Self::INTERVAL);
            match self
                .due
                .compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(other) => due = other,
            }
        }
        false
    }
}

#[cfg(not(any(test, loom)))]
impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::{AtomicU64, Pace};

    #[test]
    fn a_burst_then_one_per_interval() {
        let pace = Pace {
            due: AtomicU64::new(0),
        };
        let start = 5_000_000_000;
        for _ in 0..Pace::BURST {
            assert!(pace.admit(start));
        }
        assert!(!pace.admit(start));
        assert!(!pace.admit(start + Pace::INTERVAL - 1));
        assert!(pace.admit(start + Pace::INTERVAL));
        assert!(!pace.admit(start + Pace::INTERVAL));
        // After a pause, one burst again.
        let later = start + 1000 * Pace::INTERVAL;
        let admitted = (0..100).filter(|_| pace.admit(later)).count();
        assert_eq!(admitted as u64, Pace::BURST);
    }
}
