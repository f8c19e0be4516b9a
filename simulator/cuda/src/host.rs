//! Work of the host in the order of a GPU's work: host functions, callbacks, and copies queued behind them. One thread does
//! it, in the order of the expected times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ffi::c_void;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use tranche_simulator_machine::timeline::now;

use crate::driver::{self, driver};

/// A host function of `cuLaunchHostFunc`.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);
pub type Work = Box<dyn FnOnce() + Send>;

struct Job {
    /// When it is expected to be due, and its number.
    order: (u64, u64),
    /// The work that it comes after: a mark of a GPU.
    after: (usize, u64),
    work: Work,
}

impl PartialEq for Job {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Job {}
impl PartialOrd for Job {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Job {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order.cmp(&other.order)
    }
}

#[derive(Default)]
struct Queue {
    jobs: BinaryHeap<Reverse<Job>>,
    /// The number of the last job, and the jobs that wait or run.
    last: u64,
    pending: std::collections::BTreeSet<u64>,
    has_worker: bool,
}

static QUEUE: Mutex<Option<Queue>> = Mutex::new(None);
static ARRIVED: Condvar = Condvar::new();
static FINISHED: Condvar = Condvar::new();

fn queue() -> MutexGuard<'static, Option<Queue>> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queues `work` to be done after a GPU has reached a mark; returns the job's number.
pub fn enqueue(after: (usize, u64), work: Work) -> u64 {
    let expected = driver().map_or(0, |driver| {
        let at = now();
        let (gpu, mark) = after;
        driver
            .shared
            .expected(driver.slot, gpu, mark, at)
            .unwrap_or(at)
    });
    let mut guard = queue();
    let queue = guard.get_or_insert_default();
    queue.last += 1;
    let number = queue.last;
    queue.pending.insert(number);
    queue.jobs.push(Reverse(Job {
        order: (expected, number),
        after,
        work,
    }));
    if !queue.has_worker {
        queue.has_worker = true;
        std::thread::spawn(worker);
    }
    drop(guard);
    ARRIVED.notify_one();
    number
}

fn worker() {
    loop {
        let job = {
            let mut guard = queue();
            loop {
                if let Some(Reverse(job)) = guard.as_mut().and_then(|q| q.jobs.pop()) {
                    break job;
                }
                guard = ARRIVED.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
        };
        driver::wait(job.after.0, job.after.1);
        (job.work)();
        if let Some(queue) = queue().as_mut() {
            queue.pending.remove(&job.order.1);
        }
        FINISHED.notify_all();
    }
}

/// Whether job `number` is done. 0 means no job.
pub fn is_done(number: u64) -> bool {
    number == 0
        || !queue()
            .as_ref()
            .is_some_and(|q| q.pending.contains(&number))
}

/// Waits until job `number` is done.
pub fn wait(number: u64) {
    if number == 0 {
        return;
    }
    let mut guard = queue();
    while guard.as_ref().is_some_and(|q| q.pending.contains(&number)) {
        guard = FINISHED.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Waits until all jobs that are queued now are done.
pub fn drain() {
    let mut guard = queue();
    let Some(last) = guard.as_ref().map(|q| q.last) else {
        return;
    };
    while guard
        .as_ref()
        .is_some_and(|q| q.pending.first().is_some_and(|first| *first <= last))
    {
        guard = FINISHED.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
}
