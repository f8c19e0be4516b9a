//! What launches take on the GPU: by events of our own before and after them, in their stream.
//!
//! Few launches are measured at a time, and nothing waits for an event: who launches looks whether
//! any are done. An event belongs to its context, and goes with it.
//!
//! While a stream is captured, by whatever thread, most of what is done here would end the capture, but
//! for a thread that says that it knows what it does: [`relaxed`].

use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use tranche_shim_core::compute::{Costs, Shape};
use tranche_shim_runtime::sys;

use crate::abi::{CUcontext, CUevent, CUresult, CUstream};
use crate::driver::real;
use crate::process::current_context;

/// Launches that are measured at a time.
const PLACES: usize = 16;

/// Measurements that a launch looks at.
const LOOKS: usize = 4;

/// Measurements under way. All zeros is none.
pub struct Measuring {
    places: [Place; PLACES],
    /// The next to look at.
    next: AtomicUsize,
}

struct Place {
    state: AtomicU32,
    /// That of the events; 0 for none.
    context: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    key: AtomicU64,
    kernel: AtomicU64,
    work: AtomicU64,
    /// When the launch was first seen to run; 0 for not yet.
    seen: AtomicU64,
}

// States of a place. Who has it OWNED alone uses the rest.
const FREE: u32 = 0;
const OWNED: u32 = 1;
const RUNNING: u32 = 2;

/// A measurement that has begun; ended by [`end`](Self::end).
pub struct Measurement {
    place: &'static Place,
    stream: CUstream,
}

impl Measuring {
    /// Begins to measure what is launched next in `stream`; `None` if all places are taken, or the
    /// driver does not let us.
    pub fn begin(&'static self, stream: CUstream, shape: Shape) -> Option<Measurement> {
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

    /// Whether a launch of this shape is measured.
    pub fn is_measuring(&self, shape: &Shape) -> bool {
        self.places.iter().any(|place| {
            place.state.load(Ordering::Relaxed) != FREE
                && place.key.load(Ordering::Relaxed) == shape.key
        })
    }

    /// Looks at some of what is measured and notes what is done. Returns how much more (or less) the
    /// launches should have paid that knew no price.
    pub fn look(&self, costs: &Costs) -> i64 {
        let mut more = 0i64;
        for _ in 0..LOOKS {
            let next = self.next.fetch_add(1, Ordering::Relaxed) % PLACES;
            let place = &self.places[next];
            if place.state.load(Ordering::Relaxed) == RUNNING && place.take(RUNNING) {
                let (now, owed) = relaxed(|| place.look(costs));
                more = more.saturating_add(owed);
                place.give(now);
            }
        }
        more
    }

    /// Makes a call at which contexts may end, and their events with them; it returns who tells of a
    /// context whether it has. Nobody measures meanwhile. One thread at a time.
    pub fn across<E: Fn(CUcontext) -> bool>(
        &self,
        call: impl FnOnce() -> (CUresult, E),
    ) -> CUresult {
        let mut states = [FREE; PLACES];
        for (place, state) in self.places.iter().zip(&mut states) {
            // Another thread has it for as long as a launch takes, or a look.
            *state = loop {
                if place.take(FREE) {
                    break FREE;
                }
                if place.take(RUNNING) {
                    break RUNNING;
                }
                sys::give_way();
            };
        }
        let (result, has_ended) = call();
        for (place, state) in self.places.iter().zip(states) {
            let context = place.context.load(Ordering::Relaxed);
            if context != 0 && has_ended(context) {
                place.context.store(0, Ordering::Relaxed);
                place.give(FREE);
            } else {
                place.give(state);
            }
        }
        result
    }
}

impl Measurement {
    /// The launch is in its stream, or has failed.
    pub fn end(self, launched: CUresult) {
        let runs = launched.is_ok() && relaxed(|| record(&self.place.end, self.stream));
        self.place.give(if runs { RUNNING } else { FREE });
    }
}

impl Place {
    fn take(&self, from: u32) -> bool {
        self.state
            .compare_exchange(from, OWNED, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    fn give(&self, state: u32) {
        self.state.store(state, Ordering::Release);
    }

    /// Sees that the events are those of the stream's context.
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

    /// The state that the place gets, and what was paid too little.
    fn look(&self, costs: &Costs) -> (u32, i64) {
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
                    costs.at_least(shape.key, now.saturating_sub(seen));
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
    // SAFETY: an event of ours, which nobody uses from now on.
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

/// Does what a capture under way would not survive, if it is another thread's, or another stream's.
/// (cuda.h, `cuThreadExchangeStreamCaptureMode`.)
pub fn relaxed<T>(act: impl FnOnce() -> T) -> T {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    // SAFETY: reads and writes the local: puts this thread's mode into it.
    let exchange = |mode: &mut u32| unsafe {
        real!(cuThreadExchangeStreamCaptureMode: fn(*mut u32))(mode).is_ok()
    };
    let exchanged = exchange(&mut mode);
    let done = act();
    if exchanged {
        exchange(&mut mode);
    }
    done
}

/// The context of a stream; of a default one the current context; 0 for none.
fn context_of(stream: CUstream) -> CUcontext {
    if stream <= crate::pool::LAST_IMPLICIT_STREAM {
        return current_context();
    }
    let mut context = 0;
    // SAFETY: `stream` is what the program passes to the driver as a stream; writes the local handle.
    let result =
        unsafe { real!(cuStreamGetCtx: fn(CUstream, *mut CUcontext))(stream, &raw mut context) };
    if result.is_ok() { context } else { 0 }
}

/// Does `work` with a stream's context current; where it cannot be, with the one that is.
pub fn within_stream<T>(stream: CUstream, work: impl Fn() -> T) -> T {
    within(context_of(stream), || Some(work())).unwrap_or_else(&work)
}

/// Does `work` with `context` current.
fn within<T>(context: CUcontext, work: impl FnOnce() -> Option<T>) -> Option<T> {
    if current_context() == context {
        return work();
    }
    // SAFETY: a context that the driver named; what was current becomes so again.
    unsafe {
        if !real!(cuCtxPushCurrent_v2: fn(CUcontext))(context).is_ok() {
            return None;
        }
        let done = work();
        let mut former = 0;
        real!(cuCtxPopCurrent_v2: fn(*mut CUcontext))(&raw mut former);
        done
    }
}
