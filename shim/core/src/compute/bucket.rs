//! How much of its grant a share has used: three words of its account.
//!
//! `position` is the share's position on the line of its grant. The share may launch while it is not
//! ahead of the line, and pays by moving forward; the distance ahead of the line is its debt. The position
//! is never further behind than the burst, because unused grant expires, and never further ahead than the
//! grant of [`WAIT_NANOS`], so that no launch waits longer.
//!
//! `carried` is the debt beyond that. While there is one, launches pay double, so half of the rate
//! repays it.
//!
//! `spent` is the sum of the prices, without the node's scale and without expired grant. The node
//! compares it with the measured GPU time.

use super::{BURST_NANOS, CARRIED_NANOS, Refill, WAIT_NANOS, part};
use crate::account::Account;
use crate::sync::{AtomicU64, Ordering};

/// A share's bucket at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    granted: u64,
    rate: u64,
    prices_may_rise: bool,
    refill: Refill,
}

/// How long to wait, in nanoseconds, until the share has no debt at the present rate, which may
/// change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait(pub u64);

impl Bucket {
    /// The bucket of a share of `cores` percent at `now`, `CLOCK_MONOTONIC` in nanoseconds.
    #[must_use]
    pub fn new(refill: &Refill, cores: u8, now: u64) -> Self {
        Self {
            granted: refill.granted(cores, now),
            rate: refill.rate(cores, now).max(1),
            prices_may_rise: refill.may_rise(now),
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

    /// Whether prices may rise.
    #[must_use]
    pub const fn prices_may_rise(&self) -> bool {
        self.prices_may_rise
    }

    /// Nanoseconds of GPU time that the share is behind its grant; 0 with a debt.
    #[must_use]
    pub fn left<const N: usize>(&self, account: &Account<N>) -> u64 {
        let position = account.position.load(Ordering::Relaxed);
        self.granted.saturating_sub(position.max(self.lapsed()))
    }

    /// Corrects what was paid by `more`; a negative correction first reduces what is carried.
    pub fn correct<const N: usize>(&self, account: &Account<N>, more: i64) {
        let (price, scaled) = (more.unsigned_abs(), self.refill.scaled(more.unsigned_abs()));
        if more < 0 {
            change(&account.spent, |spent| spent.saturating_sub(price));
            let carried = change(&account.carried, |carried| carried.saturating_sub(scaled));
            let rest = scaled.saturating_sub(carried);
            change(&account.position, |position| position.saturating_sub(rest));
        } else {
            change(&account.spent, |spent| spent.saturating_add(price));
            let ahead = |position: u64| position.saturating_add(scaled);
            let most = self.most();
            let former = change(&account.position, |position| {
                // A position that is ahead already, by another grant, stays.
                ahead(position).min(most.max(position))
            });
            let beyond = ahead(former).saturating_sub(most.max(former));
            self.carry(account, 0, beyond);
        }
    }

    /// The scaled price of `nanos`.
    #[must_use]
    pub fn scaled(&self, nanos: u64) -> u64 {
        self.refill.scaled(nanos)
    }

    fn lapsed(&self) -> u64 {
        self.granted.saturating_sub(part(BURST_NANOS, self.rate))
    }

    /// The furthest position.
    fn most(&self) -> u64 {
        self.granted.saturating_add(part(WAIT_NANOS, self.rate))
    }

    /// Subtracts `repaid` from what is carried, and adds `beyond`.
    fn carry<const N: usize>(&self, account: &Account<N>, repaid: u64, beyond: u64) {
        if repaid > 0 || beyond > 0 {
            let most = part(CARRIED_NANOS, self.rate);
            change(&account.carried, |carried| {
                carried
                    .saturating_sub(repaid)
                    .saturating_add(beyond)
                    .min(most)
            });
        }
    }

    fn pay<const N: usize>(
        &self,
        account: &Account<N>,
        price: u64,
        in_debt_too: bool,
    ) -> Result<(), Wait> {
        let most = self.most();
        let scaled = self.refill.scaled(price);
        let repaid = scaled.min(account.carried.load(Ordering::Relaxed));
        let mut found = account.position.load(Ordering::Relaxed);
        loop {
            let position = found.clamp(self.lapsed(), most);
            let debt = position.saturating_sub(self.granted);
            let waits = debt > 0 && !in_debt_too;
            let paid = if waits {
                position
            } else {
                position.saturating_add(scaled).saturating_add(repaid)
            };
            let next = paid.min(most);
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
            self.carry(account, repaid, paid - next);
            return Ok(());
        }
    }
}

/// Changes a word; returns what it was.
fn change(word: &AtomicU64, to: impl Fn(u64) -> u64) -> u64 {
    let mut now = word.load(Ordering::Relaxed);
    loop {
        match word.compare_exchange_weak(now, to(now), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(former) => return former,
            Err(other) => now = other,
        }
    }
}

/// The time in which `nanos` of GPU time are granted at `rate`; at least a nanosecond.
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
    use crate::account::Account;
    use crate::compute::{BURST_NANOS, Refill, WAIT_NANOS, WHOLE, part};
    use crate::sync::{AtomicU64, Ordering};

    const SECOND: u64 = 1_000_000_000;

    fn at(now: u64) -> Bucket {
        Bucket::new(&Refill::default(), 25, now)
    }

    #[test]
    fn a_debt_is_waited_for_and_a_rest_kept() {
        let account: Account<1> = Account::empty();
        let start = 1000 * SECOND;
        // A burst is available, and no more than a burst.
        assert_eq!(at(start).left(&account), BURST_NANOS / 4);
        at(start).take(&account, BURST_NANOS / 4).unwrap();
        assert_eq!(at(start).left(&account), 0);
        // Not ahead yet: one more launch passes, at any price.
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
        for _ in 0..2 {
            at(SECOND).charge(&account, SECOND);
        }
        let Err(Wait(wait)) = at(SECOND).take(&account, 1) else {
            panic!("a debt of two seconds");
        };
        assert_eq!(wait, 8 * SECOND - BURST_NANOS);
    }

    /// Launches whose time is known only after they ran: no launch waits longer than the bound, the
    /// rest is repaid at half the rate, and nothing is lost.
    #[test]
    fn a_debt_of_a_minute_is_repaid_without_a_minutes_wait() {
        let account: Account<1> = Account::empty();
        let start = 1000 * SECOND;
        at(start).take(&account, 0).unwrap();
        at(start).correct(&account, 15_000_000_000);
        let (mut now, mut ran, mut longest, mut half) = (start, 15 * SECOND, 0, 0);
        while now < start + 300 * SECOND {
            match at(now).take(&account, SECOND / 100) {
                Ok(()) => ran += SECOND / 100,
                Err(Wait(nanos)) => {
                    longest = longest.max(nanos);
                    now += nanos;
                }
            }
            if now < start + 30 * SECOND {
                half = ran - 15 * SECOND;
            }
        }
        assert!(longest <= WAIT_NANOS, "{longest}");
        // After the wait of 10 s, half of a quarter for 20 s.
        assert!(half.abs_diff(20 * SECOND / 8) < SECOND / 10, "{half}");
        assert_eq!(account.carried.load(Ordering::Relaxed), 0);
        assert!(ran.abs_diff(300 * SECOND / 4) < SECOND / 10, "{ran}");
    }

    #[test]
    fn what_was_charged_too_much_is_taken_off_what_is_carried_first() {
        let account: Account<1> = Account::empty();
        at(SECOND).correct(&account, 60_000_000_000);
        let most = SECOND / 4 + WAIT_NANOS / 4;
        let words = || {
            let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
            (word(&account.position), word(&account.carried))
        };
        assert_eq!(words(), (most, 60 * SECOND - most));
        at(SECOND).correct(&account, -59_000_000_000);
        assert_eq!(words(), (SECOND, 0));
        // A known price of a minute is carried as well.
        at(5 * SECOND).take(&account, 60_000_000_000).unwrap();
        let start = 5 * SECOND / 4 - BURST_NANOS / 4;
        let most = 5 * SECOND / 4 + WAIT_NANOS / 4;
        assert_eq!(words(), (most, start + 60 * SECOND - most));
    }

    #[test]
    fn a_broken_number_heals() {
        let account: Account<1> = Account::empty();
        account.position.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(at(SECOND).take(&account, 1), Err(Wait(WAIT_NANOS)));
        assert!(at(SECOND + WAIT_NANOS).take(&account, 1).is_ok());
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
        /// For any launches at any times: never more than the grant, a burst and the last launch.
        #[test]
        fn a_share_gets_no_more_than_its_grant(
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

        /// A share that always wants more gets everything that is granted, except for the last
        /// launch.
        #[test]
        fn a_share_gets_no_less_than_its_grant(cores in 1u8..100, price in 1_000..100_000_000u64) {
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

        /// No content of the account causes a panic or a longer wait than the longest debt.
        #[test]
        fn any_content_of_the_account_is_tolerated(words: [u64; 3], cores in 1u8..=100, now: u64, price: u64, more: i64, refill: [u64; 5]) {
            let account: Account<1> = Account::empty();
            for (word, value) in [&account.position, &account.spent, &account.carried].into_iter().zip(words) {
                word.store(value, Ordering::Relaxed);
            }
            let [since, base, rate, until, scale] = refill;
            let bucket = Bucket::new(&Refill { since, base, rate, until, scale, falls_until: 0 }, cores, now);
            if let Err(Wait(nanos)) = bucket.take(&account, price) {
                prop_assert!(nanos <= WAIT_NANOS + WHOLE);
            }
            bucket.charge(&account, price);
            bucket.correct(&account, more);
            let _ = bucket.left(&account);
        }
    }
}
