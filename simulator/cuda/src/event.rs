//! Events: marks in a stream's virtual time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tranche_simulator_machine::timeline::{Moment, now};

use crate::code::Code;
use crate::context::current;
use crate::device::devices;
use crate::driver::{self, driver};
use crate::export::{export, put};
use crate::graph::{Capture, CaptureMark};
use crate::host;
use crate::memory;
use crate::object::{Handle, Kind, Object};
use crate::stream::{self, Stream};

/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

/// An event.
#[derive(Debug)]
pub struct Event {
    flags: u32,
    /// What it comes after, if it was recorded.
    recorded: Mutex<Option<Recorded>>,
    /// The last host function that it comes after.
    functions: AtomicU64,
    /// Set when it was recorded in a stream that captures.
    mark: Mutex<Option<CaptureMark>>,
}

/// A mark on a GPU, and when it is reached.
#[derive(Debug, Clone, Copy)]
struct Recorded {
    gpu: usize,
    mark: u64,
    moment: Moment,
}

impl Kind for Event {
    const TAG: u64 = 0x4556_5400_0000_0001;
}

impl Event {
    fn recorded(&self) -> Option<Recorded> {
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPU and mark that it comes after.
    pub fn due(&self) -> (usize, u64) {
        self.recorded().map_or((0, 0), |r| (r.gpu, r.mark))
    }

    /// When it happened; `None` if it did not yet.
    fn time(&self) -> Result<Option<u64>, Code> {
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(recorded) = recorded.as_mut() else {
            return Err(Code::INVALID_HANDLE);
        };
        if let Moment::Later(watch) = recorded.moment {
            let driver = driver()?;
            let at = driver
                .shared
                .reached_at(driver.slot, recorded.gpu, watch, now())?;
            let Some(at) = at else {
                return Ok(None);
            };
            recorded.moment = Moment::At(at);
        }
        match recorded.moment {
            Moment::At(at) => Ok(Some(at)),
            Moment::Later(_) => Ok(None),
        }
    }

    /// The last host function that it comes after.
    pub fn functions(&self) -> u64 {
        self.functions.load(Ordering::Acquire)
    }

    fn happened(&self) -> bool {
        let (gpu, mark) = self.due();
        driver::reached(gpu, mark) && host::done(self.functions())
    }

    /// Lets `stream` join the capture that this event was recorded in; false if
    /// it was recorded in none.
    pub fn join_capture(&self, stream: &Stream) -> bool {
        let mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner);
        mark.as_ref().is_some_and(|mark| mark.join(stream))
    }

    fn record(&self, stream: &Stream) -> Result<(), Code> {
        let mark = stream::captured(stream, Capture::mark);
        let captured = mark.is_some();
        *self.mark.lock().unwrap_or_else(PoisonError::into_inner) = mark;
        if !captured {
            let driver = driver()?;
            let (gpu, mark) = (stream.context.device.gpu, stream.earliest());
            let moment = if self.flags & NO_TIMING == 0 {
                driver.shared.watch(driver.slot, gpu, mark, now())?
            } else {
                Moment::At(0)
            };
            *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(Recorded { gpu, mark, moment });
            self.functions
                .store(stream.functions.load(Ordering::Acquire), Ordering::Release);
        }
        Ok(())
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
    if (start.flags | end.flags) & NO_TIMING != 0 {
        return Err(Code::INVALID_HANDLE);
    }
    let (Some(from), Some(to_time)) = (start.time()?, end.time()?) else {
        return Err(Code::NOT_READY);
    };
    if !start.happened() || !end.happened() {
        return Err(Code::NOT_READY);
    }
    let nanos = i128::from(to_time) - i128::from(from);
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
            recorded: Mutex::default(),
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
        Object::<Event>::find(event)?.record(stream)
    }
    fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz [stream] (event: Handle, stream: Handle, _flags: u32) {
        let stream = stream::find(stream)?;
        Object::<Event>::find(event)?.record(stream)
    }
    fn cuEventQuery(event: Handle) {
        driver()?;
        if Object::<Event>::find(event)?.happened() { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cuEventSynchronize(event: Handle) {
        driver()?;
        let event = Object::<Event>::find(event)?;
        let (gpu, mark) = event.due();
        driver::wait(gpu, mark);
        host::wait(event.functions());
        for device in devices()?.iter().filter(|device| device.gpu == gpu) {
            memory::trim_pools_after_wait(device);
            device.check_present()?;
        }
        Ok(())
    }
    fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz [stream] (stream: Handle, event: Handle, _flags: u32) {
        let stream = stream::find(stream)?;
        let event = Object::<Event>::find(event)?;
        if event.join_capture(stream) {
            return Ok(());
        }
        let (gpu, mark) = event.due();
        stream.after(gpu, mark);
        stream.functions.fetch_max(event.functions(), Ordering::AcqRel);
        Ok(())
    }
    fn cuEventElapsedTime(to: *mut f32, start: Handle, end: Handle) { elapsed(to, start, end) }
    fn cuEventElapsedTime_v2(to: *mut f32, start: Handle, end: Handle) { elapsed(to, start, end) }
}
