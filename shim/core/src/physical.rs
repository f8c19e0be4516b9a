//! Physical memory by handle (`cuMemCreate`, imports) and its uses; also allocations from which a `dma-buf` was made.
//!
//! Such memory exists until its last use has ended. A use is a handle that was not released, a mapping, a binding to a
//! sparse array or to a multicast object, or an open descriptor by which it can be imported. When no use is left, the
//! charge is given back.
//!
//! ```text
//!  create ─► handle ── retain, import ──► more handles ── release ──┐
//!               ├── bind ──► places that show it ──────── unbind ───┼─► no use left: freed
//!               └── export ──► descriptors ── close, by any process ┘
//! ```
//!
//! Handles, places and tokens are numbers other than 0. The caller must not use one number for two kinds of places.
//!
//! # An allocation has its own number
//!
//! The driver reuses a handle as soon as it is free, and the thread that freed it may note that later. So an allocation
//! has its own number ([`Id`]). A handle stands for it until the handle is released, or is seen to stand for other
//! memory. A release ends a use of the allocation for which its handle stood when the release began.
//!
//! # No lock is held while the driver is called
//!
//! A tool's callback may run inside the driver's call and call CUDA again. So every change has two steps, each under the
//! caller's lock, with the driver's call between them:
//!
//! - A call that adds a use first calls [`hold`](Physical::hold), so that the memory stays charged even if others
//!   release it meanwhile. The second step notes what the use is for, or ends it.
//! - A call that ends a use first calls [`begin_release`](Physical::begin_release) or [`mark`](Physical::mark). Nothing
//!   is freed before the driver has done it. Every release ends one use, in whatever order the driver does them. What
//!   others create under the same number meanwhile is younger than the mark, and is not touched.
//!
//! So all memory that the driver still has is charged at every instant.

use core::num::NonZeroU64;

use crate::map::Map;

pub use crate::map::MapFull;

/// Memory that has no use left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Bytes charged for it.
    pub bytes: u64,
    /// Which of the process's devices was charged.
    pub device: u8,
}

/// An instant. Everything that is noted later is younger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(u64);

/// The number of an allocation, which is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Id(NonZeroU64);

impl Id {
    /// The allocation with a number; `None` for 0.
    #[must_use]
    pub const fn of(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0.get()
    }
}

/// A release that the driver is asked for.
#[derive(Debug)]
#[must_use = "end it when the driver has answered"]
pub struct Release {
    handle: u64,
    /// The allocation for which the handle stood; 0 for one that is not noted here.
    of: u64,
    /// When it began to stand for that.
    born: u64,
}

/// What the driver has imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imported {
    /// Memory that is charged from now on.
    New,
    /// One more use of memory that is charged already.
    Again,
}

/// A descriptor by which memory can be imported, in this process or in another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// The allocation that it keeps.
    of: u64,
    /// The byte of its file that is locked while it is open in any process.
    pub byte: u64,
    /// This process's descriptor of the same file, which shows whether the byte is locked.
    pub witness: i32,
    /// The file's device and inode.
    pub file: (u64, u64),
}

impl Export {
    /// A descriptor of `file`, whose `byte` is locked while it is open; `witness` shows whether it is.
    #[must_use]
    pub const fn new(byte: u64, witness: i32, file: (u64, u64)) -> Self {
        Self {
            of: 0,
            byte,
            witness,
            file,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Handle {
    /// The allocation for which it stands.
    of: u64,
    /// How often it was handed out and not released.
    uses: u64,
    /// Its releases in progress.
    releasing: u64,
    /// The context with which it ends; 0 for none.
    context: u64,
    /// When it began to stand for the allocation, which it may do a second time.
    born: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Allocation {
    bytes: u64,
    /// Uses by its handles, by places that show it, by exports, and by calls in progress.
    uses: u64,
    /// How many of them are exports.
    exports: u64,
    device: u8,
    /// Whether a token exists by which it can be imported.
    has_token: bool,
    /// Whether its size is not known: it is charged what its uses have shown so far.
    is_unsized: bool,
}

impl Allocation {
    /// Whether only descriptors keep it.
    const fn is_left(&self) -> bool {
        self.exports > 0 && self.exports == self.uses
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Binding {
    /// The allocation that it shows.
    of: u64,
    /// Bytes of addresses that it covers.
    length: u64,
    /// The owner with which it ends; 0 for none.
    owner: u64,
    /// The places before and after it among those of its owner; 0 for none.
    before: u64,
    after: u64,
    /// When it was noted.
    born: u64,
}

/// All of a process's physical memory. All zeros means no memory.
#[repr(C)]
#[derive(Debug)]
pub struct Physical<const N: usize = 131_072, const FEW: usize = 4096> {
    handles: Map<Handle, N>,
    allocations: Map<Allocation, N>,
    bindings: Map<Binding, N>,
    /// The exported allocation of each token.
    tokens: Map<u64, FEW>,
    /// Exports by their byte.
    exports: Map<Export, FEW>,
    /// The first place of each owner.
    owners: Map<u64, FEW>,
    /// Counts marks, bindings and allocations.
    clock: u64,
    /// Allocations that only descriptors keep.
    left: usize,
    /// Handles that end with a context.
    in_contexts: usize,
    /// Where the next search for closed descriptors begins.
    next_export: usize,
}

impl<const N: usize, const FEW: usize> Physical<N, FEW> {
    /// Notes memory that the driver has created, with one use. Calls `freed` with the memory for which the handle stood
    /// before, if that has no use left.
    pub fn create(
        &mut self,
        handle: u64,
        bytes: u64,
        device: u8,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<(), MapFull> {
        self.create_in(0, handle, bytes, device, freed)
    }

    /// The same for memory whose handle ends with `context`, if that is not 0.
    fn create_in(
        &mut self,
        context: u64,
        handle: u64,
        bytes: u64,
        device: u8,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<(), MapFull> {
        self.replace_handle(handle, freed);
        let of = self.create_without_handle(bytes, device)?.number();
        let noted = self.put_handle(handle, of, context);
        if noted.is_ok() {
            self.in_contexts += usize::from(context != 0);
        } else {
            self.allocations.remove(of);
        }
        noted
    }

    /// Notes memory without a handle, with one use, which [`let_go`](Self::let_go) ends.
    pub fn create_without_handle(&mut self, bytes: u64, device: u8) -> Result<Id, MapFull> {
        let id = Id(self.next());
        let allocation = Allocation {
            bytes,
            device,
            uses: 1,
            ..Allocation::default()
        };
        self.allocations.put(id.number(), allocation)?;
        Ok(id)
    }

    /// Notes that the size of a handle's memory is not known.
    pub fn set_unsized(&mut self, handle: u64) {
        if let Some(id) = self.id_of(handle)
            && let Some(allocation) = self.allocations.get_mut(id.number())
        {
            allocation.is_unsized = true;
        }
    }

    /// What is charged for an allocation whose size is not known, and which of the process's devices; `None` for any other.
    #[must_use]
    pub fn unsized_charge(&self, id: Id) -> Option<Freed> {
        let found = self.allocations.get(id.number())?;
        found.is_unsized.then_some(Freed {
            bytes: found.bytes,
            device: found.device,
        })
    }

    /// A use has shown that an allocation has at least so many bytes: raises its charge to that, and returns by how much.
    pub fn show_bytes(&mut self, id: Id, bytes: u64) -> u64 {
        let Some(found) = self.allocations.get_mut(id.number()) else {
            return 0;
        };
        let more = bytes.saturating_sub(found.bytes);
        found.bytes += more;
        more
    }

    /// Sets the charge of an allocation.
    pub fn set_bytes(&mut self, id: Id, bytes: u64) {
        if let Some(allocation) = self.allocations.get_mut(id.number()) {
            allocation.bytes = bytes;
        }
    }

    /// Notes that a handle stands for an allocation, with one use.
    fn put_handle(&mut self, handle: u64, of: u64, context: u64) -> Result<(), MapFull> {
        let born = self.tick();
        let noted = Handle {
            of,
            uses: 1,
            releasing: 0,
            context,
            born,
        };
        self.handles.put(handle, noted)
    }

    /// Forgets for which memory a handle stood, because the driver has reused it. Uses that are being released end with
    /// their releases, because it is unknown whether the driver has done those.
    fn replace_handle(&mut self, handle: u64, freed: &mut dyn FnMut(Freed)) {
        if let Some(gone) = self.remove_handle(handle) {
            let uses = gone.uses.saturating_sub(gone.releasing);
            self.end_uses(gone.of, uses, freed);
        }
    }

    fn remove_handle(&mut self, handle: u64) -> Option<Handle> {
        let gone = self.handles.remove(handle)?;
        self.in_contexts -= usize::from(gone.context != 0);
        Some(gone)
    }

    /// Adds a use of a handle that the driver has handed out once more; returns whether it still stands for the same
    /// memory. It may stand for other memory if all of its uses are being released.
    pub fn use_again(&mut self, handle: u64) -> bool {
        match self.handles.get_mut(handle) {
            Some(found) if found.uses > found.releasing => {
                found.uses += 1;
                let of = found.of;
                self.add_use(of);
                true
            }
            _ => false,
        }
    }

    /// Notes memory that the driver has imported under a handle, which ends with `context`, if that is not 0. Nothing
    /// is charged if the memory is noted here already.
    pub fn import(
        &mut self,
        (handle, context): (u64, u64),
        bytes: u64,
        device: u8,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<Imported, MapFull> {
        if self.use_again(handle) {
            return Ok(Imported::Again);
        }
        self.create_in(context, handle, bytes, device, freed)
            .map(|()| Imported::New)
    }

    /// The allocation for which a handle stands.
    #[must_use]
    pub fn id_of(&self, handle: u64) -> Option<Id> {
        Id::of(self.handles.get(handle)?.of)
    }

    /// Which device was charged for an allocation.
    #[must_use]
    pub fn device_of(&self, id: Id) -> Option<u8> {
        self.allocations.get(id.number()).map(|found| found.device)
    }

    /// Adds a use to a handle's memory; `None` if that is not noted here.
    pub fn hold(&mut self, handle: u64) -> Option<Id> {
        let id = self.id_of(handle)?;
        self.hold_id(id)
    }

    /// The same for an allocation.
    pub fn hold_id(&mut self, id: Id) -> Option<Id> {
        self.add_use(id.number()).then_some(id)
    }

    fn add_use(&mut self, of: u64) -> bool {
        let Some(allocation) = self.allocations.get_mut(of) else {
            return false;
        };
        self.left -= usize::from(allocation.is_left());
        allocation.uses += 1;
        true
    }

    /// Ends a use that [`hold`](Self::hold) added.
    pub fn let_go(&mut self, held: Id, freed: &mut dyn FnMut(Freed)) {
        self.end_uses(held.number(), 1, freed);
    }

    fn end_uses(&mut self, of: u64, uses: u64, freed: &mut dyn FnMut(Freed)) {
        if let Some(allocation) = self.allocations.get_mut(of)
            && uses > 0
        {
            self.left -= usize::from(allocation.is_left());
            allocation.uses = allocation.uses.saturating_sub(uses);
            self.left += usize::from(allocation.is_left());
            if allocation.uses == 0 {
                self.finish(of, freed);
            }
        }
    }

    /// Forgets memory without a use, and what ends with it.
    fn finish(&mut self, of: u64, freed: &mut dyn FnMut(Freed)) {
        let Some(gone) = self.allocations.remove(of) else {
            return;
        };
        if gone.has_token {
            while let Some(token) = self.tokens.key_of(|exported| *exported == of) {
                self.tokens.remove(token);
            }
        }
        let all = self.mark();
        self.end_owner(of, all, freed);
        if gone.bytes > 0 {
            freed(Freed {
                bytes: gone.bytes,
                device: gone.device,
            });
        }
    }

    /// Begins to release a handle, before the driver is asked.
    pub fn begin_release(&mut self, handle: u64) -> Release {
        let (of, born) = self.handles.get_mut(handle).map_or((0, 0), |found| {
            found.releasing += 1;
            (found.of, found.born)
        });
        Release { handle, of, born }
    }

    /// Ends a release: the driver has done it, or has refused.
    pub fn end_release(&mut self, release: &Release, done: bool, freed: &mut dyn FnMut(Freed)) {
        let Release { handle, of, born } = *release;
        // If it is younger, the driver has handed it out again.
        let is_it = |found: &&mut Handle| found.born == born;
        if let Some(found) = self.handles.get_mut(handle).filter(is_it) {
            found.releasing = found.releasing.saturating_sub(1);
            found.uses -= u64::from(done);
            if found.uses == 0 {
                self.remove_handle(handle);
            }
        }
        self.end_uses(of, u64::from(done), freed);
    }

    /// Notes a token by which the handle's memory can be imported. If there is no room for it, an import of the token is
    /// treated as an import from another process.
    pub fn add_token(&mut self, token: u64, handle: u64) {
        if let Some(id) = self.id_of(handle)
            && self.tokens.put(token, id.number()).is_ok()
            && let Some(allocation) = self.allocations.get_mut(id.number())
        {
            allocation.has_token = true;
        }
    }

    /// Holds the memory that was exported as `token`; `None` for another process's memory.
    pub fn hold_exported(&mut self, token: u64) -> Option<Id> {
        let of = *self.tokens.get(token)?;
        self.hold_id(Id::of(of)?)
    }

    /// Notes a descriptor that keeps the memory of `held` and takes over its use. Returns the witness that is used for
    /// it, which is that of another export if that is of the same file.
    pub fn add_export(&mut self, held: Id, export: Export) -> Result<i32, MapFull> {
        let same_file = |other: &Export| other.file == export.file;
        let other = self.exports.next(0, same_file);
        let witness = other.map_or(export.witness, |(_, _, other)| other.witness);
        let noted = Export {
            of: held.number(),
            witness,
            ..export
        };
        self.exports.put(export.byte, noted)?;
        if let Some(allocation) = self.allocations.get_mut(held.number()) {
            self.left -= usize::from(allocation.is_left());
            allocation.exports += 1;
            self.left += usize::from(allocation.is_left());
        }
        Ok(witness)
    }

    /// Whether only descriptors keep some of the memory.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.left > 0
    }

    /// Whether there is any descriptor.
    #[must_use]
    pub fn has_exports(&self) -> bool {
        self.exports.len() > 0
    }

    /// The first descriptor of a file at or after a place in the list, and the place after it.
    #[must_use]
    pub fn export_of_file(&self, file: (u64, u64), from: usize) -> Option<(usize, Export)> {
        let found = self.exports.next(from, |export| export.file == file)?;
        Some((found.0, found.2))
    }

    /// Holds the memory that a descriptor keeps; `None` if it was found closed meanwhile.
    pub fn hold_export(&mut self, export: &Export) -> Option<Id> {
        self.exports
            .get(export.byte)
            .filter(|found| *found == export)?;
        self.hold_id(Id::of(export.of)?)
    }

    /// The next export whose descriptor may have been closed: among all, or among those that alone keep their memory.
    pub fn next_export(&mut self, of_all: bool) -> Option<Export> {
        if !of_all && self.left == 0 {
            return None;
        }
        let allocations = &self.allocations;
        let is_it =
            |export: &Export| of_all || allocations.get(export.of).is_some_and(Allocation::is_left);
        let found = self
            .exports
            .next(self.next_export, is_it)
            .or_else(|| self.exports.next(0, is_it));
        let (next, _, export) = found?;
        self.next_export = next;
        Some(export)
    }

    /// Ends an export, because its descriptor is closed in all processes. Returns its witness, if no other export needs
    /// it.
    pub fn end_export(&mut self, export: &Export, freed: &mut dyn FnMut(Freed)) -> Option<i32> {
        let is_it = |found: &&Export| **found == *export;
        self.exports.get(export.byte).filter(is_it)?;
        self.exports.remove(export.byte);
        if let Some(allocation) = self.allocations.get_mut(export.of) {
            self.left -= usize::from(allocation.is_left());
            allocation.exports -= 1;
            self.left += usize::from(allocation.is_left());
        }
        self.end_uses(export.of, 1, freed);
        let same = |other: &Export| other.witness == export.witness;
        self.exports
            .next(0, same)
            .is_none()
            .then_some(export.witness)
    }

    /// Notes that `handle` stands for the memory of `held` too, and takes over its use.
    pub fn name(
        &mut self,
        handle: u64,
        held: Id,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<(), MapFull> {
        if let Some(found) = self.handles.get_mut(handle)
            && found.of == held.number()
        {
            found.uses += 1;
            return Ok(());
        }
        if self.use_again(handle) {
            // It was noted as other memory, when it was unknown that it is the same.
            self.let_go(held, freed);
            return Ok(());
        }
        self.replace_handle(handle, freed);
        self.put_handle(handle, held.number(), 0)
    }

    /// Notes that `place` shows the memory of `held`, takes over its use, covers `length` bytes of addresses, and ends with
    /// `owner`, if that is not 0. It no longer shows what it showed before.
    pub fn bind(
        &mut self,
        place: u64,
        held: Id,
        length: u64,
        owner: u64,
        freed: &mut dyn FnMut(Freed),
    ) -> Result<(), MapFull> {
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
            of: held.number(),
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
        self.next().get()
    }

    fn next(&mut self) -> NonZeroU64 {
        let now = NonZeroU64::MIN.saturating_add(self.clock);
        self.clock += 1;
        now
    }

    /// Ends what `place` shows. Returns the bytes of addresses that it covered, 0 if it was not noted.
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
        self.end_uses(binding.of, 1, freed);
        binding.length
    }

    /// The same for a place that was bound before `mark`, or after `since`.
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

    /// Ends what the addresses from `start` showed at `mark`. Places that are not noted here are skipped in steps of
    /// `step` bytes.
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
        while at < end && self.bindings.len() > 0 {
            let covered = match self.bindings.get(at) {
                Some(found) if found.born < mark.0 => self.unbind(at, freed),
                Some(found) => found.length,
                None => 0,
            };
            at = at.saturating_add(covered.max(step.max(1)));
        }
    }

    /// The allocation that an address shows; `None` if it is not noted here.
    #[must_use]
    pub fn shown_at(&self, address: u64) -> Option<Id> {
        self.mapping_at(address).map(|(shown, _)| shown)
    }

    /// The same, with the end of the addresses that the place covers.
    #[must_use]
    pub fn mapping_at(&self, address: u64) -> Option<(Id, u64)> {
        // Most addresses are those of a mapping.
        let first = self.bindings.get(address).map(|found| (address, found));
        let (start, found) = first.or_else(|| {
            self.bindings
                .iter()
                .find(|(start, binding)| address.wrapping_sub(*start) < binding.length)
        })?;
        Some((Id::of(found.of)?, start.saturating_add(found.length)))
    }

    /// Ends all places that belonged to `owner` at `mark`.
    pub fn end_owner(&mut self, owner: u64, mark: Mark, freed: &mut dyn FnMut(Freed)) {
        let mut next = self.owners.get(owner).copied().unwrap_or(0);
        while let Some(&found) = self.bindings.get(next) {
            if found.born < mark.0 {
                self.unbind(next, freed);
            }
            next = found.after;
        }
    }

    /// Ends all handles that end with `context` and existed at `mark`.
    pub fn end_context(&mut self, context: u64, mark: Mark, freed: &mut dyn FnMut(Freed)) {
        if self.in_contexts == 0 || context == 0 {
            return;
        }
        let is_gone = |found: &Handle| found.context == context && found.of < mark.0;
        while let Some(handle) = self.handles.key_of(is_gone) {
            if let Some(gone) = self.remove_handle(handle) {
                self.end_uses(gone.of, gone.uses, freed);
            }
        }
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
