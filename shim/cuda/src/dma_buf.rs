//! `dma-buf`s: descriptors by which network cards and disks reach a GPU's memory.
//!
//! The kernel driver duplicates the memory objects in which a range lies (`nv_dma_buf_dup_mem_handles` in NVIDIA's open
//! kernel modules). They are freed when the last reference to the `dma-buf` is gone: its descriptors in any process, and
//! the references of devices' drivers, which may outlive the descriptors. A process cannot reliably find out when that
//! happens (ADR 0027). So the memory of a `dma-buf` stays charged until the process ends.
//!
//! The memory is held before the driver is called, and released if the driver refuses. Mapped memory gets one more use,
//! which never ends. Memory by pointer is first noted as physical memory; the pointer is one of its uses. If the pointer
//! is charged less than the driver has for it, because it shares a block with others, the whole is reserved, and replaces
//! the pointer's charge when the `dma-buf` is made.

use tranche_shim_core::Entry;
use tranche_shim_core::physical::{Id, Physical};
use tranche_shim_runtime::sys;

use crate::abi::{CUdeviceptr, CUresult};
use crate::charge::{AS_PHYSICAL, IN_ITS_BLOCK, Reserved, is_movable, let_go, return_charge};
use crate::device::Device;
use crate::driver::Call;
use crate::driver_pools::DriverPools;
use crate::ipc::{device_of, is_on_host, range_of};
use crate::keys::{Kind, key};
use crate::process::{self, Process};
use crate::settle::driver_pool_of;

/// The step in bytes of the search for memory at addresses that the driver does not know; allocations are multiples of it.
/// A range has whole pages, and may begin before the allocation and end after it.
const STEP: u64 = 512;
/// The most steps of a search: a block of 2 MiB. Allocations of one memory object are not further apart.
const STEPS: usize = 4096;

/// The least bytes of a piece, except for the first: the smallest page of a mapping. One piece is enough for a block.
const LEAST: usize = 64 << 10;
/// The most pieces that are held: 128 GiB of the smallest ones.
const MOST: usize = 1 << 21;

/// Memory of a range, which is held. All zeros means none.
#[derive(Clone, Copy)]
pub struct Piece {
    pub held: Option<Id>,
    /// The pointer whose charge it replaces; 0 for none.
    replaces: CUdeviceptr,
}

impl Piece {
    const NONE: Self = Self::of(None);

    const fn of(held: Option<Id>) -> Self {
        Self { held, replaces: 0 }
    }
}

/// A `dma-buf` of a range of addresses.
pub fn make(start: CUdeviceptr, bytes: usize, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let room = MOST.min(bytes / LEAST) + 2;
    let Ok(scratch) = sys::map_private(room * size_of::<Piece>()) else {
        return CUresult::OUT_OF_MEMORY;
    };
    // SAFETY: a mapping of this function's own, as long as this; zeros are no pieces.
    let pieces: &mut [Piece] =
        unsafe { core::slice::from_raw_parts_mut(scratch.start.as_ptr().cast(), room) };
    let result = match hold_all(process, start, bytes as u64, pieces) {
        Ok(()) => driver.make(),
        Err(code) => code,
    };
    for piece in pieces.iter() {
        let Some(held) = piece.held else { break };
        if !result.is_ok() {
            let_go(process, held);
        } else if piece.replaces != 0 {
            replace(process, piece.replaces, held);
        }
    }
    // SAFETY: this function's own, and used no more.
    unsafe { sys::unmap(scratch) };
    result
}

/// Holds all memory of a range. If it fails, what it already holds is in the list.
fn hold_all(
    process: &'static Process,
    start: CUdeviceptr,
    bytes: u64,
    pieces: &mut [Piece],
) -> Result<(), CUresult> {
    let end = start.saturating_add(bytes);
    let mut free = pieces.iter_mut();
    let (mut at, mut unknown) = (start, 0);
    // If the driver knows no memory there, it will refuse the call.
    while at < end && unknown < STEPS {
        let Some((piece, after)) = hold_at(process, at, unknown == 0)? else {
            (at, unknown) = ((at | (STEP - 1)).saturating_add(1), unknown + 1);
            continue;
        };
        if piece.held.is_some() {
            *free.next().ok_or(CUresult::OUT_OF_MEMORY)? = piece;
        }
        (at, unknown) = (after.max(at.saturating_add(1)), 0);
    }
    Ok(())
}

/// Holds the memory at an address; returns it with its end address, or `None` if the driver knows no memory there.
pub fn hold_at(
    process: &'static Process,
    at: CUdeviceptr,
    may_be_mapped: bool,
) -> Result<Option<(Piece, u64)>, CUresult> {
    let mapped = |physical: &mut Physical| {
        let (shown, end) = physical.mapping_at(at)?;
        Some((Piece::of(physical.hold_id(shown)), end))
    };
    if may_be_mapped && let Some(found) = process.physical.with(mapped) {
        return Ok(Some(found));
    }
    let Ok((base, size)) = range_of(at) else {
        return Ok(None);
    };
    let device = device_of(process, at).filter(|device| device.is_capped());
    // The driver makes no descriptor for memory that it may move.
    let may_move = || process.pointers.get(base).is_some_and(is_movable);
    let Some(device) = device.filter(|_| !is_on_host(at) && !may_move()) else {
        return Ok(Some((Piece::NONE, base.saturating_add(size))));
    };
    let piece = hold_pointer(process, device, base, size)?;
    let mut end = base.saturating_add(size);
    if device.is_small(size) {
        // Its block is held, with all that lies in it.
        end = end.next_multiple_of(device.block);
    }
    Ok(Some((piece, end)))
}

/// Holds what a pointer points to: `size` bytes.
fn hold_pointer(
    process: &'static Process,
    device: &'static Device,
    pointer: CUdeviceptr,
    size: u64,
) -> Result<Piece, CUresult> {
    // If the memory is not a whole allocation, only its blocks are known.
    let start = pointer & !(device.block - 1);
    let mut whole = device.taken_by(pointer.saturating_add(size) - start);
    if let Some(place) = process.pointers.get(pointer).and_then(driver_pool_of) {
        // It may lie in any piece of its pool.
        let covered = |pools: &mut DriverPools| pools.get(place).map(|it| it.charge.covered());
        whole = whole.max(process.driver_pools.with(covered).unwrap_or(0));
    }
    let held = process.physical.with(|physical| {
        let Some(entry) = process.pointers.get(pointer) else {
            return physical.hold(key(Kind::Import, pointer));
        };
        if entry.device == AS_PHYSICAL {
            return physical.hold_id(Id::of(entry.bytes)?);
        }
        if driver_pool_of(entry).is_some() {
            return None;
        }
        // Taken out of the table, so that a thread that frees it meanwhile does not give the same charge back.
        let mut entry = process.pointers.take(pointer)?;
        if entry.bytes == IN_ITS_BLOCK && process.blocks.leave_if_last(device.block_number(pointer))
        {
            entry.bytes = device.block;
        }
        let noted = if entry.bytes < device.taken_by(size) {
            None
        } else {
            physical
                .create_without_handle(entry.bytes, entry.device)
                .ok()
        };
        let entry = noted.map_or(entry, |id| as_physical(id, entry));
        let _ = process.pointers.put(pointer, entry);
        physical.hold_id(noted?)
    });
    if held.is_some() {
        return Ok(Piece::of(held));
    }
    let bytes = Reserved::new(process, device, whole, whole)?.keep();
    // If there is no room to note it, it stays charged until the process ends.
    let note = |physical: &mut Physical| physical.create_without_handle(bytes, device.number);
    Ok(Piece {
        held: process.physical.with(note).ok(),
        replaces: pointer,
    })
}

/// Replaces a pointer's charge by that of physical memory which is held.
fn replace(process: &'static Process, pointer: CUdeviceptr, held: Id) {
    let former = process.physical.with(|physical| {
        let is_own =
            |entry: &Entry| entry.device != AS_PHYSICAL && driver_pool_of(*entry).is_none();
        process.pointers.get(pointer).filter(is_own)?;
        let entry = process.pointers.take(pointer)?;
        let id = physical.hold_id(held)?;
        let _ = process.pointers.put(pointer, as_physical(id, entry));
        Some(entry)
    });
    if let Some(former) = former {
        return_charge(process, pointer, former);
    }
}

/// The entry of a pointer whose charge is noted as physical memory.
fn as_physical(id: Id, entry: Entry) -> Entry {
    Entry {
        bytes: id.number(),
        device: AS_PHYSICAL,
        context: entry.context,
    }
}
