//! Streams, and the calling thread's state: its current context and its capture mode.

use core::ptr;

use crate::abi::{CUcontext, CUgraph, CUstream};
use crate::driver::{index, real, real_if_any};

/// The handles of the three streams that every context has; they mean the current context's.
pub const LAST_IMPLICIT_STREAM: CUstream = 2;

/// The thread's default stream, by the name that every function takes.
pub const PER_THREAD: CUstream = 2;

/// The stream of a function whose default stream is the thread's.
#[inline]
pub fn own(stream: CUstream) -> CUstream {
    if stream == 0 { PER_THREAD } else { stream }
}

/// A stream, and whether 0 means the calling thread's.
#[derive(Clone, Copy)]
pub struct Stream {
    pub handle: CUstream,
    pub per_thread: bool,
}

impl Stream {
    pub fn legacy(handle: CUstream) -> Self {
        Self {
            handle,
            per_thread: false,
        }
    }

    pub fn per_thread(handle: CUstream) -> Self {
        Self {
            handle,
            per_thread: true,
        }
    }

    /// The handle of this stream for functions without a suffix.
    pub fn handle(self) -> CUstream {
        if self.per_thread {
            own(self.handle)
        } else {
            self.handle
        }
    }

    /// Whether work in the stream becomes part of a graph.
    pub fn captures(self) -> bool {
        capture_status(self.handle()) == 1
    }

    /// The graph that is captured.
    pub fn graph(self) -> Option<CUgraph> {
        let (mut status, mut id, mut graph, none) = (0, 0, 0, ptr::null_mut::<usize>());
        // SAFETY: the handle is what the program passes to the driver as a stream; null for values that are not needed.
        // Either version is there, and writes the graph as its fourth.
        let result = unsafe {
            if real_if_any(index::cuStreamGetCaptureInfo_v2).is_some() {
                real!(cuStreamGetCaptureInfo_v2: fn(CUstream, *mut u32, *mut u64, *mut CUgraph, *mut usize, *mut usize))(
                    self.handle(),
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    none,
                    none,
                )
            } else {
                real!(cuStreamGetCaptureInfo_v3: fn(CUstream, *mut u32, *mut u64, *mut CUgraph, *mut usize, *mut usize, *mut usize))(
                    self.handle(),
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    none,
                    none,
                    none,
                )
            }
        };
        (result.is_ok() && graph != 0).then_some(graph)
    }
}

/// Whether a stream is captured, even if the capture is invalid. While another stream is captured, the driver refuses this
/// query for the legacy stream, which is not captured then.
pub fn is_capturing(stream: CUstream) -> bool {
    capture_status(stream) != 0
}

fn capture_status(stream: CUstream) -> u32 {
    let mut status = 0;
    // SAFETY: `stream` is what the program passes to the driver as a stream; writes the local number.
    let result =
        unsafe { real!(cuStreamIsCapturing: fn(CUstream, *mut u32))(stream, &raw mut status) };
    if result.is_ok() { status } else { 0 }
}

/// The context current to the calling thread; 0 for none.
pub fn current_context() -> CUcontext {
    let mut context = 0;
    // SAFETY: writes to the local handle.
    let result = unsafe { real!(cuCtxGetCurrent: fn(*mut CUcontext))(&raw mut context) };
    if result.is_ok() { context } else { 0 }
}

/// The context of a stream: for a default stream the current one; 0 for none.
pub fn context_of(stream: CUstream) -> CUcontext {
    if stream <= LAST_IMPLICIT_STREAM {
        return current_context();
    }
    let mut context = 0;
    // SAFETY: `stream` is what the program passes to the driver as a stream; writes the local handle.
    let result =
        unsafe { real!(cuStreamGetCtx: fn(CUstream, *mut CUcontext))(stream, &raw mut context) };
    if result.is_ok() { context } else { 0 }
}

/// Does `work` with a stream's context current, or with the present one if that fails.
pub fn within_stream<T>(stream: CUstream, work: impl Fn() -> T) -> T {
    within(context_of(stream), || Some(work())).unwrap_or_else(&work)
}

/// Does `work` with `context` current; `None` if it cannot become current.
pub fn within<T>(context: CUcontext, work: impl FnOnce() -> Option<T>) -> Option<T> {
    if current_context() == context {
        return work();
    }
    // SAFETY: a context from the driver or the program; the former one becomes current again.
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

/// Does work in relaxed capture mode. Otherwise it would invalidate a capture of another thread or stream.
/// (cuda.h, `cuThreadExchangeStreamCaptureMode`.)
pub fn relaxed<T>(work: impl FnOnce() -> T) -> T {
    const RELAXED: u32 = 2;
    let mut mode = RELAXED;
    // SAFETY: reads and writes the local: puts this thread's mode into it.
    let exchange = |mode: &mut u32| unsafe {
        real!(cuThreadExchangeStreamCaptureMode: fn(*mut u32))(mode).is_ok()
    };
    let exchanged = exchange(&mut mode);
    let done = work();
    if exchanged {
        exchange(&mut mode);
    }
    done
}
