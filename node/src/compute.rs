//! Decides how much of a GPU's time each share gets: from what the sampler reads, it computes what the sampler writes.
//!
//! ```text
//!  account pages: position, spent ─┐
//!  NVML: how busy the GPU was ─────┴─► Controller::step ─► a Refill for each share ─► cap pages
//! ```
//!
//! It does no I/O: tests run it with a simulated GPU, in virtual time.
//!
//! **Rates.** A strict share always gets its cores. A work-conserving one gets its cores and, while
//! it uses them all, its part of the rest: cores that belong to no share, and cores that other shares
//! do not use at present. If it is alone on its GPU, it is not limited.
//!
//! **Scale.** The programs measure the prices of launches, and all of them may be wrong: a kernel that runs longer than
//! the GPU's time slice is measured with the neighbours' slices in it, concurrent kernels are each counted in full, and
//! a tenant may write any number. NVML reports how long the GPU worked for each process. The ratio of both ([`ratio`]),
//! over the same time ([`evidence`]), is the scale of the share's prices. On a full GPU some of a share's launches wait
//! in their queues; that does not mean that a price is wrong.
//!
//! As long as that scale says that prices are high enough, the programs' prices may only fall ([`Refill::falls_until`]): the
//! neighbours' work is in every measurement of a long kernel, now more and now less, and a scale that follows prices up and
//! down comes too late each time.
//!
//! If NVML's processes cannot be assigned to shares, all working shares get a common correction, by the
//! utilization of the whole GPU: downwards and back up, but never above their own measurements, because
//! the rest may be the work of a process without a share.
//!
//! **Debts.** A share that is in debt although it got less than its cores was charged too much, for
//! example because its first measurements were made under contention. The node cancels such a debt.
//!
//! Accounts are not trusted: a share that writes too little gets a higher scale, up to [`MOST_SCALE`], and is
//! [`Decision::suspect`], as is one that writes more than it was granted. When the scales of other shares are computed,
//! a share counts with at most what it was granted.

pub mod evidence;
mod ratio;

use std::collections::BTreeMap;

use tranche_shim_core::ComputePolicy;
use tranche_shim_core::compute::{BURST_NANOS, PERCENT, Refill, WHOLE, part};

use evidence::{Evidence, Report, Step};
use ratio::Averages;

/// From one step to the next, in nanoseconds.
pub const PERIOD_NANOS: u64 = 100_000_000;

/// How long a rate above the cores is valid unless it is renewed, in nanoseconds.
const LEASE_NANOS: u64 = 3_000_000_000;

/// The rate of a work-conserving share that is alone.
const ALONE: u64 = 4 * WHOLE;

/// The least and the most that a price is scaled by, in millionths.
pub const LEAST_SCALE: u64 = WHOLE / 32;
/// See [`LEAST_SCALE`].
pub const MOST_SCALE: u64 = 8 * WHOLE;

/// The most that a scale changes in a step: a second of odd steps changes it by a third.
const STEP: f64 = 0.03;

/// A GPU that works for this part of the time is full: it spends the rest on switching between processes.
const FULL: f64 = 0.9;

/// On a full GPU a smaller difference than this part does not change a scale: launches that wait in the queues look
/// like wrong prices of some percent, and small changes would add up.
const NEAR: f64 = 0.05;

/// Up to this scale prices are high enough, and may only fall.
const HIGH_ENOUGH: f64 = 1.05;

/// A GPU that runs less than this part of what its shares launch does not show that a price has fallen: each share gets as much as
/// the others. There prices may rise as long as most of them is the neighbours' work.
const SHOWS: f64 = 0.98;
/// See [`SHOWS`].
const MOSTLY_ITS_OWN: f64 = 0.5;

/// Weight of a step in the average of what a share uses.
const USE_WEIGHT: f64 = 0.2;

/// How long a share must be working before it is compared with the whole GPU's utilization: by then
/// NVML has samples, and launches that were charged in advance have run. In nanoseconds.
const WATCH_NANOS: u64 = 1_000_000_000;

/// A debt is cancelled when the share wanted more and got this much less than its cores: half a second of its cores.
const OWED_NANOS: f64 = 0.5e9;

/// The longest debt that is cancelled at a time, in nanoseconds of GPU time, and for how many nanoseconds a share's
/// past use counts.
const DEBT_NANOS: u64 = 60_000_000_000;

/// A share that launched nothing for this long is not working, in nanoseconds.
const REST_NANOS: u64 = 500_000_000;

/// The number of steps with an insufficient scale after which an account is suspect: ten seconds.
const SUSPECT_STEPS: u32 = 100;

/// The number of steps in which a share works and is not charged, or is charged more than it was granted, after which
/// its account is suspect: a minute, because a long kernel is charged at once, or at its end.
const SUSPECT_CHARGE_STEPS: u32 = 600;

/// The most that corrections may take from an account between two steps, in nanoseconds.
const CORRECTION_NANOS: u64 = 1_000_000_000;

/// What was read from a share's pages.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Percent of the GPU's time, 1 to 99.
    pub cores: u8,
    /// Strict or work-conserving.
    pub policy: ComputePolicy,
    /// How far it has used its grant; written by the tenant.
    pub position: u64,
    /// The estimated GPU time of its launches; written by the tenant.
    pub spent: u64,
    /// What NVML has reported of its processes since the last step.
    pub report: Report,
}

/// The decision for a share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// What to write to its cap page.
    pub refill: Refill,
    /// Whether it differs from the page's content.
    pub is_changed: bool,
    /// Why its account must be wrong, if it must.
    pub suspect: Option<Suspicion>,
}

/// Why an account must be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspicion {
    /// The sum of what was spent went back.
    WentBack,
    /// The GPU works far more than all accounts say.
    TooLittle,
    /// The account says that more was spent than was granted.
    TooMuch,
}

impl std::fmt::Display for Suspicion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::WentBack => "the GPU time that its account says was spent went back",
            Self::TooLittle => "the GPU works far more than its account says",
            Self::TooMuch => "its account says that more GPU time was spent than was granted",
        })
    }
}

/// Grants one GPU's time to its shares, which are identified by a `K`.
#[derive(Debug)]
pub struct Controller<K> {
    shares: BTreeMap<K, Share>,
    /// The time of the last step.
    last: Option<u64>,
    /// The averages of the whole GPU, for shares whose own ratio is not known.
    whole: Averages,
}

#[derive(Debug)]
struct Share {
    refill: Refill,
    spent: u64,
    /// The time of its last launch.
    launched: u64,
    /// The part of the last step that its account charged, negative for a correction; and an average of what it uses,
    /// at least 0.
    charged: f64,
    uses: f64,
    scale: f64,
    evidence: Evidence,
    averages: Averages,
    /// NVML reports that its prices are high enough.
    prices_only_fall: bool,
    /// Since when it is working; `None` while it is idle.
    since: Option<u64>,
    /// Steps in which the scale could not follow.
    wrong: u32,
    /// Steps in which it worked and was not charged, or was charged more than it was granted.
    uncharged: u32,
    overcharged: u32,
    /// How much less than its cores it got while it wanted more, in nanoseconds; negative if it got
    /// more.
    owed: f64,
}

impl<K: Ord + Clone> Default for Controller<K> {
    fn default() -> Self {
        Self {
            shares: BTreeMap::new(),
            last: None,
            whole: Averages::default(),
        }
    }
}

/// A working share.
#[derive(Clone, Copy)]
struct Worker {
    cores: f64,
    conserving: bool,
    /// It uses everything that it gets.
    wants: bool,
    uses: f64,
}

impl<K: Ord + Clone> Controller<K> {
    /// Decides at `now` (`CLOCK_MONOTONIC` in nanoseconds). `busy` is the part of the last period in
    /// which the GPU worked, 0 to 1, if that is known. `shares` are all shares of this GPU, each with
    /// what was read from its pages; `written` is what the node last wrote for a share that is new
    /// here.
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
        self.follow(now, busy, shares, elapsed);
        // On a full GPU, a share that gets less than it wants has not shown that it wants more.
        let saturated = busy.is_some_and(|busy| busy >= 0.95);
        let workers: Vec<Option<Worker>> = shares
            .iter()
            .map(|(key, reading)| self.shares.get(key)?.worker(now, saturated, reading))
            .collect();
        shares
            .iter()
            .zip(workers.iter().zip(suspects))
            .filter_map(|((key, reading), (worker, suspect))| {
                let rate = rate(reading, *worker, &workers);
                let share = self.shares.get_mut(key)?;
                let suspect = suspect.or_else(|| share.suspicion());
                Some((key.clone(), share.decide(now, reading, rate, suspect)))
            })
            .collect()
    }

    /// Adjusts the scales to the measured utilization.
    fn follow(&mut self, now: u64, busy: Option<f64>, shares: &[(K, Reading)], elapsed: u64) {
        if elapsed == 0 {
            return;
        }
        let scaled: f64 = self.shares.values().map(Share::charged_scaled).sum();
        let is_settled = |share: &Share| {
            let since = share.since.unwrap_or(now);
            now.saturating_sub(since) >= WATCH_NANOS
        };
        if let Some(busy) = busy
            && self.shares.values().any(is_settled)
        {
            self.whole.add(elapsed, busy, scaled);
        }
        // Without the GPU's utilization the ratio would be about old scales.
        let in_common = busy.and_then(|_| self.whole.ratio());
        let mut compared = Vec::new();
        for (key, reading) in shares {
            let Some(share) = self.shares.get_mut(key) else {
                continue;
            };
            let step = share.present_step(now, elapsed, reading);
            if reading.report != Report::Unknown {
                share.note_use(share.charged_scaled());
                let steps = share.compare(now, reading, step);
                if steps > 0 {
                    compared.push((key, reading.cores, steps));
                }
                continue;
            }
            // Its part of the whole GPU's utilization, by its own account.
            let part = if scaled > 0.0 {
                share.charged_scaled() / scaled
            } else {
                0.0
            };
            let worked = busy.map_or(share.charged_scaled(), |busy| busy * part);
            share.evidence.clear();
            share.prices_only_fall = false;
            share.note_use(worked);
            share.note_worked(reading.cores, step, worked);
            // The common ratio is the error of the present scales.
            if is_settled(share)
                && let Some(ratio) = in_common
            {
                share.follow((ratio * share.scale).min(share.scale.max(1.0)), 1);
            }
        }
        let runs = self.part_that_runs(now, shares);
        for (key, cores, steps) in compared {
            if let Some(share) = self.shares.get_mut(key) {
                share.note_charges(now, cores, steps);
                let Some(ratio) = share.averages.ratio() else {
                    continue;
                };
                if !(runs < 1.0 && is_near(ratio / runs, share.scale)) {
                    share.follow(ratio / runs, steps);
                }
                let least = if runs < SHOWS { MOSTLY_ITS_OWN } else { 0.0 };
                share.prices_only_fall = (least..=HIGH_ENOUGH).contains(&share.scale);
            }
        }
    }

    /// The part of its shares' launches that a full GPU runs; 1 for a GPU that has time left. The rest waits in the
    /// queues. A share counts with at most what it was granted, whatever its account says.
    fn part_that_runs(&self, now: u64, shares: &[(K, Reading)]) -> f64 {
        if self.whole.worked < FULL {
            return 1.0;
        }
        let (mut worked, mut launched) = (0.0, 0.0);
        for (key, reading) in shares {
            if let Some(share) = self.shares.get(key)
                && share.since.is_some()
                && reading.report != Report::Unknown
            {
                worked += share.averages.worked;
                launched += share.launches(now, reading.cores);
            }
        }
        if launched > worked {
            worked / launched
        } else {
            1.0
        }
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
            charged: 0.0,
            uses: 0.0,
            scale: parts(scale),
            evidence: Evidence::default(),
            averages: Averages::default(),
            prices_only_fall: false,
            since: None,
            wrong: 0,
            uncharged: 0,
            overcharged: 0,
            owed: 0.0,
        }
    }

    /// Compares what the share was charged with what NVML reports for its processes, in each step that
    /// NVML has described by now. Returns the number of steps in which it was not idle.
    fn compare(&mut self, now: u64, reading: &Reading, step: Step) -> u32 {
        self.evidence.add_step(step);
        if let Report::Worked(worked) = reading.report {
            self.evidence.add(worked);
        }
        let mut compared = 0;
        while let Some(described) = self.evidence.next(now) {
            let step = described.step;
            let worked = described.worked(step.charged * self.scale);
            self.note_worked(reading.cores, step, worked);
            // An idle step proves nothing.
            if worked > 0.0 || step.charged != 0.0 {
                self.averages.add(step.elapsed(), worked, step.charged);
                compared += 1;
            }
        }
        compared
    }

    /// The part of the GPU's time that it launches by its scaled prices, at most what it is granted.
    fn launches(&self, now: u64, cores: u8) -> f64 {
        // Alone it is granted more than there is.
        let granted = parts(self.refill.rate(cores, now)).min(1.0);
        let launched = self.averages.charged * self.scale;
        launched.clamp(0.0, granted)
    }

    /// Counts the steps in which its charges must be wrong.
    fn note_charges(&mut self, now: u64, cores: u8, steps: u32) {
        let Averages { worked, charged } = self.averages;
        let granted = parts(self.refill.rate(cores, now));
        let count = |former: u32, is: bool| if is { former.saturating_add(steps) } else { 0 };
        self.uncharged = count(self.uncharged, worked >= 0.02 && charged < 0.0005);
        self.overcharged = count(self.overcharged, charged * self.scale > 2.0 * granted);
    }

    fn suspicion(&self) -> Option<Suspicion> {
        if self.wrong > SUSPECT_STEPS || self.uncharged > SUSPECT_CHARGE_STEPS {
            Some(Suspicion::TooLittle)
        } else if self.overcharged > SUSPECT_CHARGE_STEPS {
            Some(Suspicion::TooMuch)
        } else {
            None
        }
    }

    /// Moves the scale towards `wanted`, as far as it may in so many steps.
    fn follow(&mut self, wanted: f64, steps: u32) {
        let (least, most) = (parts(LEAST_SCALE), parts(MOST_SCALE));
        self.wrong = if wanted > most {
            self.wrong.saturating_add(steps)
        } else {
            0
        };
        let steps = steps.min(20).cast_signed();
        let change = (1.0 + STEP).powi(steps);
        let change = (wanted / self.scale).clamp(1.0 / change, change);
        self.scale = (self.scale * change).clamp(least, most);
    }

    fn read(&mut self, now: u64, elapsed: u64, reading: &Reading) -> Option<Suspicion> {
        let went_back = reading.spent.saturating_add(CORRECTION_NANOS) < self.spent;
        // A queue of long kernels is charged at once; more than some minutes in a step cannot come
        // from launches.
        let spent = reading
            .spent
            .saturating_sub(self.spent)
            .min(elapsed.saturating_mul(1000));
        let corrected = self
            .spent
            .saturating_sub(reading.spent)
            .min(CORRECTION_NANOS);
        self.spent = reading.spent;
        if spent > 0 {
            self.launched = now;
            self.since.get_or_insert(now);
        } else if now.saturating_sub(self.launched) >= REST_NANOS
            && reading.position <= self.refill.granted(reading.cores, now)
        {
            self.since = None;
        }
        if elapsed > 0 {
            self.charged = (as_f64(spent) - as_f64(corrected)) / as_f64(elapsed);
        }
        went_back.then_some(Suspicion::WentBack)
    }

    fn charged_scaled(&self) -> f64 {
        self.charged.max(0.0) * self.scale
    }

    fn present_step(&self, now: u64, elapsed: u64, reading: &Reading) -> Step {
        Step {
            from: now.saturating_sub(elapsed),
            to: now,
            charged: self.charged,
            in_debt: reading.position > self.refill.granted(reading.cores, now),
        }
    }

    /// Records how much of the GPU it uses at present, 0 to 1.
    fn note_use(&mut self, uses: f64) {
        self.uses += (uses - self.uses) * USE_WEIGHT;
    }

    /// Records the part of a step in which the GPU worked for it, 0 to 1.
    fn note_worked(&mut self, cores: u8, step: Step, worked: f64) {
        let cores = parts(u64::from(cores) * PERCENT);
        let less = (cores - worked) * as_f64(step.elapsed());
        // Time that it could have used and did not is lost.
        self.owed = if step.in_debt || less < 0.0 {
            (self.owed + less).clamp(-as_f64(DEBT_NANOS), as_f64(DEBT_NANOS))
        } else {
            (self.owed + less).min(0.0)
        };
    }

    fn worker(&self, now: u64, saturated: bool, reading: &Reading) -> Option<Worker> {
        let cores = parts(u64::from(reading.cores) * PERCENT);
        let granted = self.refill.granted(reading.cores, now);
        let rate = self.refill.rate(reading.cores, now);
        let in_debt = reading.position > granted;
        if !in_debt && now.saturating_sub(self.launched) >= REST_NANOS {
            return None;
        }
        // Granted time that is not used expires after a burst: a share with most of a burst left
        // does not want more.
        let left = granted.saturating_sub(reading.position);
        let hungry = left < part(BURST_NANOS / 2, rate);
        Some(Worker {
            cores,
            conserving: reading.policy == ComputePolicy::WorkConserving,
            wants: hungry || self.uses >= if saturated { 0.5 } else { 0.9 } * cores,
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
        let ends_soon = |lease: u64| lease < now.saturating_add(LEASE_NANOS / 2);
        let ends = rate != u64::from(cores) * PERCENT && ends_soon(self.refill.until);
        let falls = if self.prices_only_fall {
            self.since.is_some() && ends_soon(self.refill.falls_until)
        } else {
            !self.refill.may_rise(now)
        };
        let debt = reading
            .position
            .saturating_sub(self.refill.granted(cores, now));
        let forgives = debt > 0 && self.owed > OWED_NANOS * parts(u64::from(cores) * PERCENT);
        let is_changed =
            ends || forgives || falls || differ(present, rate) || differ(scale_now, scale);
        if is_changed {
            let until = now.saturating_add(LEASE_NANOS);
            self.refill = Refill {
                falls_until: if self.prices_only_fall { until } else { 0 },
                ..self.refill.then(cores, now, rate, until, scale)
            };
        }
        if forgives {
            // At most the longest debt, because the tenant writes the position.
            self.refill.base = self.refill.base.saturating_add(debt.min(DEBT_NANOS));
            self.owed = 0.0;
            self.evidence.forgive();
        }
        Decision {
            refill: self.refill,
            is_changed,
            suspect,
        }
    }
}

/// The rate of a share, where 1 is the whole GPU.
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

fn is_near(wanted: f64, scale: f64) -> bool {
    (wanted / scale - 1.0).abs() < NEAR
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
