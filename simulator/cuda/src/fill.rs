//! Fills of device memory (memset).

use crate::code::Code;
use crate::memory::zero;
use crate::space::check;

/// The size in bytes from which zeros are written by returning the pages to the host.
const MIN_RETURNED: u64 = 1 << 20;

/// Fills rows of device memory with a value of 1, 2 or 4 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    pub start: u64,
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
            if same && bytes[0] == 0 && row >= MIN_RETURNED {
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
