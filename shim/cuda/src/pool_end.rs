//! The end of pools.
//!
//! A destroyed pool has memory until its allocations are freed, and their streams have reached the frees. The driver cannot
//! be asked about a pool that it has destroyed. So it destroys a pool only when that has nothing any more:
//!
//! ```text
//!  the program destroys it ─► it has nothing: the driver destroys it
//!        └─ it has memory: it is no longer the current pool, and keeps nothing that is not in use
//!             └─ settled like others, until it has nothing: the driver destroys it
//! ```

use tranche_shim_core::physical::Id;

use crate::abi::{CUdevice, CUmemoryPool, CUresult};
use crate::driver::{Call, real};
use crate::driver_pools::State;
use crate::exports;
use crate::pool_query::{Query, default_pool, ignore, watch};
use crate::process::Process;
use crate::stream::relaxed;

/// The pool at a place is destroyed by the program, which means `driver`.
pub fn end(process: &Process, place: usize, driver: Call<'_>) -> CUresult {
    destroy_empty(process, place, State::Pool, false, driver)
        .or_else(|| keep_until_empty(process, place))
        .unwrap_or_else(|| driver.make())
}

/// Destroys a pool that the program has destroyed, if it has nothing any more.
#[cold]
#[inline(never)]
pub fn end_if_empty(process: &Process, place: usize, has_waited: bool) {
    let handle = process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        let is_unused = pool.state == State::Destroyed && pool.charge.live() == 0;
        is_unused.then_some(pool.handle)
    });
    if let Some(handle) = handle {
        // SAFETY: the pool is one that was not destroyed, and the program cannot name it any more.
        let destroy = || unsafe { real!(cuMemPoolDestroy: fn(CUmemoryPool))(handle) };
        let driver = || relaxed(destroy);
        destroy_empty(
            process,
            place,
            State::Destroyed,
            has_waited,
            Call::of(&driver),
        );
    }
}

/// Calls `driver` to destroy a pool in this state that has nothing, and gives back its charge; `None` if it has memory, or
/// if another call uses it.
fn destroy_empty(
    process: &Process,
    place: usize,
    state: State,
    has_waited: bool,
    driver: Call<'_>,
) -> Option<CUresult> {
    let query = Query::begin(process, place)?;
    let is_empty = query.is_empty(has_waited);
    query.end(|_| ());
    process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        let is_over = is_empty && pool.state == state && pool.is_unused();
        is_over.then(|| pool.state = State::Ending)
    })?;
    let result = driver.make();
    let ended = process.driver_pools.with(|pools| {
        let pool = pools.get(place)?;
        if !result.is_ok() {
            pool.state = state;
            return None;
        }
        pool.state = State::None;
        let ended = (pool.device, pool.charge.covered(), pool.exported);
        // Nobody asks about it any more, also where its last answer came before its end.
        ignore(process, pools, place);
        Some(ended)
    });
    if let Some((device, charged, exported)) = ended {
        give_back(process, device, charged, exported);
    }
    Some(result)
}

/// Gives back what a pool is charged. If descriptors keep its memory, that is when they are closed.
fn give_back(process: &Process, device: u8, charged: u64, exported: Option<Id>) {
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

pub fn release(process: &Process, device: u8, bytes: u64) {
    if bytes > 0
        && let Some(device) = process.device_numbered(device)
    {
        process.release(device, bytes);
    }
}

/// Leaves a pool to the driver until it has nothing; `None` if the program cannot destroy it.
fn keep_until_empty(process: &Process, place: usize) -> Option<CUresult> {
    let query = Query::begin(process, place)?;
    let (device, pool) = (query.device, query.pool);
    let default = default_pool(device).filter(|default| *default != pool);
    let left = default.map(|default| {
        let leave = || leave_current(device.handle, pool, default);
        process.current_pools.switch(Call::of(&leave))
    });
    if left == Some(CUresult::SUCCESS) {
        query.keep_nothing();
    }
    query.end(|_| ());
    if left == Some(CUresult::SUCCESS) {
        process.driver_pools.with(|pools| {
            if let Some(pool) = pools.get(place) {
                pool.state = State::Destroyed;
                pool.charge.set_threshold(0);
            }
            watch(process, pools, place);
        });
    }
    left
}

/// Makes the default pool a device's current one, if that is `pool`: as the driver does when it destroys that.
fn leave_current(device: CUdevice, pool: CUmemoryPool, default: CUmemoryPool) -> CUresult {
    let mut current = 0;
    // SAFETY: writes to the local handle.
    let result = unsafe {
        real!(cuDeviceGetMemPool: fn(*mut CUmemoryPool, CUdevice))(&raw mut current, device)
    };
    if !result.is_ok() || current != pool {
        return result;
    }
    // SAFETY: a device, and its pool.
    unsafe { real!(cuDeviceSetMemPool: fn(CUdevice, CUmemoryPool))(device, default) }
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
