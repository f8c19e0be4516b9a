//! How busy GPUs and processes are, sampled a few times a second.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tranche_simulator_machine::layout::{MAX_GPUS, Shared};
use tranche_simulator_machine::timeline::now;

/// Time between samples. The real driver takes one every 1/6 s to 1 s.
pub const PERIOD: Duration = Duration::from_millis(100);
/// Samples in the window that utilisation is the mean of: one second.
const WINDOW: usize = 10;

/// What the last samples were.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Per sample: when, and what each GPU had run by then.
    history: VecDeque<(u64, [u64; MAX_GPUS])>,
    /// Per slot and GPU: queued at the last sample, and queued but not yet run.
    processes: Vec<Backlog>,
}

#[derive(Debug, Default, Clone)]
struct Backlog {
    slot: usize,
    queued: [u64; MAX_GPUS],
    waiting: [u64; MAX_GPUS],
}

impl Sampler {
    /// Takes a sample of the processes in `slots` and writes the percentages.
    pub fn sample(&mut self, shared: &Shared, slots: &[usize]) {
        let at = now();
        let mut ran = [0; MAX_GPUS];
        for (ran, gpu) in ran.iter_mut().zip(shared.gpus()) {
            *ran = gpu.ran(at);
        }
        self.history.push_back((at, ran));
        if self.history.len() > WINDOW + 1 {
            self.history.pop_front();
        }
        self.processes.retain(|p| slots.contains(&p.slot));
        for slot in slots {
            if !self.processes.iter().any(|p| p.slot == *slot) {
                self.processes.push(Backlog {
                    slot: *slot,
                    ..Backlog::default()
                });
            }
        }
        let Some(&(first, before)) = self.history.front() else {
            return;
        };
        let Some(&(last, previous)) = self.history.iter().rev().nth(1) else {
            return;
        };
        for (index, gpu) in shared.gpus().iter().enumerate() {
            let busy = percent(ran[index].saturating_sub(before[index]), at - first);
            gpu.utilization.store(busy, Ordering::Relaxed);
            self.divide(
                shared,
                index,
                ran[index].saturating_sub(previous[index]),
                at - last,
            );
        }
        let stamp = microseconds();
        for process in &self.processes {
            shared.slots[process.slot]
                .sampled
                .store(stamp, Ordering::Relaxed);
        }
    }

    /// Divides what GPU `gpu` ran in this period by what each process had queued:
    /// a queue of many processes' kernels runs them in turn.
    fn divide(&mut self, shared: &Shared, gpu: usize, ran: u64, period: u64) {
        for process in &mut self.processes {
            let queued = shared.slots[process.slot].scheduled[gpu].load(Ordering::Relaxed);
            process.waiting[gpu] += queued.saturating_sub(process.queued[gpu]);
            process.queued[gpu] = queued;
        }
        let waiting: u64 = self.processes.iter().map(|p| p.waiting[gpu]).sum();
        let ran = ran.min(waiting);
        for process in &mut self.processes {
            let part = if waiting == 0 {
                0
            } else {
                u64::try_from(
                    u128::from(ran) * u128::from(process.waiting[gpu]) / u128::from(waiting),
                )
                .unwrap_or(u64::MAX)
            };
            process.waiting[gpu] -= part.min(process.waiting[gpu]);
            shared.slots[process.slot].utilization[gpu]
                .store(percent(part, period), Ordering::Relaxed);
        }
    }
}

fn percent(part: u64, whole: u64) -> u32 {
    if whole == 0 {
        return 0;
    }
    // Rounded to the nearest: a GPU kept busy reads 100, not 99.
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
    fn percents_are_percents() {
        assert_eq!(percent(0, 0), 0);
        assert_eq!(percent(995, 1000), 100);
        assert_eq!(percent(30, 100), 30);
        assert_eq!(percent(u64::MAX, 1), 100);
    }
}
