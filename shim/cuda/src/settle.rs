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

use tranche_shim_core::pool_charge::{DriverAnswer, FinishedAllocation, Outdated};
use tranche_shim_core::{Entry, PoolCharge};

use crate::abi::{CUmemoryPool, CUresult};
use crate::device::{Device, Residence};
use crate::driver::{Call, real};
use crate::driver_pools::{DriverPools, MOST, State};
use crate::keys::{Kind, key};
use crate::pool_end::{self, release};
use crate::pool_query::{Query, ignore, watch};
use crate::process::{self, Process};
use crate::stream::relaxed;

/// How often the driver is asked while its answers are outdated.
const TRIES: usize = 64;

/// How many watched pools are settled in a call at which the driver may give memory back. The number is bounded so that
/// such a call takes no longer with more pools.
const IN_TURN: usize = 4;

/// After so many waits, the driver is asked about one more pool.
const WAITS: u32 = 64;

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
                && query.state.is_pool()
                && noted.is_ok()
                && !charge.may_give(has, device.block)
            {
                ignore(process, pools, place);
            }
            Some(noted)
        };
        if let Ok(done) = process.driver_pools.with(end)? {
            if query.state == State::Destroyed {
                pool_end::end_if_empty(process, place, false);
            }
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
        let threshold = query.threshold();
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
    for place in process.driver_pools.with(|pools| pools.places()) {
        pool_end::end_if_empty(process, place, true);
    }
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
        let is_last = pool.state == State::Destroyed && pool.charge.live() == 0;
        Some(watch(process, pools, place) || is_due || is_last || !in_stream)
    });
    if is_asked == Some(true) {
        settle(process, place);
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

/// Destroys a pool by `driver`. Its allocations stay, and stay charged.
pub fn end_pool(process: &Process, place: usize, driver: Call<'_>) -> CUresult {
    if let Some(query) = Query::begin(process, place) {
        // The unused memory would be given back in any case.
        trim_one(process, place, query, u64::MAX);
    }
    pool_end::end(process, place, driver)
}
