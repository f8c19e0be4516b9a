//! Memory pools and allocation in the order of a stream.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use tranche_simulator_machine::layout::Habit;

use crate::abi::{Location, ON_DEVICE, PoolProperties};
use crate::code::Code;
use crate::context::current;
use crate::device::device;
use crate::driver::{driver, has};
use crate::export::{export, get, put};
use crate::graph::Node;
use crate::graph_memory::GraphMemory;
use crate::heap::Blocks;
use crate::memory;
use crate::object::{Handle, Object};
use crate::ordered;
use crate::pool::{DevicePools, Pool};
use crate::stream::{self, Stream};

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`. It and the attributes after it have 64 bits, those before it 32.
const THRESHOLD: u32 = 4;

/// Allocates in a stream that captures: the memory belongs to the graph.
fn capture(stream: &Stream, bytes: usize) -> Result<u64, Code> {
    let memory = GraphMemory::allocate(stream.context, bytes)?;
    let address = memory.address;
    stream.with_capture(|capture| capture.add(Node::Memory(memory)));
    Ok(address)
}

fn current_pool(ordinal: i32) -> Result<&'static Object<Pool>, Code> {
    Ok(*DevicePools::of(device(ordinal)?)?.current())
}

/// The ordinal of a location that has pools, which only GPUs have here.
///
/// # Safety
/// `location` is null or valid.
unsafe fn ordinal_at(location: *const Location) -> Result<i32, Code> {
    // SAFETY: the caller's contract.
    let location = unsafe { get(location)? };
    if location.kind == ON_DEVICE {
        Ok(location.id)
    } else {
        Err(Code::NOT_SUPPORTED)
    }
}

export! {
    fn cuMemAllocAsync, cuMemAllocAsync_ptsz [stream] (to: *mut u64, bytes: usize, stream: Handle) {
        let stream = stream::find(stream)?;
        if stream.is_capturing() {
            return put(to, capture(stream, bytes)?);
        }
        put(to, ordered::allocate(current_pool(stream.context.device.ordinal)?, bytes, stream)?)
    }
    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz [stream] (to: *mut u64, bytes: usize, pool: Handle, stream: Handle) {
        let stream = stream::find(stream)?;
        let pool = Object::<Pool>::find(pool)?;
        if stream.is_capturing() {
            return put(to, capture(stream, bytes)?);
        }
        put(to, ordered::allocate(pool, bytes, stream)?)
    }
    fn cuMemFreeAsync, cuMemFreeAsync_ptsz [stream] (address: u64, stream: Handle) {
        let stream = stream::find(stream)?;
        if stream.with_capture(|capture| capture.add(Node::Free)).is_some() {
            return Ok(());
        }
        if has(Habit::FreesWait) {
            return ordered::free(address, stream);
        }
        memory::free(address)
    }
    fn cuDeviceGetDefaultMemPool(to: *mut Handle, of: i32) {
        put(to, DevicePools::of(device(of)?)?.default.handle())
    }
    fn cuDeviceGetMemPool(to: *mut Handle, of: i32) { put(to, current_pool(of)?.handle()) }
    fn cuDeviceSetMemPool(of: i32, pool: Handle) {
        let device = device(of)?;
        let pool = Object::<Pool>::find(pool)?;
        if pool.device != of {
            return Err(Code::INVALID_VALUE);
        }
        *DevicePools::of(device)?.current() = pool;
        Ok(())
    }
    fn cuMemGetDefaultMemPool(to: *mut Handle, location: *const Location, _kind: u32) {
        put(to, DevicePools::of(device(ordinal_at(location)?)?)?.default.handle())
    }
    fn cuMemGetMemPool(to: *mut Handle, location: *const Location, _kind: u32) {
        put(to, current_pool(ordinal_at(location)?)?.handle())
    }
    fn cuMemPoolCreate(to: *mut Handle, properties: *const PoolProperties) {
        driver()?;
        let properties = get(properties)?;
        if properties.kind != 1 || properties.location.kind != ON_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        device(properties.location.id)?;
        let blocks = Blocks::of(&driver()?.shared.header);
        put(to, Pool::create(properties.location.id, blocks).handle())
    }
    fn cuMemPoolDestroy(pool: Handle) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        let device = device(pool.device)?;
        let pools = DevicePools::of(device)?;
        if std::ptr::eq(pools.default, pool) {
            return Err(Code::INVALID_VALUE);
        }
        let mut current = pools.current();
        if std::ptr::eq(*current, pool) {
            *current = pools.default;
        }
        drop(current);
        memory::carry_out_frees(pool, None);
        pool.retire(device)
    }
    fn cuMemPoolTrimTo(pool: Handle, keep: usize) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        memory::carry_out_frees(pool, None);
        pool.trim(device(pool.device)?, keep as u64);
        Ok(())
    }
    fn cuMemPoolGetAttribute(pool: Handle, which: u32, value: *mut c_void) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        memory::carry_out_frees(pool, None);
        let usage = pool.usage();
        let word = match which {
            1..=3 => {
                let on = pool.reuse[which as usize - 1].load(Ordering::Relaxed) != 0;
                return put(value.cast::<u32>(), u32::from(on));
            }
            THRESHOLD => usage.threshold,
            5 => usage.reserved,
            6 => usage.reserved_high,
            7 => usage.used,
            8 => usage.used_high,
            _ => return Err(Code::INVALID_VALUE),
        };
        put(value.cast::<u64>(), word)
    }
    fn cuMemPoolSetAttribute(pool: Handle, which: u32, value: *mut c_void) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        let mut usage = pool.usage();
        match which {
            1..=3 => {
                let word = get(value.cast::<u32>())?;
                pool.reuse[which as usize - 1].store(u64::from(word), Ordering::Relaxed);
            }
            THRESHOLD => {
                usage.threshold = get(value.cast::<u64>())?;
                let threshold = usage.threshold;
                if !has(Habit::FreesWait) {
                    usage.trim(device(pool.device)?, threshold);
                }
            }
            // The high-water marks can only be reset.
            6 if get(value.cast::<u64>())? == 0 => usage.reserved_high = usage.reserved,
            8 if get(value.cast::<u64>())? == 0 => usage.used_high = usage.used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }
    fn cuMemPoolSetAccess(pool: Handle, _list: *const c_void, _count: usize) {
        driver()?;
        Object::<Pool>::find(pool).map(drop)
    }
    fn cuMemPoolGetAccess(flags: *mut u32, pool: Handle, location: *const Location) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        let at = get(location)?;
        // Read and write on its own GPU. Simulated GPUs are not peers.
        put(flags, if at == (Location { kind: ON_DEVICE, id: pool.device }) { 3 } else { 0 })
    }
    fn cuMemPoolExportPointer(_data: *mut c_void, _address: u64) {
        current()?;
        Err(Code::NOT_SUPPORTED)
    }
}
