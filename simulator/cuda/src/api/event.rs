//! Events.

use std::sync::atomic::Ordering;

use crate::code::Code;
use crate::context::current;
use crate::device::devices;
use crate::driver::{self, driver};
use crate::event::Event;
use crate::export::{export, put};
use crate::host;
use crate::memory;
use crate::object::{Handle, Object};
use crate::stream;

/// Milliseconds between two events.
///
/// # Safety
/// As [`Object::find`]; `to` is null or valid.
unsafe fn elapsed(to: *mut f32, start: Handle, end: Handle) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let (start, end) = unsafe { (Object::<Event>::find(start)?, Object::<Event>::find(end)?) };
    if !start.has_timing() || !end.has_timing() {
        return Err(Code::INVALID_HANDLE);
    }
    let (Some(from), Some(to_time)) = (start.time()?, end.time()?) else {
        return Err(Code::NOT_READY);
    };
    if !start.has_happened() || !end.has_happened() {
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
        put(to, Object::create(Event::new(flags)).handle())
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
        if Object::<Event>::find(event)?.has_happened() { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cuEventSynchronize(event: Handle) {
        driver()?;
        let event = Object::<Event>::find(event)?;
        let (gpu, mark) = event.due();
        driver::wait(gpu, mark);
        host::wait(event.functions());
        for device in devices()?.iter().filter(|device| device.gpu == gpu) {
            memory::trim_pools_after_wait(device);
            device.check()?;
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
        stream.wait_for(gpu, mark);
        stream.functions.fetch_max(event.functions(), Ordering::AcqRel);
        Ok(())
    }
    fn cuEventElapsedTime(to: *mut f32, start: Handle, end: Handle) { elapsed(to, start, end) }
    fn cuEventElapsedTime_v2(to: *mut f32, start: Handle, end: Handle) { elapsed(to, start, end) }
}
