//! A GPU, the programs of its shares and the node's sampler, in virtual time.
//!
//! The GPU runs one kernel at a time and lets processes take turns of 2 ms. Programs launch as the
//! shim lets them: the same prices, batches and accounts, and measurements as events make them, with
//! the time of everything else that ran in between. The sampler steps every 100 ms, with the
//! utilization in whole percent: of the GPU in the last second, and of each process since the last
//! answer, as NVML reports it.

use std::collections::VecDeque;

use tranche_node::compute::evidence::{Report, Worked};
use tranche_node::compute::{Controller, Decision, PERIOD_NANOS, Reading};
use tranche_shim_core::compute::bucket::Wait;
use tranche_shim_core::compute::costs::key;
use tranche_shim_core::compute::{Batch, Bucket, Costs, Price, Refill, Shape, WAIT_NANOS};
use tranche_shim_core::{Account, ComputePolicy};

pub const MICRO: u64 = 1_000;
pub const MILLI: u64 = 1_000_000;
pub const SECOND: u64 = 1_000_000_000;
const SLICE: u64 = 2 * MILLI;

/// A share's pages.
pub struct Share {
    pub cores: u8,
    pub policy: ComputePolicy,
    pub account: Box<Account<1>>,
    pub refill: Refill,
    /// What the tenant claims to have spent, if it lies.
    pub lie: Option<u64>,
    pub last: Option<Decision>,
    /// The GPU time of its kernels, and since when it is counted.
    pub ran: u64,
    /// Nanoseconds since the last answer in which the GPU worked for it, by the driver's samples.
    worked: f64,
}

/// A process that launches as much as it may.
pub struct Program {
    pub share: usize,
    /// Nanoseconds of its kernels, in turn.
    pub kernels: Vec<u64>,
    /// Each launch has a grid that was not launched before.
    pub new_grids: bool,
    /// Launches that may be queued before it waits for one.
    pub depth: usize,
    /// When it starts, and when it works: this much of each period.
    pub from: u64,
    pub until: u64,
    pub works: (u64, u64),
    /// Its measurements, in percent of the true time.
    pub measures: u64,
    // Its state.
    pub costs: Box<Costs<2048, 1024>>,
    pub batch: Batch,
    pub launched: usize,
    pub looks: u64,
    pub at: u64,
    pub held_since: Option<u64>,
    pub owes: Option<(u64, bool)>,
    /// Since when a launch waits for its share's debt, and the longest such wait.
    pub waits_since: Option<u64>,
    pub longest_wait: u64,
    pub lane: VecDeque<Kernel>,
    /// When its queue was last empty.
    pub idle_at: u64,
    /// The GPU time of its kernels since the driver's last sample.
    pub ran: u64,
}

pub struct Kernel {
    left: u64,
    shape: Shape,
    /// The time of its launch, if it is measured.
    measured: Option<u64>,
}

impl Program {
    pub fn new(share: usize, kernels: &[u64]) -> Self {
        Self {
            share,
            kernels: kernels.to_vec(),
            new_grids: false,
            depth: 64,
            from: 0,
            until: u64::MAX,
            works: (1, 1),
            measures: 100,
            costs: Box::new(Costs::empty()),
            batch: Batch::new(),
            launched: 0,
            looks: 0,
            at: 0,
            held_since: None,
            owes: None,
            waits_since: None,
            longest_wait: 0,
            lane: VecDeque::new(),
            idle_at: 0,
            ran: 0,
        }
    }
}

impl Program {
    /// The price of one of its kernels, if it is trusted.
    pub fn price(&self, which: usize) -> Option<u64> {
        self.costs.trusted(shape_key(which, 1))
    }
}

/// The key of a kernel with a grid of so many threads; with 0, of the kernel alone.
fn shape_key(which: usize, work: u64) -> u64 {
    key(which as u64 + 1, [work, 0, 0])
}

/// What NVML reports.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Nvml {
    /// The GPU's utilization and that of each process.
    EachProcess,
    /// In each sample the process that is found running, with the GPU's utilization.
    OneProcess,
    /// The GPU's utilization only, or processes that cannot be assigned to shares.
    WholeGpu,
    /// Nothing.
    Silent,
}

pub struct World {
    pub now: u64,
    pub shares: Vec<Share>,
    pub programs: Vec<Program>,
    pub node_lives: bool,
    pub nvml: Nvml,
    /// Percent of the GPU's time that processes without a share use.
    pub foreign: u8,
    /// How long the GPU stands still between two processes, and the rest of the present switch.
    pub switch: u64,
    switching: u64,
    /// The time between two of the driver's samples, and the last one's.
    pub samples_every: u64,
    sampled: u64,
    /// The last answer's time, and nanoseconds since then that the GPU worked for ended processes.
    answered: u64,
    ended: f64,
    random: u64,
    /// The longest time for which the host does not run a program that could launch: one in a hundred times.
    pub longest_stall: u64,
    controller: Controller<usize>,
    next_step: u64,
    /// The process whose turn it is, and the rest of its time slice.
    turn: usize,
    slice: u64,
    ran_last: usize,
    /// The total GPU time, at each step of the last second.
    ran: u64,
    history: VecDeque<u64>,
}

impl World {
    /// A GPU with shares of so many cores.
    pub fn new(shares: &[(u8, ComputePolicy)]) -> Self {
        let share = |&(cores, policy): &(u8, ComputePolicy)| Share {
            cores,
            policy,
            account: Box::new(Account::empty()),
            refill: Refill::default(),
            lie: None,
            last: None,
            ran: 0,
            worked: 0.0,
        };
        Self {
            // The machine has been up for some time.
            now: 1000 * SECOND,
            shares: shares.iter().map(share).collect(),
            programs: Vec::new(),
            node_lives: true,
            nvml: Nvml::EachProcess,
            foreign: 0,
            switch: 0,
            switching: 0,
            samples_every: SECOND / 6,
            sampled: 1000 * SECOND,
            answered: 1000 * SECOND,
            ended: 0.0,
            random: 1,
            longest_stall: 0,
            controller: Controller::default(),
            next_step: 1000 * SECOND,
            turn: 0,
            slice: SLICE,
            ran_last: 0,
            ran: 0,
            history: VecDeque::new(),
        }
    }

    /// Adds a program; its times count from now.
    pub fn start(&mut self, mut program: Program) {
        program.from += self.now;
        program.until = program.until.saturating_add(self.now);
        program.at = program.from;
        self.programs.push(program);
    }

    /// Lets `nanos` pass; returns the percent of the GPU's time that each share had.
    pub fn run(&mut self, nanos: u64) -> Vec<f64> {
        let end = self.now + nanos;
        let before: Vec<u64> = self.shares.iter().map(|share| share.ran).collect();
        while self.now < end {
            if self.now >= self.sampled + self.samples_every {
                self.sample();
            }
            if self.now >= self.next_step {
                self.step();
            }
            for nth in 0..self.programs.len() {
                while self.programs[nth].at <= self.now && self.attempt(nth) {}
            }
            let wakes = self.programs.iter().map(|p| {
                if p.lane.len() < p.depth {
                    p.at
                } else {
                    u64::MAX
                }
            });
            let next = wakes.filter(|at| *at > self.now).min().unwrap_or(end);
            let sample = self.sampled + self.samples_every;
            self.work(next.min(self.next_step).min(sample).min(end));
        }
        let percent = |(share, before): (&Share, u64)| {
            #[expect(clippy::cast_precision_loss, reason = "a percentage")]
            let part = (share.ran - before) as f64 / nanos as f64;
            part * 100.0
        };
        self.shares.iter().zip(before).map(percent).collect()
    }

    /// A random number below `end`.
    fn random(&mut self, end: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % end.max(1)
    }

    /// For how long the host does not run a program that could launch.
    fn stall(&mut self) -> u64 {
        if self.longest_stall > 0 && self.random(100) == 0 {
            self.random(self.longest_stall)
        } else {
            0
        }
    }

    /// The driver's sample.
    fn sample(&mut self) {
        let length = self.now - std::mem::replace(&mut self.sampled, self.now);
        let all: u64 = self.programs.iter().map(|program| program.ran).sum();
        // A moment of the GPU's work.
        let mut moment = self.random(all);
        for program in &mut self.programs {
            let mut ran = std::mem::take(&mut program.ran);
            if self.nvml == Nvml::OneProcess {
                let is_named = moment < ran;
                moment = if is_named { u64::MAX } else { moment - ran };
                ran = if is_named { all } else { 0 };
            }
            #[expect(clippy::cast_precision_loss, reason = "at most a second")]
            let worked = percent(ran, length) * length as f64;
            if self.now >= program.until && program.lane.is_empty() {
                self.ended += worked;
            } else {
                self.shares[program.share].worked += worked;
            }
        }
    }

    /// What NVML reports of a share.
    fn report(&self, share: &Share) -> Report {
        if matches!(self.nvml, Nvml::WholeGpu | Nvml::Silent) {
            return Report::Unknown;
        }
        let (from, to) = (self.answered, self.sampled);
        if from == to {
            return Report::NothingNew;
        }
        #[expect(clippy::cast_precision_loss, reason = "some seconds")]
        let part = |nanos: f64| (nanos / (to - from) as f64).min(1.0);
        Report::Worked(Worked {
            from,
            to,
            part: part(share.worked),
            ended: part(self.ended),
        })
    }

    /// The sampler's step.
    fn step(&mut self) {
        self.next_step = self.now + PERIOD_NANOS;
        let busy = percent_of_last_second(&mut self.history, self.ran)
            .map(|busy| (busy + f64::from(self.foreign) / 100.0).min(1.0))
            .filter(|_| self.nvml != Nvml::Silent);
        if !self.node_lives {
            return;
        }
        let readings: Vec<(usize, Reading)> = self
            .shares
            .iter()
            .enumerate()
            .map(|(nth, share)| {
                let (position, spent) = share.account.compute();
                (
                    nth,
                    Reading {
                        cores: share.cores,
                        policy: share.policy,
                        position,
                        spent: share.lie.unwrap_or(spent),
                        report: self.report(share),
                    },
                )
            })
            .collect();
        self.answered = self.sampled;
        self.ended = 0.0;
        for share in &mut self.shares {
            share.worked = 0.0;
        }
        let written: Vec<Refill> = self.shares.iter().map(|share| share.refill).collect();
        for (nth, decision) in self
            .controller
            .step(self.now, busy, &readings, |nth| written[*nth])
        {
            self.shares[nth].refill = decision.refill;
            self.shares[nth].last = Some(decision);
        }
    }

    /// Tries a launch as the shim does; false if it must wait.
    fn attempt(&mut self, nth: usize) -> bool {
        let now = self.now;
        let stall = self.stall();
        let program = &mut self.programs[nth];
        let share = &self.shares[program.share];
        if program.lane.len() >= program.depth {
            return false;
        }
        let (works, of) = program.works;
        let phase = (now - program.from) % of;
        if phase >= works {
            program.at = now - phase + of;
            return false;
        }
        if now >= program.until {
            program.at = u64::MAX;
            return false;
        }
        let which = program.launched % program.kernels.len();
        let work = if program.new_grids {
            1 + program.launched as u64
        } else {
            1
        };
        let key = shape_key(which, work);
        let launch = Shape {
            key,
            kernel: shape_key(which, 0),
            work,
        };
        let mut measure = false;
        let paid = program.owes.is_none()
            && program
                .costs
                .trusted(key)
                .is_some_and(|price| program.batch.pay(price));
        if !paid {
            if program.owes.is_none() {
                let under_way = program.lane.iter().any(|kernel| {
                    kernel.shape.kernel == launch.kernel && kernel.measured.is_some()
                });
                // A kernel that runs for long is measured while it runs.
                if let Some(runs) = program.lane.front()
                    && let Some(launched) = runs.measured
                {
                    let seen = now - program.idle_at.max(launched);
                    program.costs.at_least(&runs.shape, seen);
                }
                let hold = program.costs.hold(&launch);
                if hold > 0 && under_way {
                    let since = *program.held_since.get_or_insert(now);
                    if now < since + hold {
                        program.at = now + 100 * MICRO;
                        return false;
                    }
                }
                if let Some(since) = program.held_since.take() {
                    program.costs.note_hold(&launch, now - since);
                }
                let price = program.costs.price(&launch);
                program.looks += 1;
                measure = !matches!(price, Price::Trusted(_)) || program.looks.is_multiple_of(8);
                let due = program.batch.pay_part(price.nanos(), now);
                program.batch.fill(due.ahead);
                program.owes = Some((due.rest + due.ahead, measure));
            }
            let (owes, measured) = program.owes.unwrap_or_default();
            measure = measured;
            let bucket = Bucket::new(&share.refill, share.cores, now);
            if let Err(Wait(wait)) = bucket.take(&share.account, owes) {
                let since = *program.waits_since.get_or_insert(now);
                if now - since < WAIT_NANOS {
                    program.at = now + wait.min(20 * MILLI) + stall;
                    return false;
                }
                bucket.charge(&share.account, owes);
            }
            program.owes = None;
            let since = program.waits_since.take().unwrap_or(now);
            program.longest_wait = program.longest_wait.max(now - since);
        }
        let measured = program
            .lane
            .iter()
            .filter(|kernel| kernel.measured.is_some())
            .count();
        if program.lane.is_empty() {
            program.idle_at = now;
        }
        program.lane.push_back(Kernel {
            left: program.kernels[which],
            shape: launch,
            measured: (measure && measured < 16).then_some(now),
        });
        program.launched += 1;
        // The host takes two microseconds for a launch.
        program.at = now + 2 * MICRO + stall;
        false
    }

    /// The GPU's work until `end`, or until a kernel ends.
    fn work(&mut self, end: u64) {
        while self.now < end {
            let count = self.programs.len();
            let Some(nth) = (0..count)
                .map(|n| (self.turn + n) % count.max(1))
                .find(|n| !self.programs[*n].lane.is_empty())
            else {
                self.now = end;
                return;
            };
            if nth != self.turn {
                (self.turn, self.slice) = (nth, SLICE);
            }
            if nth != self.ran_last {
                (self.ran_last, self.switching) = (nth, self.switch);
            }
            if self.switching > 0 {
                let passes = self.switching.min(end - self.now);
                self.switching -= passes;
                self.now += passes;
                continue;
            }
            let alone = self.programs.iter().filter(|p| !p.lane.is_empty()).count() == 1;
            let program = &mut self.programs[nth];
            let kernel = &mut program.lane[0];
            let slice = if alone { u64::MAX } else { self.slice };
            let runs = kernel.left.min(slice).min(end - self.now);
            kernel.left -= runs;
            self.now += runs;
            self.ran += runs;
            self.shares[program.share].ran += runs;
            program.ran += runs;
            self.slice = self.slice.saturating_sub(runs);
            let ended = kernel.left == 0;
            if ended && let Some(kernel) = program.lane.pop_front() {
                if let Some(launched) = kernel.measured {
                    let took = (self.now - program.idle_at.max(launched)) * program.measures / 100;
                    let share = &self.shares[program.share];
                    let bucket = Bucket::new(&share.refill, share.cores, self.now);
                    let may_rise = bucket.prices_may_rise();
                    let more = program.costs.note(&kernel.shape, took, may_rise);
                    bucket.correct(&share.account, more);
                }
                program.idle_at = self.now;
            }
            if self.slice == 0 {
                (self.turn, self.slice) = ((nth + 1) % count, SLICE);
            }
            if ended {
                return;
            }
        }
    }
}

/// As NVML reports it: in whole percent; as a number from 0 to 1.
fn percent_of_last_second(history: &mut VecDeque<u64>, ran: u64) -> Option<f64> {
    history.push_back(ran);
    if history.len() > 11 {
        history.pop_front();
    }
    let steps = history.len() as u64 - 1;
    (steps > 0).then(|| percent(ran - history[0], steps * PERIOD_NANOS))
}

/// The nearest whole percent, as a number from 0 to 1.
fn percent(ran: u64, of: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "at most 100")]
    let percent = ((ran * 100 + of / 2) / of) as f64;
    percent / 100.0
}

/// How equal parts are: 1 for all the same (Jain's index).
pub fn jain(parts: &[f64]) -> f64 {
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    #[expect(clippy::cast_precision_loss, reason = "a few")]
    let count = parts.len() as f64;
    sum * sum / (count * squares)
}
