//! What a share has used of its grant: two words of its account.
//!
//! `position` is how far the share has got on the line that its grant draws. It may launch while it
//! is not ahead of the line, and pays by moving on; how far it is ahead then is its debt. It never
//! falls further behind than the burst: grant that is not used lapses.
//!
//! `spent` is the sum of the prices alone, without the node's scale and without what lapsed: what
//! the node compares with the time that the GPU really worked.

use super::{BURST_NANOS, DEBT_NANOS, Refill, part};
use crate::Account;
use crate::sync::Ordering;

/// A share's bucket at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    granted: u64,
    rate: u64,
    refill: Refill,
}

/// How long to wait, in nanoseconds, until the share has no debt. At the present rate: it may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait(pub u64);

impl Bucket {
    /// The bucket of a share of `cores` percent at `now`, `CLOCK_MONOTONIC` in nanoseconds.
    #[must_use]
    pub fn new(refill: &Refill, cores: u8, now: u64) -> Self {
        Self {
            granted: refill.granted(cores, now),
            rate: refill.rate(cores, now).max(1),
            refill: *refill,
        }
    }

    /// Pays `price` if the share has no debt.
    pub fn take<const N: usize>(&self, account: &Account<N>, price: u64) -> Result<(), Wait> {
        self.pay(account, price, false)
    }

    /// Pays `price` whether or not it makes a debt.
    pub fn charge<const N: usize>(&self, account: &Account<N>, price: u64) {
        let _ = self.pay(account, price, true);
    }

    /// Nanoseconds of GPU time that the share is behind its grant; 0 with a debt.
    #[must_use]
    pub fn left<const N: usize>(&self, account: &Account<N>) -> u64 {
        let position = account.position.load(Ordering::Relaxed);
        self.granted.saturating_sub(position.max(self.lapsed()))
    }

    /// Corrects what was paid: by `more`, or, where it is negative, back.
    pub fn correct<const N: usize>(&self, account: &Account<N>, more: i64) {
        let (price, scaled) = (more.unsigned_abs(), self.refill.scaled(more.unsigned_abs()));
        for (word, by) in [(&account.spent, price), (&account.position, scaled)] {
            let mut now = word.load(Ordering::Relaxed);
            loop {
                let next = if more < 0 {
                    now.saturating_sub(by)
                } else {
                    now.saturating_add(by)
                };
                match word.compare_exchange_weak(now, next, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => break,
                    Err(other) => now = other,
                }
            }
        }
    }

    fn lapsed(&self) -> u64 {
        self.granted.saturating_sub(part(BURST_NANOS, self.rate))
    }

    fn pay<const N: usize>(
        &self,
        account: &Account<N>,
        price: u64,
        in_debt_too: bool,
    ) -> Result<(), Wait> {
        let most = self.granted.saturating_add(part(DEBT_NANOS, self.rate));
        let mut found = account.position.load(Ordering::Relaxed);
        loop {
            let position = found.clamp(self.lapsed(), most);
            let debt = position.saturating_sub(self.granted);
            let waits = debt > 0 && !in_debt_too;
            let next = if waits {
                position
            } else {
                position.saturating_add(self.refill.scaled(price))
            };
            if next != found
                && let Err(other) = account.position.compare_exchange_weak(
                    found,
                    next,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
            {
                found = other;
                continue;
            }
            if waits {
                return Err(Wait(time_for(debt, self.rate)));
            }
            account.spent.fetch_add(price, Ordering::Relaxed);
            return Ok(());
        }
    }
}

/// How long `nanos` of GPU time take to come at `rate`; at least a nanosecond.
fn time_for(nanos: u64, rate: u64) -> u64 {
    (nanos / rate)
        .saturating_mul(super::WHOLE)
        .saturating_add((nanos % rate).saturating_mul(super::WHOLE) / rate)
        .max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Bucket, Wait};
    use crate::Account;
    use crate::compute::{BURST_NANOS, DEBT_NANOS, Refill, WHOLE, part};
    use crate::sync::Ordering;

    const SECOND: u64 = 1_000_000_000;

    fn at(now: u64) -> Bucket {
        Bucket::new(&Refill::default(), 25, now)
    }

    #[test]
    fn a_debt_is_waited_for_and_a_rest_kept() {
        let account: Account<1> = Account::empty();
        let start = 1000 * SECOND;
        // A burst is there, and no more than a burst.
        assert_eq!(at(start).left(&account), BURST_NANOS / 4);
        at(start).take(&account, BURST_NANOS / 4).unwrap();
        assert_eq!(at(start).left(&account), 0);
        // Not ahead yet: one more goes, whatever it takes.
        at(start).take(&account, SECOND).unwrap();
        assert_eq!(at(start).take(&account, 1), Err(Wait(4 * SECOND)));
        assert_eq!(at(start + SECOND).take(&account, 1), Err(Wait(3 * SECOND)));
        at(start + 4 * SECOND).take(&account, 1).unwrap();
        assert_eq!(
            account.spent.load(Ordering::Relaxed),
            BURST_NANOS / 4 + SECOND + 1
        );
    }

    #[test]
    fn what_must_not_wait_pays_later() {
        let account: Account<1> = Account::empty();
        for _ in 0..3 {
            at(SECOND).charge(&account, SECOND);
        }
        let Err(Wait(wait)) = at(SECOND).take(&account, 1) else {
            panic!("a debt of three seconds");
        };
        assert_eq!(wait, 12 * SECOND - BURST_NANOS);
    }

    #[test]
    fn a_broken_number_heals() {
        let account: Account<1> = Account::empty();
        account.position.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(at(SECOND).take(&account, 1), Err(Wait(DEBT_NANOS)));
        assert!(at(SECOND + DEBT_NANOS).take(&account, 1).is_ok());
    }

    #[test]
    fn corrections_go_both_ways_and_below_nothing() {
        let account: Account<1> = Account::empty();
        let refill = Refill {
            scale: 2 * WHOLE,
            ..Refill::default()
        };
        let bucket = Bucket::new(&refill, 50, SECOND);
        bucket.correct(&account, 10);
        assert_eq!(account.spent.load(Ordering::Relaxed), 10);
        assert_eq!(account.position.load(Ordering::Relaxed), 20);
        bucket.correct(&account, -11);
        assert_eq!(account.spent.load(Ordering::Relaxed), 0);
        assert_eq!(account.position.load(Ordering::Relaxed), 0);
    }

    proptest! {
        /// Whatever is launched whenever: never more than the grant, a burst and the last launch.
        #[test]
        fn no_more_than_was_granted(
            cores in 1u8..100,
            launches in proptest::collection::vec((0..50_000_000u64, 1..100_000_000u64), 1..200),
        ) {
            let account: Account<1> = Account::empty();
            let (start, mut now, mut ran, mut last) = (SECOND, SECOND, 0, 0);
            for (pause, price) in launches {
                now += pause;
                if Bucket::new(&Refill::default(), cores, now).take(&account, price).is_ok() {
                    ran += price;
                    last = last.max(price);
                }
            }
            let rate = u64::from(cores) * 10_000;
            prop_assert!(ran <= part(now - start + BURST_NANOS, rate) + last + 2);
        }

        /// Who always wants gets all that is granted but the last launch.
        #[test]
        fn no_less_than_was_granted(cores in 1u8..100, price in 1_000..100_000_000u64) {
            let account: Account<1> = Account::empty();
            let (start, mut now, mut ran) = (SECOND, SECOND, 0);
            while now < 20 * SECOND {
                match Bucket::new(&Refill::default(), cores, now).take(&account, price) {
                    Ok(()) => ran += price,
                    Err(Wait(nanos)) => now += nanos,
                }
                prop_assume!(ran / price < 200_000);
            }
            let rate = u64::from(cores) * 10_000;
            prop_assert!(ran + 2 >= part(now - start, rate));
        }

        /// No content of the account panics, or makes anybody wait longer than the longest debt.
        #[test]
        fn any_content_is_lived_with(position: u64, spent: u64, cores in 1u8..=100, now: u64, price: u64, more: i64, refill: [u64; 5]) {
            let account: Account<1> = Account::empty();
            account.position.store(position, Ordering::Relaxed);
            account.spent.store(spent, Ordering::Relaxed);
            let [since, base, rate, until, scale] = refill;
            let bucket = Bucket::new(&Refill { since, base, rate, until, scale }, cores, now);
            if let Err(Wait(nanos)) = bucket.take(&account, price) {
                prop_assert!(nanos <= DEBT_NANOS + WHOLE);
            }
            bucket.charge(&account, price);
            bucket.correct(&account, more);
            let _ = bucket.left(&account);
        }
    }
}
