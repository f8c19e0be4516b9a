//! Physical memory by handle (`cuMemCreate`, imports), and what uses it.
//!
//! Such memory exists until its last use has ended: a handle that was not released, a mapping, a binding to a
//! sparse array or to a multicast object. Only then is its charge given back.
//!
//! ```text
//!  create ─► handle ── retain, import ──► more handles ── release ──┐
//!               └── bind ──► places that show it ──────── unbind ──┴─► no use left: freed
//! ```
//!
//! Handles, places and tokens are numbers other than 0, of unrelated kinds: the caller keeps the kinds of places
//! apart.
//!
//! # No lock is held while the driver is called
//!
//! A tool's callback may run inside the driver's call and come back with another call. So every change has two
//! halves, each made under the caller's lock, with the driver's call between them:
//!
//! - What adds a use begins with [`hold`](Physical::hold), before the driver is asked: the memory stays charged
//!   whatever others release meanwhile. Its second half notes what the use is for, or ends it.
//! - What ends a use begins with [`begin_release`](Physical::begin_release) or [`mark`](Physical::mark) and
//!   frees nothing before the driver has done it. What others make under the same number meanwhile, which the
//!   driver hands out again as soon as it is free, is younger than the mark, and is left alone.
//!
//! So at no instant is memory without a charge that the driver still has.

/// Memory that has no use left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Bytes charged for it.
    pub bytes: u64,
    /// Which of the process's devices was charged.
    pub device: u8,
}

/// There is no room to note another: what was asked about stays charged to the end of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// An instant: what was noted later is younger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(u64);

/// A release that the driver is asked for.
#[derive(Debug)]
#[must_use = "end it when the driver has answered"]
pub struct Release {
    handle: u64,
    /// Which one of a handle's memory it is, where it ends the last use; 0 where others are left.
    last: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Allocation {
    bytes: u64,
    /// The allocation that this one is another name of; 0 for none.
    of: u64,
    uses: u32,
    device: u8,
    /// Whether a token exists by which it can be imported.
    exported: bool,
    /// The release under way that ends its last use; 0 for none.
    ending: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Binding {
    handle: u64,
    /// Bytes of addresses that it covers.
    length: u64,
    /// What it goes with; 0 for nothing.
    owner: u64,
    /// The places before and after it among those of its owner; 0 for none.
    before: u64,
    after: u64,
    /// When it was noted.
    born: u64,
}

/// All of a process's physical memory. All-zero memory is none.
#[repr(C)]
#[derive(Debug)]
pub struct Physical<const N: usize = 131_072, const FEW: usize = 4096> {
    allocations: Map<Allocation, N>,
    bindings: Map<Binding, N>,
    /// Of a token, the handle that was exported.
    tokens: Map<u64, FEW>,
    /// Of an owner, its first place.
    owners: Map<u64, FEW>,
    /// Counts marks, bindings and releases.
    clock: u64,
}

impl<const N: usize, const FEW: usize> Physical<N, FEW> {
    /// Notes memory that the driver has made, with one use. `freed` gets what was noted under this handle
    /// before, where that has no use left.
    pub fn create(
        &mut self,
        handle: u64,
        bytes: u64,
        device: u8,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<(), Full> {
        if self.allocations.get(handle).is_some() {
            self.end_former(handle, freed);
        }
        self.allocations.put(
            handle,
            Allocation {
                bytes,
                device,
                uses: 1,
                ..Allocation::default()
            },
        )
    }

    /// The driver has handed a handle out again: what it stood for is gone, unless it has other names.
    fn end_former(&mut self, handle: u64, freed: &mut dyn FnMut(Freed)) {
        let other_name = |found: &Allocation| found.of == handle;
        if self.allocations.key_of(other_name).is_none() {
            self.finish(handle, freed);
            return;
        }
        // A number that is no handle: those are addresses, or small.
        let hidden = self.tick() | 1 << 63;
        self.forget_tokens(handle);
        while let Some(name) = self.allocations.key_of(other_name) {
            if let Some(name) = self.allocations.get_mut(name) {
                name.of = hidden;
            }
        }
        if let Some(mut former) = self.allocations.remove(handle) {
            (former.exported, former.ending) = (false, 0);
            // It had room until now.
            let _ = self.allocations.put(hidden, former);
        }
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

    /// Adds a use to a handle's memory; whether that is noted here.
    pub fn hold(&mut self, handle: u64) -> bool {
        let found = self.allocations.get_mut(handle);
        if let Some(allocation) = found {
            allocation.uses = allocation.uses.saturating_add(1);
            return true;
        }
        false
    }

    /// Ends a use that [`hold`](Self::hold) added, or that a handle or place had that is gone.
    pub fn let_go(&mut self, handle: u64, freed: &mut dyn FnMut(Freed)) {
        if let Some(allocation) = self.allocations.get_mut(handle) {
            // Uses that were not counted any more never end.
            if allocation.uses != u32::MAX {
                allocation.uses = allocation.uses.saturating_sub(1);
            }
            if allocation.uses == 0 && allocation.ending == 0 {
                self.finish(handle, freed);
            }
        }
    }

    /// Forgets memory without a use. `freed` gets it, and what it was another name of where that has none left.
    fn finish(&mut self, handle: u64, freed: &mut dyn FnMut(Freed)) {
        let Some(gone) = self.allocations.remove(handle) else {
            return;
        };
        if gone.exported {
            self.forget_tokens(handle);
        }
        let all = self.mark();
        self.end_owner(handle, all, freed);
        if gone.bytes > 0 {
            freed(Freed {
                bytes: gone.bytes,
                device: gone.device,
            });
        }
        if gone.of != 0 {
            self.let_go(gone.of, freed);
        }
    }

    /// Begins to release a handle, before the driver is asked.
    pub fn begin_release(&mut self, handle: u64) -> Release {
        let last = self.tick();
        match self.allocations.get_mut(handle) {
            Some(found) if found.uses > 0 && found.uses != u32::MAX => {
                found.uses -= 1;
                let is_last = found.uses == 0;
                if is_last {
                    found.ending = last;
                }
                Release {
                    handle,
                    last: if is_last { last } else { 0 },
                }
            }
            // Not noted here; or released more often than it can be, which the driver refuses.
            _ => Release { handle: 0, last: 0 },
        }
    }

    /// The driver has released it, or refused to.
    pub fn end_release(&mut self, release: &Release, done: bool, freed: &mut dyn FnMut(Freed)) {
        let Release { handle, last } = *release;
        let Some(found) = self.allocations.get_mut(handle) else {
            return;
        };
        if last != 0 {
            if found.ending != last {
                // Other memory, under the same handle.
                return;
            }
            found.ending = 0;
        }
        if !done {
            found.uses = found.uses.saturating_add(1);
        } else if found.uses == 0 && found.ending == 0 {
            self.finish(handle, freed);
        }
    }

    /// A token exists by which the handle's memory can be imported. A token that cannot be noted is one whose
    /// import is taken for another process's.
    pub fn export(&mut self, token: u64, handle: u64) {
        if let Some(allocation) = self.allocations.get_mut(handle)
            && self.tokens.put(token, handle).is_ok()
        {
            allocation.exported = true;
        }
    }

    /// The handle that was exported as `token`, held; `None` for another process's memory.
    pub fn hold_exported(&mut self, token: u64) -> Option<u64> {
        let handle = *self.tokens.get(token)?;
        self.hold(handle).then_some(handle)
    }

    /// `name` is a handle, too, of the memory of `held`, whose use it has from now on.
    pub fn name(&mut self, name: u64, held: u64, freed: &mut dyn FnMut(Freed)) -> Result<(), Full> {
        if name == held {
            return Ok(());
        }
        if self.hold(name) {
            self.let_go(held, freed);
            return Ok(());
        }
        let device = self.device_of(held).unwrap_or(0);
        self.allocations.put(
            name,
            Allocation {
                of: held,
                uses: 1,
                device,
                ..Allocation::default()
            },
        )
    }

    /// `place` shows the memory of `handle`, which is held for it, for `length` bytes of addresses, and goes with
    /// `owner`, if that is not 0. What it showed before it shows no more.
    pub fn bind(
        &mut self,
        place: u64,
        handle: u64,
        length: u64,
        owner: u64,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<(), Full> {
        self.unbind(place, freed);
        let after = if owner == 0 {
            0
        } else {
            let first = self.owners.get(owner).copied().unwrap_or(0);
            self.owners.put(owner, place)?;
            first
        };
        let born = self.tick();
        let binding = Binding {
            handle,
            length,
            owner,
            before: 0,
            after,
            born,
        };
        if let Err(full) = self.bindings.put(place, binding) {
            self.set_first(owner, after);
            return Err(full);
        }
        if let Some(second) = self.bindings.get_mut(after) {
            second.before = place;
        }
        Ok(())
    }

    fn set_first(&mut self, owner: u64, place: u64) {
        if owner != 0 && place == 0 {
            self.owners.remove(owner);
        } else if owner != 0 {
            // It has an entry.
            let _ = self.owners.put(owner, place);
        }
    }

    /// This instant.
    pub fn mark(&mut self) -> Mark {
        Mark(self.tick())
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// `place` shows nothing any more. Returns the bytes of addresses that it covered, 0 if it was not noted.
    pub fn unbind(&mut self, place: u64, freed: &mut dyn FnMut(Freed)) -> u64 {
        let Some(binding) = self.bindings.remove(place) else {
            return 0;
        };
        if let Some(before) = self.bindings.get_mut(binding.before) {
            before.after = binding.after;
        } else {
            self.set_first(binding.owner, binding.after);
        }
        if let Some(after) = self.bindings.get_mut(binding.after) {
            after.before = binding.before;
        }
        self.let_go(binding.handle, freed);
        binding.length
    }

    /// The same of a place that was bound before `mark`, or after `since`.
    pub fn unbind_older(
        &mut self,
        place: u64,
        mark: Mark,
        since: Mark,
        freed: &mut dyn FnMut(Freed),
    ) {
        if let Some(found) = self.bindings.get(place)
            && (found.born < mark.0 || found.born > since.0)
        {
            self.unbind(place, freed);
        }
    }

    /// The addresses from `start` show nothing any more that they showed at `mark`; places that are not noted
    /// here are `step` bytes apart.
    pub fn unbind_range(
        &mut self,
        start: u64,
        length: u64,
        step: u64,
        mark: Mark,
        freed: &mut dyn FnMut(Freed),
    ) {
        let end = start.saturating_add(length);
        let mut at = start;
        while at < end && self.bindings.len > 0 {
            let covered = match self.bindings.get(at) {
                Some(found) if found.born < mark.0 => self.unbind(at, freed),
                Some(found) => found.length,
                None => 0,
            };
            at = at.saturating_add(covered.max(step.max(1)));
        }
    }

    /// The handle whose memory an address shows; `None` if that is not noted here.
    #[must_use]
    pub fn shown_at(&self, address: u64) -> Option<u64> {
        // Mostly the address of a mapping.
        let found = self.bindings.get(address).or_else(|| {
            self.bindings
                .iter()
                .find(|(start, binding)| address.wrapping_sub(*start) < binding.length)
                .map(|(_, binding)| binding)
        });
        found.map(|binding| binding.handle)
    }

    /// All places that went with `owner` at `mark` are gone.
    pub fn end_owner(&mut self, owner: u64, mark: Mark, freed: &mut dyn FnMut(Freed)) {
        let mut next = self.owners.get(owner).copied().unwrap_or(0);
        while let Some(&found) = self.bindings.get(next) {
            if found.born < mark.0 {
                self.unbind(next, freed);
            }
            next = found.after;
        }
    }

    fn forget_tokens(&mut self, handle: u64) {
        while let Some(token) = self.tokens.key_of(|of| *of == handle) {
            self.tokens.remove(token);
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
