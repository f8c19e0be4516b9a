//! How a GPU's time is granted to its shares: what the sampler writes, from what it reads.
//!
//! ```text
//!  account pages: position, spent ─┐
//!  NVML: how busy the GPU was ─────┴─► Controller::step ─► a Refill for each share ─► cap pages
//! ```
//!
//! Pure: a test runs it against a simulated GPU, in virtual time.
//!
//! **Rates.** A strict share always has its cores. A work-conserving one has its cores, and while it
//! uses them all, its part of what the others leave: of what is not anybody's, and of what the owners
//! do not use at present. Alone on its GPU it is not held back at all.
//!
//! **Scale.** The prices of launches are the programs' own measurements, and may be wrong in common:
//! contention makes them long, kernels that run side by side are each counted whole, and a tenant may
//! write what it likes. NVML says how long the GPU really worked. The ratio of both, slowly followed,
//! becomes the scale of the prices of the shares that were at work. NVML's figure is the GPU's, not the
//! share's: with several at work they are corrected in common.
//!
//! Nothing in an account is believed: a share that writes too little gets a higher scale, up to
//! [`MOST_SCALE`], and is [`Decision::suspect`]; one that writes too much holds up itself.

use std::collections::BTreeMap;

use tranche_shim_core::ComputePolicy;
use tranche_shim_core::compute::{BURST_NANOS, PERCENT, Refill, WHOLE, part};

/// From one step to the next, in nanoseconds.
pub const PERIOD_NANOS: u64 = 100_000_000;

/// How long a rate above the cores is good for without another word, in nanoseconds.
const LEASE_NANOS: u64 = 3_000_000_000;

/// The rate of a work-conserving share that is alone.
const ALONE: u64 = 4 * WHOLE;

/// The least and the most that a price is scaled by, in millionths.
pub const LEAST_SCALE: u64 = WHOLE / 8;
/// See [`LEAST_SCALE`].
pub const MOST_SCALE: u64 = 8 * WHOLE;

/// How much of the way to the measured scale a step goes: NVML's figure is a second old on average.
const GAIN: f64 = 0.05;

/// Weight of a step in the averages.
const WEIGHT: f64 = 0.1;

/// A share that launched nothing for so long is not at work, in nanoseconds.
const REST_NANOS: u64 = 500_000_000;

/// What an account may lose by corrections between two steps, in nanoseconds.
const CORRECTION_NANOS: u64 = 1_000_000_000;

/// What a share's pages say.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Percent of the GPU's time, 1 to 99.
    pub cores: u8,
    /// How strictly that is meant.
    pub policy: ComputePolicy,
    /// How far it has used its grant; the tenant's word.
    pub position: u64,
    /// What its launches were reckoned to take; the tenant's word.
    pub spent: u64,
}

/// What a share gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// What is to be written to its cap page.
    pub refill: Refill,
    /// Whether that says more than what is there.
    pub is_news: bool,
    /// Why its account cannot be right, if so.
    pub suspect: Option<Suspicion>,
}

/// Why an account cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspicion {
    /// The sum of what was spent went back.
    WentBack,
    /// The GPU works far more than all accounts say.
    TooLittle,
}

impl std::fmt::Display for Suspicion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::WentBack => "the GPU time that its account says was spent went back",
            Self::TooLittle => "the GPU works far more than its account says",
        })
    }
}

/// Grants one GPU's time to its shares, known by a `K`.
#[derive(Debug)]
pub struct Controller<K> {
    shares: BTreeMap<K, Share>,
    /// When the last step was.
    last: Option<u64>,
    /// How busy the GPU was, and how busy the accounts say it was: averages, in parts of 1.
    worked: f64,
    reckoned: f64,
}

#[derive(Debug)]
struct Share {
    refill: Refill,
    spent: u64,
    /// When it last launched something.
    launched: u64,
    /// What it used in the last step by its account and scale, in parts of 1, and an average.
    reckons: f64,
    uses: f64,
    scale: f64,
}

impl<K: Ord + Clone> Default for Controller<K> {
    fn default() -> Self {
        Self {
            shares: BTreeMap::new(),
            last: None,
            worked: 0.0,
            reckoned: 0.0,
        }
    }
}

/// A share at work.
#[derive(Clone, Copy)]
struct Worker {
    cores: f64,
    conserving: bool,
    /// It takes all that it gets.
    wants: bool,
    uses: f64,
}

impl<K: Ord + Clone> Controller<K> {
    /// Decides at `now` (`CLOCK_MONOTONIC` in nanoseconds). `busy` is how much of the time before the
    /// GPU worked, in parts of 1, if that is known. `shares` are all of this GPU's, each with what its
    /// pages say; `written` is what the node last wrote for a share that is new here.
    pub fn step(
        &mut self,
        now: u64,
        busy: Option<f64>,
        shares: &[(K, Reading)],
        written: impl Fn(&K) -> Refill,
    ) -> Vec<(K, Decision)> {
        let elapsed = self.last.map_or(0, |last| now.saturating_sub(last));
        self.last = Some(now);
        self.shares
            .retain(|known, _| shares.iter().any(|(key, _)| key == known));
        let mut suspects = Vec::with_capacity(shares.len());
        for (key, reading) in shares {
            let share = self.shares.entry(key.clone()).or_insert_with(|| {
                let refill = written(key);
                Share::new(refill, reading)
            });
            suspects.push(share.read(now, elapsed, reading));
        }
        self.follow(now, busy, elapsed);
        let workers: Vec<Option<Worker>> = shares
            .iter()
            .map(|(key, reading)| self.shares.get(key)?.worker(now, reading))
            .collect();
        let too_little = self.is_too_little();
        shares
            .iter()
            .zip(workers.iter().zip(suspects))
            .filter_map(|((key, reading), (worker, suspect))| {
                let rate = rate(reading, *worker, &workers);
                let share = self.shares.get_mut(key)?;
                let suspect =
                    suspect.or((too_little && worker.is_some()).then_some(Suspicion::TooLittle));
                Some((key.clone(), share.decide(now, reading, rate, suspect)))
            })
            .collect()
    }

    /// Follows the ratio of what the GPU worked to what the shares at work reckoned.
    fn follow(&mut self, now: u64, busy: Option<f64>, elapsed: u64) {
        let (Some(busy), true) = (busy, elapsed > 0) else {
            return;
        };
        let at_work = |share: &Share| now.saturating_sub(share.launched) < REST_NANOS;
        let reckoned: f64 = self.shares.values().map(|share| share.reckons).sum();
        self.worked += (busy - self.worked) * WEIGHT;
        self.reckoned += (reckoned - self.reckoned) * WEIGHT;
        // Little work says little.
        if self.worked < 0.02 || self.reckoned < 0.01 {
            return;
        }
        let step = (self.worked / self.reckoned).clamp(0.1, 10.0).powf(GAIN);
        for share in self.shares.values_mut().filter(|share| at_work(share)) {
            share.scale = (share.scale * step).clamp(parts(LEAST_SCALE), parts(MOST_SCALE));
        }
    }

    /// Even at the highest scale the accounts do not explain what the GPU does.
    fn is_too_little(&self) -> bool {
        self.worked > 0.1 && self.reckoned * 2.0 < self.worked
    }
}

impl Share {
    fn new(refill: Refill, reading: &Reading) -> Self {
        let scale = match refill.scale {
            0 => WHOLE,
            scale => scale.clamp(LEAST_SCALE, MOST_SCALE),
        };
        Self {
            refill,
            spent: reading.spent,
            launched: 0,
            reckons: 0.0,
            uses: 0.0,
            scale: parts(scale),
        }
    }

    fn read(&mut self, now: u64, elapsed: u64, reading: &Reading) -> Option<Suspicion> {
        let went_back = reading.spent.saturating_add(CORRECTION_NANOS) < self.spent;
        // A queue of long kernels is reckoned at once; more than minutes in a step is no launch's.
        let spent = reading
            .spent
            .saturating_sub(self.spent)
            .min(elapsed.saturating_mul(1000));
        self.spent = reading.spent;
        if spent > 0 {
            self.launched = now;
        }
        if elapsed > 0 {
            self.reckons = as_f64(spent) / as_f64(elapsed) * self.scale;
            self.uses += (self.reckons - self.uses) * 2.0 * WEIGHT;
        }
        went_back.then_some(Suspicion::WentBack)
    }

    fn worker(&self, now: u64, reading: &Reading) -> Option<Worker> {
        let cores = parts(u64::from(reading.cores) * PERCENT);
        let granted = self.refill.granted(reading.cores, now);
        let rate = self.refill.rate(reading.cores, now);
        let in_debt = reading.position > granted;
        if !in_debt && now.saturating_sub(self.launched) >= REST_NANOS {
            return None;
        }
        // What is granted and not used lapses after a burst: who has most of one left does not want.
        let left = granted.saturating_sub(reading.position);
        let hungry = left < part(BURST_NANOS / 2, rate);
        Some(Worker {
            cores,
            conserving: reading.policy == ComputePolicy::WorkConserving,
            wants: hungry || self.uses >= 0.9 * cores,
            uses: self.uses,
        })
    }

    fn decide(
        &mut self,
        now: u64,
        reading: &Reading,
        rate: f64,
        suspect: Option<Suspicion>,
    ) -> Decision {
        let cores = reading.cores;
        let (rate, scale) = (millionths(rate), millionths(self.scale));
        let present = self.refill.rate(cores, now);
        let scale_now = if self.refill.scale == 0 {
            WHOLE
        } else {
            self.refill.scale
        };
        let ends = rate != u64::from(cores) * PERCENT
            && self.refill.until < now.saturating_add(LEASE_NANOS / 2);
        let is_news = ends || differ(present, rate) || differ(scale_now, scale);
        if is_news {
            let until = now.saturating_add(LEASE_NANOS);
            self.refill = self.refill.then(cores, now, rate, until, scale);
        }
        Decision {
            refill: self.refill,
            is_news,
            suspect,
        }
    }
}

/// The rate of a share, in parts of 1.
fn rate(reading: &Reading, worker: Option<Worker>, workers: &[Option<Worker>]) -> f64 {
    let cores = parts(u64::from(reading.cores) * PERCENT);
    let Some(me) = worker else { return cores };
    if !me.conserving {
        return cores;
    }
    let at_work = || workers.iter().flatten();
    if at_work().count() == 1 {
        return parts(ALONE);
    }
    if !me.wants {
        return cores;
    }
    let taken: f64 = at_work()
        .map(|worker| {
            if worker.wants {
                worker.cores
            } else {
                (worker.uses * 1.1).min(worker.cores)
            }
        })
        .sum();
    let wanting: f64 = at_work()
        .filter(|worker| worker.conserving && worker.wants)
        .map(|worker| worker.cores)
        .sum();
    cores + (1.0 - taken).max(0.0) * cores / wanting
}

/// Whether two numbers of millionths are more than half a percent apart.
fn differ(a: u64, b: u64) -> bool {
    a.abs_diff(b) * 200 > a.max(b)
}

fn parts(millionths: u64) -> f64 {
    as_f64(millionths) / as_f64(WHOLE)
}

#[expect(clippy::cast_precision_loss, reason = "a ratio of it is wanted")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and some millions"
)]
fn millionths(parts: f64) -> u64 {
    (parts * as_f64(WHOLE)).round() as u64
}
