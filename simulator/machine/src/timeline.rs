//! When kernels run, in virtual time.
//!
//! A GPU runs one kernel at a time. The kernels of one process run in the order of their launches,
//! whichever streams they are in. Processes take turns as on a real GPU without MPS: one runs until it
//! has nothing left or its slice of [`SLICE`] is over, then the next that has work; a process alone
//! runs on. Between two processes the GPU stands still for as long as the machine file says
//! (`switch_micros`). Nothing computes: a launch only adds to what its process has queued, and time passes when
//! somebody looks.
//!
//! So when a kernel will end depends on what others launch meanwhile. What is known of it is its
//! *mark*: how much its process will have run on that GPU when it ends, in nanoseconds. Who waits for
//! a mark sleeps until it would be reached if nobody launched anything more, and looks again. Who wants
//! to know *when* a mark was reached has it watched from before.
//!
//! All of it changes under the GPU's lock, as the ledger does.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::layout::{GpuState, MAX_PROCESSES, Shared};
use crate::ledger::{ChargeError, Guard, lock, owner};

/// How long a process runs while others have work too, in nanoseconds: NVIDIA's default is about that.
pub const SLICE: u64 = 2_000_000;

/// Marks of a process on a GPU that can be watched at a time; more, and the oldest are lost.
pub const WATCHES: usize = 128;

/// The order in which processes run on a GPU. All zeros is none.
#[derive(Debug)]
#[repr(C)]
pub struct Turns {
    /// Up to when all is decided, monotonic nanoseconds.
    clock: AtomicU64,
    /// Nanoseconds of kernels that have run by then, since the page was made.
    ran: AtomicU64,
    /// What is left of the slice of the one whose turn it is.
    slice: AtomicU64,
    /// The process that runs or ran last: its slot + 1, or 0 for none.
    running: AtomicU32,
    /// What is left of the switch to it, nanoseconds.
    switching: AtomicU64,
    /// Nanoseconds for which the GPU stood still for switches, since the page was made.
    stood_still: AtomicU64,
    /// Slots that have work, from `first` on, round the ring.
    first: AtomicU32,
    count: AtomicU32,
    ring: [AtomicU32; MAX_PROCESSES],
}

/// A process's kernels on a GPU. All zeros is none.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Lane {
    /// Nanoseconds of kernels launched so far: the mark of the last one.
    queued: AtomicU64,
    /// Nanoseconds of them that have run.
    done: AtomicU64,
    /// Whether it is in the ring.
    waits: AtomicU32,
    /// Marks watched so far, and those of them before the first that is not reached.
    watched: AtomicU64,
    settled: AtomicU64,
    watches: [Watch; WATCHES],
}

#[derive(Debug)]
#[repr(C)]
struct Watch {
    mark: AtomicU64,
    /// When it was reached; 0 for not yet.
    at: AtomicU64,
}

/// When a mark is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// It was, then (monotonic nanoseconds).
    At(u64),
    /// It will be: the number of its watch says when.
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

    /// Runs what is queued on GPU `gpu` up to `at`; the kernels of process `slot` there, with the GPU's lock.
    fn pass_locked(
        &self,
        slot: usize,
        gpu: usize,
        at: u64,
    ) -> Result<(Guard<'_>, &Lane), ChargeError> {
        let guard = lock(&self.gpus[gpu], owner(slot))?;
        self.pass(gpu, at);
        Ok((guard, self.lane(slot, gpu)))
    }

    /// Queues a kernel of `nanos` of process `slot` on GPU `gpu` at `at`; returns its mark.
    pub fn launch(&self, slot: usize, gpu: usize, nanos: u64, at: u64) -> Result<u64, ChargeError> {
        let (_guard, lane) = self.pass_locked(slot, gpu, at)?;
        let mark = get(&lane.queued) + nanos;
        set(&lane.queued, mark);
        if nanos > 0 && lane.waits.swap(1, Ordering::Relaxed) == 0 {
            self.gpus[gpu].turns.push(slot);
        }
        Ok(mark)
    }

    /// Whether process `slot` has run as far as `mark` on GPU `gpu` at `at`.
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
        let (_guard, lane) = self.pass_locked(slot, gpu, at)?;
        Ok(get(&lane.done) >= mark)
    }

    /// When process `slot` will have run as far as `mark`, if nobody launches anything after `at`;
    /// no later than that in any case. `at` or before for a mark that is reached.
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
        let (_guard, lane) = self.pass_locked(slot, gpu, at)?;
        let left = mark.saturating_sub(get(&lane.done));
        Ok(at + self.foresee(slot, gpu, left))
    }

    /// Sleeps until process `slot` has run as far as `mark` on GPU `gpu`, or the GPU is lost.
    pub fn wait(&self, slot: usize, gpu: usize, mark: u64) -> Result<(), ChargeError> {
        /// A GPU that is lost meanwhile is noticed as soon.
        const LOOK: u64 = 100_000_000;
        loop {
            if self.gpus[gpu].is_lost() {
                return Ok(());
            }
            let at = now();
            let expected = self.expected(slot, gpu, mark, at)?;
            if expected <= at {
                return Ok(());
            }
            sleep_until(expected.min(at + LOOK));
        }
    }

    /// Has a mark watched from `at` on.
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
        let (_guard, lane) = self.pass_locked(slot, gpu, at)?;
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

    /// When the mark of a watch was reached; `None` for not yet. A watch that was lost says `at`.
    pub fn reached_at(
        &self,
        slot: usize,
        gpu: usize,
        number: u64,
        at: u64,
    ) -> Result<Option<u64>, ChargeError> {
        let (_guard, lane) = self.pass_locked(slot, gpu, at)?;
        if number + (WATCHES as u64) < get(&lane.watched) {
            return Ok(Some(at));
        }
        let then = get(&lane.watch(number).at);
        Ok((then != 0).then_some(then))
    }

    /// Lets time pass up to `at` on every GPU whose lock is free. For the daemon.
    pub fn let_pass(&self, at: u64) {
        for (gpu, state) in self.gpus().iter().enumerate() {
            if let Some(_guard) = crate::ledger::try_lock(state) {
                self.pass(gpu, at);
            }
        }
    }

    /// Nanoseconds that kernels of process `slot` have run on GPU `gpu`.
    #[must_use]
    pub fn ran(&self, slot: usize, gpu: usize) -> u64 {
        get(&self.lane(slot, gpu).done)
    }

    /// Forgets what a dead process has queued, and puts the order right that it may have left half
    /// changed. Whoever calls has the GPU's lock.
    pub(crate) fn forget_lane(&self, slot: usize, gpu: usize) {
        let lane = self.lane(slot, gpu);
        set(&lane.queued, 0);
        set(&lane.done, 0);
        set(&lane.watched, 0);
        set(&lane.settled, 0);
        self.order_anew(gpu);
    }

    /// Makes the ring from the lanes.
    pub(crate) fn order_anew(&self, gpu: usize) {
        let turns = &self.gpus[gpu].turns;
        turns.first.store(0, Ordering::Relaxed);
        turns.count.store(0, Ordering::Relaxed);
        set(&turns.switching, 0);
        set(&turns.slice, SLICE);
        for (slot, process) in self.slots.iter().enumerate() {
            // A free slot's lane was emptied when it was freed.
            if process.pid.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let lane = self.lane(slot, gpu);
            let waits = get(&lane.queued) > get(&lane.done);
            lane.waits.store(u32::from(waits), Ordering::Relaxed);
            if waits {
                turns.push(slot);
            }
        }
    }

    /// Runs what is queued on GPU `gpu` up to `at`.
    fn pass(&self, gpu: usize, at: u64) {
        let turns = &self.gpus[gpu].turns;
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

    /// How long it will take until process `slot` has run for `left` more, as things are.
    fn foresee(&self, slot: usize, gpu: usize, left: u64) -> u64 {
        let turns = &self.gpus[gpu].turns;
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
        // A bound on the work: looking again is as good.
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

    /// Runs for `runs` after `done`, from `clock` on.
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
        (0..self.count.load(Ordering::Relaxed).min(ENOUGH))
            .map(|nth| self.place(nth).load(Ordering::Relaxed) as usize % MAX_PROCESSES)
    }

    fn current(&self) -> Option<usize> {
        self.order().next()
    }

    /// Lets `slot` be the one that runs; returns how long the GPU still stands still before it does, where
    /// a switch takes `cost`.
    fn switch_to(&self, slot: usize, cost: u64) -> u64 {
        let before = self.running.swap(owner(slot), Ordering::Relaxed);
        if before != owner(slot) && before != 0 {
            set(&self.switching, cost);
        }
        get(&self.switching)
    }

    /// Puts a process at the end; the first gets a whole slice.
    fn push(&self, slot: usize) {
        let count = self.count.load(Ordering::Relaxed);
        if count == 0 {
            set(&self.slice, SLICE);
        }
        // A slot's number is small.
        let slot = u32::try_from(slot).unwrap_or(0);
        self.place(count).store(slot, Ordering::Relaxed);
        self.count.store((count + 1).min(ENOUGH), Ordering::Relaxed);
    }

    /// Takes the first away; the next gets a whole slice.
    fn pop(&self) {
        let count = self.count.load(Ordering::Relaxed);
        self.count.store(count.saturating_sub(1), Ordering::Relaxed);
        let first = self.first.load(Ordering::Relaxed);
        self.first.store(first.wrapping_add(1), Ordering::Relaxed);
        set(&self.slice, SLICE);
    }
}

/// As many as the ring has places: a slot is in it once.
#[expect(clippy::cast_possible_truncation, reason = "2048")]
const ENOUGH: u32 = MAX_PROCESSES as u32;

impl GpuState {
    /// Nanoseconds of kernels that have run since the page was made, when somebody looked last.
    #[must_use]
    pub fn ran(&self) -> u64 {
        get(&self.turns.ran)
    }

    /// Nanoseconds for which it stood still between two processes since the page was made, when somebody
    /// looked last.
    #[must_use]
    pub fn stood_still(&self) -> u64 {
        get(&self.turns.stood_still)
    }
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
        page.let_pass(2010);
        assert_eq!((page.gpus[0].ran(), page.ran(0, 0)), (110, 110));
    }

    #[test]
    fn processes_take_turns() {
        let page = test_page(T4);
        page.launch(0, 0, 10 * SLICE, 1000).unwrap();
        page.launch(1, 0, SLICE / 2, 1000).unwrap();
        // The first has its slice, then the second all it has.
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
        page.let_pass(1000 + 4 * SLICE);
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
        // First a slice, a switch, the other's slice, a switch, and the rest without another.
        let expected = 1000 + 4 * SLICE + 2 * SWITCH;
        assert_eq!(page.expected(0, 0, 3 * SLICE, 1000), Ok(expected));
        page.let_pass(1000 + SLICE + SWITCH / 2);
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
            "standing still is not running"
        );
        assert_eq!(page.gpus[0].stood_still(), 2 * SWITCH);
        // Whoever comes back to an idle GPU that it used last needs no switch.
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
    fn one_that_launches_much_takes_nothing_from_the_others() {
        let page = test_page(T4);
        for _ in 0..1000 {
            page.launch(0, 0, SLICE, 0).unwrap();
        }
        page.launch(1, 0, 100 * SLICE, 0).unwrap();
        page.launch(2, 0, 100 * SLICE, 0).unwrap();
        page.let_pass(90 * SLICE);
        assert_eq!([0, 1, 2].map(|slot| page.ran(slot, 0)), [30 * SLICE; 3]);
    }

    #[test]
    fn the_dead_leave_the_ring() {
        let page = test_page(T4);
        for slot in [0, 1] {
            page.slots[slot].pid.store(1, Ordering::Relaxed);
            page.launch(slot, 0, 100 * SLICE, 0).unwrap();
        }
        page.let_pass(SLICE / 2);
        page.slots[0].pid.store(-1, Ordering::Relaxed);
        page.reclaim(0);
        assert_eq!(
            page.expected(1, 0, 100 * SLICE, SLICE / 2),
            Ok(SLICE / 2 + 100 * SLICE)
        );
        // The slot is as new.
        page.slots[0].pid.store(1, Ordering::Relaxed);
        assert_eq!(page.launch(0, 0, 7, SLICE), Ok(7));
        page.let_pass(10 * SLICE);
        assert_eq!(page.ran(0, 0), 7);
    }

    #[test]
    fn lost_watches_and_kernels_without_duration_are_lived_with() {
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
        /// The GPU works whenever there is work, and no process with work is more than a slice behind.
        #[test]
        fn time_is_divided_fairly(
            work in proptest::collection::vec(1..20 * SLICE, 1..6),
            look in 1..30 * SLICE,
            switch in prop_oneof![Just(0), 1..500u64],
        ) {
            let machine = format!("{T4}[habits]\nswitch_micros = {switch}\n");
            let page = test_page(&machine);
            for (slot, nanos) in work.iter().enumerate() {
                page.launch(slot, 0, *nanos, 0).unwrap();
            }
            page.let_pass(look);
            let ran: Vec<u64> = (0..work.len()).map(|slot| page.ran(slot, 0)).collect();
            let sum = ran.iter().sum::<u64>();
            if switch == 0 {
                prop_assert_eq!(sum, look.min(work.iter().sum()));
            }
            prop_assert!(sum <= look);
            for (slot, ran_here) in ran.iter().enumerate() {
                if *ran_here < work[slot] {
                    prop_assert!(ran.iter().all(|other| *other <= ran_here + SLICE));
                    // What was foreseen comes true.
                    let expected = page.expected(slot, 0, work[slot], look).unwrap();
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
