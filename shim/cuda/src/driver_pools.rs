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
    /// Odd while a device's current pool changes; grows with every change.
    pub switches: u64,
    /// The pools about which the driver is asked in turn form a ring. This is the next one: its place + 1, or 0 for none.
    next: u32,
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
    /// Its neighbours in the ring.
    before: u32,
    after: u32,
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
    /// A pool that is being destroyed.
    Ending,
    /// A destroyed pool that still has allocations.
    Ended,
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

    fn set(&mut self, place: usize, state: State, device: u8, pool: CUmemoryPool) {
        self.count = self.count.max(place + 1);
        self.list[place] = DriverPool {
            state,
            device,
            handle: pool,
            charge: PoolCharge::default(),
            exported: None,
            calls: 0,
            before: 0,
            after: 0,
        };
        if !matches!(state, State::Modules | State::Code) {
            self.link(place);
        }
    }

    /// Adds a place to the ring, as the last in turn.
    fn link(&mut self, place: usize) {
        let own = number(place);
        if self.next == 0 {
            (self.next, self.list[place].before, self.list[place].after) = (own, own, own);
            return;
        }
        let first = self.next;
        let last = self.at(first).before;
        (self.list[place].before, self.list[place].after) = (last, first);
        self.at(first).before = own;
        self.at(last).after = own;
    }

    fn at(&mut self, number: u32) -> &mut DriverPool {
        &mut self.list[number as usize - 1]
    }

    /// Removes a pool that has ended.
    pub fn remove(&mut self, place: usize) {
        let DriverPool { before, after, .. } = self.list[place];
        if before != 0 {
            self.at(before).after = after;
            self.at(after).before = before;
            if self.next == number(place) {
                self.next = if after == number(place) { 0 } else { after };
            }
        }
        (self.list[place].before, self.list[place].after) = (0, 0);
        self.list[place].state = State::None;
    }

    /// The next pool about which the driver is asked.
    pub fn next_in_turn(&mut self) -> Option<usize> {
        let place = (self.next as usize).checked_sub(1)?;
        self.next = self.list[place].after;
        Some(place)
    }

    pub fn places(&self) -> core::ops::Range<usize> {
        0..self.count
    }
}

#[expect(clippy::cast_possible_truncation, reason = "at most MOST")]
fn number(place: usize) -> u32 {
    place as u32 + 1
}
