//! Allocation and freeing: device, managed and host memory.

use std::ffi::c_void;
use std::sync::{MutexGuard, PoisonError};

use tranche_simulator_machine::layout::Habit;

use crate::abi::{Location, ON_DEVICE};
use crate::code::Code;
use crate::context::{Context, current};
use crate::device::{Device, device};
use crate::driver::{driver, has};
use crate::export::{export, put, put_wanted};
use crate::heap::{BLOCK, Heap, forget, map_private};
use crate::object::Object;
use crate::pool::{self, Pool};
use crate::space::{Region, Regions, What, containing, regions};

/// Rows of a pitched allocation start at multiples of this.
const PITCH: u64 = 512;
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

/// Calls `take` again as long as it finds no memory and there is some to be had: what the pools keep for
/// later, and managed memory, which the host can have.
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

/// Takes `bytes` of a GPU that no address stands for.
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
        // The graph pool takes it, when the graph is launched.
        What::Graph => Ok(()),
        _ => device.charge(charge),
    })
}

/// Frees what `address` begins, whatever kind of allocation it is.
pub fn free(address: u64) -> Result<(), Code> {
    let mut regions = regions();
    let region = regions.get(&address).ok_or(Code::INVALID_VALUE)?;
    match region.what {
        _ if region.freed => return Err(Code::INVALID_VALUE),
        What::Mapped | What::Host | What::Registered => return Err(Code::INVALID_VALUE),
        // It is the graph's, which would need it again at this address.
        What::Graph => return Ok(()),
        What::Device | What::Pooled(_) | What::Managed => {}
    }
    remove(&mut regions, address)
}

/// Frees the allocation `id` at `address`, if it is still there: it may have gone with its context.
pub fn free_exactly(address: u64, id: u64) {
    let mut regions = regions();
    if regions.get(&address).is_some_and(|region| region.id == id) {
        let _ = remove(&mut regions, address);
    }
}

/// The number of the allocation at `address`, which no other has or will have.
pub fn id_of(address: u64) -> u64 {
    regions().get(&address).map_or(0, |region| region.id)
}

/// Removes a region and gives back what it took.
fn remove(regions: &mut Regions, address: u64) -> Result<(), Code> {
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
                leave(device(region.device)?, region.bytes);
            }
            unmap(address, region.bytes);
        }
        What::Host => unmap(address, region.bytes),
        What::Registered | What::Mapped => {}
    }
    Ok(())
}

/// Frees what a context that ends still has.
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

/// What managed memory takes of a GPU: whole blocks.
fn resident_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK)
}

/// Takes a managed allocation's memory from the GPU.
fn leave(device: &Device, bytes: u64) {
    device.note_managed(resident_bytes(bytes), false);
    device.release(resident_bytes(bytes));
}

/// Moves a managed allocation of the GPU to the host; false if there is none.
fn evict_one(device: &Device) -> bool {
    let mut regions = regions();
    let resident = regions
        .values_mut()
        .find(|region| region.resident && region.device == device.ordinal);
    let Some(region) = resident else {
        return false;
    };
    region.resident = false;
    leave(device, region.bytes);
    true
}

/// Moves the managed allocation at `address` to the GPU, where the driver has that habit. A GPU without
/// room reads it from the host.
fn occupy(device: &'static Device, address: u64) {
    if !has(Habit::ManagedMemoryOccupies) {
        return;
    }
    let Some(bytes) = regions()
        .get(&address)
        .filter(|region| !region.resident && matches!(region.what, What::Managed))
        .map(|region| region.bytes)
    else {
        return;
    };
    let bytes_taken = resident_bytes(bytes);
    if charge(device, bytes_taken).is_err() {
        return;
    }
    match regions().get_mut(&address) {
        Some(region) if !region.resident && region.bytes == bytes => {
            region.resident = true;
            region.device = device.ordinal;
            device.note_managed(bytes_taken, true);
        }
        // Another thread was first, or freed it.
        _ => device.release(bytes_taken),
    }
}

/// Notes that the GPU of `context` uses the allocation that `address` is in.
pub fn touch(context: &Context, address: u64) {
    let start = containing(&mut regions(), address).map(|(start, _)| start);
    if let Some(start) = start {
        occupy(context.device, start);
    }
}

/// Notes that the GPU of `context` uses all its managed memory.
pub fn touch_all(context: &Context) {
    let managed: Vec<u64> = regions()
        .iter()
        .filter(|(_, region)| region.context == context.id && matches!(region.what, What::Managed))
        .map(|(address, _)| *address)
        .collect();
    for address in managed {
        occupy(context.device, address);
    }
}

/// Moves managed memory to where a prefetch wants it: a GPU, or the host.
fn prefetch(address: u64, bytes: usize, to: Option<i32>) -> Result<(), Code> {
    managed(address, bytes)?;
    let start = containing(&mut regions(), address).map_or(address, |(start, _)| start);
    if let Some(ordinal) = to {
        occupy(device(ordinal)?, start);
    } else if let Some(region) = regions().get_mut(&start)
        && std::mem::take(&mut region.resident)
    {
        leave(device(region.device)?, region.bytes);
    }
    Ok(())
}

fn unmap(address: u64, bytes: u64) {
    let length = usize::try_from(bytes.next_multiple_of(PAGE)).unwrap_or(0);
    // SAFETY: `address` and the length are those of `host_pages`; its region is
    // gone from the table, so nobody else unmaps it.
    let _ = unsafe { rustix::mm::munmap(address as *mut _, length) };
}

/// Pages that the program itself will touch.
fn host_pages(bytes: u64) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    map_private(
        bytes
            .checked_next_multiple_of(PAGE)
            .ok_or(Code::OUT_OF_MEMORY)?,
    )
}

fn host(bytes: usize) -> Result<u64, Code> {
    let context = current()?;
    let address = host_pages(bytes as u64)?;
    let region = Region::new(bytes as u64, What::Host, context.device.ordinal, context.id);
    regions().insert(address, region);
    Ok(address)
}

fn register(address: u64, bytes: usize) -> Result<(), Code> {
    let context = current()?;
    if address == 0 || bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut regions = regions();
    if containing(&mut regions, address).is_some() {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let region = Region::new(
        bytes as u64,
        What::Registered,
        context.device.ordinal,
        context.id,
    );
    regions.insert(address, region);
    Ok(())
}

export! {
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) {
        let context = current()?;
        if to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, allocate(context, bytes as u64)?)
    }
    fn cuMemFree_v2(address: u64) {
        let context = current()?;
        if address == 0 {
            return Ok(());
        }
        if has(Habit::FreesWait) {
            context.synchronize();
        }
        free(address)
    }
    fn cuMemAllocPitch_v2(to: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) {
        let context = current()?;
        if to.is_null() || pitch.is_null() || width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(Code::INVALID_VALUE);
        }
        let row = (width as u64).checked_next_multiple_of(PITCH).ok_or(Code::OUT_OF_MEMORY)?;
        let bytes = row.checked_mul(height as u64).ok_or(Code::OUT_OF_MEMORY)?;
        put(to, allocate(context, bytes)?)?;
        put(pitch, usize::try_from(row).unwrap_or(usize::MAX))
    }
    fn cuMemAllocManaged(to: *mut u64, bytes: usize, flags: u32) {
        let context = current()?;
        if to.is_null() || !matches!(flags, 1 | 2) {
            return Err(Code::INVALID_VALUE);
        }
        // Managed memory migrates: no GPU has it until it touches it.
        let address = host_pages(bytes as u64)?;
        let region = Region::new(bytes as u64, What::Managed, context.device.ordinal, context.id);
        regions().insert(address, region);
        put(to, address)
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let gpu = current()?.device.state;
        put_wanted(free, usize::try_from(gpu.free()).unwrap_or(usize::MAX));
        put_wanted(total, usize::try_from(gpu.usable()).unwrap_or(usize::MAX));
        Ok(())
    }
    fn cuMemAllocHost_v2(to: *mut *mut c_void, bytes: usize) {
        put(to, host(bytes)? as *mut c_void)
    }
    fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, flags: u32) {
        if flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        put(to, host(bytes)? as *mut c_void)
    }
    fn cuMemFreeHost(address: *mut c_void) {
        driver()?;
        let mut regions = regions();
        match regions.get(&(address as u64)) {
            Some(Region { what: What::Host, .. }) => remove(&mut regions, address as u64),
            _ => Err(Code::INVALID_VALUE),
        }
    }
    fn cuMemHostGetDevicePointer_v2(to: *mut u64, address: *mut c_void, _flags: u32) {
        driver()?;
        let mut regions = regions();
        match containing(&mut regions, address as u64) {
            Some((_, Region { what: What::Host | What::Registered | What::Managed, .. })) => put(to, address as u64),
            _ => Err(Code::INVALID_VALUE),
        }
    }
    fn cuMemHostGetFlags(flags: *mut u32, address: *mut c_void) {
        driver()?;
        let mut regions = regions();
        match containing(&mut regions, address as u64) {
            Some((_, Region { what: What::Host | What::Registered, .. })) => put(flags, 2),
            _ => Err(Code::INVALID_VALUE),
        }
    }
    fn cuMemHostRegister(address: *mut c_void, bytes: usize, _flags: u32) {
        register(address as u64, bytes)
    }
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, _flags: u32) {
        register(address as u64, bytes)
    }
    fn cuMemHostUnregister(address: *mut c_void) {
        driver()?;
        let mut regions = regions();
        match regions.get(&(address as u64)) {
            Some(Region { what: What::Registered, .. }) => remove(&mut regions, address as u64),
            _ => Err(Code::HOST_MEMORY_NOT_REGISTERED),
        }
    }
    fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, address: u64) {
        current()?;
        let mut regions = regions();
        let (base, region) = containing(&mut regions, address).ok_or(Code::NOT_FOUND)?;
        put_wanted(start, base);
        put_wanted(bytes, usize::try_from(region.bytes).unwrap_or(usize::MAX));
        Ok(())
    }
    fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz [stream] (address: u64, bytes: usize, to: i32, stream: crate::object::Handle) {
        crate::stream::find(stream)?;
        // CU_DEVICE_CPU is -1.
        prefetch(address, bytes, (to != -1).then_some(to))
    }
    fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz [stream] (address: u64, bytes: usize, to: Location, _flags: u32, stream: crate::object::Handle) {
        crate::stream::find(stream)?;
        prefetch(address, bytes, (to.kind == ON_DEVICE).then_some(to.id))
    }
    fn cuMemAdvise_v2(address: u64, bytes: usize, _advice: u32, _location: Location) {
        driver()?;
        managed(address, bytes)
    }
    fn cuMemAdvise(address: u64, bytes: usize, _advice: u32, _device: i32) {
        driver()?;
        managed(address, bytes)
    }
}

/// Checks that a range is managed memory.
fn managed(address: u64, bytes: usize) -> Result<(), Code> {
    let mut regions = regions();
    match containing(&mut regions, address) {
        Some((start, region))
            if matches!(region.what, What::Managed)
                && address - start + bytes as u64 <= region.bytes =>
        {
            Ok(())
        }
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Writes zeros the cheap way where whole pages of device memory become zero.
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
