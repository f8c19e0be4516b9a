//! Descriptors by which memory can be imported: they keep it, after the last handle and mapping are gone, until they
//! are closed, in this process and in every other that got them.
//!
//! A driver's descriptor is a file of its own (`/dev/nvidiactl`, opened once more) to which the kernel driver has bound
//! the memory, and closing that frees it. Whether it is open anywhere no number or inode tells: all such files have one
//! inode. But a lock on an open file description ends with its last descriptor, whoever has that. So a byte of the
//! file's that nobody else has drawn is locked by each exported descriptor, and another description of the same file,
//! the witness, tells whether it still is.
//!
//! What cannot be found out keeps the memory charged to the end of the process.

use core::sync::atomic::Ordering;

use tranche_shim_core::physical::{Export, Id, Physical};
use tranche_shim_runtime::sys::{self, Descriptor};

use crate::process::Process;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const FILE_DESCRIPTOR: u32 = 1;

/// Descriptors that a call looks at which may find some closed; so that it takes no longer where there are more of them.
const IN_TURN: usize = 8;

/// The driver has made a descriptor that keeps the memory of `held`, whose use it has from now on.
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
        // SAFETY: of `lock`, and nobody has seen it.
        unsafe { own.close() };
    }
}

/// Locks a byte of a descriptor's file, and opens its witness; `None` where the one does not see the other.
fn lock(descriptor: Descriptor) -> Option<Export> {
    let byte = sys::unique()?;
    let witness = descriptor.reopen().ok()?;
    if !descriptor.lock(byte) || witness.is_locked(byte) != Ok(true) {
        return None;
    }
    let file = descriptor.file().ok()?;
    Some(Export::new(byte, witness.leave_open().0, file))
}

/// Holds the memory that a descriptor keeps which this process has exported, under whatever number; `None` for another
/// process's. A lock is not in the way of its own description.
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

/// Whether a descriptor is closed everywhere.
fn is_closed(export: &Export) -> bool {
    let witness = Descriptor(export.witness);
    // A program that closes what it does not know may have closed it, and another file has its number.
    witness.file() == Ok(export.file) && witness.is_locked(export.byte) == Ok(false)
}

/// Looks at some descriptors, of those that alone keep their memory, or of all; gives back what closed ones kept.
/// Returns whether there was any.
pub fn settle_some(process: &Process, of_all: bool) -> bool {
    settle(process, of_all, IN_TURN)
}

/// The same with all that alone keep their memory.
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
