//! Stream-ordered allocation and its pools.
//!
//! A pool keeps freed blocks up to its release threshold, which is 0 unless the
//! program sets it. What is above goes back to the GPU at once, or, where frees wait
//! ([`Habit::FreesWait`]), at the next synchronisation; and what a stream freed is in use until the
//! stream gets there.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::current;
use crate::device::{Device, device};
use crate::driver::{self, driver, has};
use crate::export::{export, get, put};
use crate::graph::Node;
use crate::graph_memory::GraphMemory;
use crate::heap::{BLOCK, Blocks, Heap};
use crate::host;
use crate::memory::{self, context_id};
use crate::object::{Handle, Kind, Object};
use crate::space::{What, regions};
use crate::stream::{self, Stream};

/// A memory pool of one GPU.
#[derive(Debug)]
pub struct Pool {
    device: i32,
    /// Its own addresses, so that its blocks are its own too.
    heap: Mutex<Heap>,
    books: Mutex<Books>,
    /// What streams freed that have not got there.
    pending: Mutex<Vec<PendingFree>>,
    /// The three reuse switches, all on at first.
    reuse: [AtomicU64; 3],
}

/// What a pool has, in bytes.
#[derive(Debug, Default)]
struct Books {
    /// Allocated, as asked.
    used: u64,
    used_high: u64,
    /// Taken from the GPU, in blocks.
    reserved: u64,
    reserved_high: u64,
    /// Of those, in no allocation.
    kept: u64,
    /// How much may stay reserved when it is not used.
    threshold: u64,
    /// Allocations; they outlive their pool.
    live: u64,
}

impl Books {
    /// Gives back what is kept above `limit` bytes reserved, in whole blocks.
    fn trim(&mut self, device: &Device, limit: u64) -> u64 {
        let excess = self.reserved.saturating_sub(limit).min(self.kept);
        let excess = excess - excess % BLOCK;
        if excess > 0 {
            self.kept -= excess;
            self.reserved -= excess;
            device.release(excess);
        }
        excess
    }
}

/// An allocation that is free when a stream gets there.
#[derive(Debug, Clone, Copy)]
struct PendingFree {
    address: u64,
    /// Tells the allocation from later ones at its address.
    id: u64,
    /// The stream, by its address.
    stream: usize,
    /// What it comes after: a GPU and a mark there, and a host function.
    after: (usize, u64),
    function: u64,
}

impl PendingFree {
    fn is_due(&self) -> bool {
        let (gpu, mark) = self.after;
        driver::reached(gpu, mark) && host::done(self.function)
    }
}

impl Kind for Pool {
    const TAG: u64 = 0x504f_4f00_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

/// Every pool of this process, those that were destroyed included as long as they
/// have allocations.
static POOLS: Mutex<Vec<&'static Object<Pool>>> = Mutex::new(Vec::new());

impl Pool {
    /// Makes a pool of the GPU `device`.
    pub fn create(device: i32, blocks: Blocks) -> &'static Object<Self> {
        let pool = Object::create(Self {
            device,
            heap: Mutex::new(Heap::new(blocks)),
            books: Mutex::default(),
            pending: Mutex::default(),
            reuse: [const { AtomicU64::new(1) }; 3],
        });
        POOLS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(pool);
        pool
    }

    pub fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes blocks: first those it has kept, then the GPU's.
    pub fn charge(&self, device: &Device, bytes: u64) -> Result<(), Code> {
        let mut books = self.books();
        let again = bytes.min(books.kept);
        device.charge(bytes - again)?;
        books.kept -= again;
        books.reserved += bytes - again;
        books.reserved_high = books.reserved_high.max(books.reserved);
        Ok(())
    }

    fn pending(&self) -> MutexGuard<'_, Vec<PendingFree>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees what is due, and what `stream` itself freed: it comes before whatever is queued next there.
    fn settle(&self, stream: Option<&Stream>) {
        let own = stream.map(|stream| std::ptr::from_ref(stream) as usize);
        let due: Vec<PendingFree> = self
            .pending()
            .extract_if(.., |free| own == Some(free.stream) || free.is_due())
            .collect();
        for free in due {
            memory::free_exactly(free.address, free.id);
        }
    }

    /// Lets `stream` wait for the oldest pending free and frees that; false if there is none.
    fn depend_on_oldest(&self, stream: &Stream) -> bool {
        let mut pending = self.pending();
        if pending.is_empty() {
            return false;
        }
        let oldest = pending.remove(0);
        drop(pending);
        let (gpu, mark) = oldest.after;
        stream.after(gpu, mark);
        stream
            .functions
            .fetch_max(oldest.function, Ordering::AcqRel);
        memory::free_exactly(oldest.address, oldest.id);
        true
    }

    fn took(&self, bytes: u64) {
        let mut books = self.books();
        books.used += bytes;
        books.used_high = books.used_high.max(books.used);
        books.live += 1;
    }
}

impl Object<Pool> {
    /// Notes that an allocation of `bytes` was freed, and with it `blocks`.
    pub fn gave_back(&'static self, device: &Device, bytes: u64, blocks: u64) {
        let mut books = self.books();
        books.used = books.used.saturating_sub(bytes);
        books.kept += blocks;
        books.live = books.live.saturating_sub(1);
        let threshold = books.threshold;
        // A destroyed pool keeps nothing.
        if !has(Habit::FreesWait) || !self.alive() {
            books.trim(device, threshold);
        }
        self.end_if_over(books);
    }

    /// Ends the handle; the pool itself ends with its last allocation, and keeps nothing until then.
    fn give_up(&'static self, device: &Device) -> Result<(), Code> {
        self.settle(None);
        let mut books = self.books();
        if !self.abandon() {
            return Err(Code::INVALID_VALUE);
        }
        books.threshold = 0;
        books.trim(device, 0);
        self.end_if_over(books);
        Ok(())
    }

    /// Ends a pool that was destroyed and has no allocation. The books, under whose lock both become
    /// true, tell one caller alone.
    fn end_if_over(&'static self, books: MutexGuard<'_, Books>) {
        let is_over = books.live == 0 && !self.alive();
        drop(books);
        if !is_over {
            return;
        }
        // SAFETY: it was destroyed, and has no allocation.
        unsafe { self.heap().unmap() };
        POOLS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|pool| !std::ptr::eq(*pool, self));
        // SAFETY: nobody makes allocations of it any more, so only one call takes the last one away.
        unsafe { self.bury() };
    }
}

/// The pools of a GPU, settled.
fn settled(device: &Device) -> Vec<&'static Object<Pool>> {
    let pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let of_device = pools.iter().filter(|pool| pool.device == device.ordinal);
    let of_device: Vec<_> = of_device.copied().collect();
    drop(pools);
    for pool in &of_device {
        pool.settle(None);
    }
    of_device
}

/// Gives back what all pools of a GPU keep; false if that is nothing.
pub fn trim_all(device: &Device) -> bool {
    let trimmed = settled(device)
        .into_iter()
        .map(|pool| pool.books().trim(device, 0));
    trimmed.sum::<u64>() > 0
}

/// The program has waited for work of a GPU: what its pools have above their thresholds goes back.
pub fn synchronized(device: &Device) {
    if !has(Habit::FreesWait) {
        return;
    }
    for pool in settled(device) {
        let mut books = pool.books();
        let threshold = books.threshold;
        books.trim(device, threshold);
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

fn allocate(pool: &'static Object<Pool>, bytes: usize, stream: &Stream) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    pool.settle(Some(stream));
    let place = || memory::place(pool.device, What::Pooled(pool), context_id(), bytes as u64);
    let address = loop {
        match place() {
            Err(Code::OUT_OF_MEMORY) if pool.depend_on_oldest(stream) => {}
            other => break other?,
        }
    };
    pool.took(bytes as u64);
    Ok(address)
}

/// Frees `address` when `stream` gets there.
fn free_in_order(address: u64, stream: &'static Stream) -> Result<(), Code> {
    let mut regions = regions();
    let region = regions.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
    let What::Pooled(pool) = region.what else {
        drop(regions);
        // Of no pool, which could keep it until then.
        stream.synchronize();
        return memory::free(address);
    };
    if std::mem::replace(&mut region.freed, true) {
        return Err(Code::INVALID_VALUE);
    }
    let free = PendingFree {
        address,
        id: region.id,
        stream: std::ptr::from_ref(stream) as usize,
        after: (stream.context.device.gpu, stream.earliest()),
        function: stream.functions.load(Ordering::Acquire),
    };
    drop(regions);
    pool.pending().push(free);
    Ok(())
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
        put(to, allocate(current_pool(stream.context.device.ordinal)?, bytes, stream)?)
    }
    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz [stream] (to: *mut u64, bytes: usize, pool: Handle, stream: Handle) {
        let stream = stream::find(stream)?;
        let pool = Object::<Pool>::find(pool)?;
        if stream.capturing.load(Ordering::Relaxed) {
            return put(to, capture(stream, bytes)?);
        }
        put(to, allocate(pool, bytes, stream)?)
    }
    fn cuMemFreeAsync, cuMemFreeAsync_ptsz [stream] (address: u64, stream: Handle) {
        let stream = stream::find(stream)?;
        if stream::captured(stream, |capture| capture.add(Node::Free)).is_some() {
            return Ok(());
        }
        if has(Habit::FreesWait) {
            return free_in_order(address, stream);
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
        let blocks = Blocks::of(&driver()?.shared.header);
        put(to, Pool::create(properties.location.id, blocks).handle())
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
        pool.give_up(device)
    }
    fn cuMemPoolTrimTo(pool: Handle, keep: usize) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        pool.settle(None);
        pool.books().trim(device(pool.device)?, keep as u64);
        Ok(())
    }
    fn cuMemPoolGetAttribute(pool: Handle, which: u32, value: *mut c_void) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        pool.settle(None);
        let books = pool.books();
        let word = match which {
            1..=3 => {
                let on = pool.reuse[which as usize - 1].load(Ordering::Relaxed) != 0;
                return put(value.cast::<u32>(), u32::from(on));
            }
            THRESHOLD => books.threshold,
            5 => books.reserved,
            6 => books.reserved_high,
            7 => books.used,
            8 => books.used_high,
            _ => return Err(Code::INVALID_VALUE),
        };
        put(value.cast::<u64>(), word)
    }
    fn cuMemPoolSetAttribute(pool: Handle, which: u32, value: *mut c_void) {
        driver()?;
        let pool = Object::<Pool>::find(pool)?;
        let mut books = pool.books();
        match which {
            1..=3 => {
                let word = get(value.cast::<u32>())?;
                pool.reuse[which as usize - 1].store(u64::from(word), Ordering::Relaxed);
            }
            THRESHOLD => {
                books.threshold = get(value.cast::<u64>())?;
                let threshold = books.threshold;
                if !has(Habit::FreesWait) {
                    books.trim(device(pool.device)?, threshold);
                }
            }
            // The high-water marks can only be set back.
            6 if get(value.cast::<u64>())? == 0 => books.reserved_high = books.reserved,
            8 if get(value.cast::<u64>())? == 0 => books.used_high = books.used,
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
    fn cuDeviceGetGraphMemAttribute(of: i32, which: u32, value: *mut u64) {
        put(value, device(of)?.graph_books().attribute(which)?)
    }
    fn cuDeviceSetGraphMemAttribute(of: i32, which: u32, value: *const u64) {
        let device = device(of)?;
        // The high-water marks can only be set back.
        if !matches!(which, 1 | 3) || get(value)? != 0 {
            return Err(Code::INVALID_VALUE);
        }
        device.graph_books().set_back(which);
        Ok(())
    }
    fn cuDeviceGraphMemTrim(of: i32) {
        let device = device(of)?;
        let unused = device.graph_books().trim();
        device.release(unused);
        Ok(())
    }
    fn cuMemPoolExportPointer(_data: *mut c_void, _address: u64) {
        current()?;
        Err(Code::NOT_SUPPORTED)
    }
}
