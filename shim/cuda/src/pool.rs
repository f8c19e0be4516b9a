//! What the driver keeps for stream-ordered allocations: memory pools, and a device's graphs.
//!
//! A pool takes memory from the device in pieces of its own choice and keeps it, used or not, until it
//! is trimmed. So what is charged is not what the program allocated but what the pool has reserved, as
//! the driver itself says it (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`):
//!
//! ```text
//!  reserve the allocation, rounded up ─► driver ─► what has the pool reserved now? ─► charge that,
//!        │                                                                            give back the rest
//!        └─ full: trim this process's pools by as much as is missing, wait for pending frees, trim once
//!           more ─► still full: out of memory
//! ```
//!
//! A reservation on the way covers whatever its allocation makes the pool grow by, so that charged + on
//! the way ≥ reserved by the driver. By how much pools grow is known once one has grown: only the first
//! growth of a pool, where there is room for the allocation and not for that, may exceed it, until the
//! allocation is taken back and the pool trimmed. What a pool gave back to the device is noticed
//! whenever the process allocates, frees, synchronises, asks, or would be refused.
//!
//! Graphs are alike: their memory nodes share one reserve per device. It grows at a node's making or
//! at the first launch, as the driver likes, so it is charged with at least the sizes of all memory
//! nodes of all executable graphs, and then a launch needs no look.

use core::sync::atomic::Ordering;

use tranche_shim_core::Entry;

use crate::abi::{
    CUcontext, CUdevice, CUdeviceptr, CUmemLocation, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream,
};
use crate::driver::{Call, real};
use crate::graph;
use crate::measure::relaxed;
use crate::memory::{Reserved, note};
use crate::process::{self, Kind, Process, key};
use crate::share::Device;

/// Pools and graphs' reserves of a process. All zeros is none.
pub struct Reserves {
    list: [Reserve; MOST],
    count: usize,
    /// Odd while a device's current pool changes; grows with every change.
    switches: u64,
}

/// One that the driver keeps. All zeros is none.
#[derive(Clone, Copy)]
struct Reserve {
    state: State,
    /// Which of the process's devices it lies on.
    device: u8,
    /// The pool's handle.
    pool: CUmemoryPool,
    /// Bytes charged for it.
    charged: u64,
    /// Bytes charged for allocations on their way.
    pending: u64,
    /// Bytes that it is charged at least.
    floor: u64,
    /// Allocations from it that were not freed.
    live: u64,
    /// What it grows by, as far as it was seen to; 0 before.
    step: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    None = 0,
    Pool,
    Graphs,
    /// The modules of a device: what they are charged is their floor.
    Modules,
    /// A destroyed pool, whose allocations live on.
    Ended,
}

const MOST: usize = 1024;

/// What pools of all drivers so far grow by at least, in bytes: 32 MiB.
const STEP: u64 = 32 << 20;

/// The numbers of the attributes that say how much is reserved, and how much of that is used.
const POOL_RESERVED: u32 = 5;
const POOL_USED: u32 = 7;
const GRAPHS_RESERVED: u32 = 2;

impl Reserve {
    /// Whether so much can come from what the pool has and does not use; where the driver does not say,
    /// it cannot.
    fn has_unused(&self, bytes: u64) -> bool {
        self.state == State::Pool
            && self
                .attribute(POOL_RESERVED)
                .zip(self.attribute(POOL_USED))
                .is_some_and(|(reserved, used)| reserved.saturating_sub(used) >= bytes)
    }

    /// What the driver says of a pool that was not destroyed.
    fn attribute(&self, attribute: u32) -> Option<u64> {
        let mut bytes = 0u64;
        // SAFETY: writes 64 bits to the local; the pool is one that was not destroyed.
        let result = unsafe {
            real!(cuMemPoolGetAttribute: fn(CUmemoryPool, u32, *mut u64))(
                self.pool,
                attribute,
                &raw mut bytes,
            )
        };
        result.is_ok().then_some(bytes)
    }

    /// Has the driver give back what a pool that was not destroyed has reserved, but for `keep` bytes.
    fn trim_pool(&self, keep: u64) {
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        // SAFETY: the pool is one that was not destroyed.
        unsafe { real!(cuMemPoolTrimTo: fn(CUmemoryPool, usize))(self.pool, keep) };
    }

    /// Bytes that the driver has reserved, in whole blocks, and no less than the floor; where it does
    /// not say, all that was charged so far.
    fn reserved(&self, device: &Device) -> u64 {
        let said = match self.state {
            State::Pool => self.attribute(POOL_RESERVED),
            State::Graphs => {
                let mut bytes = 0u64;
                // SAFETY: writes 64 bits to the local.
                let result = unsafe {
                    real!(cuDeviceGetGraphMemAttribute: fn(CUdevice, u32, *mut u64))(
                        device.handle,
                        GRAPHS_RESERVED,
                        &raw mut bytes,
                    )
                };
                result.is_ok().then_some(bytes)
            }
            State::Modules => Some(0),
            State::None | State::Ended => None,
        };
        match said {
            Some(bytes) => device.taken_by(bytes.max(self.floor)),
            None => self.charged + self.pending,
        }
    }

    /// Brings the charge to what the driver has reserved.
    fn settle(&mut self, process: &Process, device: &Device) {
        let reserved = self.reserved(device);
        if reserved < self.charged {
            process.release(device, self.charged - reserved);
            self.charged = reserved;
        } else if reserved > self.charged + self.pending {
            // Grown behind our back. Where there is no room for it, the next allocation finds none.
            let more = reserved - self.charged - self.pending;
            self.charged += process.reserve_in_parts(device, 0, more).unwrap_or(0);
        }
    }

    /// Ends an allocation's reservation after the driver was asked: what the reserve grew by is
    /// charged from now on. Fails where it grew by more than there is room for.
    fn arrive(&mut self, mut reserved: Reserved, least: u64) -> Result<(), CUresult> {
        let device = reserved.device;
        let now = self.reserved(device);
        self.pending -= reserved.bytes;
        let covered = self.charged + self.pending + reserved.bytes;
        let mut grown = Ok(());
        if now > covered {
            let more = now - covered;
            // Without looking for room in pools: their lock is held.
            match reserved.process.reserve_in_parts(device, more, more) {
                Some(more) => reserved.bytes += more,
                None => grown = Err(CUresult::OUT_OF_MEMORY),
            }
        }
        if now > self.charged {
            let growth = now - self.charged;
            if self.pending == 0 {
                let step = if growth > least {
                    growth.min(STEP).next_power_of_two()
                } else {
                    device.block
                };
                self.step = self.step.max(step);
            }
            // What others on their way cover is theirs to charge.
            reserved.shrink(growth);
            self.charged += reserved.keep();
        } else {
            reserved.process.release(device, self.charged - now);
            self.charged = now;
        }
        grown
    }
}

impl Reserves {
    fn find(&self, is_it: impl Fn(&Reserve) -> bool) -> Option<usize> {
        self.list.iter().take(self.count).position(is_it)
    }

    fn add(&mut self, reserve: Reserve) -> Option<usize> {
        let at = match self.find(|reserve| reserve.state == State::None) {
            Some(at) => at,
            None if self.count < MOST => {
                self.count += 1;
                self.count - 1
            }
            None => return None,
        };
        *self.list.get_mut(at)? = reserve;
        Some(at)
    }

    /// Brings all charges to what the driver has reserved.
    fn settle(&mut self, process: &Process) {
        for reserve in self.list.iter_mut().take(self.count) {
            if let (State::Pool | State::Graphs | State::Modules, Some(device)) =
                (reserve.state, process.device_numbered(reserve.device))
            {
                reserve.settle(process, device);
            }
        }
    }
}

fn new(state: State, device: &Device, pool: CUmemoryPool) -> Reserve {
    Reserve {
        state,
        device: device.number,
        pool,
        charged: 0,
        pending: 0,
        floor: 0,
        live: 0,
        step: 0,
    }
}

/// A reserve that something is allocated from.
#[derive(Clone, Copy)]
pub struct Source {
    pub process: &'static Process,
    pub device: &'static Device,
    place: usize,
}

impl Source {
    /// The graphs of a device.
    pub fn graphs(process: &'static Process, device: &'static Device) -> Result<Self, CUresult> {
        Self::of_device(State::Graphs, process, device)
    }

    /// The modules of a device.
    pub fn modules(process: &'static Process, device: &'static Device) -> Result<Self, CUresult> {
        Self::of_device(State::Modules, process, device)
    }

    fn of_device(
        state: State,
        process: &'static Process,
        device: &'static Device,
    ) -> Result<Self, CUresult> {
        let place = process.reserves.with(|reserves| {
            reserves
                .find(|found| found.state == state && found.device == device.number)
                .or_else(|| reserves.add(new(state, device, 0)))
        });
        process.has_reserves.store(true, Ordering::Relaxed);
        Ok(Self {
            process,
            device,
            place: place.ok_or(CUresult::OUT_OF_MEMORY)?,
        })
    }

    /// A pool; `None` for one whose memory has no cap.
    fn pool(
        process: &'static Process,
        pool: CUmemoryPool,
        stream: CUstream,
    ) -> Result<Option<Self>, CUresult> {
        let noted = process.pointers.get(pool_key(pool));
        let device = match noted {
            Some(noted) => process.device_numbered(noted.device),
            None => match device_with_default_pool(process, pool) {
                Some(device) => Some(device),
                None => Some(device_of_stream(process, stream)?),
            },
        };
        let Some(device) = device.filter(|device| device.is_capped()) else {
            return Ok(None);
        };
        let place = if let Some(place) = noted.and_then(reserve_of) {
            place
        } else {
            let place = process.reserves.with(|reserves| {
                reserves
                    .find(|found| found.state == State::Pool && found.pool == pool)
                    .or_else(|| reserves.add(new(State::Pool, device, pool)))
            });
            let place = place.ok_or(CUresult::OUT_OF_MEMORY)?;
            process.has_reserves.store(true, Ordering::Relaxed);
            let _ = process
                .pointers
                .put(pool_key(pool), entry(device.number, place));
            place
        };
        Ok(Some(Self {
            process,
            device,
            place,
        }))
    }

    fn with<R>(self, act: impl FnOnce(&mut Reserve) -> R) -> Option<R> {
        self.process
            .reserves
            .with(|reserves| reserves.list.get_mut(self.place).map(act))
    }

    /// Reserves for `bytes` more, asks the driver, and charges what became of it. Where the driver
    /// took more than there is room for, `undo` is called.
    pub fn grow(self, bytes: u64, driver: Call<'_>, undo: Call<'_>) -> CUresult {
        let least = self.device.taken_by(bytes);
        let seen = self.with(|reserve| reserve.step).unwrap_or(0);
        let step = if seen == 0 { STEP } else { seen };
        let most = least.checked_next_multiple_of(step).unwrap_or(least);
        let reserve = |least| Reserved::new(self.process, self.device, least, most);
        let mut reserved = reserve(least);
        if let Ok(some) = &reserved
            && some.bytes < most
            && seen != 0
            && self.with(|reserve| reserve.has_unused(bytes)) != Some(true)
        {
            // It would grow by a whole step, for which there is no room.
            drop(reserved);
            reserved = reserve(most);
        }
        let reserved = match reserved {
            Ok(reserved) => reserved,
            Err(code) => return code,
        };
        self.with(|reserve| reserve.pending += reserved.bytes);
        let result = driver.make();
        let grown = self.with(|reserve| reserve.arrive(reserved, least));
        if let (true, Some(Err(code))) = (result.is_ok(), grown) {
            undo.make();
            self.with(|reserve| {
                if reserve.state == State::Pool {
                    reserve.trim_pool(reserve.charged);
                }
            });
            return code;
        }
        result
    }

    /// Charges at least `bytes` more from now on, if the driver does what it is asked. What it has
    /// reserved already counts.
    pub fn raise_floor(self, bytes: u64, driver: Call<'_>) -> CUresult {
        let missing = self.with(|reserve| {
            let floor = self.device.taken_by(reserve.floor.saturating_add(bytes));
            floor.saturating_sub(reserve.charged)
        });
        let missing = missing.unwrap_or(bytes);
        let reserved = match Reserved::new(self.process, self.device, missing, missing) {
            Ok(reserved) => reserved,
            Err(code) => return code,
        };
        self.with(|reserve| reserve.pending += reserved.bytes);
        let result = driver.make();
        self.with(|reserve| {
            if result.is_ok() {
                reserve.floor = reserve.floor.saturating_add(bytes);
            }
            let _ = reserve.arrive(reserved, missing);
        });
        result
    }

    /// Takes that back.
    pub fn lower_floor(self, bytes: u64) {
        self.with(|reserve| {
            reserve.floor = reserve.floor.saturating_sub(bytes);
            reserve.settle(self.process, self.device);
        });
    }
}

/// An allocation in a stream's order: from a pool, or from its device's current one.
pub fn allocate(
    pool: Option<CUmemoryPool>,
    stream: graph::Stream,
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
    if stream.captures() {
        return graph::capture(process, stream, bytes as u64, driver);
    }
    let before = process.reserves.with(|reserves| reserves.switches);
    let source = match pool {
        Some(pool) => Source::pool(process, pool, stream.handle),
        None => current_pool(process, stream.handle),
    };
    let source = match source {
        Ok(Some(source)) => source,
        Ok(None) => return driver.make(),
        Err(code) => return code,
    };
    // SAFETY: frees what the driver has just allocated and nobody has seen, and waits for it.
    let free = || unsafe {
        real!(cuMemFreeAsync: fn(CUdeviceptr, CUstream))(pointer.read(), stream.handle());
        relaxed(|| real!(cuStreamSynchronize: fn(CUstream))(stream.handle()))
    };
    let result = source.grow(bytes as u64, driver, Call::of(&free));
    if result.is_ok() {
        source.with(|reserve| reserve.live += 1);
        // SAFETY: not null, and the driver has just written to it.
        let pointer = unsafe { pointer.read() };
        note(process, pointer, entry(source.device.number, source.place));
    }
    if pool.is_none() {
        process.reserves.with(|reserves| {
            // It may have come from another pool than the one that was current.
            if reserves.switches != before || before % 2 == 1 {
                reserves.settle(process);
            }
        });
    }
    result
}

/// The pool that a stream's device allocates from.
fn current_pool(process: &'static Process, stream: CUstream) -> Result<Option<Source>, CUresult> {
    let device = device_of_stream(process, stream)?;
    if !device.is_capped() {
        return Ok(None);
    }
    let mut pool = 0;
    // SAFETY: writes to the local handle.
    let result = unsafe {
        real!(cuDeviceGetMemPool: fn(*mut CUmemoryPool, CUdevice))(&raw mut pool, device.handle)
    };
    if !result.is_ok() {
        return Err(result);
    }
    Source::pool(process, pool, stream)
}

/// A table's entry for what a reserve gave: where in the list it is, instead of a context.
fn entry(device: u8, place: usize) -> Entry {
    Entry {
        bytes: 0,
        device,
        context: place as u64 + 1,
    }
}

/// The reserve that an entry is of. No context's handle is that small.
pub fn reserve_of(entry: Entry) -> Option<usize> {
    let place = usize::try_from(entry.context).ok()?.checked_sub(1)?;
    (place < MOST).then_some(place)
}

/// An allocation of a reserve was freed.
#[cold]
#[inline(never)]
pub fn freed(process: &Process, place: usize) {
    process.reserves.with(|reserves| {
        let Some(reserve) = reserves.list.get_mut(place) else {
            return;
        };
        reserve.live = reserve.live.saturating_sub(1);
        let Some(device) = process.device_numbered(reserve.device) else {
            return;
        };
        if reserve.state == State::Ended && reserve.live == 0 {
            process.release(device, reserve.charged);
            reserve.state = State::None;
        } else {
            reserve.settle(process, device);
        }
    });
}

/// Makes a call at which the driver may give back what pools kept, and looks.
pub fn looked_at(driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if let Some(process) = process::joined() {
        look(process);
    }
    result
}

/// Looks at what the driver has reserved, if this process has pools.
pub fn look(process: &Process) {
    if process.has_reserves.load(Ordering::Relaxed) {
        process.reserves.with(|reserves| reserves.settle(process));
    }
}

/// Makes room of `bytes` on a device with what this process's pools keep and do not use; whether
/// there was any.
#[cold]
#[inline(never)]
pub fn trim(process: &Process, device: &Device, bytes: u64) -> bool {
    if !process.has_reserves.load(Ordering::Relaxed) {
        return false;
    }
    let missing = trim_once(process, device, bytes);
    if missing == 0 || process.launches.captures.load(Ordering::Relaxed) != 0 {
        return missing < bytes;
    }
    // What was freed in a stream's order is in use until the stream gets there. The driver, too, waits for
    // that before it says that there is no memory.
    // SAFETY: no arguments.
    relaxed(|| unsafe { real!(cuCtxSynchronize: fn())() });
    trim_once(process, device, missing) < bytes
}

/// Trims the pools of a device by `bytes`; returns how much of that is missing.
fn trim_once(process: &Process, device: &Device, bytes: u64) -> u64 {
    process.reserves.with(|reserves| {
        let mut left = bytes;
        for reserve in reserves.list.iter_mut().take(reserves.count) {
            if left == 0 || reserve.device != device.number || reserve.charged == 0 {
                continue;
            }
            let before = reserve.charged;
            match reserve.state {
                // Its destruction waits for this lock.
                State::Pool => reserve.trim_pool(before.saturating_sub(left)),
                State::Graphs => {
                    // SAFETY: only a device.
                    unsafe { real!(cuDeviceGraphMemTrim: fn(CUdevice))(device.handle) };
                }
                State::None | State::Ended | State::Modules => continue,
            }
            reserve.settle(process, device);
            left = left.saturating_sub(before.saturating_sub(reserve.charged));
        }
        left
    })
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

/// Notes where the memory of a pool lies that the driver told of.
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
        // Nowhere in particular (managed memory): where the process allocates.
        None => process.current_device().ok().map(|device| device.number),
    };
    // A full table: the pool counts as its stream's device's.
    let _ = process.pointers.put(
        pool_key(pool),
        Entry {
            bytes: 0,
            device: device.unwrap_or(u8::MAX),
            context: 0,
        },
    );
}

/// The end of a pool. What was allocated from it lives on, and with it its charge.
pub fn end(pool: CUmemoryPool, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    process.reserves.with(|reserves| {
        let place = reserves.find(|found| found.state == State::Pool && found.pool == pool);
        if place.is_some() {
            // SAFETY: the program's own pool. What is unused would be gone in any case.
            unsafe { real!(cuMemPoolTrimTo: fn(CUmemoryPool, usize))(pool, 0) };
            reserves.settle(process);
        }
        let result = driver.make();
        if !result.is_ok() {
            return result;
        }
        process.pointers.take(pool_key(pool));
        if let Some(reserve) = place.and_then(|place| reserves.list.get_mut(place)) {
            if reserve.live > 0 || reserve.pending > 0 {
                reserve.state = State::Ended;
            } else if let Some(device) = process.device_numbered(reserve.device) {
                process.release(device, reserve.charged);
                reserve.state = State::None;
            }
        }
        result
    })
}

/// Another pool becomes a device's current one.
pub fn switch(driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    // An allocation on its way sees the change before it or after it.
    process.reserves.with(|reserves| reserves.switches += 1);
    let result = driver.make();
    process.reserves.with(|reserves| reserves.switches += 1);
    result
}

fn pool_key(pool: CUmemoryPool) -> u64 {
    key(Kind::Pool, pool as u64)
}

/// The three streams that every context has: they are the current context's.
pub const LAST_IMPLICIT_STREAM: CUstream = 2;

/// The device of a stream.
pub fn device_of_stream(
    process: &'static Process,
    stream: CUstream,
) -> Result<&'static Device, CUresult> {
    if process.has_one_device() || stream <= LAST_IMPLICIT_STREAM {
        return process.current_device();
    }
    let mut context = 0;
    // SAFETY: `stream` is what the program passes to the driver as a stream; the rest writes to
    // local handles, and leaves the stack of contexts as it was.
    unsafe {
        let found = real!(cuStreamGetCtx: fn(CUstream, *mut CUcontext))(stream, &raw mut context);
        if !found.is_ok() {
            return Err(found);
        }
        let pushed = real!(cuCtxPushCurrent_v2: fn(CUcontext))(context);
        if !pushed.is_ok() {
            return Err(pushed);
        }
        let device = process.current_device();
        real!(cuCtxPopCurrent_v2: fn(*mut CUcontext))(&raw mut context);
        device
    }
}

fn device_with_default_pool(
    process: &'static Process,
    pool: CUmemoryPool,
) -> Option<&'static Device> {
    process.devices().find(|device| {
        let mut own = 0;
        // SAFETY: writes to the local handle.
        let result = unsafe {
            real!(cuDeviceGetDefaultMemPool: fn(*mut CUmemoryPool, CUdevice))(
                &raw mut own,
                device.handle,
            )
        };
        result.is_ok() && own == pool
    })
}
