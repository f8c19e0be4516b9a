//! Measures how long launches take on the GPU, by the shim's own events before and after them in their stream.
//!
//! Few launches are measured at a time, and nothing waits for an event: later launches check which measurements are
//! done. An event belongs to its context, and is destroyed before the context ends.
//!
//! While any thread captures a stream, most of the calls made here would invalidate the capture, unless the calling
//! thread is in relaxed capture mode: [`relaxed`].

use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use tranche_shim_core::compute::{Costs, Shape};
use tranche_shim_runtime::sys;

use crate::abi::{CUcontext, CUevent, CUresult, CUstream};
use crate::driver::real;
use crate::stream::{context_of, relaxed, within};

/// Launches that are measured at a time.
const PLACES: usize = 16;

/// Measurements that one launch checks.
const CHECKS: usize = 4;

/// Measurements in progress. All zeros means none.
pub struct Measuring {
    places: [MeasurementSlot; PLACES],
    /// The next one to check.
    next: AtomicUsize,
    /// Calls in progress that may end contexts: nothing is measured meanwhile.
    ending: AtomicU32,
}

struct MeasurementSlot {
    state: AtomicU32,
    /// The thread that uses it, while it is OWNED.
    owner: AtomicU64,
    /// The context of the events; 0 for none.
    context: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    key: AtomicU64,
    kernel: AtomicU64,
    work: AtomicU64,
    /// When the launch was first seen to run; 0 for not yet.
    seen: AtomicU64,
}

// States of a place. Only the thread that set OWNED uses the other fields. ABANDONED: the thread still uses them, but
// their context is ending.
const FREE: u32 = 0;
const OWNED: u32 = 1;
const RUNNING: u32 = 2;
const ABANDONED: u32 = 3;

/// How long the end of a context waits for other threads that use its events, in nanoseconds. They need no longer than
/// one call of the driver takes, but a tool's callback in that call may itself wait for the thread that waits here.
const WAIT_NANOS: u64 = 100_000_000;
const NAP_NANOS: u64 = 20_000;

/// A measurement that has begun; ended by [`end`](Self::end).
pub struct Measurement {
    place: &'static MeasurementSlot,
    stream: CUstream,
}

impl Measuring {
    /// Begins to measure what is launched next in `stream`; `None` if all places are taken, or the
    /// driver refuses.
    pub fn begin(&'static self, stream: CUstream, shape: Shape) -> Option<Measurement> {
        if self.ending.load(Ordering::Acquire) != 0 {
            return None;
        }
        let place = self.places.iter().find(|place| place.take(FREE))?;
        if !relaxed(|| place.prepare(stream) && record(&place.start, stream)) {
            place.give(FREE);
            return None;
        }
        place.key.store(shape.key, Ordering::Relaxed);
        place.kernel.store(shape.kernel, Ordering::Relaxed);
        place.work.store(shape.work, Ordering::Relaxed);
        place.seen.store(0, Ordering::Relaxed);
        Some(Measurement { place, stream })
    }

    /// Whether a launch of this kernel is measured.
    pub fn is_measuring(&self, kernel: u64) -> bool {
        self.places.iter().any(|place| {
            place.state.load(Ordering::Relaxed) != FREE
                && place.kernel.load(Ordering::Relaxed) == kernel
        })
    }

    /// Checks some measurements and notes those that are done. Returns how much more (or less) the launches without a
    /// known price should have been charged, in nanoseconds.
    pub fn collect(&self, costs: &Costs) -> i64 {
        let mut more = 0i64;
        for _ in 0..CHECKS {
            let next = self.next.fetch_add(1, Ordering::Relaxed) % PLACES;
            let place = &self.places[next];
            if place.state.load(Ordering::Relaxed) == RUNNING && place.take(RUNNING) {
                let (now, owed) = relaxed(|| place.check(costs));
                more = more.saturating_add(owed);
                place.give(now);
            }
        }
        more
    }

    /// Forgets the measurements of a shape, because its handle may stand for another kernel from now on.
    pub fn discard(&self, key: u64) {
        for place in &self.places {
            if place.key.load(Ordering::Relaxed) == key && place.take(RUNNING) {
                let is_it = place.key.load(Ordering::Relaxed) == key;
                place.give(if is_it { FREE } else { RUNNING });
            }
        }
    }

    /// Must be called before a call that may end contexts: ends the measurements in them. No new one begins until the
    /// returned value is dropped.
    pub fn leave(&self, contexts: &[CUcontext]) -> impl Drop + use<'_> {
        self.ending.fetch_add(1, Ordering::AcqRel);
        let start = sys::now();
        for place in &self.places {
            while !place.leave(contexts) {
                let is_own = place.owner.load(Ordering::Relaxed) == sys::thread();
                if (is_own || sys::now().saturating_sub(start) > WAIT_NANOS)
                    && place.abandon(contexts)
                {
                    break;
                }
                sys::sleep(NAP_NANOS);
            }
        }
        Ending(&self.ending)
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
        let runs = launched.is_ok()
            && self.place.state.load(Ordering::Acquire) == OWNED
            && relaxed(|| record(&self.place.end, self.stream));
        self.place.give(if runs { RUNNING } else { FREE });
    }
}

impl MeasurementSlot {
    fn take(&self, from: u32) -> bool {
        let taken = self
            .state
            .compare_exchange(from, OWNED, Ordering::Acquire, Ordering::Relaxed)
            .is_ok();
        if taken {
            self.owner.store(sys::thread(), Ordering::Relaxed);
        }
        taken
    }

    fn give(&self, state: u32) {
        let given = self
            .state
            .compare_exchange(OWNED, state, Ordering::AcqRel, Ordering::Relaxed);
        if given.is_err() {
            // Abandoned: the events ended with their context.
            self.context.store(0, Ordering::Relaxed);
            self.state.store(FREE, Ordering::Release);
        }
    }

    /// Ends a measurement that is in one of these contexts; false if a thread is using the place.
    fn leave(&self, contexts: &[CUcontext]) -> bool {
        for state in [FREE, RUNNING] {
            if self.take(state) {
                let is_one = contexts.contains(&self.context.load(Ordering::Relaxed));
                if is_one {
                    relaxed(|| self.destroy());
                }
                self.give(if is_one { FREE } else { state });
                return true;
            }
        }
        false
    }

    /// Marks the place as abandoned for the thread that uses it, which must not use events of these contexts any more;
    /// false if that thread has just finished.
    fn abandon(&self, contexts: &[CUcontext]) -> bool {
        let context = self.context.load(Ordering::Relaxed);
        if context != 0 && !contexts.contains(&context) {
            return true;
        }
        let abandoned =
            self.state
                .compare_exchange(OWNED, ABANDONED, Ordering::AcqRel, Ordering::Acquire);
        abandoned.is_ok() || self.state.load(Ordering::Acquire) == ABANDONED
    }

    /// Makes the events in the stream's context, unless they are there already.
    fn prepare(&self, stream: CUstream) -> bool {
        let context = context_of(stream);
        if context == 0 {
            return false;
        }
        if self.context.load(Ordering::Relaxed) == context {
            return true;
        }
        self.destroy();
        let Some((start, end)) = within(context, make_events) else {
            return false;
        };
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.context.store(context, Ordering::Relaxed);
        true
    }

    fn destroy(&self) {
        if self.context.swap(0, Ordering::Relaxed) != 0 {
            for event in [&self.start, &self.end] {
                destroy(event.load(Ordering::Relaxed));
            }
        }
    }

    /// The new state of the place, and by how much launches were charged too little.
    fn check(&self, costs: &Costs) -> (u32, i64) {
        let (start, end) = (
            self.start.load(Ordering::Relaxed),
            self.end.load(Ordering::Relaxed),
        );
        let shape = Shape {
            key: self.key.load(Ordering::Relaxed),
            kernel: self.kernel.load(Ordering::Relaxed),
            work: self.work.load(Ordering::Relaxed),
        };
        match query(end) {
            CUresult::SUCCESS => {
                let owed = elapsed(start, end).map_or(0, |nanos| costs.note(&shape, nanos));
                (FREE, owed)
            }
            CUresult::NOT_READY => {
                let (seen, now) = (self.seen.load(Ordering::Relaxed), sys::now());
                if seen != 0 {
                    costs.at_least(&shape, now.saturating_sub(seen));
                } else if query(start).is_ok() {
                    self.seen.store(now, Ordering::Relaxed);
                }
                (RUNNING, 0)
            }
            _ => {
                self.destroy();
                (FREE, 0)
            }
        }
    }
}

fn record(event: &AtomicUsize, stream: CUstream) -> bool {
    let event = event.load(Ordering::Relaxed);
    // SAFETY: an event of ours, and what the program passes to the driver as a stream.
    unsafe { real!(cuEventRecord: fn(CUevent, CUstream))(event, stream) }.is_ok()
}

fn query(event: CUevent) -> CUresult {
    // SAFETY: an event of ours.
    unsafe { real!(cuEventQuery: fn(CUevent))(event) }
}

fn destroy(event: CUevent) {
    // SAFETY: an event of ours, which is no longer used.
    unsafe { real!(cuEventDestroy_v2: fn(CUevent))(event) };
}

/// Nanoseconds from one event to the other.
fn elapsed(start: CUevent, end: CUevent) -> Option<u64> {
    let mut millis = 0f32;
    // SAFETY: two events of ours; writes the local number.
    let result = unsafe {
        real!(cuEventElapsedTime: fn(*mut f32, CUevent, CUevent))(&raw mut millis, start, end)
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates; what is not a number is 0"
    )]
    let nanos = (f64::from(millis) * 1e6) as u64;
    result.is_ok().then_some(nanos)
}

fn make_events() -> Option<(CUevent, CUevent)> {
    let make = || {
        let mut event = 0;
        // SAFETY: writes the local handle.
        let result = unsafe { real!(cuEventCreate: fn(*mut CUevent, u32))(&raw mut event, 0) };
        result.is_ok().then_some(event)
    };
    let start = make()?;
    let Some(end) = make() else {
        destroy(start);
        return None;
    };
    Some((start, end))
}
