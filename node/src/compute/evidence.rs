//! What a share was charged, and how long the GPU worked for it, in the same time.
//!
//! NVML's answer describes the past: it arrives up to a second after the time that it describes has begun. Charges are
//! known at once. If both were compared as they arrive, every program that starts, ends or changes its kernels would be
//! compared with the one before it. So a step waits for the answer that describes its time; a step without such an
//! answer is not compared.

use std::collections::VecDeque;

use super::as_f64;

/// How long a step waits for an answer, in nanoseconds: twice the longest time between two samples of
/// the driver.
const PATIENCE_NANOS: u64 = 2_000_000_000;

/// The part of a step that must be described by answers.
const DESCRIBED: f64 = 0.9;

/// What NVML reports of a share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Report {
    /// NVML does not report processes, or it is not known which of them are the share's.
    Unknown,
    /// No answer is newer than the last one.
    NothingNew,
    /// A new answer.
    Worked(Worked),
}

/// How much the GPU worked for a share in a period.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worked {
    /// When the period begins, `CLOCK_MONOTONIC` in nanoseconds.
    pub from: u64,
    /// When it ends.
    pub to: u64,
    /// The part of it in which the GPU worked for the share's processes, 0 to 1.
    pub part: f64,
    /// The part in which it worked for processes that have ended since, 0 to 1: they may have been the
    /// share's.
    pub ended: f64,
}

/// A step, as the share's account describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub from: u64,
    pub to: u64,
    /// The GPU time that was charged, as a part of the step; below 0 for a correction.
    pub charged: f64,
    /// Whether the share was in debt at the end.
    pub in_debt: bool,
}

impl Step {
    /// Its length, in nanoseconds.
    pub fn elapsed(&self) -> u64 {
        self.to.saturating_sub(self.from)
    }
}

/// A step and what the GPU worked in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Compared {
    pub step: Step,
    part: f64,
    ended: f64,
}

impl Compared {
    /// The part of the step in which the GPU worked for the share, 0 to 1. Work for processes that have ended counts as
    /// far as `expected` needs it.
    pub fn worked(&self, expected: f64) -> f64 {
        expected.clamp(self.part, (self.part + self.ended).min(1.0))
    }
}

/// The steps and answers of a share that have not been compared yet.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    steps: VecDeque<Step>,
    answers: VecDeque<Worked>,
}

impl Evidence {
    /// Adds the newest step.
    pub fn add_step(&mut self, step: Step) {
        self.steps.push_back(step);
    }

    /// Adds the newest answer.
    pub fn add(&mut self, answer: Worked) {
        self.answers.push_back(answer);
    }

    /// The oldest step that was not compared yet and whose time answers describe.
    pub fn next(&mut self, now: u64) -> Option<Compared> {
        loop {
            let step = *self.steps.front()?;
            let known_to = self.answers.back().map_or(0, |answer| answer.to);
            if known_to < step.to && now < step.to.saturating_add(PATIENCE_NANOS) {
                return None;
            }
            self.steps.pop_front();
            let compared = self.compare(step);
            self.answers.retain(|answer| answer.to > step.to);
            if compared.is_some() {
                return compared;
            }
        }
    }

    fn compare(&self, step: Step) -> Option<Compared> {
        let (mut described, mut part, mut ended) = (0.0, 0.0, 0.0);
        for answer in &self.answers {
            let to = answer.to.min(step.to);
            let both = as_f64(to.saturating_sub(answer.from.max(step.from)));
            described += both;
            part += both * answer.part;
            ended += both * answer.ended;
        }
        let is_described = described > 0.0 && described >= DESCRIBED * as_f64(step.elapsed());
        is_described.then(|| Compared {
            step,
            part: (part / described).min(1.0),
            ended: (ended / described).min(1.0),
        })
    }

    /// The debts of the steps until now are cancelled.
    pub fn forgive(&mut self) {
        for step in &mut self.steps {
            step.in_debt = false;
        }
    }

    /// Forgets everything, because NVML does not report the share's processes any more.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::{Compared, Evidence, Step, Worked};

    const MILLI: u64 = 1_000_000;

    fn step(from: u64) -> Step {
        Step {
            from: from * MILLI,
            to: (from + 100) * MILLI,
            charged: 1.0,
            in_debt: true,
        }
    }

    fn answer(from: u64, to: u64, part: f64) -> Worked {
        Worked {
            from: from * MILLI,
            to: to * MILLI,
            part,
            ended: 0.0,
        }
    }

    fn parts(evidence: &mut Evidence, now: u64) -> Vec<(u64, f64)> {
        std::iter::from_fn(|| evidence.next(now * MILLI))
            .map(|compared| {
                let part = (compared.worked(0.0) * 1000.0).round() / 1000.0;
                (compared.step.from / MILLI, part)
            })
            .collect()
    }

    #[test]
    fn a_step_is_compared_with_the_answers_of_its_time() {
        let mut evidence = Evidence::default();
        for from in [1000, 1100, 1200, 1300] {
            evidence.add_step(step(from));
        }
        // The first answer begins before the first step.
        evidence.add(answer(850, 1050, 0.5));
        assert!(parts(&mut evidence, 1400).is_empty());
        evidence.add(answer(1050, 1250, 0.2));
        assert_eq!(parts(&mut evidence, 1400), [(1000, 0.35), (1100, 0.2)]);
        evidence.add(answer(1250, 1400, 0.4));
        assert_eq!(parts(&mut evidence, 1500), [(1200, 0.3), (1300, 0.4)]);
        assert!(evidence.steps.is_empty() && evidence.answers.is_empty());
    }

    /// Unknown work is different from no work.
    #[test]
    fn a_step_that_no_answer_describes_is_not_compared() {
        let mut evidence = Evidence::default();
        for from in [1000, 1100, 1200, 1300] {
            evidence.add_step(step(from));
        }
        // The driver did not answer for a while.
        evidence.add(answer(900, 1100, 0.5));
        evidence.add(answer(1250, 1400, 0.5));
        assert_eq!(parts(&mut evidence, 1400), [(1000, 0.5), (1300, 0.5)]);
        // The driver no longer answers.
        evidence.add_step(step(1400));
        assert!(parts(&mut evidence, 3499).is_empty());
        assert_eq!(evidence.steps.len(), 1);
        assert!(parts(&mut evidence, 3500).is_empty());
        assert!(evidence.steps.is_empty());
    }

    #[test]
    fn work_of_ended_processes_counts_as_far_as_it_was_charged() {
        let mut evidence = Evidence::default();
        evidence.add_step(step(1000));
        evidence.add(Worked {
            ended: 0.5,
            ..answer(1000, 1100, 0.2)
        });
        let compared: Compared = evidence.next(1100 * MILLI).unwrap();
        for (expected, worked) in [(0.0, 0.2), (0.4, 0.4), (1.0, 0.7)] {
            assert!(
                (compared.worked(expected) - worked).abs() < 1e-9,
                "{expected}"
            );
        }
    }

    #[test]
    fn a_cancelled_debt_is_not_counted_again() {
        let mut evidence = Evidence::default();
        evidence.add_step(step(1000));
        evidence.forgive();
        evidence.add_step(step(1100));
        evidence.add(answer(1000, 1200, 0.2));
        let debts: Vec<bool> = std::iter::from_fn(|| evidence.next(1200 * MILLI))
            .map(|compared| compared.step.in_debt)
            .collect();
        assert_eq!(debts, [false, true]);
    }
}
