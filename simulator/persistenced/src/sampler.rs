//! Utilization of GPUs and processes, sampled ten times a second.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tranche_simulator_machine::timeline::now;
use tranche_simulator_machine::{MAX_GPUS, Shared};

/// Time between samples. The real driver takes one every 1/6 s to 1 s.
pub const PERIOD: Duration = Duration::from_millis(100);
/// The number of samples over which a GPU's utilization is the mean: one second.
const WINDOW: usize = 10;

#[derive(Debug, Default)]
pub struct Sampler {
    /// Per sample: its time, and the nanoseconds that each GPU had run by then.
    history: VecDeque<(u64, [u64; MAX_GPUS])>,
    /// Per slot: the nanoseconds that it had run on each GPU at the last sample.
    processes: Vec<(usize, [u64; MAX_GPUS])>,
}

impl Sampler {
    /// Takes a sample of the processes in `slots` and writes the percentages.
    pub fn sample(&mut self, shared: &Shared, slots: &[usize]) {
        let at = now();
        shared.advance_all(at);
        let mut ran = [0; MAX_GPUS];
        for (ran, gpu) in ran.iter_mut().zip(shared.gpus()) {
            *ran = gpu.ran();
        }
        let last = self.history.back().map(|(at, _)| *at);
        self.history.push_back((at, ran));
        if self.history.len() > WINDOW + 1 {
            self.history.pop_front();
        }
        if let Some((first, before)) = self.history.front() {
            for (index, gpu) in shared.gpus().iter().enumerate() {
                let busy = percent(ran[index].saturating_sub(before[index]), at - first);
                gpu.utilization.store(busy, Ordering::Relaxed);
            }
        }
        self.processes.retain(|(slot, _)| slots.contains(slot));
        for &slot in slots {
            let mut ran = [0; MAX_GPUS];
            for (gpu, ran) in ran.iter_mut().enumerate().take(shared.gpus().len()) {
                *ran = shared.ran(slot, gpu);
            }
            match (self.processes.iter_mut().find(|(s, _)| *s == slot), last) {
                (Some((_, before)), Some(last)) => {
                    for gpu in 0..shared.gpus().len() {
                        let part = ran[gpu].saturating_sub(before[gpu]);
                        shared.slots[slot].utilization[gpu]
                            .store(percent(part, at - last), Ordering::Relaxed);
                    }
                    *before = ran;
                }
                (Some((_, before)), None) => *before = ran,
                (None, _) => self.processes.push((slot, ran)),
            }
        }
        let stamp = microseconds();
        for (slot, _) in &self.processes {
            shared.slots[*slot].sampled.store(stamp, Ordering::Relaxed);
        }
    }
}

fn percent(part: u64, whole: u64) -> u32 {
    if whole == 0 {
        return 0;
    }
    // Rounded to the nearest number: a GPU that runs all the time has 100, not 99.
    u32::try_from((part.saturating_mul(100) + whole / 2) / whole)
        .unwrap_or(100)
        .min(100)
}

fn microseconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |time| {
            u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_rounded_and_at_most_100() {
        assert_eq!(percent(0, 0), 0);
        assert_eq!(percent(995, 1000), 100);
        assert_eq!(percent(30, 100), 30);
        assert_eq!(percent(u64::MAX, 1), 100);
    }
}
