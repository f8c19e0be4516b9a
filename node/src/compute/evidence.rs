//! What a share was charged, and how long the GPU worked for it, in the same time.
//!
//! A sample of NVML describes a time that is over: it arrives up to a second after that time began.
//! What was charged is known at once. If both were compared as they arrive, every program that
//! starts, ends or changes its kernels would be compared with the one before it. So a step is
//! compared when the samples of its time have arrived.

use std::collections::VecDeque;

use super::{PERIOD_NANOS, as_f64};

/// The longest time that a sample describes, in nanoseconds: the driver samples every 1/6 s to 1 s.
const LONGEST_SAMPLE: u64 = 1_000_000_000;

/// How long after its time a sample is read at the latest, in nanoseconds.
const READ_NANOS: u64 = 2 * PERIOD_NANOS;

/// The most samples that are kept for a share: those of 100 processes, each sampled every 100 ms.
const SAMPLES: usize = 1024;

/// A sample: how much the GPU worked for a process of a share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worked {
    /// When the time that the sample describes begins, `CLOCK_MONOTONIC` in nanoseconds.
    pub from: u64,
    /// When it ends.
    pub to: u64,
    /// The part of that time, 0 to 1.
    pub part: f64,
}

/// A step, as the share's account describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub from: u64,
    pub to: u64,
    /// The GPU time of the launches, as a part of the step.
    pub reckons: f64,
    /// Whether the share was in debt at the end.
    pub in_debt: bool,
}

impl Step {
    /// Its length, in nanoseconds.
    pub fn elapsed(&self) -> u64 {
        self.to.saturating_sub(self.from)
    }
}

/// The steps and samples of a share that are not compared yet.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    steps: VecDeque<Step>,
    samples: VecDeque<Worked>,
    /// The longest time that a recent sample describes, in nanoseconds; 0 without a sample.
    longest: u64,
}

impl Evidence {
    /// Adds the newest step.
    pub fn add_step(&mut self, step: Step) {
        self.steps.push_back(step);
    }

    /// Adds samples, which may overlap where they are of several processes.
    pub fn add_samples(&mut self, samples: &[Worked]) {
        for sample in samples {
            let length = sample.to.saturating_sub(sample.from);
            let recent = self.longest - self.longest / 32;
            self.longest = length.clamp(recent, LONGEST_SAMPLE.max(recent));
        }
        self.samples.extend(samples);
        let excess = self.samples.len().saturating_sub(SAMPLES);
        self.samples.drain(..excess);
    }

    /// The oldest step whose evidence is complete at `now`, and the part of it in which the GPU
    /// worked for the share.
    pub fn next(&mut self, now: u64) -> Option<(Step, f64)> {
        let step = *self.steps.front()?;
        let longest = match self.longest {
            0 => LONGEST_SAMPLE,
            known => known,
        };
        if now < step.to.saturating_add(longest + READ_NANOS) {
            return None;
        }
        self.steps.pop_front();
        let worked: f64 = self
            .samples
            .iter()
            .map(|sample| {
                let both = sample
                    .to
                    .min(step.to)
                    .saturating_sub(sample.from.max(step.from));
                as_f64(both) * sample.part
            })
            .sum();
        self.samples.retain(|sample| sample.to > step.to);
        Some((step, (worked / as_f64(step.elapsed().max(1))).min(1.0)))
    }

    /// Forgets everything, because NVML does not report the share's processes any more.
    pub fn clear(&mut self) {
        self.steps.clear();
        self.samples.clear();
    }
}

/// Averages of the measured and the estimated utilization, 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ratio {
    pub worked: f64,
    pub reckoned: f64,
    /// The weight of a period.
    weight: f64,
}

impl Ratio {
    /// Averages of about a second, so that a launch and all of the samples of its run are in them.
    pub fn of_a_second() -> Self {
        Self::new(0.1)
    }

    /// Averages of some seconds.
    pub fn of_seconds() -> Self {
        Self::new(0.025)
    }

    fn new(weight: f64) -> Self {
        Self {
            worked: 0.0,
            reckoned: 0.0,
            weight,
        }
    }

    /// Adds a step of `elapsed` nanoseconds.
    pub fn add(&mut self, elapsed: u64, worked: f64, reckoned: f64) {
        let weight = (self.weight * as_f64(elapsed) / as_f64(PERIOD_NANOS)).min(1.0);
        self.worked += (worked - self.worked) * weight;
        self.reckoned += (reckoned - self.reckoned) * weight;
    }

    /// Measured by estimated; `None` where there was too little work.
    pub fn value(self) -> Option<f64> {
        let enough = self.worked >= 0.002 && self.reckoned >= 0.0005;
        enough.then(|| self.worked / self.reckoned)
    }
}

#[cfg(test)]
mod tests {
    use super::{Evidence, LONGEST_SAMPLE, Step, Worked};

    const MILLI: u64 = 1_000_000;

    fn step(from: u64, reckons: f64) -> Step {
        Step {
            from: from * MILLI,
            to: (from + 100) * MILLI,
            reckons,
            in_debt: false,
        }
    }

    fn sample(from: u64, to: u64, part: f64) -> Worked {
        Worked {
            from: from * MILLI,
            to: to * MILLI,
            part,
        }
    }

    fn worked(evidence: &mut Evidence, now: u64) -> Vec<f64> {
        std::iter::from_fn(|| evidence.next(now * MILLI))
            .map(|(_, worked)| (worked * 1000.0).round() / 1000.0)
            .collect()
    }

    #[test]
    fn a_step_is_compared_with_the_samples_of_its_time() {
        let mut evidence = Evidence::default();
        for from in [1000, 1100, 1200] {
            evidence.add_step(step(from, 1.0));
        }
        // Of two processes; one sample begins before the first step, one ends in the last.
        evidence.add_samples(&[
            sample(850, 1050, 0.5),
            sample(1050, 1250, 0.2),
            sample(1000, 1200, 0.1),
        ]);
        assert_eq!(worked(&mut evidence, 5000), [0.45, 0.3, 0.1]);
        assert!(evidence.steps.is_empty() && evidence.samples.is_empty());
        // The parts of several processes together are at most the whole GPU.
        evidence.add_step(step(2000, 1.0));
        evidence.add_samples(&[sample(2000, 2100, 0.7), sample(2000, 2100, 0.7)]);
        assert_eq!(worked(&mut evidence, 5000), [1.0]);
    }

    #[test]
    fn a_step_waits_as_long_as_samples_take() {
        let mut evidence = Evidence::default();
        evidence.add_step(step(1000, 1.0));
        // Nothing is known of the driver's period: a second, and two steps until it is read.
        assert!(worked(&mut evidence, 2299).is_empty());
        assert_eq!(worked(&mut evidence, 2300), [0.0]);
        // The driver samples every 100 ms.
        let mut at = 3000;
        while at < 20_000 {
            evidence.add_step(step(at, 1.0));
            evidence.add_samples(&[sample(at, at + 100, 1.0)]);
            worked(&mut evidence, at);
            at += 100;
        }
        evidence.add_step(step(at, 1.0));
        assert_eq!(worked(&mut evidence, at + 399), [1.0; 4]);
        assert_eq!(worked(&mut evidence, at + 400), [0.0]);
        // One sample was missing: the next one is longer, and so is the wait.
        evidence.add_samples(&[sample(at, at + 300, 1.0)]);
        evidence.add_step(step(at + 100, 1.0));
        assert!(worked(&mut evidence, at + 699).is_empty());
        assert_eq!(worked(&mut evidence, at + 700), [1.0]);
        // No sample makes it wait for longer than the driver's longest period.
        evidence.add_samples(&[sample(0, 1 << 40, 1.0)]);
        assert_eq!(evidence.longest, LONGEST_SAMPLE);
    }
}
