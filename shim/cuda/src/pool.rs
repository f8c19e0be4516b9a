//! Memory pools, for stream-ordered allocation.
//!
//! A pool takes memory from the device in steps of its own choice and keeps it, used or not, until it is trimmed. So
//! not the program's allocations are charged, but what the pool has reserved, as the driver says
//! (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`): [`crate::pool_allocator`], [`crate::settle`].

use tranche_shim_core::Entry;

use crate::abi::{
    CUdevice, CUdeviceptr, CUmemLocation, CUmemPoolProps, CUmemoryPool, CUresult, CUstream,
};
use crate::charge::{let_go, note};
use crate::device::Device;
use crate::driver::{Call, real};
use crate::exports::{self, FILE_DESCRIPTOR};
use crate::graph;
use crate::keys::{Kind, key};
use crate::pool_allocator::PoolAllocator;
use crate::pool_query::default_pool;
use crate::process::{self, Process};
use crate::settle::{self, driver_pool_of};
use crate::stream::{Stream, relaxed};

/// A stream-ordered allocation: from a pool, or from its device's current pool.
pub fn allocate(
    pool: Option<CUmemoryPool>,
    stream: Stream,
    bytes: usize,
    pointer: *mut CUdeviceptr,
    driver: Call<'_>,
) -> CUresult {
    if pointer.is_null() || bytes == 0 {
        return driver.make();
    }
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    if process.launches.captures.any() && stream.captures() {
        return graph::capture(process, stream, bytes as u64, driver);
    }
    let before = process.current_pools.switches();
    let allocator = match pool {
        Some(pool) => allocator_of(process, pool, stream.handle),
        None => current_pool(process, stream.handle, before),
    };
    let allocator = match allocator {
        Ok(Some(allocator)) => allocator,
        Ok(None) => return driver.make(),
        Err(code) => return code,
    };
    // SAFETY: frees what the driver has just allocated, which nothing else uses, and waits for it.
    let free = || unsafe {
        real!(cuMemFreeAsync: fn(CUdeviceptr, CUstream))(pointer.read(), stream.handle());
        relaxed(|| real!(cuStreamSynchronize: fn(CUstream))(stream.handle()))
    };
    let result = allocator.allocate(bytes as u64, driver, Call::of(&free));
    if result.is_ok() {
        // SAFETY: not null, and the driver has just written to it.
        let pointer = unsafe { pointer.read() };
        note(process, pointer, allocator.entry(bytes as u64));
    }
    // It may have come from another pool, if the current pool changed meanwhile.
    if pool.is_none() && !process.current_pools.was_stable(before) {
        settle::settle_all(process);
    }
    result
}

/// The pool that a stream's device allocates from, after so many switches.
#[inline]
fn current_pool(
    process: &'static Process,
    stream: CUstream,
    switches: u64,
) -> Result<Option<PoolAllocator>, CUresult> {
    let device = process.device_of_stream(stream)?;
    if !device.is_capped() {
        return Ok(None);
    }
    match process.current_pools.place(device, switches) {
        Some(place) => PoolAllocator::at(process, device, Some(place)).map(Some),
        None => ask_current_pool(process, device, stream, switches),
    }
}

#[cold]
#[inline(never)]
fn ask_current_pool(
    process: &'static Process,
    device: &'static Device,
    stream: CUstream,
    switches: u64,
) -> Result<Option<PoolAllocator>, CUresult> {
    let mut pool = 0;
    // SAFETY: writes to the local handle.
    let result = unsafe {
        real!(cuDeviceGetMemPool: fn(*mut CUmemoryPool, CUdevice))(&raw mut pool, device.handle)
    };
    if !result.is_ok() {
        return Err(result);
    }
    let allocator = allocator_of(process, pool, stream)?;
    // A switch while the driver was asked would not be seen later.
    if let Some(allocator) = allocator
        && allocator.device.number == device.number
        && process.current_pools.was_stable(switches)
    {
        let place = allocator.place;
        process.current_pools.note(device, switches, place);
    }
    Ok(allocator)
}

/// The allocator of a pool; `None` for a pool whose memory has no cap.
fn allocator_of(
    process: &'static Process,
    pool: CUmemoryPool,
    stream: CUstream,
) -> Result<Option<PoolAllocator>, CUresult> {
    let noted = process.pointers.get(pool_key(pool));
    let device = match noted {
        Some(noted) => process.device_numbered(noted.device),
        None => match device_with_default_pool(process, pool) {
            Some(device) => Some(device),
            None => Some(process.device_of_stream(stream)?),
        },
    };
    let Some(device) = device.filter(|device| device.is_capped()) else {
        return Ok(None);
    };
    if let Some(place) = noted.and_then(driver_pool_of) {
        return PoolAllocator::at(process, device, Some(place)).map(Some);
    }
    let allocator = PoolAllocator::pool(process, device, pool)?;
    settle::note_threshold(process, allocator.place);
    let _ = process.pointers.put(pool_key(pool), allocator.own_entry());
    Ok(Some(allocator))
}

/// Notes where a new pool's memory lies.
pub fn make(
    pool: *mut CUmemoryPool,
    properties: *const CUmemPoolProps,
    driver: Call<'_>,
) -> CUresult {
    let result = driver.make();
    if result.is_ok() {
        // SAFETY: the driver has just read and written them.
        let (pool, location) = unsafe { (pool.read(), (*properties).location) };
        if let Some(process) = process::joined() {
            process.pointers.take(pool_key(pool));
        }
        locate(pool, location);
    }
    result
}

/// Notes where a pool's memory lies, from the properties that the driver has returned.
pub fn get(pool: *mut CUmemoryPool, location: *const CUmemLocation, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok() {
        // SAFETY: the driver has just read and written them.
        let (pool, location) = unsafe { (pool.read(), location.read()) };
        locate(pool, location);
    }
    result
}

fn locate(pool: CUmemoryPool, location: CUmemLocation) {
    let Ok(process) = process::current() else {
        return;
    };
    if process.pointers.get(pool_key(pool)).is_some() {
        return;
    }
    let device = match location.device() {
        Some(handle) => process.device(handle).map(|device| device.number),
        None if location.is_host() => None,
        // No particular device (managed memory): the current one.
        None => process.current_device().ok().map(|device| device.number),
    };
    // If the table is full, the pool is treated as one of its stream's device.
    let _ = process.pointers.put(
        pool_key(pool),
        Entry {
            bytes: 0,
            device: device.unwrap_or(u8::MAX),
            context: 0,
        },
    );
}

/// Exports a pool by a descriptor. What the pool has when it is destroyed stays charged until the descriptor is closed.
pub fn export(descriptor: *const i32, pool: CUmemoryPool, kind: u32, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let allocator = match allocator_of(process, pool, 0) {
        Ok(Some(allocator)) if kind == FILE_DESCRIPTOR => allocator,
        Ok(_) => return driver.make(),
        Err(code) => return code,
    };
    let Some(held) = allocator.hold_exported() else {
        return CUresult::OUT_OF_MEMORY;
    };
    let result = driver.make();
    if result.is_ok() {
        // SAFETY: the call succeeded, so the pointer is not null and has a descriptor.
        exports::add(process, unsafe { descriptor.read_unaligned() }, held);
    } else {
        let_go(process, held);
    }
    result
}

/// Destroys a pool. Its allocations stay, and stay charged.
pub fn end(pool: CUmemoryPool, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    // Taken out before the driver may reuse the handle.
    let taken = process.pointers.take(pool_key(pool));
    // Where it was the current pool, the default pool becomes that.
    let destroy = || process.current_pools.switch(driver);
    let result = match taken.and_then(driver_pool_of) {
        Some(place) => settle::end_pool(process, place, Call::of(&destroy)),
        None if process.driver_pools.with(|pools| pools.is_destroyed(pool)) => {
            CUresult::INVALID_VALUE
        }
        None => destroy(),
    };
    if let Some(entry) = taken
        && !result.is_ok()
    {
        let _ = process.pointers.put(pool_key(pool), entry);
    }
    result
}

/// Makes another pool a device's current one.
pub fn switch(driver: Call<'_>) -> CUresult {
    match process::joined() {
        Some(process) => process.current_pools.switch(driver),
        None => driver.make(),
    }
}

fn pool_key(pool: CUmemoryPool) -> u64 {
    key(Kind::Pool, pool as u64)
}

fn device_with_default_pool(
    process: &'static Process,
    pool: CUmemoryPool,
) -> Option<&'static Device> {
    process
        .devices()
        .find(|device| default_pool(device) == Some(pool))
}
