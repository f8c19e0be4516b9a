//! Asks the driver about a pool, and notes about which pools it must be asked.

use core::sync::atomic::Ordering;

use tranche_shim_core::PoolCharge;
use tranche_shim_core::pool_charge::Version;

use crate::abi::{CUdevice, CUmemoryPool};
use crate::device::Device;
use crate::driver::real;
use crate::driver_pools::{DriverPool, DriverPools, State};
use crate::process::Process;

/// The numbers of the attributes that say how much may stay reserved without use, how much is reserved, and how much of that
/// is used.
const POOL_THRESHOLD: u32 = 4;
const POOL_RESERVED: u32 = 5;
const POOL_USED: u32 = 7;
const GRAPHS_USED: u32 = 0;
const GRAPHS_RESERVED: u32 = 2;

/// A query of the driver about a pool. The pool is not destroyed meanwhile.
pub struct Query<'a> {
    process: &'a Process,
    pub device: &'a Device,
    place: usize,
    pub state: State,
    pub pool: CUmemoryPool,
    /// Whether descriptors keep what it has.
    is_exported: bool,
    pub version: Version,
}

impl<'a> Query<'a> {
    pub fn begin(process: &'a Process, place: usize) -> Option<Self> {
        process.driver_pools.with(|pools| {
            let pool = pools.get(place)?;
            if matches!(pool.state, State::None | State::Ending) {
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
                is_exported: pool.exported.is_some(),
                version: pool.charge.version(),
            })
        })
    }

    /// Bytes that the driver has for the pool; `None` if the driver does not say.
    pub fn ask(&self) -> Option<u64> {
        match self.state {
            State::Destroyed if self.is_exported => None,
            State::Pool | State::Destroyed => pool_attribute(self.pool, POOL_RESERVED),
            State::Graphs => graphs_attribute(self.device.handle, GRAPHS_RESERVED),
            _ => Some(0),
        }
    }

    /// Bytes that the driver has for the pool, and how many of them are in use; `None` if the driver does not say.
    pub fn ask_both(&self) -> Option<(u64, u64)> {
        let used = match self.state {
            State::Pool | State::Destroyed => pool_attribute(self.pool, POOL_USED),
            State::Graphs => graphs_attribute(self.device.handle, GRAPHS_USED),
            _ => None,
        };
        self.ask().zip(used)
    }

    /// Whether the pool has at least `bytes` unused bytes, as the driver says.
    pub fn has_unused(&self, bytes: u64) -> bool {
        let unused = |(reserved, used): (u64, u64)| reserved.saturating_sub(used) >= bytes;
        self.state.is_pool() && self.ask_both().is_some_and(unused)
    }

    /// Whether the pool has no memory, except for what its descriptors keep. A driver that keeps a rest until the pool is
    /// destroyed has nothing in use when the program has waited.
    pub fn is_empty(&self, has_waited: bool) -> bool {
        pool_attribute(self.pool, POOL_USED) == Some(0)
            && (has_waited
                || self.is_exported
                || pool_attribute(self.pool, POOL_RESERVED) == Some(0))
    }

    /// Makes the pool keep nothing that is not in use.
    pub fn keep_nothing(&self) {
        let mut bytes = 0u64;
        // SAFETY: the driver reads 64 bits from the local.
        unsafe {
            real!(cuMemPoolSetAttribute: fn(CUmemoryPool, u32, *mut u64))(
                self.pool,
                POOL_THRESHOLD,
                &raw mut bytes,
            )
        };
    }

    /// How much the pool may keep when the program waits.
    pub fn threshold(&self) -> u64 {
        pool_attribute(self.pool, POOL_THRESHOLD).unwrap_or(0)
    }

    /// Makes the driver give back what is not in use, except for `keep` bytes.
    pub fn trim(&self, keep: u64) {
        if self.state == State::Graphs {
            // SAFETY: only a device.
            unsafe { real!(cuDeviceGraphMemTrim: fn(CUdevice))(self.device.handle) };
        } else if self.state.is_pool() {
            trim_pool(self.pool, keep);
        }
    }

    /// Ends the query, and changes the pool's charge.
    pub fn end<R>(self, note: impl FnOnce(&mut PoolCharge) -> R) -> Option<R> {
        let end = |pools: &mut DriverPools| Some(note(&mut self.end_in(pools)?.charge));
        self.process.driver_pools.with(end)
    }

    #[inline(never)]
    pub fn end_in<'p>(&self, pools: &'p mut DriverPools) -> Option<&'p mut DriverPool> {
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

/// The pool that the driver made for a device.
pub fn default_pool(device: &Device) -> Option<CUmemoryPool> {
    let mut pool = 0;
    // SAFETY: writes to the local handle.
    let result = unsafe {
        real!(cuDeviceGetDefaultMemPool: fn(*mut CUmemoryPool, CUdevice))(
            &raw mut pool,
            device.handle,
        )
    };
    result.is_ok().then_some(pool)
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
pub fn ignore(process: &Process, pools: &mut DriverPools, place: usize) {
    let still = pools.ignore(place);
    process.watches_pools.store(still, Ordering::Relaxed);
}
