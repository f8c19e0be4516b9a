//! The list of the memory that the driver keeps: memory pools, and for each device its graphs, its modules' variables and
//! its modules' code. Each entry is treated as a pool.

use tranche_shim_core::PoolCharge;
use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_core::physical::Id;

use crate::abi::CUmemoryPool;

/// The list of a process. All zeros means an empty list.
pub struct DriverPools {
    list: [DriverPool; MOST],
    /// Places that were ever used.
    count: usize,
    /// A bit for each place about which the driver is asked when the program has waited.
    watched: [u64; MOST / 64],
    /// The place from which on it is asked about them next.
    pub next: usize,
}

/// One entry of the list. All zeros means an unused entry.
#[derive(Clone, Copy)]
pub struct DriverPool {
    pub state: State,
    /// The number of its device.
    pub device: u8,
    /// The pool's handle.
    pub handle: CUmemoryPool,
    pub charge: PoolCharge,
    /// The memory that descriptors of the pool keep after it was destroyed.
    pub exported: Option<Id>,
    /// Calls of the driver in progress that use the pool.
    pub calls: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    None = 0,
    Pool,
    Graphs,
    /// The variables of a device's modules. The floor is their charge.
    Modules,
    /// The code of a device's modules, charged in the same way. The driver puts it into separate blocks.
    Code,
    /// A pool that the program has destroyed, but the driver has not: it still has memory.
    Destroyed,
    /// A pool that the driver is destroying.
    Ending,
}

impl State {
    /// Whether the driver has a pool for it, about which it can be asked.
    pub const fn is_pool(self) -> bool {
        matches!(self, Self::Pool | Self::Destroyed)
    }
}

impl DriverPool {
    /// Whether it has no allocation, and no call uses it.
    pub const fn is_unused(&self) -> bool {
        self.calls == 0 && self.charge.live() == 0
    }
}

/// The most entries of a process; further pools are refused.
pub const MOST: usize = 1024;

/// The first places are for the devices' graphs, variables and code.
const FIRST_POOL: usize = OF_DEVICE * MAX_SHARES;
const OF_DEVICE: usize = 3;

impl DriverPools {
    pub fn get(&mut self, place: usize) -> Option<&mut DriverPool> {
        self.list
            .get_mut(place)
            .filter(|pool| pool.state != State::None)
    }

    /// The place of a device's graphs, variables or code.
    pub fn of_device(&mut self, state: State, device: u8) -> Option<usize> {
        let nth = match state {
            State::Modules => 1,
            State::Code => 2,
            _ => 0,
        };
        let place = OF_DEVICE * usize::from(device) + nth;
        let free = self.list.get_mut(place).filter(|_| place < FIRST_POOL)?;
        if free.state == State::None {
            self.set(place, state, device, 0);
            self.watch(place);
        }
        Some(place)
    }

    /// The place of a pool; makes one for a pool that has none.
    pub fn of_pool(&mut self, pool: CUmemoryPool, device: u8) -> Option<usize> {
        let used = self.count.max(FIRST_POOL);
        let pools = self.list.get(FIRST_POOL..used)?;
        let is_it = |found: &DriverPool| found.state == State::Pool && found.handle == pool;
        if let Some(nth) = pools.iter().position(is_it) {
            return Some(FIRST_POOL + nth);
        }
        let is_free = |found: &DriverPool| found.state == State::None;
        let place = match pools.iter().position(is_free) {
            Some(nth) => FIRST_POOL + nth,
            None if used < MOST => used,
            None => return None,
        };
        self.set(place, State::Pool, device, pool);
        Some(place)
    }

    /// Whether the program has destroyed this pool, and the driver has not yet.
    pub fn is_destroyed(&self, pool: CUmemoryPool) -> bool {
        let is_it = |found: &DriverPool| found.state == State::Destroyed && found.handle == pool;
        self.list[..self.count].iter().any(is_it)
    }

    #[inline(never)]
    fn set(&mut self, place: usize, state: State, device: u8, pool: CUmemoryPool) {
        self.count = self.count.max(place + 1);
        self.list[place] = DriverPool {
            state,
            device,
            handle: pool,
            charge: PoolCharge::default(),
            exported: None,
            calls: 0,
        };
    }

    /// Watches a pool, if the driver can be asked about it; false if it is watched already.
    #[inline]
    pub fn watch(&mut self, place: usize) -> bool {
        let bit = 1 << (place % 64);
        let is_watched = self.watched.get(place / 64);
        is_watched.is_some_and(|word| word & bit == 0) && self.watch_if_asked(place)
    }

    #[cold]
    #[inline(never)]
    fn watch_if_asked(&mut self, place: usize) -> bool {
        let is_asked = self
            .get(place)
            .is_some_and(|pool| pool.state.is_pool() || pool.state == State::Graphs);
        if is_asked {
            self.watched[place / 64] |= 1 << (place % 64);
        }
        is_asked
    }

    /// Watches one of the pools, by a number that grows.
    pub fn watch_one(&mut self, number: usize) -> bool {
        let pools = self.count.saturating_sub(FIRST_POOL);
        let nth = number.checked_rem(pools);
        nth.is_some_and(|nth| self.watch(FIRST_POOL + nth))
    }

    /// Ends the watch of a pool; returns whether any other is watched.
    pub fn ignore(&mut self, place: usize) -> bool {
        if let Some(word) = self.watched.get_mut(place / 64) {
            *word &= !(1 << (place % 64));
        }
        self.watched.iter().any(|word| *word != 0)
    }

    /// The first watched pool from a place on, before another one.
    #[inline(never)]
    pub fn watched_in(&mut self, from: usize, to: usize) -> Option<usize> {
        let mut at = from;
        while at < to {
            let rest = self.watched.get(at / 64)? >> (at % 64);
            if rest == 0 {
                at = (at / 64 + 1) * 64;
                continue;
            }
            let place = at + rest.trailing_zeros() as usize;
            if place >= to {
                break;
            }
            self.next = place + 1;
            return Some(place);
        }
        None
    }

    pub fn places(&self) -> core::ops::Range<usize> {
        0..self.count
    }
}
