//! Fills of device memory (memset).

use crate::code::Code;
use crate::context::current;
use crate::copy::in_order;
use crate::export::export;
use crate::graph::Node;
use crate::managed::touch;
use crate::memory::zero;
use crate::object::Handle;
use crate::space::check;
use crate::stream;

/// From this size on, zeros are written by giving the pages back.
const WORTH_FORGETTING: u64 = 1 << 20;

/// Fills rows of device memory with a value of 1, 2 or 4 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    start: u64,
    pitch: u64,
    value: u32,
    width: u32,
    count: u64,
    rows: u64,
}

impl Fill {
    /// `count` values of `width` bytes in each of `rows` rows.
    pub fn new(
        start: u64,
        pitch: usize,
        value: u32,
        width: u32,
        count: usize,
        rows: usize,
    ) -> Result<Self, Code> {
        let fill = Self {
            start,
            pitch: pitch as u64,
            value,
            width,
            count: count as u64,
            rows: rows as u64,
        };
        if !matches!(width, 1 | 2 | 4) || !start.is_multiple_of(u64::from(width)) {
            return Err(Code::INVALID_VALUE);
        }
        if fill.count == 0 || fill.rows == 0 {
            return Ok(fill);
        }
        let row = fill
            .count
            .checked_mul(u64::from(width))
            .ok_or(Code::INVALID_VALUE)?;
        if fill.rows > 1 && fill.pitch < row {
            return Err(Code::INVALID_VALUE);
        }
        let bytes = (fill.rows - 1)
            .checked_mul(fill.pitch)
            .and_then(|b| b.checked_add(row))
            .ok_or(Code::INVALID_VALUE)?;
        check(start, bytes, true)?;
        Ok(fill)
    }

    /// Writes the bytes.
    pub fn run(self) {
        if self.count == 0 {
            return;
        }
        let bytes = self.value.to_le_bytes();
        let same = bytes[..self.width as usize].iter().all(|b| *b == bytes[0]);
        let row = self.count * u64::from(self.width);
        let length = usize::try_from(row).unwrap_or(0);
        for index in 0..self.rows {
            let start = self.start + index * self.pitch;
            if same && bytes[0] == 0 && row >= WORTH_FORGETTING {
                zero(start, row);
            } else if same {
                // SAFETY: the rows were checked to be device memory.
                unsafe { std::ptr::write_bytes(start as *mut u8, bytes[0], length) };
            } else if self.width == 2 {
                let value = u16::from_le_bytes([bytes[0], bytes[1]]);
                // SAFETY: as above; the start is aligned, checked in `new`.
                unsafe { std::slice::from_raw_parts_mut(start as *mut u16, length / 2) }
                    .fill(value);
            } else {
                // SAFETY: as above.
                unsafe { std::slice::from_raw_parts_mut(start as *mut u32, length / 4) }
                    .fill(self.value);
            }
        }
    }
}

fn now(fill: Result<Fill, Code>) -> Result<(), Code> {
    let context = current()?;
    let fill = fill?;
    touch(context, fill.start);
    stream::null(context)?.synchronize();
    fill.run();
    Ok(())
}

/// # Safety
/// As [`stream::find`].
unsafe fn later(fill: Result<Fill, Code>, stream: Handle) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let fill = fill?;
    if stream::captured(stream, |capture| capture.add(Node::Fill(fill))).is_none() {
        touch(stream.context, fill.start);
        in_order(stream, move || fill.run());
    }
    Ok(())
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
