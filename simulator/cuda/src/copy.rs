//! Copies of bytes. They take no virtual time.

use crate::array::Array;
use crate::code::Code;
use crate::object::{Handle, Object};
use crate::space::{check, check_unified};

/// One end of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Host memory.
    Host(u64),
    /// Device memory.
    Device(u64),
    /// Host or device memory, as the address is.
    Either(u64),
}

impl Side {
    fn address(self) -> u64 {
        match self {
            Self::Host(a) | Self::Device(a) | Self::Either(a) => a,
        }
    }

    fn check(self, bytes: u64, write: bool) -> Result<(), Code> {
        if self.address() == 0 && bytes > 0 {
            return Err(Code::INVALID_VALUE);
        }
        match self {
            // CUDA does not check host memory.
            Self::Host(_) => Ok(()),
            Self::Device(address) => check(address, bytes, write),
            Self::Either(address) => check_unified(address, bytes, write),
        }
    }
}

/// Moves bytes between two places.
#[derive(Debug, Clone, Copy)]
pub struct Move {
    to: Side,
    from: Side,
    bytes: u64,
}

impl Move {
    pub fn new(to: Side, from: Side, bytes: usize) -> Result<Self, Code> {
        let bytes = bytes as u64;
        to.check(bytes, true)?;
        from.check(bytes, false)?;
        Ok(Self { to, from, bytes })
    }

    /// Moves the bytes now.
    ///
    /// # Safety
    /// Host memory is valid, by CUDA's contract; device memory was checked.
    pub unsafe fn run(self) {
        // SAFETY: the caller's contract. The two may overlap.
        unsafe {
            std::ptr::copy(
                self.from.address() as *const u8,
                self.to.address() as *mut u8,
                usize::try_from(self.bytes).unwrap_or(0),
            );
        }
    }
}

/// One side of a copy of a box of bytes: rows of a pitch, layers of a height.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct End3 {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: *mut u8,
    device: u64,
    array: Handle,
    reserved: Handle,
    pitch: usize,
    height: usize,
}

/// cuda.h's `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Copy3 {
    from: End3,
    to: End3,
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct End2 {
    x: usize,
    y: usize,
    kind: u32,
    host: *mut u8,
    device: u64,
    array: Handle,
    pitch: usize,
}

/// cuda.h's `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Copy2 {
    from: End2,
    to: End2,
    width: usize,
    height: usize,
}

impl From<End2> for End3 {
    fn from(end: End2) -> Self {
        Self {
            x: end.x,
            y: end.y,
            z: 0,
            level: 0,
            kind: end.kind,
            host: end.host,
            device: end.device,
            array: end.array,
            reserved: std::ptr::null_mut(),
            pitch: end.pitch,
            height: 0,
        }
    }
}

impl From<Copy2> for Copy3 {
    fn from(copy: Copy2) -> Self {
        Self {
            from: copy.from.into(),
            to: copy.to.into(),
            width: copy.width,
            height: copy.height,
            depth: 1,
        }
    }
}

/// Rows to copy: the address of the first, and the bytes from a row and a layer to the next.
#[derive(Debug, Clone, Copy)]
struct Rows {
    start: u64,
    row: u64,
    layer: u64,
}

impl End3 {
    /// # Safety
    /// As [`Object::find`] for the array.
    unsafe fn rows(&self, copy: &Copy3, write: bool) -> Result<Rows, Code> {
        let (width, height, depth) = (copy.width as u64, copy.height as u64, copy.depth as u64);
        let (base, pitch, layer_rows) = match self.kind {
            1 => (
                Side::Host(self.host as u64),
                self.pitch as u64,
                self.height as u64,
            ),
            2 => (
                Side::Device(self.device),
                self.pitch as u64,
                self.height as u64,
            ),
            // Unified memory has its address in the same field as device memory.
            4 => (
                Side::Either(self.device),
                self.pitch as u64,
                self.height as u64,
            ),
            3 => {
                // SAFETY: the caller's contract.
                let array = unsafe { Object::<Array>::find(self.array)? };
                (Side::Device(array.address()?), array.pitch(), array.rows())
            }
            _ => return Err(Code::INVALID_VALUE),
        };
        // A pitch of 0 means rows without gaps.
        let row = if pitch == 0 {
            width + self.x as u64
        } else {
            pitch
        };
        if row < width + self.x as u64 {
            return Err(Code::INVALID_VALUE);
        }
        let layer_rows = if layer_rows == 0 {
            height + self.y as u64
        } else {
            layer_rows
        };
        let layer = row.checked_mul(layer_rows).ok_or(Code::INVALID_VALUE)?;
        let offset = (self.z as u64)
            .checked_mul(layer)
            .and_then(|z| z.checked_add((self.y as u64).checked_mul(row)?))
            .and_then(|zy| zy.checked_add(self.x as u64))
            .ok_or(Code::INVALID_VALUE)?;
        let start = base
            .address()
            .checked_add(offset)
            .ok_or(Code::INVALID_VALUE)?;
        let extent = (depth - 1)
            .checked_mul(layer)
            .and_then(|d| d.checked_add((height - 1).checked_mul(row)?))
            .and_then(|dh| dh.checked_add(width))
            .ok_or(Code::INVALID_VALUE)?;
        match base {
            Side::Host(_) => Side::Host(start),
            Side::Device(_) => Side::Device(start),
            Side::Either(_) => Side::Either(start),
        }
        .check(extent, write)?;
        Ok(Rows { start, row, layer })
    }
}

/// A checked copy of a box.
#[derive(Debug, Clone, Copy)]
pub struct BoxMove {
    from: Rows,
    to: Rows,
    width: usize,
    height: u64,
    depth: u64,
}

impl BoxMove {
    /// # Safety
    /// As [`Object::find`] for arrays.
    pub unsafe fn new(copy: &Copy3) -> Result<Option<Self>, Code> {
        if copy.width == 0 || copy.height == 0 || copy.depth == 0 {
            return Ok(None);
        }
        // SAFETY: the caller's contract.
        let (from, to) = unsafe { (copy.from.rows(copy, false)?, copy.to.rows(copy, true)?) };
        Ok(Some(Self {
            from,
            to,
            width: copy.width,
            height: copy.height as u64,
            depth: copy.depth as u64,
        }))
    }

    /// # Safety
    /// As [`Move::run`].
    pub unsafe fn run(self) {
        for z in 0..self.depth {
            for y in 0..self.height {
                let from = self.from.start + z * self.from.layer + y * self.from.row;
                let to = self.to.start + z * self.to.layer + y * self.to.row;
                // SAFETY: the whole box was checked; host sides by contract.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, self.width) };
            }
        }
    }
}

const _: () = assert!(size_of::<Copy2>() == 128 && size_of::<Copy3>() == 200);
