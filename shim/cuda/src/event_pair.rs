//! Two events of the shim in a stream, between which launches are measured.
//!
//! Nothing waits for an event: later launches ask whether the pair is done. An event belongs to its context, and is destroyed
//! before the context ends.

use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use tranche_shim_core::compute::Shape;
use tranche_shim_runtime::sys;

use crate::abi::{CUcontext, CUevent, CUresult, CUstream};
use crate::driver::real;
use crate::stream::{context_of, relaxed, within};

/// A pair. All zeros means a free one without events.
pub struct EventPair {
    state: AtomicU32,
    /// The thread that uses it, or used it last.
    owner: AtomicU64,
    /// The context of the events; 0 for none.
    context: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    key: AtomicU64,
    kernel: AtomicU64,
    work: AtomicU64,
    /// When what it measures was first seen to run; 0 for not yet.
    seen: AtomicU64,
}

/// The state of a pair. Only the thread that made it `Owned` uses the other fields.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    Free = 0,
    Owned,
    /// The first event is in its stream, and a series of launches follows it.
    Open,
    /// Both events are in their stream.
    Running,
    /// A thread still uses it, but its context is ending.
    Abandoned,
}

/// What a pair says.
pub enum Found {
    /// The nanoseconds between its events.
    Took(u64),
    /// It is not done, and was seen to run for so many nanoseconds so far.
    Runs(u64),
    /// The driver does not say it.
    Nothing,
}

/// How long the end of a context waits for other threads that use its events, in nanoseconds. They need no longer than
/// one call of the driver takes, but a tool's callback in that call may itself wait for the thread that waits here.
const WAIT_NANOS: u64 = 100_000_000;
const NAP_NANOS: u64 = 20_000;

impl EventPair {
    /// Whether it is in a state.
    pub fn is(&self, state: State) -> bool {
        self.state.load(Ordering::Relaxed) == state as u32
    }

    /// Whether the calling thread used it last.
    pub fn is_own(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == sys::thread()
    }

    /// Whether its events are of this context.
    pub fn is_in(&self, context: CUcontext) -> bool {
        self.context.load(Ordering::Relaxed) == context
    }

    /// Makes it the calling thread's; false if it is not in that state.
    pub fn take(&self, from: State) -> bool {
        let taken = self.is(from) && self.change(from, State::Owned);
        if taken {
            self.owner.store(sys::thread(), Ordering::Relaxed);
        }
        taken
    }

    /// Ends the thread's use of it.
    pub fn give(&self, state: State) {
        if !self.change(State::Owned, state) {
            // Abandoned: the events ended with their context.
            self.context.store(0, Ordering::Relaxed);
            self.state.store(State::Free as u32, Ordering::Release);
        }
    }

    fn change(&self, from: State, to: State) -> bool {
        let (from, to) = (from as u32, to as u32);
        self.state
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Records the first event: what is launched next in `stream` is measured as launches of `shape`. False if the driver
    /// refuses.
    pub fn start(&self, stream: CUstream, shape: Shape) -> bool {
        if !relaxed(|| self.prepare(stream) && record(&self.start, stream)) {
            return false;
        }
        self.key.store(shape.key, Ordering::Relaxed);
        self.kernel.store(shape.kernel, Ordering::Relaxed);
        self.work.store(shape.work, Ordering::Relaxed);
        self.seen.store(0, Ordering::Relaxed);
        true
    }

    /// Records the second event, if all is in the stream that should be, and gives the pair.
    pub fn end(&self, is_whole: bool, stream: CUstream) {
        let runs = is_whole
            && self.state.load(Ordering::Acquire) == State::Owned as u32
            && relaxed(|| record(&self.end, stream));
        self.give(if runs { State::Running } else { State::Free });
    }

    /// What its launches are measured as.
    pub fn shape(&self) -> Shape {
        Shape {
            key: self.key.load(Ordering::Relaxed),
            kernel: self.kernel.load(Ordering::Relaxed),
            work: self.work.load(Ordering::Relaxed),
        }
    }

    /// Whether it measures launches of a kernel.
    pub fn measures(&self, kernel: u64) -> bool {
        !self.is(State::Free) && self.kernel.load(Ordering::Relaxed) == kernel
    }

    /// What it says, if it runs and no other thread uses it. It is free if it is done.
    pub fn collect<T>(&self, what: impl FnOnce(Found) -> T) -> Option<T> {
        if !self.take(State::Running) {
            return None;
        }
        let found = relaxed(|| self.find());
        let next = match found {
            Found::Runs(_) => State::Running,
            Found::Took(_) | Found::Nothing => State::Free,
        };
        let said = what(found);
        self.give(next);
        Some(said)
    }

    fn find(&self) -> Found {
        let (start, end) = (
            self.start.load(Ordering::Relaxed),
            self.end.load(Ordering::Relaxed),
        );
        match query(end) {
            CUresult::SUCCESS => elapsed(start, end).map_or(Found::Nothing, Found::Took),
            CUresult::NOT_READY => {
                let (seen, now) = (self.seen.load(Ordering::Relaxed), sys::now());
                if seen == 0 && query(start).is_ok() {
                    self.seen.store(now, Ordering::Relaxed);
                }
                Found::Runs(if seen == 0 {
                    0
                } else {
                    now.saturating_sub(seen)
                })
            }
            _ => {
                self.destroy();
                Found::Nothing
            }
        }
    }

    /// Forgets what it measures of a shape.
    pub fn discard(&self, key: u64) {
        for state in [State::Open, State::Running] {
            if self.key.load(Ordering::Relaxed) == key && self.take(state) {
                let is_it = self.key.load(Ordering::Relaxed) == key;
                self.give(if is_it { State::Free } else { state });
            }
        }
    }

    /// Ends it before these contexts end, if it belongs to one of them; `start` is when that began.
    pub fn leave(&self, contexts: &[CUcontext], start: u64) {
        while !self.try_leave(contexts) {
            let waited = sys::now().saturating_sub(start);
            if (self.is_own() || waited > WAIT_NANOS) && self.abandon(contexts) {
                break;
            }
            sys::sleep(NAP_NANOS);
        }
    }

    /// False if a thread is using it.
    fn try_leave(&self, contexts: &[CUcontext]) -> bool {
        for state in [State::Free, State::Open, State::Running] {
            if self.take(state) {
                let is_one = contexts.contains(&self.context.load(Ordering::Relaxed));
                if is_one {
                    relaxed(|| self.destroy());
                }
                self.give(if is_one { State::Free } else { state });
                return true;
            }
        }
        false
    }

    /// Marks it as abandoned for the thread that uses it, which must not use events of these contexts any more; false if
    /// that thread has just finished.
    fn abandon(&self, contexts: &[CUcontext]) -> bool {
        let context = self.context.load(Ordering::Relaxed);
        if context != 0 && !contexts.contains(&context) {
            return true;
        }
        self.change(State::Owned, State::Abandoned)
            || self.state.load(Ordering::Acquire) == State::Abandoned as u32
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
