//! Allocation and freeing of memory of all kinds.

use std::sync::{MutexGuard, PoisonError};

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::Context;
use crate::device::{Device, device};
use crate::driver::has;
use crate::heap::{BLOCK, Heap, forget, map_private};
use crate::object::Object;
use crate::pool::{self, Pool};
use crate::space::{Region, Regions, What, regions};

const PAGE: u64 = 4096;

/// Allocates memory of the context's GPU.
pub fn allocate(context: &Context, bytes: u64) -> Result<u64, Code> {
    place(context.device.ordinal, What::Device, context.id, bytes)
}

/// Allocates memory of a GPU as `what`.
pub fn place(ordinal: i32, what: What, context: u64, bytes: u64) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = device(ordinal)?;
    let address = with_room(device, || take(device, what, bytes))?;
    regions().insert(address, Region::new(bytes, what, ordinal, context));
    Ok(address)
}

/// Calls `take` again as long as it finds no memory and some can be made free: what pools keep, and managed memory, which
/// can move to the host.
pub fn with_room<T>(
    device: &'static Device,
    take: impl Fn() -> Result<T, Code>,
) -> Result<T, Code> {
    loop {
        match take() {
            Err(Code::OUT_OF_MEMORY) if trim_pools(device) || evict_one(device) => {}
            other => return other,
        }
    }
}

/// Charges `bytes` of a GPU's memory that has no address in its heap.
pub fn charge(device: &'static Device, bytes: u64) -> Result<(), Code> {
    with_room(device, || device.charge(bytes))
}

/// Frees what is due of a pool's pending frees, and all that the stream `own` (its address) has freed.
pub fn settle(pool: &Pool, own: Option<usize>) {
    for free in pool.take_due_frees(own) {
        free_exactly(free.address, free.id);
    }
}

/// The pools of a GPU, after their pending frees that are due.
fn settled_pools(device: &Device) -> Vec<&'static Object<Pool>> {
    let pools = pool::pools_of(device);
    for pool in &pools {
        settle(pool, None);
    }
    pools
}

/// Returns to a GPU all that its pools keep; false if they keep nothing.
fn trim_pools(device: &Device) -> bool {
    let trimmed = settled_pools(device)
        .into_iter()
        .map(|pool| pool.trim(device, 0));
    trimmed.sum::<u64>() > 0
}

/// Returns to a GPU what its pools keep above their release thresholds, now that the program has waited for work of
/// that GPU.
pub fn trim_pools_after_wait(device: &Device) {
    if !has(Habit::FreesWait) {
        return;
    }
    for pool in settled_pools(device) {
        pool.trim_to_threshold(device);
    }
}

fn heap_of(device: &'static Device, what: What) -> MutexGuard<'static, Heap> {
    match what {
        What::Pooled(pool) => pool.heap(),
        _ => device.heap.lock().unwrap_or_else(PoisonError::into_inner),
    }
}

fn take(device: &'static Device, what: What, bytes: u64) -> Result<u64, Code> {
    let total = device.state.memory_total;
    heap_of(device, what).allocate(bytes, total, |charge| match what {
        What::Pooled(pool) => pool.charge(device, charge),
        // The graph pool charges it when the graph is launched.
        What::Graph => Ok(()),
        _ => device.charge(charge),
    })
}

/// Frees the allocation of device or managed memory that begins at `address`.
pub fn free(address: u64) -> Result<(), Code> {
    let mut regions = regions();
    let region = regions.get(&address).ok_or(Code::INVALID_VALUE)?;
    match region.what {
        _ if region.freed => return Err(Code::INVALID_VALUE),
        What::Mapped | What::Host | What::Registered => return Err(Code::INVALID_VALUE),
        // It belongs to the graph, whose next launch needs it at this address.
        What::Graph => return Ok(()),
        What::Device | What::Pooled(_) | What::Managed => {}
    }
    remove(&mut regions, address)
}

/// Frees the allocation `id` at `address`, if it is still there: it may have been freed with its context.
pub fn free_exactly(address: u64, id: u64) {
    let mut regions = regions();
    if regions.get(&address).is_some_and(|region| region.id == id) {
        let _ = remove(&mut regions, address);
    }
}

/// The id of the allocation at `address`; 0 if there is none.
pub fn id_of(address: u64) -> u64 {
    regions().get(&address).map_or(0, |region| region.id)
}

/// Removes a region and returns its memory.
pub fn remove(regions: &mut Regions, address: u64) -> Result<(), Code> {
    let region = regions.remove(&address).ok_or(Code::INVALID_VALUE)?;
    match region.what {
        What::Device | What::Pooled(_) => {
            let device = device(region.device)?;
            let freed = heap_of(device, region.what).release(address, region.bytes, region.touched);
            match region.what {
                What::Pooled(pool) => pool.record_free(device, region.bytes, freed),
                _ if freed > 0 => device.release(freed),
                _ => {}
            }
        }
        What::Graph => {
            let device = device(region.device)?;
            let _ = heap_of(device, region.what).release(address, region.bytes, region.touched);
        }
        What::Managed => {
            if region.resident {
                free_resident(device(region.device)?, region.bytes);
            }
            unmap(address, region.bytes);
        }
        What::Host => unmap(address, region.bytes),
        What::Registered | What::Mapped => {}
    }
    Ok(())
}

/// Frees all that a context which ends still has.
pub fn free_all(context: &Context) {
    let mut regions = regions();
    let left: Vec<u64> = regions
        .iter()
        .filter(|(_, region)| region.context == context.id)
        .map(|(address, _)| *address)
        .collect();
    let mut books = context.device.graph_books();
    for address in left {
        if let Some(region) = regions.get(&address) {
            books.detach(region.id);
        }
        let _ = remove(&mut regions, address);
    }
    context.device.release(books.trim());
    drop((books, regions));
    trim_pools(context.device);
}

/// Bytes that managed memory takes of a GPU: whole blocks.
pub fn resident_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK)
}

/// Returns the GPU memory of a managed allocation.
pub fn free_resident(device: &Device, bytes: u64) {
    device.note_managed(resident_bytes(bytes), false);
    device.release(resident_bytes(bytes));
}

/// Moves one managed allocation from the GPU to the host; false if none is on the GPU.
fn evict_one(device: &Device) -> bool {
    let mut regions = regions();
    let resident = regions
        .values_mut()
        .find(|region| region.resident && region.device == device.ordinal);
    let Some(region) = resident else {
        return false;
    };
    region.resident = false;
    free_resident(device, region.bytes);
    true
}

fn unmap(address: u64, bytes: u64) {
    let length = usize::try_from(bytes.next_multiple_of(PAGE)).unwrap_or(0);
    // SAFETY: `address` and the length are those of `map_host`. The region is no longer in the table, so nobody else
    // unmaps it.
    let _ = unsafe { rustix::mm::munmap(address as *mut _, length) };
}

/// Maps host memory for the program: whole pages.
pub fn map_host(bytes: u64) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    map_private(
        bytes
            .checked_next_multiple_of(PAGE)
            .ok_or(Code::OUT_OF_MEMORY)?,
    )
}

/// Writes zeros. Whole pages are returned to the host, which makes them zero at less cost.
pub fn zero(address: u64, bytes: u64) {
    let start = address.next_multiple_of(PAGE);
    let end = (address + bytes) & !(PAGE - 1);
    let clear = |from: u64, length: u64| {
        // SAFETY: within the range that the caller checked.
        unsafe { std::ptr::write_bytes(from as *mut u8, 0, usize::try_from(length).unwrap_or(0)) };
    };
    if end <= start {
        clear(address, bytes);
        return;
    }
    clear(address, start - address);
    forget(start, end - start);
    clear(end, address + bytes - end);
}
