//! The hooks for stream captures. A launch into a captured stream is work for a graph, which pays when it is launched.
//!
//! A capture ends with `cuStreamEndCapture`, or with its stream, or with the stream's context. A handle may be reused as
//! soon as the driver has ended its object, so a stream's captures are taken out before the driver destroys it.

use tranche_shim_runtime::sys;

use crate::abi::{CUresult, CUstream};
use crate::driver::Call;
use crate::launches::Capture;
use crate::process;
use crate::stream::{PER_THREAD, Stream, context_of, is_capturing};

/// A stream as a number that is never 0: its handle, or the thread whose default stream it is.
fn number(stream: Stream) -> u64 {
    match stream.handle() {
        PER_THREAD => sys::thread() << 1 | 1,
        handle => (handle as u64) << 1,
    }
}

/// `cuStreamBeginCapture` in all its forms. The capture is noted before it begins.
pub fn begin(stream: Stream, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let captures = &process.launches.captures;
    let (stream, context) = (number(stream), context_of(stream.handle()));
    captures.add(Capture { stream, context });
    let result = driver.make();
    if !result.is_ok() {
        captures.remove(stream, true);
    }
    result
}

/// `cuStreamEndCapture`. A capture that had become invalid ends with it, too.
pub fn end(stream: Stream, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if let Some(process) = process::joined()
        && process.launches.captures.any()
        && (result.is_ok() || !is_capturing(stream.handle()))
    {
        process.launches.captures.remove(number(stream), true);
    }
    result
}

/// `cuStreamDestroy`: a capture of the stream ends with it.
pub fn destroy(stream: CUstream, driver: Call<'_>) -> CUresult {
    let stream = number(Stream::legacy(stream));
    let captures = process::joined().map(|process| &process.launches.captures);
    let taken = captures.filter(|captures| captures.any());
    let taken = taken.and_then(|captures| Some((captures, captures.remove(stream, false)?)));
    let result = driver.make();
    if let Some((captures, context)) = taken
        && !result.is_ok()
    {
        captures.add(Capture { stream, context });
    }
    result
}
