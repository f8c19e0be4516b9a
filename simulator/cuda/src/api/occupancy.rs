//! Occupancy: the blocks that fit on a multiprocessor.

use std::ffi::c_void;

use crate::code::Code;
use crate::context::current;
use crate::device::{Device, attribute};
use crate::driver::driver;
use crate::export::{export, put};
use crate::module::Function;
use crate::object::{Handle, Object};

/// `CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR`
const MAX_BLOCKS: u32 = 106;

fn blocks(device: &Device, threads: i32, shared: usize) -> Result<i32, Code> {
    if !(1..=1024).contains(&threads) {
        return Err(Code::INVALID_VALUE);
    }
    let resident = i32::try_from(device.state.threads_per_multiprocessor).unwrap_or(i32::MAX);
    // A block takes whole warps.
    let by_threads = resident / ((threads + 31) / 32 * 32);
    let by_shared = if shared == 0 {
        i32::MAX
    } else {
        i32::try_from(device.state.shared_memory_bytes as usize / (shared + 1024))
            .unwrap_or(i32::MAX)
    };
    Ok(by_threads
        .min(by_shared)
        .min(attribute(device, MAX_BLOCKS)?))
}

/// Writes the block size that fills a multiprocessor, and the grid size that fills the GPU.
///
/// # Safety
/// As [`Object::find`]; both outputs are null or valid.
unsafe fn best(grid: *mut i32, block: *mut i32, function: Handle, limit: i32) -> Result<(), Code> {
    let device = current()?.device;
    // SAFETY: the caller's contract.
    unsafe { Object::<Function>::find(function)? };
    let threads = if limit > 0 { limit.min(1024) } else { 1024 };
    let each = blocks(device, threads, 0)?;
    let count = i32::try_from(device.multiprocessors()).unwrap_or(1);
    // SAFETY: the caller's contract.
    unsafe {
        put(grid, each.max(1) * count)?;
        put(block, threads)
    }
}

export! {
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(count: *mut i32, function: Handle, threads: i32, shared: usize) {
        let device = current()?.device;
        Object::<Function>::find(function)?;
        put(count, blocks(device, threads, shared)?)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count: *mut i32, function: Handle, threads: i32, shared: usize, _flags: u32) {
        let device = current()?.device;
        Object::<Function>::find(function)?;
        put(count, blocks(device, threads, shared)?)
    }
    fn cuOccupancyMaxPotentialBlockSize(grid: *mut i32, block: *mut i32, function: Handle, _size: *const c_void, _shared: usize, limit: i32) {
        best(grid, block, function, limit)
    }
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(grid: *mut i32, block: *mut i32, function: Handle, _size: *const c_void, _shared: usize, limit: i32, _flags: u32) {
        best(grid, block, function, limit)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: *mut usize, function: Handle, count: i32, _threads: i32) {
        let device = current()?.device;
        Object::<Function>::find(function)?;
        let each = device.state.shared_memory_bytes as usize / usize::try_from(count.max(1)).unwrap_or(1);
        put(bytes, each.saturating_sub(1024))
    }
    fn cuOccupancyMaxPotentialClusterSize(size: *mut i32, function: Handle, _config: *const c_void) {
        driver()?;
        Object::<Function>::find(function)?;
        put(size, 8)
    }
    fn cuOccupancyMaxActiveClusters(count: *mut i32, function: Handle, _config: *const c_void) {
        let device = current()?.device;
        Object::<Function>::find(function)?;
        put(count, i32::try_from(device.multiprocessors() / 8).unwrap_or(1))
    }
}
