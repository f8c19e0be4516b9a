//! Allocation and freeing of memory of all kinds.

use std::sync::{MutexGuard, PoisonError};

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::Context;
use crate::device::{Device, device};
use crate::driver::has;
use crate::heap::{BLOCK, Heap, map_private, return_pages};
use crate::heap_objects;
use crate::object::Object;
use crate::pool::{self, Pool};
use crate::space::{MemoryKind, Region, Regions, regions};

/// The host's pages, in bytes.
pub const PAGE: u64 = 4096;

/// Allocates memory of the context's GPU.
pub fn allocate(context: &Context, bytes: u64) -> Result<u64, Code> {
    place(
        context.device.ordinal,
        MemoryKind::Device,
        context.id,
        bytes,
    )
}

/// Allocates memory of a GPU as `kind`.
pub fn place(ordinal: i32, kind: MemoryKind, context: u64, bytes: u64) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = device(ordinal)?;
    let address = with_room(device, || take(device, kind, bytes))?;
    regions().insert(address, Region::new(bytes, kind, ordinal, context));
    Ok(address)
}

/// Calls `take` again while it finds no memory and some can be freed: memory that pools keep, and managed memory, which can
/// move to the host.
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

/// Charges `bytes` of managed memory that moves to a GPU.
pub fn charge_managed(device: &'static Device, bytes: u64) -> Result<(), Code> {
    with_room(device, || device.charge_managed(bytes))
}

/// Carries out a pool's pending frees that are due, and all of the stream `own` (its address).
pub fn carry_out_frees(pool: &Pool, own: Option<usize>) {
    for free in pool.take_due_frees(own) {
        free_exactly(free.address, free.id);
    }
}

/// The pools of a GPU, after their due frees are carried out.
fn pools_after_frees(device: &Device) -> Vec<&'static Object<Pool>> {
    let pools = pool::pools_of(device);
    for pool in &pools {
        carry_out_frees(pool, None);
    }
    pools
}

/// Returns all that its pools keep to a GPU; false if they keep nothing.
fn trim_pools(device: &Device) -> bool {
    let trimmed = pools_after_frees(device)
        .into_iter()
        .map(|pool| pool.trim(device, 0));
    trimmed.sum::<u64>() > 0
}

/// Returns what its pools keep above their release thresholds to a GPU. Called after the program has waited for work of that
/// GPU.
pub fn trim_pools_after_wait(device: &Device) {
    if !has(Habit::FreesWait) {
        return;
    }
    for pool in pools_after_frees(device) {
        pool.trim_to_threshold(device);
    }
}

fn heap_of(device: &'static Device, kind: MemoryKind) -> MutexGuard<'static, Heap> {
    match kind {
        MemoryKind::Pooled(pool) => pool.heap(),
        _ => device.heap.lock().unwrap_or_else(PoisonError::into_inner),
    }
}

fn take(device: &'static Device, kind: MemoryKind, bytes: u64) -> Result<u64, Code> {
    let total = device.state.memory_total;
    heap_of(device, kind).allocate(bytes, total, |charge| match kind {
        MemoryKind::Pooled(pool) => pool.charge(device, charge),
        // The graph pool charges it when the graph is launched.
        MemoryKind::Graph => Ok(()),
        _ => device.charge(charge),
    })
}

/// Frees the allocation of device or managed memory that begins at `address`.
pub fn free(address: u64) -> Result<(), Code> {
    let mut regions = regions();
    let region = regions.get(&address).ok_or(Code::INVALID_VALUE)?;
    match region.kind {
        _ if region.freed => return Err(Code::INVALID_VALUE),
        MemoryKind::Mapped | MemoryKind::Host | MemoryKind::Registered => {
            return Err(Code::INVALID_VALUE);
        }
        // It belongs to the graph, whose next launch needs it at this address.
        MemoryKind::Graph => return Ok(()),
        MemoryKind::Device | MemoryKind::Pooled(_) | MemoryKind::Managed => {}
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
    match region.kind {
        MemoryKind::Device | MemoryKind::Pooled(_) => {
            let device = device(region.device)?;
            let freed = heap_of(device, region.kind).release(address, region.bytes, region.touched);
            match region.kind {
                MemoryKind::Pooled(pool) => pool.record_free(device, region.bytes, freed),
                _ if freed > 0 => heap_objects::free(device, address & !(BLOCK - 1), freed),
                _ => {}
            }
        }
        MemoryKind::Graph => {
            let device = device(region.device)?;
            let _ = heap_of(device, region.kind).release(address, region.bytes, region.touched);
        }
        MemoryKind::Managed => {
            if region.resident {
                free_resident(device(region.device)?, region.bytes);
            }
            unmap(address, region.bytes);
        }
        MemoryKind::Host => unmap(address, region.bytes),
        MemoryKind::Registered | MemoryKind::Mapped => {}
    }
    Ok(())
}

/// Frees all memory of a context that ends.
pub fn free_all(context: &Context) {
    let mut regions = regions();
    let left: Vec<u64> = regions
        .iter()
        .filter(|(_, region)| region.context == context.id)
        .map(|(address, _)| *address)
        .collect();
    let mut graph_pool = context.device.graph_pool();
    for address in left {
        if let Some(region) = regions.get(&address) {
            graph_pool.detach(region.id);
        }
        let _ = remove(&mut regions, address);
    }
    context.device.release(graph_pool.trim());
    drop((graph_pool, regions));
    trim_pools(context.device);
}

/// Bytes that managed memory takes of a GPU: whole blocks.
pub fn resident_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK)
}

/// Returns the GPU memory of a managed allocation.
pub fn free_resident(device: &Device, bytes: u64) {
    device.release_managed(resident_bytes(bytes));
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
    // SAFETY: `address` and the length are those of `map_host`. The region is no longer in the table, so nothing else
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

/// Writes zeros. Whole pages are returned to the host, which zeroes them at less cost.
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
    return_pages(start, end - start);
    clear(end, address + bytes - end);
}
