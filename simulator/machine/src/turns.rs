//! The words of the shared page that say which kernels run: [`crate::timeline`] reads and changes them.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// The most processes that use CUDA at a time.
pub const MAX_PROCESSES: usize = 2048;

/// Watches of a process on a GPU at a time. A further watch replaces the oldest.
pub const WATCHES: usize = 128;

/// The order in which processes run on a GPU. All zeros is a valid value: no process has work.
#[derive(Debug)]
#[repr(C)]
pub struct Turns {
    /// The time up to which the state is advanced, in monotonic nanoseconds.
    pub(crate) clock: AtomicU64,
    /// Nanoseconds of kernels that have run up to that time since the page was made.
    pub(crate) ran: AtomicU64,
    /// The rest of the running process's slice.
    pub(crate) slice: AtomicU64,
    /// The process that runs or ran last: its slot + 1; 0 for none.
    pub(crate) running: AtomicU32,
    /// The rest of the switch to that process, in nanoseconds.
    pub(crate) switching: AtomicU64,
    /// Nanoseconds for which the GPU stood still for switches since the page was made.
    pub(crate) stood_still: AtomicU64,
    /// The ring of slots that have work: `count` places from `first` on.
    pub(crate) first: AtomicU32,
    pub(crate) count: AtomicU32,
    pub(crate) ring: [AtomicU32; MAX_PROCESSES],
}

/// The kernels of a process on a GPU. All zeros is a valid value: no kernel.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Lane {
    /// Nanoseconds of all launched kernels: the mark of the last one.
    pub(crate) queued: AtomicU64,
    /// The part of those nanoseconds that has run.
    pub(crate) done: AtomicU64,
    /// 1 if the process is in the ring.
    pub(crate) waits: AtomicU32,
    /// The number of watches so far, and the number of those before the first whose mark is not reached.
    pub(crate) watched: AtomicU64,
    pub(crate) settled: AtomicU64,
    pub(crate) watches: [Watch; WATCHES],
}

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Watch {
    pub(crate) mark: AtomicU64,
    /// When the mark was reached; 0 if it is not reached.
    pub(crate) at: AtomicU64,
}
