//! Allocates from a pool or from the graphs' memory: reserves the most by which the pool may grow, asks the driver, and
//! charges by how much it grew.
//!
//! An allocation for which the process's spare is enough is noted without asking:
//! [`PoolCharge::begin_unasked`]. Any other takes all steps:
//!
//! ```text
//!  reserve the allocation, rounded up ─► driver ─► what has the pool now? ─► charge that, give back the rest
//!        └─ full: wait for pending frees ─► claim what the pool has and does not use
//!             └─ nothing: trim this process's pools by as much as is missing ─► still full: out of memory
//! ```
//!
//! The step by which a pool grows is known after its first growth. If there is room for the allocation but not for the
//! first growth, the pool exceeds its charge until the allocation is freed again and the pool is trimmed.
//!
//! Graphs work in the same way: the memory nodes of a device share one pool. The driver may grow it when a node is
//! created or at the first launch. So at least the sizes of all memory nodes of all executable graphs are charged, and a
//! launch needs no check.

use core::sync::atomic::Ordering;

use tranche_shim_core::PoolCharge;
use tranche_shim_core::physical::Id;
use tranche_shim_core::pool_charge::{MOST_STEP, PendingAllocation, Size};

use crate::abi::{CUmemoryPool, CUresult};
use crate::charge::Reserved;
use crate::device::{Device, Residence};
use crate::driver::Call;
use crate::driver_pools::State;
use crate::pool_end;
use crate::pool_query::{Query, watch};
use crate::process::Process;
use crate::settle::{self, entry};

/// Allocates from one pool.
#[derive(Clone, Copy)]
pub struct PoolAllocator {
    pub process: &'static Process,
    pub device: &'static Device,
    pub place: usize,
}

impl PoolAllocator {
    /// The graphs of a device.
    pub fn graphs(process: &'static Process, device: &'static Device) -> Result<Self, CUresult> {
        Self::of_device(State::Graphs, process, device)
    }

    /// The memory that the driver keeps for a device beside its pools. The driver can be asked about graphs, but not about
    /// modules.
    pub fn of_device(
        state: State,
        process: &'static Process,
        device: &'static Device,
    ) -> Result<Self, CUresult> {
        let place = process
            .driver_pools
            .with(|pools| pools.of_device(state, device.number));
        match state {
            State::Modules | State::Code => Self::new(process, device, place),
            _ => {
                // Graphs are always watched.
                process.watches_pools.store(true, Ordering::Relaxed);
                Self::at(process, device, place)
            }
        }
    }

    /// A pool of a device.
    pub fn pool(
        process: &'static Process,
        device: &'static Device,
        pool: CUmemoryPool,
    ) -> Result<Self, CUresult> {
        let find = || {
            process
                .driver_pools
                .with(|pools| pools.of_pool(pool, device.number))
        };
        let place = find().or_else(|| {
            // Destroyed pools may have nothing any more.
            settle::settle_all(process);
            find()
        });
        Self::at(process, device, place)
    }

    /// The pool at a place, about which the driver can be asked.
    pub fn at(
        process: &'static Process,
        device: &'static Device,
        place: Option<usize>,
    ) -> Result<Self, CUresult> {
        // Read first: a write would cost other threads its cache line.
        if !process.has_driver_pools.load(Ordering::Relaxed) {
            process.has_driver_pools.store(true, Ordering::Relaxed);
        }
        Self::new(process, device, place)
    }

    fn new(
        process: &'static Process,
        device: &'static Device,
        place: Option<usize>,
    ) -> Result<Self, CUresult> {
        Ok(Self {
            process,
            device,
            place: place.ok_or(CUresult::OUT_OF_MEMORY)?,
        })
    }

    /// A table's entry for an allocation of `bytes` from the pool.
    pub fn entry(self, bytes: u64) -> tranche_shim_core::Entry {
        entry(self.device.number, self.place, bytes)
    }

    /// A table's entry for the pool itself.
    pub fn own_entry(self) -> tranche_shim_core::Entry {
        entry(self.device.number, self.place, 0)
    }

    /// Holds the memory that the pool's descriptors keep, for one more descriptor.
    pub fn hold_exported(self) -> Option<Id> {
        pool_end::hold_exported(self.process, self.place)
    }

    fn with<R>(self, note: impl FnOnce(&mut PoolCharge) -> R) -> Option<R> {
        self.process
            .driver_pools
            .with(|pools| pools.get(self.place).map(|found| note(&mut found.charge)))
    }

    /// The same for a change after which the pool may have something to give back.
    fn with_watched<R>(self, note: impl FnOnce(&mut PoolCharge) -> R) -> Option<R> {
        self.process.driver_pools.with(|pools| {
            let noted = note(&mut pools.get(self.place)?.charge);
            watch(self.process, pools, self.place);
            Some(noted)
        })
    }

    /// Allocates from a pool: asks the driver only if it must, and then does as [`grow`](Self::grow).
    #[inline]
    pub fn allocate(self, bytes: u64, driver: Call<'_>, undo: Call<'_>) -> CUresult {
        let Some(allocation) = self.begin_unasked(bytes) else {
            return self.grow(bytes, driver, undo);
        };
        let result = driver.make();
        self.finish_unanswered(allocation);
        if !result.is_ok() {
            self.undo(allocation);
        }
        result
    }

    #[inline(never)]
    fn finish_unanswered(self, allocation: PendingAllocation) {
        self.with(|charge| charge.finish_unanswered(allocation));
    }

    #[cold]
    #[inline(never)]
    fn undo(self, allocation: PendingAllocation) {
        self.with_watched(|charge| charge.undo(allocation));
    }

    /// Begins an allocation of `bytes` after which the driver need not be asked, if it is small, the process has one share
    /// and its spare is enough.
    fn begin_unasked(self, bytes: u64) -> Option<PendingAllocation> {
        let (_, share) = self.process.sole()?;
        let size = self.device.size_of(bytes);
        // The step for a larger one is not known.
        if size.blocks > self.device.block {
            return None;
        }
        let take = |growth| share.take_spare(Residence::Gpu, growth);
        self.with_watched(|charge| charge.begin_unasked(size, take))?
    }

    /// Reserves for `bytes` more, calls the driver, and charges the result. Calls `undo` if the driver took more than
    /// there is room for.
    #[inline(never)]
    pub fn grow(self, bytes: u64, driver: Call<'_>, undo: Call<'_>) -> CUresult {
        let allocation = match self.begin(self.device.size_of(bytes)) {
            Ok(allocation) => allocation,
            Err(code) => return code,
        };
        let result = driver.make();
        let is_covered = self.finish(allocation);
        if result.is_ok() && is_covered {
            return result;
        }
        if result.is_ok() {
            undo.make();
        }
        self.undo(allocation);
        if !is_covered && let Some(query) = Query::begin(self.process, self.place) {
            settle::trim_one(self.process, self.place, query, 0);
        }
        if result.is_ok() {
            self.process.refuse(self.device)
        } else {
            result
        }
    }

    /// Reserves for an allocation, or claims what the pool has.
    fn begin(self, size: Size) -> Result<PendingAllocation, CUresult> {
        let (process, device, bytes) = (self.process, self.device, size.blocks);
        let unknown =
            |charge: &mut PoolCharge| (charge.growth_of(bytes, MOST_STEP), charge.has_grown());
        let (most, has_grown) = self.with(unknown).ok_or(CUresult::OUT_OF_MEMORY)?;
        // The step of a pool is unknown until it has grown once.
        let least = if has_grown { most } else { bytes };
        if bytes > process.limit(device, Residence::Gpu) {
            return Err(process.refuse(device));
        }
        if let Some(reserved) = process.reserve_what_is_free(device, Residence::Gpu, least, most) {
            return self.begin_with(size, reserved);
        }
        if let Some(allocation) = self.claim(size) {
            return Ok(allocation);
        }
        let granted = process
            .reserve_by_trimming(device, Residence::Gpu, least, most)
            .or_else(|| self.reserve_beside_unused(bytes));
        match granted {
            Some(reserved) => self.begin_with(size, reserved),
            None => Err(process.refuse(device)),
        }
    }

    fn begin_with(self, size: Size, reserved: u64) -> Result<PendingAllocation, CUresult> {
        self.with_watched(|charge| charge.begin(size, reserved))
            .ok_or_else(|| {
                self.process.release(self.device, reserved);
                CUresult::OUT_OF_MEMORY
            })
    }

    /// Claims what the pool has and does not use, also in blocks that it uses partly.
    fn claim(self, size: Size) -> Option<PendingAllocation> {
        let query = Query::begin(self.process, self.place)?;
        let (seen, asked) = (query.version, query.ask_both());
        query.end(|_| ());
        self.with_watched(|charge| charge.claim(seen, asked?, size))?
    }

    /// Reserves the allocation without growth, if the driver says that the pool has room for it.
    fn reserve_beside_unused(self, bytes: u64) -> Option<u64> {
        let query = Query::begin(self.process, self.place)?;
        let has_unused = query.has_unused(bytes);
        query.end(|_| ());
        let reserve = || {
            self.process
                .reserve_in_parts(self.device, Residence::Gpu, bytes, bytes)
        };
        has_unused.then(reserve)?
    }

    /// Charges the result of an allocation; returns whether there was room for it.
    fn finish(self, allocation: PendingAllocation) -> bool {
        let (process, device) = (self.process, self.device);
        let finished = settle::ask_until_noted(process, self.place, &mut |charge, _, answer| {
            charge.finish(allocation, answer, device.block, |more| {
                // Does not search for room in pools, because their list is locked.
                process
                    .reserve_in_parts(device, Residence::Gpu, more, more)
                    .is_some()
            })
        });
        if let Some(finished) = finished {
            process.release(device, finished.surplus);
            finished.is_covered
        } else {
            self.finish_unanswered(allocation);
            true
        }
    }

    /// Raises the floor by `bytes`, if the driver's call succeeds. What is charged beyond the floor counts
    /// towards it.
    pub fn raise_floor(self, bytes: u64, driver: Call<'_>) -> CUresult {
        let to_blocks = |bytes| self.device.taken_by(bytes);
        // Noted before the driver is called, so that a concurrent raise does not rely on what this one needs.
        let missing = self
            .with(|charge| charge.await_floor(bytes, to_blocks))
            .unwrap_or(bytes);
        let reserved = match Reserved::new(self.process, self.device, missing, missing) {
            Ok(reserved) => reserved.keep(),
            Err(code) => {
                self.with(|charge| charge.abandon_floor(bytes));
                settle::settle(self.process, self.place);
                return code;
            }
        };
        let allocation = self.with(|charge| charge.begin_floor(bytes, reserved));
        let result = driver.make();
        if let Some(allocation) = allocation {
            self.finish(allocation);
        }
        if !result.is_ok() {
            settle::lower_floor_at(self.process, self.place, bytes);
        }
        result
    }
}
