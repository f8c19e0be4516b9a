//! When kernels run, in virtual time.
//!
//! A GPU runs one kernel at a time. The kernels of a process run in the order of their launches, in whatever streams.
//! Processes take turns as on a real GPU without MPS: a process runs until it has no work left or its slice of
//! [`SLICE`] ends, then the next process with work runs. A process alone is not interrupted. Between two processes the GPU
//! stands still for the machine file's `switch_micros`. Nothing is computed: a launch adds to the queue of its process, and
//! every call that reads the state first advances it to the present.
//!
//! When a kernel will end depends on later launches of other processes. What is known is its *mark*: the nanoseconds that
//! its process will have run on that GPU when the kernel ends. A thread that waits for a mark sleeps until the time at which the
//! mark is reached without further launches, and then checks again. To learn *when* a mark was reached, a caller registers
//! a watch before.
//!
//! All fields change under the GPU's lock, as those of the ledger do.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::layout::{GpuState, Shared};
use crate::ledger::{ChargeError, Guard, lock, owner};
use crate::turns::{Lane, MAX_PROCESSES, Turns, WATCHES, Watch};

/// How long a process runs while others have work too, in nanoseconds: about NVIDIA's default.
pub const SLICE: u64 = 2_000_000;

/// The time of a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// When it was reached, in monotonic nanoseconds.
    At(u64),
    /// The number of the watch of a mark that is not reached.
    Later(u64),
}

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

fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

fn set(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Relaxed);
}

impl Shared {
    fn lane(&self, slot: usize, gpu: usize) -> &Lane {
        &self.lanes[slot][gpu]
    }

    /// The turns in which process `slot` runs: those of its partition, or the GPU's.
    fn turns(&self, slot: usize, gpu: usize) -> &Turns {
        let state = &self.gpus[gpu];
        let place = self.slots[slot].partition_on(gpu);
        place.map_or(&state.turns, |place| state.partition_turns(place))
    }

    /// Takes the lock of GPU `gpu` and runs its kernels up to the time `at`; returns the lock, and the lane of process `slot`.
    fn advance_locked(
        &self,
        slot: usize,
        gpu: usize,
        at: u64,
    ) -> Result<(Guard<'_>, &Lane), ChargeError> {
        let guard = lock(&self.gpus[gpu], owner(slot))?;
        self.advance(self.turns(slot, gpu), gpu, at);
        Ok((guard, self.lane(slot, gpu)))
    }

    /// Queues a kernel of `nanos` of process `slot` on GPU `gpu` at `at`; returns its mark.
    pub fn launch(&self, slot: usize, gpu: usize, nanos: u64, at: u64) -> Result<u64, ChargeError> {
        let (_guard, lane) = self.advance_locked(slot, gpu, at)?;
        let mark = get(&lane.queued) + nanos;
        set(&lane.queued, mark);
        if nanos > 0 && lane.waits.swap(1, Ordering::Relaxed) == 0 {
            self.turns(slot, gpu).push(slot);
        }
        Ok(mark)
    }

    /// Whether process `slot` has reached `mark` on GPU `gpu` at the time `at`.
    pub fn reached(
        &self,
        slot: usize,
        gpu: usize,
        mark: u64,
        at: u64,
    ) -> Result<bool, ChargeError> {
        if self.ran(slot, gpu) >= mark {
            return Ok(true);
        }
        let (_guard, lane) = self.advance_locked(slot, gpu, at)?;
        Ok(get(&lane.done) >= mark)
    }

    /// The time at which process `slot` will reach `mark` if no process launches anything after `at`. With further launches
    /// it is never reached earlier. At most `at` for a mark that is reached.
    pub fn expected(
        &self,
        slot: usize,
        gpu: usize,
        mark: u64,
        at: u64,
    ) -> Result<u64, ChargeError> {
        if self.ran(slot, gpu) >= mark {
            return Ok(at);
        }
        let (_guard, lane) = self.advance_locked(slot, gpu, at)?;
        let left = mark.saturating_sub(get(&lane.done));
        Ok(at + self.time_until(slot, gpu, left))
    }

    /// Sleeps until process `slot` has reached `mark` on GPU `gpu`, or the GPU is lost.
    pub fn wait(&self, slot: usize, gpu: usize, mark: u64) -> Result<(), ChargeError> {
        /// How often a waiting thread checks whether the GPU is lost, in nanoseconds.
        const POLL: u64 = 100_000_000;
        loop {
            if self.gpus[gpu].is_lost() {
                return Ok(());
            }
            let at = now();
            let expected = self.expected(slot, gpu, mark, at)?;
            if expected <= at {
                return Ok(());
            }
            sleep_until(expected.min(at + POLL));
        }
    }

    /// Registers a watch of a mark at the time `at`.
    pub fn watch(
        &self,
        slot: usize,
        gpu: usize,
        mark: u64,
        at: u64,
    ) -> Result<Moment, ChargeError> {
        if self.ran(slot, gpu) >= mark {
            return Ok(Moment::At(at));
        }
        let (_guard, lane) = self.advance_locked(slot, gpu, at)?;
        if get(&lane.done) >= mark {
            return Ok(Moment::At(at));
        }
        let number = get(&lane.watched);
        let watch = lane.watch(number);
        set(&watch.mark, mark);
        set(&watch.at, 0);
        set(&lane.watched, number + 1);
        let oldest = (number + 1).saturating_sub(WATCHES as u64);
        lane.settled.fetch_max(oldest, Ordering::Relaxed);
        Ok(Moment::Later(number))
    }

    /// When the mark of a watch was reached; `None` if it is not reached, and `at` for a watch that was replaced.
    pub fn reached_at(
        &self,
        slot: usize,
        gpu: usize,
        number: u64,
        at: u64,
    ) -> Result<Option<u64>, ChargeError> {
        let (_guard, lane) = self.advance_locked(slot, gpu, at)?;
        if number + (WATCHES as u64) < get(&lane.watched) {
            return Ok(Some(at));
        }
        let then = get(&lane.watch(number).at);
        Ok((then != 0).then_some(then))
    }

    /// Advances every GPU whose lock is free to the time `at`. For the daemon.
    pub fn advance_all(&self, at: u64) {
        for (gpu, state) in self.gpus().iter().enumerate() {
            if let Some(_guard) = crate::ledger::try_lock(state) {
                for turns in state.all_turns() {
                    self.advance(turns, gpu, at);
                }
            }
        }
    }

    /// Nanoseconds that kernels of process `slot` have run on GPU `gpu`.
    #[must_use]
    pub fn ran(&self, slot: usize, gpu: usize) -> u64 {
        get(&self.lane(slot, gpu).done)
    }

    /// Removes the kernels of a process that has ended, and repairs the ring, which it may have left incomplete. The caller
    /// has the GPU's lock.
    pub(crate) fn reset_lane(&self, slot: usize, gpu: usize) {
        let lane = self.lane(slot, gpu);
        set(&lane.queued, 0);
        set(&lane.done, 0);
        set(&lane.watched, 0);
        set(&lane.settled, 0);
        self.rebuild_ring(gpu);
    }

    /// Makes the ring again from the lanes.
    pub(crate) fn rebuild_ring(&self, gpu: usize) {
        for turns in self.gpus[gpu].all_turns() {
            turns.restart();
        }
        for (slot, process) in self.slots.iter().enumerate() {
            // The lane of a free slot is empty.
            if process.pid.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let lane = self.lane(slot, gpu);
            let waits = get(&lane.queued) > get(&lane.done);
            lane.waits.store(u32::from(waits), Ordering::Relaxed);
            if waits {
                self.turns(slot, gpu).push(slot);
            }
        }
    }

    /// Runs the kernels of `turns` on GPU `gpu` up to the time `at`. The caller has the GPU's lock.
    fn advance(&self, turns: &Turns, gpu: usize, at: u64) {
        while get(&turns.clock) < at {
            let clock = get(&turns.clock);
            let Some(slot) = turns.current() else {
                set(&turns.clock, at);
                return;
            };
            let switching = turns.switch_to(slot, self.header.switch_nanos);
            if switching > 0 {
                let stands_still = switching.min(at - clock);
                set(&turns.switching, switching - stands_still);
                set(&turns.stood_still, get(&turns.stood_still) + stands_still);
                set(&turns.clock, clock + stands_still);
                continue;
            }
            let lane = self.lane(slot, gpu);
            let done = get(&lane.done);
            let left = get(&lane.queued).saturating_sub(done);
            let alone = turns.count.load(Ordering::Relaxed) == 1;
            let slice = if alone { u64::MAX } else { get(&turns.slice) };
            let runs = left.min(slice).min(at - clock);
            lane.run(done, runs, clock);
            set(&turns.ran, get(&turns.ran) + runs);
            set(&turns.clock, clock + runs);
            set(&turns.slice, get(&turns.slice).saturating_sub(runs));
            if runs == left {
                turns.pop();
                lane.waits.store(0, Ordering::Relaxed);
            } else if runs == slice {
                turns.pop();
                turns.push(slot);
            }
        }
    }

    /// Nanoseconds until process `slot` has run for `left` more, if no process launches anything.
    fn time_until(&self, slot: usize, gpu: usize, left: u64) -> u64 {
        let turns = self.turns(slot, gpu);
        let mut order: std::collections::VecDeque<(usize, u64)> = turns
            .order()
            .map(|other| {
                let lane = self.lane(other, gpu);
                let queued = get(&lane.queued).saturating_sub(get(&lane.done));
                (other, if other == slot { left } else { queued })
            })
            .collect();
        let (mut time, mut slice) = (0, get(&turns.slice).max(1));
        let mut running = turns.running.load(Ordering::Relaxed);
        let mut switching = get(&turns.switching);
        // The number of rounds is bounded: the caller checks again after the returned time.
        for _ in 0..1000 {
            let Some((next, left)) = order.pop_front() else {
                break;
            };
            if running != owner(next) {
                switching = if running == 0 {
                    0
                } else {
                    self.header.switch_nanos
                };
                running = owner(next);
            }
            time += std::mem::take(&mut switching);
            let runs = if order.is_empty() {
                left
            } else {
                left.min(slice)
            };
            time += runs;
            slice = SLICE;
            match (next == slot, left - runs) {
                (true, 0) => break,
                (false, 0) => {}
                (_, left) => order.push_back((next, left)),
            }
        }
        time.max(1)
    }
}

impl Lane {
    fn watch(&self, number: u64) -> &Watch {
        &self.watches[usize::try_from(number).unwrap_or(0) % WATCHES]
    }

    /// Runs kernels for `runs` nanoseconds from the time `clock` on, after `done` nanoseconds.
    fn run(&self, done: u64, runs: u64, clock: u64) {
        let now = done + runs;
        let (first, end) = (get(&self.settled), get(&self.watched));
        let mut settled = first;
        for number in first..end {
            let watch = self.watch(number);
            let mark = get(&watch.mark);
            if get(&watch.at) == 0 && mark <= now {
                set(&watch.at, clock + mark.saturating_sub(done));
            }
            if get(&watch.at) != 0 && settled == number {
                settled += 1;
            }
        }
        set(&self.settled, settled);
        set(&self.done, now);
    }
}

impl Turns {
    fn place(&self, nth: u32) -> &AtomicU32 {
        let first = self.first.load(Ordering::Relaxed);
        &self.ring[(first.wrapping_add(nth)) as usize % MAX_PROCESSES]
    }

    fn order(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.count.load(Ordering::Relaxed).min(RING_PLACES))
            .map(|nth| self.place(nth).load(Ordering::Relaxed) as usize % MAX_PROCESSES)
    }

    fn current(&self) -> Option<usize> {
        self.order().next()
    }

    /// Makes `slot` the process that runs. Returns how long the GPU stands still before that, if a switch takes `cost`.
    fn switch_to(&self, slot: usize, cost: u64) -> u64 {
        let before = self.running.swap(owner(slot), Ordering::Relaxed);
        if before != owner(slot) && before != 0 {
            set(&self.switching, cost);
        }
        get(&self.switching)
    }

    /// Adds a process at the end. The first one gets a whole slice.
    fn push(&self, slot: usize) {
        let count = self.count.load(Ordering::Relaxed);
        if count == 0 {
            set(&self.slice, SLICE);
        }
        // At most MAX_PROCESSES.
        let slot = u32::try_from(slot).unwrap_or(0);
        self.place(count).store(slot, Ordering::Relaxed);
        self.count
            .store((count + 1).min(RING_PLACES), Ordering::Relaxed);
    }

    /// Removes all processes from the ring.
    fn restart(&self) {
        self.first.store(0, Ordering::Relaxed);
        self.count.store(0, Ordering::Relaxed);
        set(&self.switching, 0);
        set(&self.slice, SLICE);
    }

    /// Makes these the turns of a new compute instance.
    pub(crate) fn clear(&self) {
        self.restart();
        set(&self.clock, 0);
        set(&self.ran, 0);
        set(&self.stood_still, 0);
        self.running.store(0, Ordering::Relaxed);
    }

    /// Nanoseconds of kernels that have run.
    pub(crate) fn ran(&self) -> u64 {
        get(&self.ran)
    }

    /// Counts kernels that ran in a partition.
    pub(crate) fn add_ran(&self, nanos: u64) {
        set(&self.ran, get(&self.ran) + nanos);
    }

    /// Removes the first process. The next one gets a whole slice.
    fn pop(&self) {
        let count = self.count.load(Ordering::Relaxed);
        self.count.store(count.saturating_sub(1), Ordering::Relaxed);
        let first = self.first.load(Ordering::Relaxed);
        self.first.store(first.wrapping_add(1), Ordering::Relaxed);
        set(&self.slice, SLICE);
    }
}

/// The places of the ring. A slot is in it once at most.
#[expect(clippy::cast_possible_truncation, reason = "2048")]
const RING_PLACES: u32 = MAX_PROCESSES as u32;

impl GpuState {
    /// Nanoseconds of kernels that have run since the page was made, up to the last advance. A partition counts with its
    /// part of the GPU's compute slices.
    #[must_use]
    pub fn ran(&self) -> u64 {
        let slices = self.model().map_or(1, |model| model.whole().slices);
        let of_partitions = self.compute_slices().map(|(its, turns)| turns.ran() * its);
        self.turns.ran() + of_partitions.sum::<u64>() / u64::from(slices)
    }

    /// Nanoseconds of kernels that have run since the page was made, and the time of that value: that of the last advance, or
    /// the present if no kernel runs.
    #[must_use]
    pub fn ran_by(&self) -> (u64, u64) {
        let at = advanced_to(self.all_turns());
        (self.ran(), at)
    }

    /// The same for a GPU instance, whose compute slices together count as the whole; `None` if it does not exist.
    #[must_use]
    pub fn instance_ran_by(&self, id: u32) -> Option<(u64, u64)> {
        let slices = u64::from(self.gpu_instance(id as usize)?.profile.slices).max(1);
        let devices = self.mig_devices().into_iter();
        let devices: Vec<_> = devices
            .filter(|it| it.gpu_instance.id == id)
            .map(|it| {
                let turns = &self.instances[id as usize].compute[it.id as usize].turns;
                (turns, u64::from(it.profile.slices))
            })
            .collect();
        let at = advanced_to(devices.iter().map(|(turns, _)| *turns));
        let ran: u64 = devices.iter().map(|(turns, its)| turns.ran() * its).sum();
        Some((ran / slices, at))
    }

    /// The turns of the GPU and of each of its partitions.
    fn all_turns(&self) -> impl Iterator<Item = &Turns> {
        let of_partitions = self.compute_slices().map(|(_, turns)| turns);
        std::iter::once(&self.turns).chain(of_partitions)
    }

    /// Nanoseconds for which the GPU stood still between two processes since the page was made, up to the last advance.
    #[must_use]
    pub fn stood_still(&self) -> u64 {
        get(&self.turns.stood_still)
    }
}

/// The time of the newest advance of those that have kernels, or the present if none has: the clock of turns without kernels
/// may stand still.
fn advanced_to<'a>(turns: impl Iterator<Item = &'a Turns>) -> u64 {
    let running = turns.filter(|turns| turns.count.load(Ordering::Relaxed) > 0);
    let clocks = running.map(|turns| get(&turns.clock));
    clocks.max().unwrap_or_else(now)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::test_page;

    const T4: &str = include_str!("../../machines/T4.toml");

    #[test]
    fn a_process_alone_runs_one_kernel_after_another() {
        let page = test_page(&T4.replace("count = 1", "count = 2"));
        assert_eq!(page.launch(0, 0, 50, 1000), Ok(50));
        assert_eq!(page.launch(0, 0, 50, 1010), Ok(100));
        assert_eq!(page.expected(0, 0, 100, 1010), Ok(1100));
        assert_eq!(page.reached(0, 0, 50, 1049), Ok(false));
        assert_eq!(page.reached(0, 0, 50, 1050), Ok(true));
        assert_eq!(page.launch(0, 1, 50, 1010), Ok(50), "another GPU");
        assert_eq!(page.expected(0, 1, 50, 1010), Ok(1060));
        assert_eq!(page.launch(0, 0, 50, 2000), Ok(150), "after idling");
        assert_eq!(page.expected(0, 0, 150, 2000), Ok(2050));
        page.advance_all(2010);
        assert_eq!((page.gpus[0].ran(), page.ran(0, 0)), (110, 110));
    }

    /// Nobody advances the clock of a GPU that has no work.
    #[test]
    fn what_an_idle_gpu_has_run_is_of_the_present() {
        let page = test_page(T4);
        let begun = now();
        let (ran, at) = page.gpus[0].ran_by();
        assert!(ran == 0 && at >= begun, "{ran} by {at}");
        assert_eq!(page.launch(0, 0, 50, 1000), Ok(50));
        page.advance_all(1010);
        assert_eq!(page.gpus[0].ran_by(), (10, 1010));
        page.advance_all(1060);
        let (ran, at) = page.gpus[0].ran_by();
        assert!(ran == 50 && at >= begun, "{ran} by {at}");
    }

    #[test]
    fn processes_take_turns() {
        let page = test_page(T4);
        page.launch(0, 0, 10 * SLICE, 1000).unwrap();
        page.launch(1, 0, SLICE / 2, 1000).unwrap();
        // The first runs for a slice, then the second until its end.
        assert_eq!(
            page.expected(1, 0, SLICE / 2, 1000),
            Ok(1000 + 3 * SLICE / 2)
        );
        assert_eq!(
            page.expected(0, 0, 10 * SLICE, 1000),
            Ok(1000 + 21 * SLICE / 2)
        );
        let Ok(Moment::Later(watch)) = page.watch(1, 0, SLICE / 2, 1000) else {
            panic!("not yet reached");
        };
        assert_eq!(page.reached_at(1, 0, watch, 2000), Ok(None));
        page.advance_all(1000 + 4 * SLICE);
        assert_eq!(
            page.reached_at(1, 0, watch, 0),
            Ok(Some(1000 + 3 * SLICE / 2))
        );
        assert_eq!(page.ran(0, 0), 7 * SLICE / 2);
        assert_eq!(page.gpus[0].ran(), 4 * SLICE);
    }

    #[test]
    fn a_switch_between_processes_takes_the_gpus_time() {
        const SWITCH: u64 = 50_000;
        let page = test_page(&format!("{T4}[habits]\nswitch_micros = 50\n"));
        page.launch(0, 0, 3 * SLICE, 1000).unwrap();
        page.launch(1, 0, SLICE, 1000).unwrap();
        // A slice, a switch, the other's slice, a switch, and the rest without a switch.
        let expected = 1000 + 4 * SLICE + 2 * SWITCH;
        assert_eq!(page.expected(0, 0, 3 * SLICE, 1000), Ok(expected));
        page.advance_all(1000 + SLICE + SWITCH / 2);
        assert_eq!([0, 1].map(|slot| page.ran(slot, 0)), [SLICE, 0]);
        assert_eq!(
            page.expected(0, 0, 3 * SLICE, 1000 + SLICE + SWITCH / 2),
            Ok(expected)
        );
        assert_eq!(page.reached(0, 0, 3 * SLICE, expected - 1), Ok(false));
        assert_eq!(page.reached(0, 0, 3 * SLICE, expected), Ok(true));
        assert_eq!(
            page.gpus[0].ran(),
            4 * SLICE,
            "a switch does not count as running"
        );
        assert_eq!(page.gpus[0].stood_still(), 2 * SWITCH);
        // The process that used the idle GPU last needs no switch.
        let later = expected + SLICE;
        page.launch(0, 0, SLICE, later).unwrap();
        assert_eq!(page.expected(0, 0, 4 * SLICE, later), Ok(later + SLICE));
        page.launch(1, 0, SLICE, later + 2 * SLICE).unwrap();
        assert_eq!(
            page.expected(1, 0, 2 * SLICE, later + 2 * SLICE),
            Ok(later + 3 * SLICE + SWITCH)
        );
    }

    #[test]
    fn a_process_that_launches_much_takes_no_time_from_others() {
        let page = test_page(T4);
        for _ in 0..1000 {
            page.launch(0, 0, SLICE, 0).unwrap();
        }
        page.launch(1, 0, 100 * SLICE, 0).unwrap();
        page.launch(2, 0, 100 * SLICE, 0).unwrap();
        page.advance_all(90 * SLICE);
        assert_eq!([0, 1, 2].map(|slot| page.ran(slot, 0)), [30 * SLICE; 3]);
    }

    #[test]
    fn a_reclaimed_process_leaves_the_ring() {
        let page = test_page(T4);
        for slot in [0, 1] {
            page.slots[slot].pid.store(1, Ordering::Relaxed);
            page.launch(slot, 0, 100 * SLICE, 0).unwrap();
        }
        page.advance_all(SLICE / 2);
        page.slots[0].pid.store(-1, Ordering::Relaxed);
        page.reclaim(0);
        assert_eq!(
            page.expected(1, 0, 100 * SLICE, SLICE / 2),
            Ok(SLICE / 2 + 100 * SLICE)
        );
        // The slot can be used again.
        page.slots[0].pid.store(1, Ordering::Relaxed);
        assert_eq!(page.launch(0, 0, 7, SLICE), Ok(7));
        page.advance_all(10 * SLICE);
        assert_eq!(page.ran(0, 0), 7);
    }

    #[test]
    fn replaced_watches_and_kernels_without_duration_work() {
        let page = test_page(T4);
        assert_eq!(page.launch(0, 0, 0, 1000), Ok(0));
        assert_eq!(page.watch(0, 0, 0, 1000), Ok(Moment::At(1000)));
        let mark = page.launch(0, 0, SLICE, 1000).unwrap();
        for _ in 0..2 * WATCHES {
            page.watch(0, 0, mark, 1000).unwrap();
        }
        assert_eq!(page.reached_at(0, 0, 0, 1001), Ok(Some(1001)));
        let last = 2 * WATCHES as u64 - 1;
        assert_eq!(page.reached_at(0, 0, last, 1001), Ok(None));
        assert_eq!(
            page.reached_at(0, 0, last, SLICE * 2),
            Ok(Some(1000 + SLICE))
        );
    }

    proptest! {
        /// The GPU runs whenever there is work, and no process with work is more than a slice behind another.
        #[test]
        fn time_is_divided_fairly(
            work in proptest::collection::vec(1..20 * SLICE, 1..6),
            at in 1..30 * SLICE,
            switch in prop_oneof![Just(0), 1..500u64],
        ) {
            let machine = format!("{T4}[habits]\nswitch_micros = {switch}\n");
            let page = test_page(&machine);
            for (slot, nanos) in work.iter().enumerate() {
                page.launch(slot, 0, *nanos, 0).unwrap();
            }
            page.advance_all(at);
            let ran: Vec<u64> = (0..work.len()).map(|slot| page.ran(slot, 0)).collect();
            let sum = ran.iter().sum::<u64>();
            if switch == 0 {
                prop_assert_eq!(sum, at.min(work.iter().sum()));
            }
            prop_assert!(sum <= at);
            for (slot, ran_here) in ran.iter().enumerate() {
                if *ran_here < work[slot] {
                    prop_assert!(ran.iter().all(|other| *other <= ran_here + SLICE));
                    // The mark is reached at the expected time.
                    let expected = page.expected(slot, 0, work[slot], at).unwrap();
                    let whole = test_page(&machine);
                    for (slot, nanos) in work.iter().enumerate() {
                        whole.launch(slot, 0, *nanos, 0).unwrap();
                    }
                    prop_assert_eq!(whole.reached(slot, 0, work[slot], expected - 1), Ok(false));
                    prop_assert_eq!(whole.reached(slot, 0, work[slot], expected), Ok(true));
                }
            }
        }
    }
}
