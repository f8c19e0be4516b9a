//! Events: marks in the virtual time of a stream.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tranche_simulator_machine::timeline::{Moment, now};

use crate::capture::{Capture, CaptureMark};
use crate::code::Code;
use crate::driver::{self, driver};
use crate::host;
use crate::object::{Kind, Object};
use crate::stream::Stream;

/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

#[derive(Debug)]
pub struct Event {
    flags: u32,
    /// The work that it follows, if it was recorded.
    recorded: Mutex<Option<Recorded>>,
    /// The last host function that it comes after.
    functions: AtomicU64,
    /// Its place in a capture, if it was recorded in a captured stream.
    mark: Mutex<Option<CaptureMark>>,
}

/// A mark on a GPU, and its time.
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
    /// An event that was not recorded yet.
    pub fn new(flags: u32) -> Self {
        Self {
            flags,
            recorded: Mutex::default(),
            functions: AtomicU64::new(0),
            mark: Mutex::default(),
        }
    }

    /// Whether it records times.
    pub fn has_timing(&self) -> bool {
        self.flags & NO_TIMING == 0
    }

    fn recorded(&self) -> Option<Recorded> {
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPU and mark that it follows.
    pub fn due(&self) -> (usize, u64) {
        self.recorded().map_or((0, 0), |r| (r.gpu, r.mark))
    }

    /// When it happened, in nanoseconds of the monotonic clock; `None` if it has not happened yet.
    pub fn time(&self) -> Result<Option<u64>, Code> {
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

    /// Whether the work before it is done.
    pub fn has_happened(&self) -> bool {
        let (gpu, mark) = self.due();
        driver::has_reached(gpu, mark) && host::is_done(self.functions())
    }

    /// Makes `stream` join the capture in which this event was recorded; false if it was recorded in none.
    pub fn join_capture(&self, stream: &Object<Stream>) -> bool {
        let mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner);
        mark.as_ref().is_some_and(|mark| stream.join_capture(mark))
    }

    /// Records it after all that is queued in `stream`.
    pub fn record(&self, stream: &Stream) -> Result<(), Code> {
        let mark = stream.with_capture(Capture::mark);
        let captured = mark.is_some();
        *self.mark.lock().unwrap_or_else(PoisonError::into_inner) = mark;
        if !captured {
            let driver = driver()?;
            let (gpu, mark) = (stream.context.device.gpu, stream.earliest());
            let moment = if self.has_timing() {
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
