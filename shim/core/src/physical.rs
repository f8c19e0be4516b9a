//! Physical memory that a process created by itself (`cuMemCreate`), and who holds on to it.
//!
//! Such memory is there until its last use is gone: a handle that was not released, a mapping, a
//! binding to a sparse array or a multicast object. Only then is its charge given back.
//!
//! ```text
//!  create ─► handle ── retain, import ──► more handles ── release ──┐
//!               └── bind ──► places that show it ──────── unbind ──┴─► none left: freed
//! ```
//!
//! Handles, places and tokens are numbers, none of them 0, that say nothing of each other: the
//! caller keeps the kinds of places apart. Whoever uses this holds a lock around it and the driver's
//! call together, so that both are of one mind.

/// Memory that nothing holds any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Bytes charged for it.
    pub bytes: u64,
    /// Which of the process's devices was charged.
    pub device: u8,
}

/// There is no room to note another: what was asked about stays held to the end of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

#[derive(Clone, Copy, Debug, Default)]
struct Allocation {
    bytes: u64,
    /// The allocation that this one is another name of; 0 for none.
    of: u64,
    uses: u32,
    device: u8,
    /// Whether a token is out by which it can be imported.
    exported: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Binding {
    handle: u64,
    /// Bytes of addresses that it covers.
    length: u64,
    /// What it goes with; 0 for nothing.
    owner: u64,
}

/// All of a process's physical memory. All-zero memory is none.
#[repr(C)]
#[derive(Debug)]
pub struct Physical<const N: usize = 131_072, const TOKENS: usize = 4096> {
    allocations: Map<Allocation, N>,
    bindings: Map<Binding, N>,
    tokens: Map<u64, TOKENS>,
    /// Bindings with an owner.
    owned: usize,
}

impl<const N: usize, const TOKENS: usize> Physical<N, TOKENS> {
    /// A new allocation. Returns what was charged under this handle before, whose end nobody saw.
    pub fn create(&mut self, handle: u64, bytes: u64, device: u8) -> Result<Option<Freed>, Full> {
        let former = self.allocations.remove(handle).map(|former| Freed {
            bytes: former.bytes,
            device: former.device,
        });
        self.allocations.put(
            handle,
            Allocation {
                bytes,
                device,
                uses: 1,
                ..Allocation::default()
            },
        )?;
        Ok(former)
    }

    /// Whether a handle stands for memory that is noted here.
    #[must_use]
    pub fn knows(&self, handle: u64) -> bool {
        self.allocations.get(handle).is_some()
    }

    /// Which device was charged for a handle's memory.
    #[must_use]
    pub fn device_of(&self, handle: u64) -> Option<u8> {
        self.allocations.get(handle).map(|found| found.device)
    }

    /// Another use of a handle, if it is noted here.
    pub fn retain(&mut self, handle: u64) {
        if let Some(allocation) = self.allocations.get_mut(handle) {
            allocation.uses = allocation.uses.saturating_add(1);
        }
    }

    /// The end of one use of a handle. `freed` gets what is held no more.
    pub fn release(&mut self, handle: u64, freed: &mut dyn FnMut(Freed)) {
        let mut next = handle;
        while next != 0 {
            let Some(allocation) = self.allocations.get_mut(next) else {
                return;
            };
            // Uses that were not counted any more never end.
            if allocation.uses != u32::MAX {
                allocation.uses -= 1;
            }
            if allocation.uses > 0 {
                return;
            }
            let Some(gone) = self.allocations.remove(next) else {
                return;
            };
            if gone.exported {
                while let Some(token) = self.tokens.key_of(|of| *of == next) {
                    self.tokens.remove(token);
                }
            }
            self.end_owner(next, freed);
            if gone.bytes > 0 {
                freed(Freed {
                    bytes: gone.bytes,
                    device: gone.device,
                });
            }
            next = gone.of;
        }
    }

    /// A token went out by which the handle's memory can be imported. A token that cannot be noted
    /// is one whose import is taken for another process's.
    pub fn export(&mut self, token: u64, handle: u64) {
        if let Some(allocation) = self.allocations.get_mut(handle)
            && self.tokens.put(token, handle).is_ok()
        {
            allocation.exported = true;
        }
    }

    /// `handle` came of importing `token`. If that is a token of ours, it is one more use of our
    /// memory; else the memory is another process's, and so is its charge.
    pub fn import(&mut self, token: u64, handle: u64) -> Result<(), Full> {
        let Some(&of) = self.tokens.get(token) else {
            return Ok(());
        };
        if handle == of {
            self.retain(of);
            return Ok(());
        }
        let Some(allocation) = self.allocations.get(of).copied() else {
            return Ok(());
        };
        // First: if there is no room for the name, this use never ends.
        self.retain(of);
        self.allocations.put(
            handle,
            Allocation {
                of,
                uses: 1,
                device: allocation.device,
                ..Allocation::default()
            },
        )
    }

    /// `place` shows the handle's memory from now on, for `length` bytes of addresses, and goes with
    /// `owner`, if that is not 0. What it showed before it shows no more.
    pub fn bind(
        &mut self,
        place: u64,
        handle: u64,
        length: u64,
        owner: u64,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<(), Full> {
        if !self.knows(handle) {
            self.unbind(place, freed);
            return Ok(());
        }
        self.retain(handle);
        self.unbind(place, freed);
        self.bindings.put(
            place,
            Binding {
                handle,
                length,
                owner,
            },
        )?;
        self.owned += usize::from(owner != 0);
        Ok(())
    }

    /// `place` shows nothing any more. Returns the bytes of addresses that it covered, 0 if it was
    /// not noted.
    pub fn unbind(&mut self, place: u64, freed: &mut dyn FnMut(Freed)) -> u64 {
        let Some(binding) = self.bindings.remove(place) else {
            return 0;
        };
        self.owned -= usize::from(binding.owner != 0);
        self.release(binding.handle, freed);
        binding.length
    }

    /// The addresses from `start` show nothing any more; places that are not noted here are `step`
    /// bytes apart.
    pub fn unbind_range(
        &mut self,
        start: u64,
        length: u64,
        step: u64,
        freed: &mut dyn FnMut(Freed),
    ) {
        let end = start.saturating_add(length);
        let mut at = start;
        while at < end && self.bindings.len > 0 {
            at = at.saturating_add(self.unbind(at, freed).max(step.max(1)));
        }
    }

    /// The handle whose memory an address shows; `None` if that is not noted here.
    #[must_use]
    pub fn shown_at(&self, address: u64) -> Option<u64> {
        self.bindings
            .iter()
            .find(|(start, binding)| address.wrapping_sub(*start) < binding.length)
            .map(|(_, binding)| binding.handle)
    }

    /// All places that go with `owner` are gone.
    pub fn end_owner(&mut self, owner: u64, freed: &mut dyn FnMut(Freed)) {
        while self.owned > 0 {
            let Some(place) = self.bindings.key_of(|binding| binding.owner == owner) else {
                return;
            };
            self.unbind(place, freed);
        }
    }
}

/// Values by number, in open addressing: no allocation, and nothing but memory.
#[repr(C)]
#[derive(Debug)]
struct Map<V, const N: usize> {
    len: usize,
    keys: [u64; N],
    values: [V; N],
}

impl<V: Copy, const N: usize> Map<V, N> {
    const MOST: usize = N / 8 * 7;

    fn home(key: u64) -> usize {
        // Fibonacci hashing.
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % N
    }

    /// Where a key is, or the free place where it would be.
    fn find(&self, key: u64) -> (usize, bool) {
        let mut at = Self::home(key);
        // There is always a free place.
        while self.keys[at] != 0 {
            if self.keys[at] == key {
                return (at, true);
            }
            at = (at + 1) % N;
        }
        (at, false)
    }

    fn get(&self, key: u64) -> Option<&V> {
        match self.find(key) {
            (at, true) if key != 0 => Some(&self.values[at]),
            _ => None,
        }
    }

    fn get_mut(&mut self, key: u64) -> Option<&mut V> {
        match self.find(key) {
            (at, true) if key != 0 => Some(&mut self.values[at]),
            _ => None,
        }
    }

    fn put(&mut self, key: u64, value: V) -> Result<(), Full> {
        if key == 0 {
            return Err(Full);
        }
        let (at, there) = self.find(key);
        if !there {
            if self.len >= Self::MOST {
                return Err(Full);
            }
            self.len += 1;
            self.keys[at] = key;
        }
        self.values[at] = value;
        Ok(())
    }

    fn remove(&mut self, key: u64) -> Option<V> {
        let (mut hole, there) = self.find(key);
        if !there || key == 0 {
            return None;
        }
        let value = self.values[hole];
        self.len -= 1;
        // Those behind it move up, so that nobody's search ends at the hole.
        let mut at = hole;
        loop {
            at = (at + 1) % N;
            if self.keys[at] == 0 {
                break;
            }
            let ideal = Self::home(self.keys[at]);
            // Whether its own place is not behind the hole, going round.
            if (at + N - ideal) % N >= (at + N - hole) % N {
                self.keys[hole] = self.keys[at];
                self.values[hole] = self.values[at];
                hole = at;
            }
        }
        self.keys[hole] = 0;
        Some(value)
    }

    fn iter(&self) -> impl Iterator<Item = (u64, &V)> {
        let all = if self.len == 0 { 0 } else { N };
        self.keys
            .iter()
            .zip(&self.values)
            .take(all)
            .filter(|(key, _)| **key != 0)
            .map(|(key, value)| (*key, value))
    }

    /// The key of a value that is sought.
    fn key_of(&self, is_it: impl Fn(&V) -> bool) -> Option<u64> {
        let mut all = self.iter();
        all.find(|(_, value)| is_it(value)).map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests;
