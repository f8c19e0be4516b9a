//! Measures a series of launches by one pair of events, to learn what the events add to a launch that is measured alone
//! ([`tranche_shim_core::compute::overhead`]).
//!
//! A process has one at a time, of one thread. While it is open, it holds what was left in the thread's batch, so that each
//! launch of the thread comes here, and pays from that without a wait. It ends after [`MOST`] launches, or before a launch
//! that does not belong to it.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tranche_shim_core::compute::{Batch, Costs, LaunchSeries, Shape};
use tranche_shim_runtime::sys;

use crate::abi::{CUresult, CUstream};
use crate::event_pair::{EventPair, Found, State};
use crate::stream::context_of;

/// The launches of a series.
const MOST: u64 = 16;

/// Launches above this price are measured alone, in nanoseconds: what events add is a small part of it.
pub const SHORT_NANOS: u64 = 100_000;

/// After so many nanoseconds, another thread may begin a series instead of one that launches nothing more.
const STALE_NANOS: u64 = 1_000_000_000;

/// The series in progress. All zeros means none.
pub struct Series {
    events: EventPair,
    stream: AtomicUsize,
    /// When it began.
    since: AtomicU64,
    /// What it has of its thread's batch, in nanoseconds.
    held: AtomicU64,
    launches: AtomicU64,
    prices: AtomicU64,
    is_mixed: AtomicBool,
}

/// The series, while the thread makes a launch of it.
pub struct OpenSeries(&'static Series);

impl Series {
    /// Begins a series with a launch in `stream` that was paid; `None` if another one is in progress, the batch has too
    /// little for a series, or the driver refuses.
    pub fn begin(
        &'static self,
        stream: CUstream,
        shape: Shape,
        price: u64,
        batch: &Batch,
    ) -> Option<OpenSeries> {
        let age = sys::now().saturating_sub(self.since.load(Ordering::Relaxed));
        let is_taken =
            self.events.take(State::Free) || age > STALE_NANOS && self.events.take(State::Open);
        if !is_taken {
            return None;
        }
        let held = batch.take(u64::MAX);
        if held < price * MOST || !self.events.start(stream, shape) {
            let _ = batch.give(held);
            self.events.give(State::Free);
            return None;
        }
        self.stream.store(stream, Ordering::Relaxed);
        self.since.store(sys::now(), Ordering::Relaxed);
        self.held.store(held, Ordering::Relaxed);
        self.launches.store(1, Ordering::Relaxed);
        self.prices.store(price, Ordering::Relaxed);
        self.is_mixed.store(false, Ordering::Relaxed);
        Some(OpenSeries(self))
    }

    /// The calling thread's series, if it is in this stream's context.
    pub fn resume(&'static self, stream: CUstream) -> Option<OpenSeries> {
        let is_own = self.events.is(State::Open) && self.events.is_own();
        (is_own && self.events.is_in(context_of(stream)) && self.events.take(State::Open))
            .then_some(OpenSeries(self))
    }

    /// Notes the series if it is done; returns how much more (or less) launches should have been charged.
    pub fn collect(&self, costs: &Costs, may_rise: impl Fn() -> bool) -> i64 {
        let owed = self.events.collect(|found| match found {
            Found::Took(nanos) => costs.note_series(&self.measured(), nanos, may_rise()),
            Found::Runs(_) | Found::Nothing => 0,
        });
        owed.unwrap_or(0)
    }

    /// Its events.
    pub fn pair(&self) -> &EventPair {
        &self.events
    }

    fn measured(&self) -> LaunchSeries {
        let is_mixed = self.is_mixed.load(Ordering::Relaxed);
        LaunchSeries {
            launches: self.launches.load(Ordering::Relaxed),
            prices: self.prices.load(Ordering::Relaxed),
            shape: (!is_mixed).then(|| self.events.shape()),
        }
    }
}

impl OpenSeries {
    /// Adds a launch and pays for it; false if it does not belong to the series.
    pub fn add(&self, stream: CUstream, shape: &Shape, price: u64) -> bool {
        let Self(series) = self;
        let held = series.held.load(Ordering::Relaxed);
        if series.stream.load(Ordering::Relaxed) != stream || price > held {
            return false;
        }
        series.held.store(held - price, Ordering::Relaxed);
        series.launches.fetch_add(1, Ordering::Relaxed);
        series.prices.fetch_add(price, Ordering::Relaxed);
        if series.events.shape().key != shape.key {
            series.is_mixed.store(true, Ordering::Relaxed);
        }
        true
    }

    /// Ends the call of a launch. Returns the nanoseconds to give back, if the series ends with it.
    pub fn end_launch(self, launched: CUresult) -> u64 {
        if launched.is_ok() && self.0.launches.load(Ordering::Relaxed) < MOST {
            self.0.events.give(State::Open);
            0
        } else {
            self.end(launched.is_ok())
        }
    }

    /// Ends the series. It is measured if `is_whole`: all of its launches are in its stream, and the stream is there.
    /// Returns the nanoseconds to give back.
    pub fn end(self, is_whole: bool) -> u64 {
        let held = self.0.held.swap(0, Ordering::Relaxed);
        let stream = self.0.stream.load(Ordering::Relaxed);
        self.0.events.end(is_whole, stream);
        held
    }

    /// Whether it is of this stream.
    pub fn is_in(&self, stream: CUstream) -> bool {
        self.0.stream.load(Ordering::Relaxed) == stream
    }
}
