//! Asks the driver what it keeps for pools, graphs and modules, and sets their charges to that.
//!
//! The list of pools is locked while it is read or written, but never while the driver is called;
//! [`tranche_shim_core::pool_charge`] describes how an answer of the driver is noted in spite of that.
//!
//! What a pool gave back to the device is noticed when the process has waited for the GPU, queries the free memory, or
//! would be refused, and after some allocations and frees. The first two ask only about pools that are watched: from an
//! allocation or a free until they have nothing more to give back. A thread that frees notes it after the driver's call. If
//! the pool was not watched until then, another thread may have waited and not asked; so this one asks. A driver may give
//! back more than it promises: so one more pool is watched again now and then.

use core::sync::atomic::Ordering;

use tranche_shim_core::physical::Id;
use tranche_shim_core::pool_charge::{DriverAnswer, FinishedAllocation, Outdated, Version};
use tranche_shim_core::{Entry, PoolCharge};
use tranche_shim_runtime::sys;

use crate::abi::{CUdevice, CUmemoryPool, CUresult};
use crate::device::{Device, Residence};
use crate::driver::{Call, real};
use crate::driver_pools::{DriverPool, DriverPools, MOST, State};
use crate::exports;
use crate::keys::{Kind, key};
use crate::process::{self, Process};
use crate::stream::relaxed;

/// The numbers of the attributes that say how much may stay reserved without use, how much is reserved, and how much of that
/// is used.
const POOL_THRESHOLD: u32 = 4;
const POOL_RESERVED: u32 = 5;
const POOL_USED: u32 = 7;
const GRAPHS_USED: u32 = 0;
const GRAPHS_RESERVED: u32 = 2;

/// How often the driver is asked while its answers are outdated.
const TRIES: usize = 64;

/// How many watched pools are settled in a call at which the driver may give memory back. The number is bounded so that
/// such a call takes no longer with more pools.
const IN_TURN: usize = 4;

/// After so many waits, the driver is asked about one more pool.
const WAITS: u32 = 64;

/// How long the destruction of a pool waits for other threads' calls that use it, in nanoseconds.
const WAIT_NANOS: u64 = 1_000_000_000;
const NAP_NANOS: u64 = 20_000;

/// A query of the driver about a pool. The pool is not destroyed meanwhile.
pub struct Query<'a> {
    process: &'a Process,
    pub device: &'a Device,
    place: usize,
    state: State,
    pool: CUmemoryPool,
    pub version: Version,
}

impl<'a> Query<'a> {
    pub fn begin(process: &'a Process, place: usize) -> Option<Self> {
        process.driver_pools.with(|pools| {
            let pool = pools.get(place)?;
            if matches!(pool.state, State::None | State::Ending | State::Ended) {
                return None;
            }
            let device = process.device_numbered(pool.device)?;
            pool.calls += 1;
            Some(Self {
                process,
                device,
                place,
                state: pool.state,
                pool: pool.handle,
                version: pool.charge.version(),
            })
        })
    }

    /// Bytes that the driver has for the pool; `None` if the driver does not say.
    pub fn ask(&self) -> Option<u64> {
        match self.state {
            State::Pool => pool_attribute(self.pool, POOL_RESERVED),
            State::Graphs => graphs_attribute(self.device.handle, GRAPHS_RESERVED),
            _ => Some(0),
        }
    }

    /// Bytes that the driver has for the pool, and how many of them are in use; `None` if the driver does not say.
    pub fn ask_both(&self) -> Option<(u64, u64)> {
        let used = match self.state {
            State::Pool => pool_attribute(self.pool, POOL_USED),
            State::Graphs => graphs_attribute(self.device.handle, GRAPHS_USED),
            _ => None,
        };
        self.ask().zip(used)
    }

    /// Whether the pool has at least `bytes` unused bytes, as the driver says.
    pub fn has_unused(&self, bytes: u64) -> bool {
        let unused = |(reserved, used): (u64, u64)| reserved.saturating_sub(used) >= bytes;
        self.state == State::Pool && self.ask_both().is_some_and(unused)
    }

    /// Makes the driver give back what is not in use, except for `keep` bytes.
    fn trim(&self, keep: u64) {
        if self.state == State::Graphs {
            // SAFETY: only a device.
            unsafe { real!(cuDeviceGraphMemTrim: fn(CUdevice))(self.device.handle) };
        } else if self.state == State::Pool {
            trim_pool(self.pool, keep);
        }
    }

    /// Ends the query, and changes the pool's charge.
    pub fn end<R>(self, note: impl FnOnce(&mut PoolCharge) -> R) -> Option<R> {
        let end = |pools: &mut DriverPools| Some(note(&mut self.end_in(pools)?.charge));
        self.process.driver_pools.with(end)
    }

    #[inline(never)]
    fn end_in<'p>(&self, pools: &'p mut DriverPools) -> Option<&'p mut DriverPool> {
        let pool = pools.get(self.place)?;
        if pool.handle != self.pool {
            return None;
        }
        pool.calls = pool.calls.saturating_sub(1);
        Some(pool)
    }
}

fn pool_attribute(pool: CUmemoryPool, attribute: u32) -> Option<u64> {
    let mut bytes = 0u64;
    // SAFETY: writes 64 bits to the local; the pool is one that was not destroyed.
    let result = unsafe {
        real!(cuMemPoolGetAttribute: fn(CUmemoryPool, u32, *mut u64))(
            pool,
            attribute,
            &raw mut bytes,
        )
    };
    result.is_ok().then_some(bytes)
}

fn graphs_attribute(device: CUdevice, attribute: u32) -> Option<u64> {
    let mut bytes = 0u64;
    // SAFETY: writes 64 bits to the local.
    let result = unsafe {
        real!(cuDeviceGetGraphMemAttribute: fn(CUdevice, u32, *mut u64))(
            device,
            attribute,
            &raw mut bytes,
        )
    };
    result.is_ok().then_some(bytes)
}

fn trim_pool(pool: CUmemoryPool, keep: u64) {
    let keep = usize::try_from(keep).unwrap_or(usize::MAX);
    // SAFETY: the pool is one that was not destroyed.
    unsafe { real!(cuMemPoolTrimTo: fn(CUmemoryPool, usize))(pool, keep) };
}

/// From now on, the driver is asked about a pool when the program has waited; false if it was before.
#[inline]
pub fn watch(process: &Process, pools: &mut DriverPools, place: usize) -> bool {
    let is_new = pools.watch(place);
    if is_new {
        process.watches_pools.store(true, Ordering::Relaxed);
    }
    is_new
}

/// No longer asks the driver about a pool when the program has waited.
#[inline(never)]
fn ignore(process: &Process, pools: &mut DriverPools, place: usize) {
    let still = pools.ignore(place);
    process.watches_pools.store(still, Ordering::Relaxed);
}

/// Asks the driver what a pool has and notes it, and repeats this while the answer is outdated; `None` if all answers
/// are outdated, or if there is no such pool.
pub fn ask_until_noted(
    process: &Process,
    place: usize,
    note: &mut dyn FnMut(
        &mut PoolCharge,
        &Device,
        DriverAnswer,
    ) -> Result<FinishedAllocation, Outdated>,
) -> Option<FinishedAllocation> {
    for _ in 0..TRIES {
        let query = Query::begin(process, place)?;
        let (device, seen) = (query.device, query.version);
        let asked = query.ask();
        let end = |pools: &mut DriverPools| {
            let charge = &mut query.end_in(pools)?.charge;
            // If the driver does not say, it is assumed to have all that was charged.
            let now = asked.unwrap_or(charge.covered()).max(charge.floor());
            let found = DriverAnswer {
                seen,
                now: device.taken_by(now),
                least: device.taken_by(charge.least()),
            };
            let noted = note(charge, device, found);
            // What graphs have does not follow from their allocations: they stay watched.
            if let Some(has) = asked
                && query.state == State::Pool
                && noted.is_ok()
                && !charge.may_give(has, device.block)
            {
                ignore(process, pools, place);
            }
            Some(noted)
        };
        if let Ok(done) = process.driver_pools.with(end)? {
            return Some(done);
        }
    }
    None
}

/// Sets a pool's charge to what the driver has for it.
pub fn settle(process: &Process, place: usize) {
    let mut of = None;
    let settled = ask_until_noted(process, place, &mut |charge, device, found| {
        let reserve = |more| {
            let granted = process.reserve_in_parts(device, Residence::Gpu, 0, more);
            granted.unwrap_or(0)
        };
        of = Some(device.number);
        let surplus = charge.settle(found, reserve)?;
        Ok(FinishedAllocation {
            surplus,
            is_covered: true,
        })
    });
    if let (Some(device), Some(settled)) = (of, settled) {
        release(process, device, settled.surplus);
    }
}

fn release(process: &Process, device: u8, bytes: u64) {
    if bytes > 0
        && let Some(device) = process.device_numbered(device)
    {
        process.release(device, bytes);
    }
}

/// Makes a call at which the driver may give back what pools kept, and settles some of those that are watched.
pub fn settle_after(driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if let Some(process) = process::joined() {
        settle_some(process);
    }
    result
}

/// Makes a call that changes how much a pool keeps, and settles the pool: it gives back the rest now, or when the program
/// waits.
pub fn settle_pool_after(pool: CUmemoryPool, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if let Some(process) = process::joined()
        && let Some(entry) = process.pointers.get(key(Kind::Pool, pool as u64))
        && let Some(place) = driver_pool_of(entry)
    {
        note_threshold(process, place);
        process.driver_pools.with(|pools| {
            watch(process, pools, place);
        });
        settle(process, place);
    }
    result
}

/// Asks the driver how much a pool may keep when the program waits.
pub fn note_threshold(process: &Process, place: usize) {
    if let Some(query) = Query::begin(process, place) {
        let threshold = pool_attribute(query.pool, POOL_THRESHOLD).unwrap_or(0);
        query.end(|charge| charge.set_threshold(threshold));
    }
}

/// Settles some of the watched pools, in turn, after the program may have waited.
#[inline(never)]
pub fn settle_some(process: &Process) {
    if process.has_driver_pools.load(Ordering::Relaxed) {
        // Threads that count at the same time may count once.
        let waits = process.waits.load(Ordering::Relaxed).wrapping_add(1);
        process.waits.store(waits, Ordering::Relaxed);
        if process.watches_pools.load(Ordering::Relaxed) || waits.is_multiple_of(WAITS) {
            settle_watched_pools(process, IN_TURN, waits);
        }
    }
}

/// Settles all watched pools.
#[inline]
pub fn settle_watched(process: &Process) {
    if process.watches_pools.load(Ordering::Relaxed) {
        settle_watched_pools(process, MOST, 1);
    }
}

#[cold]
#[inline(never)]
fn settle_watched_pools(process: &Process, most: usize, waits: u32) {
    let start = process.driver_pools.with(|pools| {
        if waits.is_multiple_of(WAITS) && pools.watch_one((waits / WAITS) as usize) {
            process.watches_pools.store(true, Ordering::Relaxed);
        }
        pools.next
    });
    let mut left = most;
    for (mut from, to) in [(start, MOST), (0, start)] {
        while left > 0
            && let Some(place) = process
                .driver_pools
                .with(|pools| pools.watched_in(from, to))
        {
            settle(process, place);
            (from, left) = (place + 1, left - 1);
        }
    }
}

/// Settles all pools.
pub fn settle_all(process: &Process) {
    if process.has_driver_pools.load(Ordering::Relaxed) {
        for place in process.driver_pools.with(|pools| pools.places()) {
            settle(process, place);
        }
    }
}

/// Waits until pending stream-ordered frees are done, as the driver does before it reports out of memory; returns whether
/// there was any pool to wait for.
#[cold]
#[inline(never)]
pub fn wait_for_frees(process: &Process) -> bool {
    if !process.has_driver_pools.load(Ordering::Relaxed) || process.launches.captures.any() {
        return false;
    }
    // SAFETY: no arguments.
    relaxed(|| unsafe { real!(cuCtxSynchronize: fn())() });
    settle_all(process);
    true
}

/// Trims this process's pools on a device by up to `bytes`; returns whether anything was given back.
#[cold]
#[inline(never)]
pub fn trim(process: &Process, device: &Device, bytes: u64) -> bool {
    if !process.has_driver_pools.load(Ordering::Relaxed) {
        return false;
    }
    let mut missing = bytes;
    for place in process.driver_pools.with(|pools| pools.places()) {
        if missing == 0 {
            break;
        }
        let Some(query) = Query::begin(process, place) else {
            continue;
        };
        if query.device.number == device.number {
            missing = missing.saturating_sub(trim_one(process, place, query, missing));
        } else {
            query.end(|_| ());
        }
    }
    missing < bytes
}

/// Trims a pool by `bytes`; returns by how much its charge fell.
pub fn trim_one(process: &Process, place: usize, query: Query<'_>, bytes: u64) -> u64 {
    let begun = process.driver_pools.with(|pools| {
        let charge = &mut pools.get(place)?.charge;
        let before = charge.charged();
        (before > 0).then(|| (before, charge.begin_trim(bytes)))
    });
    let Some((before, keep)) = begun else {
        query.end(|_| ());
        return 0;
    };
    query.trim(keep);
    query.end(PoolCharge::end_trim);
    settle(process, place);
    let after = process
        .driver_pools
        .with(|pools| pools.get(place).map_or(0, |found| found.charge.charged()));
    before.saturating_sub(after)
}

/// A table's entry for an allocation of `bytes` from a pool: it has the pool's place in the list instead of a context.
pub fn entry(device: u8, place: usize, bytes: u64) -> Entry {
    Entry {
        bytes,
        device,
        context: place as u64 + 1,
    }
}

/// The place of the pool from which an entry was allocated. No context's handle is that small.
pub fn driver_pool_of(entry: Entry) -> Option<usize> {
    let place = usize::try_from(entry.context).ok()?.checked_sub(1)?;
    (place < MOST).then_some(place)
}

/// Notes that an allocation from a pool was freed: in the order of a stream, or by a call after which the driver is asked.
#[cold]
#[inline(never)]
pub fn freed(process: &Process, place: usize, bytes: u64, in_stream: bool) {
    let is_asked = process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        let size = process.device_numbered(pool.device)?.size_of(bytes);
        let is_due = pool.charge.free(size);
        let is_over = pool.state == State::Ended && pool.charge.live() == 0;
        (!is_over).then(|| watch(process, pools, place) || is_due || !in_stream)
    });
    match is_asked {
        Some(false) => {}
        Some(true) => settle(process, place),
        None => end_if_over(process, place),
    }
}

/// Ends a destroyed pool that has no allocation any more, and gives back its charge.
#[cold]
#[inline(never)]
fn end_if_over(process: &Process, place: usize) {
    let ended = process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        let is_over = pool.state == State::Ended && pool.charge.live() == 0;
        is_over.then(|| {
            pool.state = State::None;
            (pool.device, pool.charge.covered(), pool.exported)
        })
    });
    let Some((device, charged, exported)) = ended else {
        return;
    };
    // If descriptors keep its memory, the charge is given back when they are closed.
    let Some(exported) = exported else {
        release(process, device, charged);
        return;
    };
    process.note_physical(|physical, freed| {
        physical.set_bytes(exported, charged);
        physical.let_go(exported, freed);
    });
    exports::settle_some(process, false);
}

/// Lowers the floor of a device's modules or graphs by `bytes`.
pub fn lower_floor(process: &Process, state: State, device: &Device, bytes: u64) {
    let place = process
        .driver_pools
        .with(|pools| pools.of_device(state, device.number));
    if let Some(place) = place {
        lower_floor_at(process, place, bytes);
    }
}

/// The same for the pool at a place.
pub fn lower_floor_at(process: &Process, place: usize, bytes: u64) {
    process.driver_pools.with(|pools| {
        if let Some(pool) = pools.get(place) {
            pool.charge.lower_floor(bytes);
        }
    });
    settle(process, place);
}

/// Calls `driver` to destroy a pool. Its allocations stay, and stay charged.
pub fn end_pool(process: &Process, place: usize, driver: Call<'_>) -> CUresult {
    if let Some(query) = Query::begin(process, place) {
        // The unused memory would be given back in any case.
        trim_one(process, place, query, u64::MAX);
    }
    set_state(process, place, State::Ending);
    let start = sys::now();
    // A tool's callback in one of these calls may wait for this thread.
    while calls(process, place) > 0 && sys::now().saturating_sub(start) < WAIT_NANOS {
        sys::sleep(NAP_NANOS);
    }
    let result = driver.make();
    if !result.is_ok() {
        set_state(process, place, State::Pool);
        return result;
    }
    set_state(process, place, State::Ended);
    end_if_over(process, place);
    result
}

/// Holds the memory that a pool's descriptors keep, for one more descriptor.
pub fn hold_exported(process: &Process, place: usize) -> Option<Id> {
    process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        process.physical.with(|physical| {
            let known = match pool.exported {
                Some(known) => known,
                None => physical.create_without_handle(0, pool.device).ok()?,
            };
            pool.exported = Some(known);
            physical.hold_id(known)
        })
    })
}

fn set_state(process: &Process, place: usize, state: State) {
    process.driver_pools.with(|pools| {
        if let Some(pool) = pools.get(place) {
            pool.state = state;
        }
        // The driver is not asked about a pool that ends.
        ignore(process, pools, place);
        watch(process, pools, place);
    });
}

fn calls(process: &Process, place: usize) -> u32 {
    process
        .driver_pools
        .with(|pools| pools.get(place).map_or(0, |pool| pool.calls))
}
