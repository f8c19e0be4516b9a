//! Measures how long launches take on the GPU: alone, by a pair of events around each, or several together ([`Series`]).
//!
//! Few launches are measured at a time, and nothing waits for a measurement.
//!
//! While any thread captures a stream, most of the calls made here would invalidate the capture, unless the calling
//! thread is in relaxed capture mode: [`relaxed`](crate::stream::relaxed).

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use tranche_shim_core::compute::{Costs, Shape};
use tranche_shim_runtime::sys;

use crate::abi::{CUcontext, CUresult, CUstream};
use crate::event_pair::{EventPair, Found, State};
use crate::series::Series;

/// Launches that are measured alone at a time.
const PAIRS: usize = 16;

/// Measurements that one launch checks.
const CHECKS: usize = 4;

/// Measurements in progress. All zeros means none.
pub struct Measuring {
    pairs: [EventPair; PAIRS],
    /// The next one to check.
    next: AtomicUsize,
    /// Launches that are measured together.
    pub series: Series,
    /// Calls in progress that may end contexts: nothing is measured meanwhile.
    ending: AtomicU32,
}

/// A measurement that has begun; ended by [`end`](Self::end).
pub struct Measurement {
    pair: &'static EventPair,
    stream: CUstream,
}

impl Measuring {
    /// Begins to measure what is launched next in `stream`; `None` if all pairs are in use, or the driver refuses.
    pub fn begin(&'static self, stream: CUstream, shape: Shape) -> Option<Measurement> {
        if self.is_paused() {
            return None;
        }
        let pair = self.pairs.iter().find(|pair| pair.take(State::Free))?;
        if !pair.start(stream, shape) {
            pair.give(State::Free);
            return None;
        }
        Some(Measurement { pair, stream })
    }

    /// Whether nothing may be measured now.
    pub fn is_paused(&self) -> bool {
        self.ending.load(Ordering::Acquire) != 0
    }

    /// Whether a launch of this kernel is measured.
    pub fn is_measuring(&self, kernel: u64) -> bool {
        self.pairs.iter().any(|pair| pair.measures(kernel))
    }

    /// Checks some measurements and notes those that are done. Returns how much more (or less) the launches without a
    /// known price should have been charged, in nanoseconds. `may_rise`: whether a price may.
    pub fn collect(&self, costs: &Costs, may_rise: impl Fn() -> bool) -> i64 {
        let mut more = self.series.collect(costs, &may_rise);
        for _ in 0..CHECKS {
            let next = self.next.fetch_add(1, Ordering::Relaxed) % PAIRS;
            let pair = &self.pairs[next];
            let owed = pair.collect(|found| match found {
                Found::Took(nanos) => costs.note(&pair.shape(), nanos, may_rise()),
                Found::Runs(nanos) => {
                    costs.at_least(&pair.shape(), nanos);
                    0
                }
                Found::Nothing => 0,
            });
            more = more.saturating_add(owed.unwrap_or(0));
        }
        more
    }

    /// Forgets the measurements of a shape, because its handle may stand for another kernel from now on.
    pub fn discard(&self, key: u64) {
        self.all_pairs().for_each(|pair| pair.discard(key));
    }

    /// Must be called before a call that may end contexts: ends the measurements in them. No new one begins until the
    /// returned value is dropped.
    pub fn leave(&self, contexts: &[CUcontext]) -> impl Drop + use<'_> {
        self.ending.fetch_add(1, Ordering::AcqRel);
        let start = sys::now();
        self.all_pairs()
            .for_each(|pair| pair.leave(contexts, start));
        Ending(&self.ending)
    }

    fn all_pairs(&self) -> impl Iterator<Item = &EventPair> {
        self.pairs.iter().chain([self.series.pair()])
    }
}

struct Ending<'a>(&'a AtomicU32);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Measurement {
    /// Ends the call: the launch is in its stream, or has failed.
    pub fn end(self, launched: CUresult) {
        self.pair.end(launched.is_ok(), self.stream);
    }
}
