//! Fills of device memory (memset).

use crate::code::Code;
use crate::context::current;
use crate::export::export;
use crate::fill::Fill;
use crate::graph::Node;
use crate::managed::touch;
use crate::object::Handle;
use crate::stream;
use crate::work;

/// Fills after all work of the null stream.
fn now(fill: Result<Fill, Code>) -> Result<(), Code> {
    let context = current()?;
    let fill = fill?;
    touch(context, fill.start);
    stream::null(context)?.synchronize();
    fill.run();
    Ok(())
}

/// Fills in the order of a stream.
///
/// # Safety
/// As [`stream::find`].
unsafe fn later(fill: Result<Fill, Code>, stream: Handle) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let fill = fill?;
    if !stream.is_capturing() {
        touch(stream.context, fill.start);
    }
    work::submit(&Node::Fill(fill), stream)
}

export! {
    fn cuMemsetD8_v2, cuMemsetD8_v2_ptds [] (to: u64, value: u8, count: usize) {
        now(Fill::new(to, 0, u32::from(value), 1, count, 1))
    }
    fn cuMemsetD16_v2, cuMemsetD16_v2_ptds [] (to: u64, value: u16, count: usize) {
        now(Fill::new(to, 0, u32::from(value), 2, count, 1))
    }
    fn cuMemsetD32_v2, cuMemsetD32_v2_ptds [] (to: u64, value: u32, count: usize) {
        now(Fill::new(to, 0, value, 4, count, 1))
    }
    fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds [] (to: u64, pitch: usize, value: u8, width: usize, height: usize) {
        now(Fill::new(to, pitch, u32::from(value), 1, width, height))
    }
    fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds [] (to: u64, pitch: usize, value: u16, width: usize, height: usize) {
        now(Fill::new(to, pitch, u32::from(value), 2, width, height))
    }
    fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds [] (to: u64, pitch: usize, value: u32, width: usize, height: usize) {
        now(Fill::new(to, pitch, value, 4, width, height))
    }
    fn cuMemsetD8Async, cuMemsetD8Async_ptsz [stream] (to: u64, value: u8, count: usize, stream: Handle) {
        later(Fill::new(to, 0, u32::from(value), 1, count, 1), stream)
    }
    fn cuMemsetD16Async, cuMemsetD16Async_ptsz [stream] (to: u64, value: u16, count: usize, stream: Handle) {
        later(Fill::new(to, 0, u32::from(value), 2, count, 1), stream)
    }
    fn cuMemsetD32Async, cuMemsetD32Async_ptsz [stream] (to: u64, value: u32, count: usize, stream: Handle) {
        later(Fill::new(to, 0, value, 4, count, 1), stream)
    }
    fn cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz [stream] (to: u64, pitch: usize, value: u8, width: usize, height: usize, stream: Handle) {
        later(Fill::new(to, pitch, u32::from(value), 1, width, height), stream)
    }
    fn cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz [stream] (to: u64, pitch: usize, value: u16, width: usize, height: usize, stream: Handle) {
        later(Fill::new(to, pitch, u32::from(value), 2, width, height), stream)
    }
    fn cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz [stream] (to: u64, pitch: usize, value: u32, width: usize, height: usize, stream: Handle) {
        later(Fill::new(to, pitch, value, 4, width, height), stream)
    }
}
