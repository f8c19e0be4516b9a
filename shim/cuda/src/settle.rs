//! Asks the driver what it keeps for pools, graphs and modules, and sets their charges to that.
//!
//! The list of pools is locked while it is read or written, but never while the driver is called;
//! [`tranche_shim_core::pool_charge`] describes how an answer of the driver is noted in spite of that. What a pool gave
//! back to the device is noticed when the process allocates, frees, synchronizes, queries the free memory, or would be
//! refused.

use core::sync::atomic::Ordering;

use tranche_shim_core::physical::Id;
use tranche_shim_core::pool_charge::{DriverAnswer, Outdated, Version};
use tranche_shim_core::{Entry, PoolCharge};
use tranche_shim_runtime::sys;

use crate::abi::{CUdevice, CUmemoryPool, CUresult};
use crate::device::{Device, Residence};
use crate::driver::{Call, real};
use crate::driver_pools::{DriverPool, MOST, State};
use crate::exports;
use crate::process::{self, Process};
use crate::stream::relaxed;

/// The numbers of the attributes that say how much is reserved, and how much of that is used.
const POOL_RESERVED: u32 = 5;
const POOL_USED: u32 = 7;
const GRAPHS_USED: u32 = 0;
const GRAPHS_RESERVED: u32 = 2;

/// How often the driver is asked while its answers are outdated.
const TRIES: usize = 64;

/// How many pools are settled in a call at which the driver may give memory back. The number is bounded so that such a
/// call takes no longer with more pools.
const IN_TURN: usize = 4;

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
        self.process.driver_pools.with(|pools| {
            let pool = pools.get(self.place)?;
            if pool.handle != self.pool {
                return None;
            }
            pool.calls = pool.calls.saturating_sub(1);
            Some(note(&mut pool.charge))
        })
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

/// Asks the driver what a pool has and notes it, and repeats this while the answer is outdated; `None` if all answers
/// are outdated, or if there is no such pool.
pub fn ask_until_noted<R>(
    process: &Process,
    place: usize,
    mut note: impl FnMut(&mut PoolCharge, &Device, DriverAnswer) -> Result<R, Outdated>,
) -> Option<R> {
    for _ in 0..TRIES {
        let query = Query::begin(process, place)?;
        let (device, seen) = (query.device, query.version);
        let asked = query.ask();
        let noted = query.end(|charge| {
            // If the driver does not say, it is assumed to have all that was charged.
            let now = asked.unwrap_or(charge.covered()).max(charge.floor());
            let found = DriverAnswer {
                seen,
                now: device.taken_by(now),
                least: device.taken_by(charge.least()),
            };
            note(charge, device, found)
        })?;
        if let Ok(done) = noted {
            return Some(done);
        }
    }
    None
}

/// Sets a pool's charge to what the driver has for it.
pub fn settle(process: &Process, place: usize) {
    let settled = ask_until_noted(process, place, |charge, device, found| {
        let reserve = |more| {
            let granted = process.reserve_in_parts(device, Residence::Gpu, 0, more);
            granted.unwrap_or(0)
        };
        charge
            .settle(found, reserve)
            .map(|surplus| (device.number, surplus))
    });
    if let Some((device, surplus)) = settled {
        release(process, device, surplus);
    }
}

fn release(process: &Process, device: u8, bytes: u64) {
    if bytes > 0
        && let Some(device) = process.device_numbered(device)
    {
        process.release(device, bytes);
    }
}

/// Makes a call at which the driver may give back what pools kept, and settles some of them.
pub fn settle_after(driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if let Some(process) = process::joined() {
        settle_some(process);
    }
    result
}

/// Settles the next pools in turn.
pub fn settle_some(process: &Process) {
    if !process.has_driver_pools.load(Ordering::Relaxed) {
        return;
    }
    let mut first = None;
    for _ in 0..IN_TURN {
        let next = process.driver_pools.with(|pools| {
            let next = pools.next_in_turn()?;
            (first != Some(next)).then_some(next)
        });
        let Some(place) = next else {
            return;
        };
        first = first.or(next);
        settle(process, place);
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

/// A table's entry for an allocation of `bytes` (whole blocks) from a pool: it has the pool's place in the list instead
/// of a context.
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

/// Notes that an allocation from a pool was freed.
#[cold]
#[inline(never)]
pub fn freed(process: &Process, place: usize, bytes: u64) {
    let ended = process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        pool.charge.free(bytes);
        let is_over = pool.state == State::Ended && pool.charge.live() == 0;
        let over = is_over.then_some(*pool);
        if is_over {
            pools.remove(place);
        }
        over
    });
    match ended {
        Some(ended) => give_up(process, &ended),
        None => settle(process, place),
    }
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
    let ended = process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        let ended = *pool;
        if ended.charge.live() > 0 {
            pool.state = State::Ended;
            return None;
        }
        pools.remove(place);
        Some(ended)
    });
    if let Some(ended) = ended {
        give_up(process, &ended);
    }
    result
}

/// Gives back the charge of a pool that has ended. If descriptors keep its memory, the charge is given back when they are
/// closed.
fn give_up(process: &Process, ended: &DriverPool) {
    let charged = ended.charge.covered();
    let Some(exported) = ended.exported else {
        release(process, ended.device, charged);
        return;
    };
    process.note_physical(|physical, freed| {
        physical.set_bytes(exported, charged);
        physical.let_go(exported, freed);
    });
    exports::settle_some(process, false);
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
    });
}

fn calls(process: &Process, place: usize) -> u32 {
    process
        .driver_pools
        .with(|pools| pools.get(place).map_or(0, |pool| pool.calls))
}
