//! Which launches wait for shares of high priority on the same GPU.
//!
//! ```text
//!  launch of a high share ─► Work::add ─► load page: until when it has work
//!  launch of a low share  ─► Queue::wait ◄────┘  naps while there is work, unless it is below its floor
//! ```
//!
//! What is queued on the GPU cannot be taken back. So a low share never has more queued, by its prices, than
//! [`QUEUE_NANOS`], a batch and one launch, also while no high share has work: a request may come at any time.

use super::{BURST_NANOS, WAIT_NANOS, WHOLE, part};
use crate::cap::Priority;
use crate::load::MOST_AHEAD_NANOS;
use crate::sync::{AtomicU64, Ordering};

/// How long low shares wait after the last work of a high share, in nanoseconds: from the half of it to all of it. Its
/// program may only be preparing the next launch.
pub const LINGER_NANOS: u64 = 2_000_000;

/// How much a low share may have queued when it takes its next batch, in nanoseconds of GPU time.
pub const QUEUE_NANOS: u64 = 1_000_000;

/// A high share takes this part of a batch in advance. Launches that are paid from a batch note no work: this is how much
/// of it low shares may not know.
const HIGH_PART: u64 = 16;

impl Priority {
    /// What a share takes in advance, where another would take `ahead`.
    #[must_use]
    pub const fn ahead(self, ahead: u64) -> u64 {
        match self {
            Self::High => ahead / HIGH_PART,
            Self::Normal | Self::Low { .. } => ahead,
        }
    }
}

/// The work of a process with high priority on a GPU. All zeros means none.
#[derive(Debug)]
pub struct Work {
    /// When all that it launched has run, by its prices.
    until: AtomicU64,
    /// What it wrote last.
    noted: AtomicU64,
}

impl Work {
    /// None.
    #[must_use]
    pub fn none() -> Self {
        Self {
            until: AtomicU64::new(0),
            noted: AtomicU64::new(0),
        }
    }

    /// Adds a launch of `nanos` at `now`. Returns what to write into the load page, if it must be written: about once in
    /// half of [`LINGER_NANOS`] at most.
    pub fn add(&self, now: u64, nanos: u64) -> Option<u64> {
        let most = now.saturating_add(MOST_AHEAD_NANOS);
        let until = extend(&self.until, now, nanos, MOST_AHEAD_NANOS);
        let lingers = until.saturating_add(LINGER_NANOS).min(most);
        let noted = self.noted.load(Ordering::Relaxed);
        // A time that is too far ahead is of another clock.
        if noted <= most && lingers.saturating_sub(noted.max(now)) < LINGER_NANOS / 2 {
            return None;
        }
        self.noted.store(lingers, Ordering::Relaxed);
        Some(lingers)
    }
}

/// What a share has paid for its launches in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spent {
    /// Before the launch that waits.
    pub before: u64,
    /// For the launch that waits.
    pub launch: u64,
}

/// The launches of a process with low priority on a GPU. All zeros means none.
#[derive(Debug)]
pub struct Queue {
    /// When all that it launched has run, by its prices.
    until: AtomicU64,
    /// The start of the line of its floor: when there was no work of high shares, and what its share had paid by then.
    since: AtomicU64,
    spent: AtomicU64,
}

impl Queue {
    /// None.
    #[must_use]
    pub fn none() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            until: zero(),
            since: zero(),
            spent: zero(),
        }
    }

    /// For how long a launch has to wait at `now`, unless something changes; 0 if it may be launched. High shares have
    /// work until `busy`; the share keeps `floor` millionths of the GPU's time meanwhile.
    pub fn wait(&self, now: u64, spent: Spent, busy: Option<u64>, floor: u64) -> u64 {
        let queued = self.until.load(Ordering::Relaxed).saturating_sub(now);
        let for_others = if let Some(until) = busy {
            let ahead = self.until_floor(now, spent, floor);
            ahead.min(until.saturating_sub(now))
        } else {
            self.begin(now, spent.before.saturating_add(spent.launch));
            0
        };
        for_others.max(queued.saturating_sub(QUEUE_NANOS))
    }

    /// For how long the share has been ahead of its floor: of the line that began with the present work of high shares.
    fn until_floor(&self, now: u64, spent: Spent, floor: u64) -> u64 {
        let (since, base) = (
            self.since.load(Ordering::Relaxed),
            self.spent.load(Ordering::Relaxed),
        );
        let granted = part(now.saturating_sub(since), floor);
        let paid = spent.before.saturating_add(spent.launch);
        let used = paid.saturating_sub(base);
        if granted > used.saturating_add(part(BURST_NANOS, floor)) {
            // As in a bucket, only so much unused time is kept.
            self.begin(now.saturating_sub(BURST_NANOS), paid);
        }
        let ahead = used.saturating_sub(granted);
        match (ahead, floor) {
            (0, _) => 0,
            (_, 0) => WAIT_NANOS,
            // Rounded up: it sleeps for at least a nanosecond.
            _ => ahead.saturating_mul(WHOLE).div_ceil(floor),
        }
    }

    /// Begins the line of the floor.
    fn begin(&self, since: u64, spent: u64) {
        self.since.store(since, Ordering::Relaxed);
        self.spent.store(spent, Ordering::Relaxed);
    }

    /// Adds a launch of `nanos`.
    pub fn add(&self, now: u64, nanos: u64) {
        extend(&self.until, now, nanos, WAIT_NANOS);
    }
}

/// Moves the end of what is queued, which is at least `now`, by `nanos`, to at most `most` from now; returns it.
fn extend(end: &AtomicU64, now: u64, nanos: u64, most: u64) -> u64 {
    let after = |former: u64| {
        let end = former.max(now).saturating_add(nanos);
        end.min(now.saturating_add(most))
    };
    let mut former = end.load(Ordering::Relaxed);
    loop {
        let next = after(former);
        match end.compare_exchange_weak(former, next, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return next,
            Err(other) => former = other,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{LINGER_NANOS, QUEUE_NANOS, Queue, Spent, Work};
    use crate::compute::batch::BATCH_NANOS;
    use crate::compute::{BURST_NANOS, PERCENT, WAIT_NANOS, part};
    use crate::load::{MOST_AHEAD_NANOS, busy_until};

    /// The most that a low share has queued on the GPU when it launches nothing longer than a batch.
    const MOST_QUEUED_NANOS: u64 = QUEUE_NANOS + BATCH_NANOS;

    const MILLI: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MILLI;

    /// What a low share has launched, and its queue.
    struct Low {
        queue: Queue,
        floor: u64,
        spent: u64,
    }

    impl Low {
        fn new(floor: u64) -> Self {
            Self {
                queue: Queue::none(),
                floor,
                spent: 0,
            }
        }

        /// Tries to launch; the error is how long to wait.
        fn launch(&mut self, now: u64, nanos: u64, busy: Option<u64>) -> Result<(), u64> {
            let spent = Spent {
                before: self.spent,
                launch: nanos,
            };
            match self.queue.wait(now, spent, busy, self.floor) {
                0 => {
                    self.queue.add(now, nanos);
                    self.spent += nanos;
                    Ok(())
                }
                wait => Err(wait),
            }
        }
    }

    #[test]
    fn a_high_share_notes_its_work_and_the_pause_after_it() {
        let work = Work::none();
        assert_eq!(
            work.add(SECOND, 5 * MILLI),
            Some(SECOND + 5 * MILLI + LINGER_NANOS)
        );
        // What is noted covers a short launch.
        assert_eq!(work.add(SECOND, MILLI / 2), None);
        assert_eq!(
            work.add(SECOND, MILLI),
            Some(SECOND + 13 * MILLI / 2 + LINGER_NANOS)
        );
        // No more than others believe.
        assert_eq!(work.add(SECOND, SECOND), Some(SECOND + MOST_AHEAD_NANOS));
        assert_eq!(work.add(SECOND, SECOND), None);
        let later = SECOND + LINGER_NANOS;
        assert_eq!(work.add(later, SECOND), Some(later + MOST_AHEAD_NANOS));
    }

    #[test]
    fn a_low_share_waits_while_there_is_work() {
        let mut low = Low::new(0);
        low.launch(SECOND, MILLI, None).unwrap();
        assert_eq!(
            low.launch(SECOND + MILLI, MILLI, Some(SECOND + 3 * MILLI)),
            Err(2 * MILLI)
        );
        assert_eq!(low.launch(SECOND + 3 * MILLI, MILLI, None), Ok(()));
    }

    #[test]
    fn a_low_share_queues_little() {
        let mut low = Low::new(0);
        low.launch(SECOND, MILLI, None).unwrap();
        low.launch(SECOND, MILLI, None).unwrap();
        assert_eq!(low.launch(SECOND, MILLI, None), Err(MILLI));
        low.launch(SECOND + MILLI, MILLI, None).unwrap();
        // A long kernel is waited for.
        low.launch(SECOND + 2 * MILLI, SECOND, None).unwrap();
        assert_eq!(
            low.launch(SECOND + 3 * MILLI, MILLI, None),
            Err(SECOND - QUEUE_NANOS)
        );
    }

    #[test]
    fn a_low_share_that_rested_has_no_more_than_a_burst() {
        let mut low = Low::new(10 * PERCENT);
        low.launch(SECOND, MILLI, None).unwrap();
        let (mut now, mut ran) = (100 * SECOND, 0);
        while low.launch(now, MILLI, Some(now + MILLI)).is_ok() {
            (now, ran) = (now + MILLI, ran + MILLI);
        }
        let burst = part(BURST_NANOS, 10 * PERCENT);
        // What is granted meanwhile is a tenth.
        assert!((burst..=burst + 3 * MILLI).contains(&ran), "{ran}");
    }

    /// A high share has work all the time, in launches of any length.
    fn share_beside_work(floor: u64, prices: &[u64]) -> f64 {
        let mut low = Low::new(floor);
        let (start, mut now) = (SECOND, SECOND);
        low.launch(now, MILLI, None).unwrap();
        let (before, end) = (low.spent, start + 20 * SECOND);
        for price in prices.iter().cycle() {
            while let Err(wait) = low.launch(now, *price, Some(now + MILLI)) {
                now += wait;
            }
            if now >= end {
                break;
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "some seconds")]
        let share = (low.spent - before) as f64 / (now - start) as f64;
        share
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_low_share_keeps_its_floor(
            floor in 1..50u64, prices in prop::collection::vec(10_000..3 * MILLI, 1..20),
        ) {
            let share = share_beside_work(floor * PERCENT, &prices);
            #[expect(clippy::cast_precision_loss, reason = "a percentage")]
            let wanted = floor as f64 / 100.0;
            // The last launch may be as long as a fiftieth of a second of the smallest floor.
            prop_assert!((share - wanted).abs() < 0.1 * wanted + 0.001, "{share} of {wanted}");
        }

        /// Whatever it launches, and whatever the others do: what is queued is bounded, and a launch waits for a bounded
        /// time if nothing changes.
        #[test]
        fn what_is_queued_is_bounded(
            floor in 0..100 * PERCENT,
            launches in prop::collection::vec((0..5 * MILLI, 0..BATCH_NANOS, prop::option::of(0..MOST_AHEAD_NANOS)), 1..100),
        ) {
            let mut low = Low::new(floor);
            let (mut now, mut runs_until) = (SECOND, SECOND);
            for (pause, price, busy) in launches {
                now += pause;
                match low.launch(now, price, busy.map(|ahead| now + ahead)) {
                    Ok(()) => runs_until = runs_until.max(now) + price,
                    Err(wait) => prop_assert!(wait <= MOST_AHEAD_NANOS.max(MOST_QUEUED_NANOS), "{wait}"),
                }
                prop_assert!(runs_until.saturating_sub(now) <= MOST_QUEUED_NANOS);
            }
        }

        /// What a high share has noted covers its work from the first launch on, and less than [`LINGER_NANOS`] more.
        #[test]
        fn what_is_noted_covers_the_work(
            launches in prop::collection::vec((0..3 * MILLI, 0..3 * MILLI), 1..100),
        ) {
            let work = Work::none();
            let (mut now, mut until, mut page) = (SECOND, 0u64, 0u64);
            for (pause, nanos) in launches {
                now += pause;
                until = (until.max(now) + nanos).min(now + MOST_AHEAD_NANOS);
                if let Some(noted) = work.add(now, nanos) {
                    page = noted;
                }
                let noted = busy_until(&page.to_le_bytes(), now).unwrap_or(0);
                let least = (until + LINGER_NANOS / 2).min(now + MOST_AHEAD_NANOS - LINGER_NANOS);
                prop_assert!(noted >= least && noted <= until + LINGER_NANOS, "{noted} for {until}");
            }
        }

        /// No content of the words causes a panic, and every wait ends.
        #[test]
        fn any_words_are_tolerated(words: [u64; 3], now: u64, before: u64, launch: u64, busy: Option<u64>, floor in 0..1_000_001u64) {
            use crate::sync::Ordering;
            let queue = Queue::none();
            for (word, value) in [&queue.until, &queue.since, &queue.spent].into_iter().zip(words) {
                word.store(value, Ordering::Relaxed);
            }
            let _ = queue.wait(now, Spent { before, launch }, busy, floor);
            queue.add(now, launch);
            prop_assert!(queue.until.load(Ordering::Relaxed).saturating_sub(now) <= WAIT_NANOS);
            let work = Work::none();
            work.until.store(words[0], Ordering::Relaxed);
            work.noted.store(words[1], Ordering::Relaxed);
            if let Some(noted) = work.add(now, launch) {
                prop_assert!(noted.saturating_sub(now) <= MOST_AHEAD_NANOS);
            }
        }
    }
}
