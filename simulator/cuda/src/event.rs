//! Events: marks in a stream's virtual time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tranche_simulator_machine::timeline::{now, sleep_until};

use crate::code::Code;
use crate::context::current;
use crate::driver::driver;
use crate::export::{export, put};
use crate::graph::{Capture, CaptureMark};
use crate::host;
use crate::object::{Handle, Kind, Object};
use crate::stream::{self, Stream};

/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

/// An event.
#[derive(Debug)]
pub struct Event {
    flags: u32,
    /// When it happens, if it was recorded; 0 if not.
    due: AtomicU64,
    /// The last host function that it comes after.
    functions: AtomicU64,
    /// Set when it was recorded in a stream that captures.
    mark: Mutex<Option<CaptureMark>>,
}

impl Kind for Event {
    const TAG: u64 = 0x4556_5400_0000_0001;
}

impl Event {
    /// When it happens, in the clock of streams.
    pub fn due(&self) -> u64 {
        self.due.load(Ordering::Relaxed)
    }

    /// The last host function that it comes after.
    pub fn functions(&self) -> u64 {
        self.functions.load(Ordering::Acquire)
    }

    fn happened(&self) -> bool {
        self.due() <= now() && host::done(self.functions())
    }

    /// Lets `stream` join the capture that this event was recorded in; false if
    /// it was recorded in none.
    pub fn join_capture(&self, stream: &Stream) -> bool {
        let mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner);
        mark.as_ref().is_some_and(|mark| mark.join(stream))
    }

    fn record(&self, stream: &Stream) {
        let mark = stream::captured(stream, Capture::mark);
        let captured = mark.is_some();
        *self.mark.lock().unwrap_or_else(PoisonError::into_inner) = mark;
        if !captured {
            self.due
                .store(stream.earliest().max(now()), Ordering::Relaxed);
            self.functions
                .store(stream.functions.load(Ordering::Acquire), Ordering::Release);
        }
    }
}

/// Milliseconds between two events.
///
/// # Safety
/// As [`Object::find`]; `to` is null or valid.
unsafe fn elapsed(to: *mut f32, start: Handle, end: Handle) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let (start, end) = unsafe { (Object::<Event>::find(start)?, Object::<Event>::find(end)?) };
    if (start.flags | end.flags) & NO_TIMING != 0 || start.due() == 0 || end.due() == 0 {
        return Err(Code::INVALID_HANDLE);
    }
    if !start.happened() || !end.happened() {
        return Err(Code::NOT_READY);
    }
    let nanos = i128::from(end.due()) - i128::from(start.due());
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "CUDA's type"
    )]
    let milliseconds = (nanos as f64 / 1e6) as f32;
    // SAFETY: the caller's contract.
    unsafe { put(to, milliseconds) }
}

export! {
    fn cuEventCreate(to: *mut Handle, flags: u32) {
        current()?;
        if flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        let event = Event {
            flags,
            due: AtomicU64::new(0),
            functions: AtomicU64::new(0),
            mark: Mutex::new(None),
        };
        put(to, Object::create(event).handle())
    }
    fn cuEventDestroy(event: Handle) {
        driver()?;
        Object::<Event>::find(event)?.destroy();
        Ok(())
    }
    fn cuEventDestroy_v2(event: Handle) {
        driver()?;
        Object::<Event>::find(event)?.destroy();
        Ok(())
    }
    fn cuEventRecord, cuEventRecord_ptsz [stream] (event: Handle, stream: Handle) {
        let stream = stream::find(stream)?;
        Object::<Event>::find(event)?.record(stream);
        Ok(())
    }
    fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz [stream] (event: Handle, stream: Handle, _flags: u32) {
        let stream = stream::find(stream)?;
        Object::<Event>::find(event)?.record(stream);
        Ok(())
    }
    fn cuEventQuery(event: Handle) {
        driver()?;
        if Object::<Event>::find(event)?.happened() { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cuEventSynchronize(event: Handle) {
        driver()?;
        let event = Object::<Event>::find(event)?;
        sleep_until(event.due());
        host::wait(event.functions());
        Ok(())
    }
    fn cuEventElapsedTime(to: *mut f32, start: Handle, end: Handle) { elapsed(to, start, end) }
    fn cuEventElapsedTime_v2(to: *mut f32, start: Handle, end: Handle) { elapsed(to, start, end) }
}
