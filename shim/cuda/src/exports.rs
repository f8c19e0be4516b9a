//! Descriptors by which memory can be imported. They keep the memory, after its last handle and mapping are gone, until
//! they are closed in this process and in every other process that received them.
//!
//! Such a descriptor is a new open file description of `/dev/nvidiactl` to which the kernel driver has bound the memory;
//! its last close frees the memory. The inode does not tell whether it is open anywhere, because all such files have the
//! same one. But a lock on an open file description ends when its last descriptor is closed, in whichever process. So
//! each exported descriptor locks a unique byte of the file, and another description of the same file, the witness, shows
//! whether the byte is still locked.
//!
//! If this cannot be found out, the memory stays charged until the process ends.

use core::sync::atomic::Ordering;

use tranche_shim_core::physical::{Export, Id, Physical};
use tranche_shim_runtime::sys::{self, Descriptor};

use crate::process::Process;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const FILE_DESCRIPTOR: u32 = 1;

/// How many descriptors a call checks. The number is bounded so that a call takes no longer with more descriptors.
const IN_TURN: usize = 8;

/// Notes a new descriptor that keeps the memory of `held` and takes over its use.
pub fn add(process: &Process, descriptor: i32, held: Id) {
    if process.has_exports.load(Ordering::Relaxed) {
        settle_some(process, true);
    }
    process.has_exports.store(true, Ordering::Relaxed);
    let Some(export) = lock(Descriptor(descriptor)) else {
        return;
    };
    let own = Descriptor(export.witness);
    let mut noted = process
        .physical
        .with(|physical| physical.add_export(held, export));
    if noted.is_err() && settle_all(process) {
        noted = process
            .physical
            .with(|physical| physical.add_export(held, export));
    }
    if noted != Ok(own.0) {
        // SAFETY: `lock` has opened it, and nothing else uses it.
        unsafe { own.close() };
    }
}

/// Locks a byte of a descriptor's file, and opens its witness; `None` if the witness does not see the lock.
fn lock(descriptor: Descriptor) -> Option<Export> {
    let byte = sys::unique()?;
    let witness = descriptor.reopen().ok()?;
    if !descriptor.lock(byte) || witness.is_locked(byte) != Ok(true) {
        return None;
    }
    let file = descriptor.file().ok()?;
    Some(Export::new(byte, witness.leave_open().0, file))
}

/// Holds the memory of a descriptor that this process has exported, even if its number has changed; `None` for another
/// process's descriptor. A description does not see its own lock.
pub fn hold(process: &Process, descriptor: i32) -> Option<Id> {
    if !process.has_exports.load(Ordering::Relaxed) {
        return None;
    }
    let descriptor = Descriptor(descriptor);
    let file = descriptor.file().ok()?;
    let mut from = 0;
    loop {
        let find = |physical: &mut Physical| physical.export_of_file(file, from);
        let (next, export) = process.physical.with(find)?;
        let is_seen = Descriptor(export.witness).is_locked(export.byte) == Ok(true);
        if is_seen && descriptor.is_locked(export.byte) == Ok(false) {
            return process
                .physical
                .with(|physical| physical.hold_export(&export));
        }
        from = next;
    }
}

/// Whether a descriptor is closed in all processes.
fn is_closed(export: &Export) -> bool {
    let witness = Descriptor(export.witness);
    // A program may have closed the witness, for example by closing all descriptors, and its number may be reused.
    witness.file() == Ok(export.file) && witness.is_locked(export.byte) == Ok(false)
}

/// Checks some descriptors, among all or among those that alone keep their memory, and gives back what closed ones kept.
/// Returns whether any was closed.
pub fn settle_some(process: &Process, of_all: bool) -> bool {
    settle(process, of_all, IN_TURN)
}

/// The same for all descriptors that alone keep their memory.
#[inline]
pub fn settle_all(process: &Process) -> bool {
    process.has_exports.load(Ordering::Relaxed) && settle(process, false, usize::MAX)
}

#[cold]
#[inline(never)]
fn settle(process: &Process, of_all: bool, most: usize) -> bool {
    let mut found = false;
    let mut first = None;
    for _ in 0..most {
        let next = process
            .physical
            .with(|physical| physical.next_export(of_all));
        let Some(export) = next.filter(|next| first != Some(next.byte)) else {
            break;
        };
        if is_closed(&export) {
            found = true;
            let unused =
                process.note_physical(|physical, freed| physical.end_export(&export, freed));
            if let Some(witness) = unused {
                // SAFETY: `lock` left it open, and no export has it any more.
                unsafe { Descriptor(witness).close() };
            }
        } else {
            first = first.or(Some(export.byte));
        }
    }
    found
}
