//! When a GPU is busy, in virtual time.
//!
//! A GPU runs one kernel after another, whichever process or stream it comes
//! from, in the order of their launches. Nothing computes: a launch only moves
//! the end of the queue, and who waits for it sleeps.

use std::sync::atomic::Ordering;

use crate::layout::{GpuState, Shared};

/// Nanoseconds of the monotonic clock, which all processes of a host share.
#[must_use]
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // The monotonic clock starts at boot: both parts are small and not negative.
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Sleeps until `deadline` of [`now`]'s clock.
pub fn sleep_until(deadline: u64) {
    let left = deadline.saturating_sub(now());
    if left > 0 {
        std::thread::sleep(std::time::Duration::from_nanos(left));
    }
}

impl Shared {
    /// Queues a kernel of `nanos` on GPU `gpu` that can start at `earliest`;
    /// returns when it ends.
    pub fn schedule(&self, slot: usize, gpu: usize, earliest: u64, nanos: u64) -> u64 {
        if nanos == 0 {
            return earliest;
        }
        let state = &self.gpus[gpu];
        let mut queued = state.busy_until.load(Ordering::Relaxed);
        let end = loop {
            let end = queued.max(earliest) + nanos;
            match state.busy_until.compare_exchange_weak(
                queued,
                end,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => break end,
                Err(current) => queued = current,
            }
        };
        state.scheduled.fetch_add(nanos, Ordering::Relaxed);
        self.slots[slot].scheduled[gpu].fetch_add(nanos, Ordering::Relaxed);
        end
    }
}

impl GpuState {
    /// Nanoseconds of kernels that have run by `at`, since the page was made.
    #[must_use]
    pub fn ran(&self, at: u64) -> u64 {
        let pending = self.busy_until.load(Ordering::Relaxed).saturating_sub(at);
        self.scheduled
            .load(Ordering::Relaxed)
            .saturating_sub(pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::test_page;

    #[test]
    fn kernels_queue_behind_each_other_on_one_gpu() {
        let text = include_str!("../../machines/T4.toml").replace("count = 1", "count = 2");
        let page = test_page(&text);
        assert_eq!(page.schedule(0, 0, 1000, 50), 1050);
        assert_eq!(page.schedule(1, 0, 1000, 50), 1100, "another process waits");
        assert_eq!(page.schedule(1, 1, 1000, 50), 1050, "another GPU does not");
        assert_eq!(page.schedule(0, 0, 2000, 50), 2050, "after idling");
        assert_eq!(page.gpus[0].ran(2050), 150);
        assert_eq!(page.gpus[0].ran(2010), 110);
        assert_eq!(page.slots[0].scheduled[0].load(Ordering::Relaxed), 100);
    }

    #[test]
    fn a_kernel_without_duration_takes_no_place() {
        let page = test_page(include_str!("../../machines/T4.toml"));
        assert_eq!(page.schedule(0, 0, 1000, 0), 1000);
        assert_eq!(page.gpus[0].busy_until.load(Ordering::Relaxed), 0);
    }
}
