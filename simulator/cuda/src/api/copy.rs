//! Copies.

use crate::array::Array;
use crate::code::Code;
use crate::context::current;
use crate::copy::{
    BoxMove, Copy2, Copy3, Move,
    Side::{self, Device, Either, Host},
};
use crate::driver::driver;
use crate::export::{export, get};
use crate::graph::Node;
use crate::object::{Handle, Object};
use crate::stream;
use crate::work;

/// Copies after all work of the null stream.
///
/// # Safety
/// As [`Move::run`].
unsafe fn now(to: Side, from: Side, bytes: usize) -> Result<(), Code> {
    let context = current()?;
    let copy = Move::new(to, from, bytes)?;
    let stream = stream::null(context)?;
    if stream.is_capturing() {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    stream.synchronize();
    // SAFETY: the caller's contract.
    unsafe { copy.run() };
    Ok(())
}

/// Copies in the order of a stream.
///
/// # Safety
/// As [`Move::run`], until the stream has done it.
unsafe fn later(to: Side, from: Side, bytes: usize, stream: Handle) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let copy = Move::new(to, from, bytes)?;
    work::submit(&Node::Copy(copy), stream)
}

/// Copies a box after all work of the null stream.
///
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

/// Copies a box in the order of a stream.
///
/// # Safety
/// As [`BoxMove::run`], until the stream has done it.
unsafe fn box_later(copy: &Copy3, stream: Handle) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    // SAFETY: as above.
    match unsafe { BoxMove::new(copy)? } {
        Some(moves) => work::submit(&Node::Box(moves), stream),
        None => Ok(()),
    }
}

/// The memory of an array from `offset` bytes on.
///
/// # Safety
/// As [`Object::find`].
unsafe fn array_side(array: Handle, offset: usize) -> Result<Side, Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let array = unsafe { Object::<Array>::find(array)? };
    Ok(Device(array.address()? + offset as u64))
}

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
