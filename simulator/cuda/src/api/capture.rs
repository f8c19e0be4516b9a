//! Stream capture.

use std::ffi::c_void;

use crate::code::Code;
use crate::driver::driver;
use crate::export::{export, get, put, put_wanted};
use crate::graph::Graph;
use crate::object::{Handle, Object};
use crate::stream;

type Nodes = *const Handle;

/// # Safety
/// As [`stream::find`].
unsafe fn capture_info(
    stream: Handle,
    status: *mut u32,
    id: *mut u64,
    graph: *mut Handle,
) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let capture = stream.capture();
    // SAFETY: the caller's contract.
    unsafe {
        put(status, u32::from(capture.is_some()))?;
        if let Some(capture) = capture.as_ref() {
            put_wanted(id, capture.id);
            put_wanted(graph, capture.graph.handle());
        }
    }
    Ok(())
}

export! {
    fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz [stream] (stream: Handle) {
        stream::find(stream)?.begin_capture(Object::create(Graph::default()))
    }
    fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz [stream] (stream: Handle, _mode: u32) {
        if stream.is_null() {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        stream::find(stream)?.begin_capture(Object::create(Graph::default()))
    }
    fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz [stream] (stream: Handle, graph: Handle, _dependencies: Nodes, _edges: *const c_void, _count: usize, _mode: u32) {
        stream::find(stream)?.begin_capture(Object::<Graph>::find(graph)?)
    }
    fn cuStreamEndCapture, cuStreamEndCapture_ptsz [stream] (stream: Handle, to: *mut Handle) {
        put(to, stream::find(stream)?.end_capture()?.handle())
    }
    fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz [stream] (stream: Handle, status: *mut u32) {
        put(status, u32::from(stream::find(stream)?.is_capturing()))
    }
    fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz [stream] (stream: Handle, status: *mut u32, id: *mut u64) {
        capture_info(stream, status, id, std::ptr::null_mut())
    }
    fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz [stream] (stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut Nodes, count: *mut usize) {
        capture_info(stream, status, id, graph)?;
        put_wanted(dependencies, std::ptr::null());
        put_wanted(count, 0);
        Ok(())
    }
    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz [stream] (stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut Nodes, edges: *mut *const c_void, count: *mut usize) {
        capture_info(stream, status, id, graph)?;
        put_wanted(dependencies, std::ptr::null());
        put_wanted(edges, std::ptr::null());
        put_wanted(count, 0);
        Ok(())
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        driver()?;
        get(mode).map(drop)
    }
}
