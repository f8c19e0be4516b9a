//! Stream-ordered allocation and its pools.
//!
//! A pool keeps nothing back: what is freed goes to the GPU at once, so what is
//! reserved is what is used, and a release threshold is only remembered.

use std::ffi::c_void;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::code::Code;
use crate::context::current;
use crate::driver::{device, driver};
use crate::export::{export, get, put};
use crate::graph::{GraphMemory, Node};
use crate::memory::{self, context_id};
use crate::object::{Handle, Kind, Object};
use crate::space::{What, regions};
use crate::stream::{self, Stream};

/// A memory pool of one GPU.
#[derive(Debug)]
pub struct Pool {
    device: i32,
    used: AtomicU64,
    high: AtomicU64,
    threshold: AtomicU64,
    /// The three reuse switches, all on at first.
    reuse: [AtomicU64; 3],
}

impl Kind for Pool {
    const TAG: u64 = 0x504f_4f00_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

impl Pool {
    pub fn new(device: i32) -> Self {
        Self {
            device,
            used: AtomicU64::new(0),
            high: AtomicU64::new(0),
            threshold: AtomicU64::new(0),
            reuse: [const { AtomicU64::new(1) }; 3],
        }
    }

    fn took(&self, bytes: u64) {
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.high.fetch_max(used, Ordering::Relaxed);
    }

    /// Notes that an allocation of it was freed.
    pub fn gave_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// cuda.h's `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`
pub const ON_DEVICE: u32 = 1;

/// cuda.h's `CUmemPoolProps`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    kind: u32,
    handles: u32,
    location: Location,
    security: *mut c_void,
    maximum: usize,
    usage: u16,
    reserved: [u8; 54],
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` and those after it are 64 bits wide, those
/// before are ints.
const THRESHOLD: u32 = 4;

fn allocate(pool: &'static Object<Pool>, bytes: usize) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let address = memory::place(pool.device, What::Pooled(pool), context_id(), bytes as u64)?;
    pool.took(bytes as u64);
    Ok(address)
}

/// Allocates in a stream that captures: the memory becomes the graph's.
fn capture(stream: &Stream, bytes: usize) -> Result<u64, Code> {
    let memory = GraphMemory::allocate(stream.context, bytes)?;
    let address = memory.address;
    stream::captured(stream, |capture| capture.add(Node::Memory(memory)));
    Ok(address)
}

fn current_pool(ordinal: i32) -> Result<&'static Object<Pool>, Code> {
    Ok(*device(ordinal)?
        .current_pool
        .lock()
        .unwrap_or_else(PoisonError::into_inner))
}

/// The location's default pool: GPUs have one, the host has none here.
///
/// # Safety
/// `location` is null or valid.
unsafe fn pool_at(location: *const Location) -> Result<i32, Code> {
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
        if stream.capturing.load(Ordering::Relaxed) {
            return put(to, capture(stream, bytes)?);
        }
        put(to, allocate(current_pool(stream.context.device.ordinal)?, bytes)?)
    }
    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz [stream] (to: *mut u64, bytes: usize, pool: Handle, stream: Handle) {
        let stream = stream::find(stream)?;
        let pool = Object::<Pool>::find(pool)?;
        if stream.capturing.load(Ordering::Relaxed) {
            return put(to, capture(stream, bytes)?);
        }
        put(to, allocate(pool, bytes)?)
    }
    fn cuMemFreeAsync, cuMemFreeAsync_ptsz [stream] (address: u64, stream: Handle) {
        let stream = stream::find(stream)?;
        if stream::captured(stream, |capture| capture.add(Node::Free)).is_some() {
            return Ok(());
        }
        memory::free(address)
    }
    fn cuDeviceGetDefaultMemPool(to: *mut Handle, of: i32) {
        put(to, device(of)?.default_pool.handle())
    }
    fn cuDeviceGetMemPool(to: *mut Handle, of: i32) { put(to, current_pool(of)?.handle()) }
    fn cuDeviceSetMemPool(of: i32, pool: Handle) {
        let device = device(of)?;
        let pool = Object::<Pool>::find(pool)?;
        if pool.device != of {
            return Err(Code::INVALID_VALUE);
        }
        *device.current_pool.lock().unwrap_or_else(PoisonError::into_inner) = pool;
        Ok(())
    }
    fn cuMemGetDefaultMemPool(to: *mut Handle, location: *const Location, _kind: u32) {
        put(to, device(pool_at(location)?)?.default_pool.handle())
    }
    fn cuMemGetMemPool(to: *mut Handle, location: *const Location, _kind: u32) {
        put(to, current_pool(pool_at(location)?)?.handle())
    }
    fn cuMemPoolCreate(to: *mut Handle, properties: *const Properties) {
        driver()?;
        let properties = get(properties)?;
        if properties.kind != 1 || properties.location.kind != ON_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        device(properties.location.id)?;
        put(to, Object::create(Pool::new(properties.location.id)).handle())
    }
    fn cuMemPoolDestroy(pool: Handle) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        let device = device(pool.device)?;
        if std::ptr::eq(device.default_pool, pool) {
            return Err(Code::INVALID_VALUE);
        }
        let mut current = device.current_pool.lock().unwrap_or_else(PoisonError::into_inner);
        if std::ptr::eq(*current, pool) {
            *current = device.default_pool;
        }
        drop(current);
        // Allocations that live on keep their memory, as with the real driver, but
        // no longer count in the pool.
        for region in regions().values_mut() {
            if matches!(region.what, What::Pooled(of) if std::ptr::eq(of, pool)) {
                region.what = What::Device;
            }
        }
        pool.destroy();
        Ok(())
    }
    fn cuMemPoolTrimTo(pool: Handle, _keep: usize) {
        driver()?;
        Object::<Pool>::find(pool).map(drop)
    }
    fn cuMemPoolGetAttribute(pool: Handle, which: u32, value: *mut c_void) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        let word = match which {
            1..=3 => &pool.reuse[which as usize - 1],
            THRESHOLD => &pool.threshold,
            5 | 7 => &pool.used,
            6 | 8 => &pool.high,
            _ => return Err(Code::INVALID_VALUE),
        };
        let word = word.load(Ordering::Relaxed);
        if which < THRESHOLD {
            put(value.cast::<u32>(), u32::from(word != 0))
        } else {
            put(value.cast::<u64>(), word)
        }
    }
    fn cuMemPoolSetAttribute(pool: Handle, which: u32, value: *mut c_void) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        match which {
            1..=3 => {
                let word = get(value.cast::<u32>())?;
                pool.reuse[which as usize - 1].store(u64::from(word), Ordering::Relaxed);
            }
            THRESHOLD => pool.threshold.store(get(value.cast::<u64>())?, Ordering::Relaxed),
            // The high-water marks can only be set back.
            6 | 8 if get(value.cast::<u64>())? == 0 => {
                pool.high.store(pool.used.load(Ordering::Relaxed), Ordering::Relaxed);
            }
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
        // Read and write on its own GPU; GPUs here are not peers.
        put(flags, if at == (Location { kind: ON_DEVICE, id: pool.device }) { 3 } else { 0 })
    }
    fn cuDeviceGetGraphMemAttribute(of: i32, _which: u32, value: *mut u64) {
        device(of)?;
        put(value, 0)
    }
    fn cuDeviceGraphMemTrim(of: i32) { device(of).map(drop) }
    fn cuMemPoolExportPointer(_data: *mut c_void, _address: u64) {
        current()?;
        Err(Code::NOT_SUPPORTED)
    }
}
