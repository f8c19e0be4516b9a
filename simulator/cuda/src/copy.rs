//! Copies. Bytes really move; none takes virtual time.

use crate::array::Array;
use crate::code::Code;
use crate::context::current;
use crate::driver::driver;
use crate::export::{export, get};
use crate::graph::Node;
use crate::host;
use crate::object::{Handle, Object};
use crate::space::{check, check_unified};
use crate::stream::{self, Stream};

/// One end of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The program's memory.
    Host(u64),
    /// Device memory.
    Device(u64),
    /// Whichever the address says.
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
            // Pinned memory is known; other host memory is the program's business.
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
    /// Host sides are the program's and valid, by CUDA's contract; device sides
    /// were checked.
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

/// Does `work` in `stream`'s order: now, as nothing that is queued changes bytes
/// but the host's own functions; behind them if there are any.
pub fn in_order(stream: &Stream, work: impl FnOnce() + Send + 'static) {
    let last = stream.functions.load(std::sync::atomic::Ordering::Acquire);
    if host::done(last) {
        work();
    } else {
        stream.enqueue(Box::new(work));
    }
}

/// # Safety
/// As [`Move::run`].
unsafe fn now(to: Side, from: Side, bytes: usize) -> Result<(), Code> {
    let context = current()?;
    let copy = Move::new(to, from, bytes)?;
    let stream = stream::null(context)?;
    if stream.capturing.load(std::sync::atomic::Ordering::Relaxed) {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    stream.synchronize();
    // SAFETY: the caller's contract.
    unsafe { copy.run() };
    Ok(())
}

/// # Safety
/// As [`Move::run`], until the stream gets there.
unsafe fn later(to: Side, from: Side, bytes: usize, stream: Handle) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let copy = Move::new(to, from, bytes)?;
    if stream::captured(stream, |capture| capture.add(Node::Copy(copy))).is_none() {
        // SAFETY: the caller's contract.
        in_order(stream, move || unsafe { copy.run() });
    }
    Ok(())
}

use Side::{Device, Either, Host};

export! {
    fn cuMemcpy, cuMemcpy_ptds [] (to: u64, from: u64, bytes: usize) { now(Either(to), Either(from), bytes) }
    fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds [] (to: u64, from: *const u8, bytes: usize) {
        now(Device(to), Host(from as u64), bytes)
    }
    fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds [] (to: *mut u8, from: u64, bytes: usize) {
        now(Host(to as u64), Device(from), bytes)
    }
    fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds [] (to: u64, from: u64, bytes: usize) {
        now(Device(to), Device(from), bytes)
    }
    fn cuMemcpyPeer, cuMemcpyPeer_ptds [] (to: u64, _to_context: Handle, from: u64, _from_context: Handle, bytes: usize) {
        now(Device(to), Device(from), bytes)
    }
    fn cuMemcpyAsync, cuMemcpyAsync_ptsz [stream] (to: u64, from: u64, bytes: usize, stream: Handle) {
        later(Either(to), Either(from), bytes, stream)
    }
    fn cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz [stream] (to: u64, from: *const u8, bytes: usize, stream: Handle) {
        later(Device(to), Host(from as u64), bytes, stream)
    }
    fn cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz [stream] (to: *mut u8, from: u64, bytes: usize, stream: Handle) {
        later(Host(to as u64), Device(from), bytes, stream)
    }
    fn cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz [stream] (to: u64, from: u64, bytes: usize, stream: Handle) {
        later(Device(to), Device(from), bytes, stream)
    }
    fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz [stream] (to: u64, _to_context: Handle, from: u64, _from_context: Handle, bytes: usize, stream: Handle) {
        later(Device(to), Device(from), bytes, stream)
    }
}

/// A box of bytes somewhere: rows of a pitch, layers of a height.
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

/// Rows to move: where the first is, and how far it is to the next row and layer.
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
            // Unified: the address stands where the device's does.
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

/// # Safety
/// As [`BoxMove::run`].
unsafe fn box_now(copy: &Copy3) -> Result<(), Code> {
    let context = current()?;
    // SAFETY: the caller's contract.
    let moves = unsafe { BoxMove::new(copy)? };
    stream::null(context)?.synchronize();
    if let Some(moves) = moves {
        // SAFETY: as above.
        unsafe { moves.run() };
    }
    Ok(())
}

/// # Safety
/// As [`BoxMove::run`].
unsafe fn box_later(copy: &Copy3, stream: Handle) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    // SAFETY: as above.
    if let Some(moves) = unsafe { BoxMove::new(copy)? }
        && stream::captured(stream, |capture| capture.add(Node::Box(moves))).is_none()
    {
        // SAFETY: as above.
        in_order(stream, move || unsafe { moves.run() });
    }
    Ok(())
}

/// # Safety
/// `array` is an array's handle; the host side is valid.
unsafe fn array_side(array: Handle, offset: usize) -> Result<Side, Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let array = unsafe { Object::<Array>::find(array)? };
    Ok(Device(array.address()? + offset as u64))
}

export! {
    fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds [] (copy: *const Copy2) { box_now(&get(copy)?.into()) }
    fn cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds [] (copy: *const Copy2) { box_now(&get(copy)?.into()) }
    fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds [] (copy: *const Copy3) { box_now(&get(copy)?) }
    fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz [stream] (copy: *const Copy2, stream: Handle) {
        box_later(&get(copy)?.into(), stream)
    }
    fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz [stream] (copy: *const Copy3, stream: Handle) {
        box_later(&get(copy)?, stream)
    }
    fn cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds [] (array: Handle, offset: usize, from: *const u8, bytes: usize) {
        now(array_side(array, offset)?, Host(from as u64), bytes)
    }
    fn cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds [] (to: *mut u8, array: Handle, offset: usize, bytes: usize) {
        now(Host(to as u64), array_side(array, offset)?, bytes)
    }
    fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds [] (array: Handle, offset: usize, from: u64, bytes: usize) {
        now(array_side(array, offset)?, Device(from), bytes)
    }
    fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds [] (to: u64, array: Handle, offset: usize, bytes: usize) {
        now(Device(to), array_side(array, offset)?, bytes)
    }
    fn cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds [] (to: Handle, to_offset: usize, from: Handle, from_offset: usize, bytes: usize) {
        now(array_side(to, to_offset)?, array_side(from, from_offset)?, bytes)
    }
    fn cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz [stream] (array: Handle, offset: usize, from: *const u8, bytes: usize, stream: Handle) {
        later(array_side(array, offset)?, Host(from as u64), bytes, stream)
    }
    fn cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz [stream] (to: *mut u8, array: Handle, offset: usize, bytes: usize, stream: Handle) {
        later(Host(to as u64), array_side(array, offset)?, bytes, stream)
    }
}
const _: () = assert!(size_of::<Copy2>() == 128 && size_of::<Copy3>() == 200);
