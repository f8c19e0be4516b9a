//! Virtual memory management: physical allocations, reserved addresses, mappings.
//!
//! A physical allocation is an anonymous file, so that several mappings of it, in
//! several processes too, see the same bytes. It belongs to the GPU's books until
//! its handle is released and its last mapping is gone.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::abi::{Location, ON_DEVICE};
use crate::code::Code;
use crate::device::{device, devices};
use crate::driver::driver;
use crate::export::{export, get, put};
use crate::heap::BLOCK;
use crate::memory;
use crate::space::{Region, What, regions};

/// cuda.h's `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    kind: u32,
    handle_kinds: u32,
    location: Location,
    windows: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// cuda.h's `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Access {
    location: Location,
    flags: u32,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const PINNED: u32 = 1;
const FILE_DESCRIPTOR: u32 = 1;

/// A physical allocation.
struct Physical {
    file: OwnedFd,
    bytes: u64,
    device: i32,
    handle_kinds: u32,
    /// Handles not yet released, and mappings.
    handles: u32,
    mappings: u32,
    /// Whether this process's books carry it; an imported one is its exporter's.
    ours: bool,
}

/// A mapping of a physical allocation.
struct Mapping {
    bytes: u64,
    handle: u64,
    flags: u32,
}

struct Vmm {
    physical: BTreeMap<u64, Physical>,
    /// Reserved stretches by address.
    reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
}

fn vmm() -> MutexGuard<'static, Vmm> {
    static VMM: Mutex<Vmm> = Mutex::new(Vmm {
        physical: BTreeMap::new(),
        reserved: BTreeMap::new(),
        mappings: BTreeMap::new(),
    });
    VMM.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Not small: 0 is no handle, and small numbers hide mistakes.
    NEXT.fetch_add(1, Ordering::Relaxed) << 12
}

fn whole_blocks(bytes: u64) -> bool {
    bytes != 0 && bytes.is_multiple_of(BLOCK)
}

fn create(bytes: usize, properties: Properties) -> Result<u64, Code> {
    let bytes = bytes as u64;
    if properties.kind != PINNED || properties.location.kind != ON_DEVICE || !whole_blocks(bytes) {
        return Err(Code::INVALID_VALUE);
    }
    if properties.handle_kinds & !FILE_DESCRIPTOR != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let device = device(properties.location.id)?;
    memory::charge(device, bytes)?;
    let file = memfd_create(c"simulated-gpu-memory", MemfdFlags::CLOEXEC)
        .and_then(|file| ftruncate(&file, bytes).map(|()| file));
    let Ok(file) = file else {
        device.release(bytes);
        return Err(Code::OUT_OF_MEMORY);
    };
    let handle = next_handle();
    let physical = Physical {
        file,
        bytes,
        device: device.ordinal,
        handle_kinds: properties.handle_kinds,
        handles: 1,
        mappings: 0,
        ours: true,
    };
    vmm().physical.insert(handle, physical);
    Ok(handle)
}

impl Vmm {
    /// Drops an allocation that nothing refers to any more.
    fn settle(&mut self, handle: u64) {
        let gone = self
            .physical
            .get(&handle)
            .is_some_and(|p| p.handles == 0 && p.mappings == 0);
        if gone
            && let Some(physical) = self.physical.remove(&handle)
            && physical.ours
            && let Ok(device) = device(physical.device)
        {
            device.release(physical.bytes);
        }
    }

    /// The reservation that a stretch lies in.
    fn reservation(&self, address: u64, bytes: u64) -> Option<u64> {
        let (start, length) = self.reserved.range(..=address).next_back()?;
        (address.checked_add(bytes)? <= start + length).then_some(*start)
    }
}

/// Maps addresses again as reserved ones: nothing there.
fn vacate(address: u64, bytes: u64) -> Result<(), Code> {
    // SAFETY: the stretch is in a reservation of ours; whatever was mapped there
    // is what the caller gives up.
    unsafe {
        rustix::mm::mmap_anonymous(
            address as *mut _,
            usize::try_from(bytes).unwrap_or(0),
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
        )
    }
    .map(drop)
    .map_err(|_| Code::UNKNOWN)
}

fn reserve(bytes: usize, alignment: usize) -> Result<u64, Code> {
    let alignment = (alignment as u64).max(BLOCK);
    let bytes = bytes as u64;
    if !whole_blocks(bytes) || !alignment.is_power_of_two() {
        return Err(Code::INVALID_VALUE);
    }
    let room = bytes.checked_add(alignment).ok_or(Code::OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at a place of the kernel's choice.
    let start = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            usize::try_from(room).map_err(|_| Code::OUT_OF_MEMORY)?,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }
    .map_err(|_| Code::OUT_OF_MEMORY)? as u64;
    let aligned = start.next_multiple_of(alignment);
    for (from, length) in [
        (start, aligned - start),
        (aligned + bytes, start + room - aligned - bytes),
    ] {
        if length > 0 {
            // SAFETY: the ends of the mapping just made, which nobody knows.
            let _ =
                unsafe { rustix::mm::munmap(from as *mut _, usize::try_from(length).unwrap_or(0)) };
        }
    }
    vmm().reserved.insert(aligned, bytes);
    Ok(aligned)
}

fn map(address: u64, bytes: u64, offset: usize, handle: u64) -> Result<(), Code> {
    if offset != 0 || !whole_blocks(bytes) || !address.is_multiple_of(BLOCK) {
        return Err(Code::INVALID_VALUE);
    }
    let mut vmm = vmm();
    vmm.reservation(address, bytes).ok_or(Code::INVALID_VALUE)?;
    let taken = vmm.mappings.range(..address + bytes).next_back();
    if taken.is_some_and(|(start, mapping)| start + mapping.bytes > address) {
        return Err(Code::INVALID_VALUE);
    }
    let physical = vmm.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
    if bytes > physical.bytes {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the stretch is reserved for this and free, both checked; the file
    // is as long. No access until it is given.
    unsafe {
        rustix::mm::mmap(
            address as *mut _,
            usize::try_from(bytes).unwrap_or(0),
            ProtFlags::empty(),
            MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED,
            &physical.file,
            0,
        )
    }
    .map_err(|_| Code::OUT_OF_MEMORY)?;
    physical.mappings += 1;
    let region = Region::new(bytes, What::Mapped, physical.device, 0);
    vmm.mappings.insert(
        address,
        Mapping {
            bytes,
            handle,
            flags: 0,
        },
    );
    drop(vmm);
    regions().insert(address, region);
    Ok(())
}

fn unmap(address: u64, bytes: u64) -> Result<(), Code> {
    let mut vmm = vmm();
    let inside: Vec<(u64, u64)> = vmm
        .mappings
        .range(address..address.saturating_add(bytes))
        .map(|(start, mapping)| (*start, mapping.bytes))
        .collect();
    // Whole mappings, and nothing but mappings.
    if inside.is_empty() || inside.iter().map(|(_, length)| length).sum::<u64>() != bytes {
        return Err(Code::INVALID_VALUE);
    }
    for (start, length) in inside {
        vacate(start, length)?;
        regions().remove(&start);
        if let Some(mapping) = vmm.mappings.remove(&start) {
            if let Some(physical) = vmm.physical.get_mut(&mapping.handle) {
                physical.mappings -= 1;
            }
            vmm.settle(mapping.handle);
        }
    }
    Ok(())
}

fn give_access(address: u64, bytes: u64, flags: u32) -> Result<(), Code> {
    let protection = match flags {
        0 => MprotectFlags::empty(),
        1 => MprotectFlags::READ,
        3 => MprotectFlags::READ | MprotectFlags::WRITE,
        _ => return Err(Code::INVALID_VALUE),
    };
    let mut vmm = vmm();
    let mut covered = 0;
    for (start, mapping) in vmm
        .mappings
        .range_mut(address..address.saturating_add(bytes))
    {
        // SAFETY: a mapping of ours.
        unsafe {
            rustix::mm::mprotect(
                *start as *mut _,
                usize::try_from(mapping.bytes).unwrap_or(0),
                protection,
            )
        }
        .map_err(|_| Code::UNKNOWN)?;
        mapping.flags = flags;
        covered += mapping.bytes;
    }
    if covered == bytes && bytes > 0 {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

export! {
    fn cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const Properties, _option: u32) {
        driver()?;
        device(get(properties)?.location.id)?;
        put(bytes, usize::try_from(BLOCK).unwrap_or(0))
    }
    fn cuMemCreate(to: *mut u64, bytes: usize, properties: *const Properties, flags: u64) {
        driver()?;
        if flags != 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, create(bytes, get(properties)?)?)
    }
    fn cuMemRelease(handle: u64) {
        driver()?;
        let mut vmm = vmm();
        let physical = vmm.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        physical.handles = physical.handles.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
        vmm.settle(handle);
        Ok(())
    }
    fn cuMemAddressReserve(to: *mut u64, bytes: usize, alignment: usize, _address: u64, flags: u64) {
        driver()?;
        if flags != 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, reserve(bytes, alignment)?)
    }
    fn cuMemAddressFree(address: u64, bytes: usize) {
        driver()?;
        let mut vmm = vmm();
        if vmm.reserved.get(&address) != Some(&(bytes as u64))
            || vmm.mappings.range(address..address + bytes as u64).next().is_some()
        {
            return Err(Code::INVALID_VALUE);
        }
        vmm.reserved.remove(&address);
        // The reservation is ours and nothing is mapped in it.
        rustix::mm::munmap(address as *mut _, bytes).map_err(|_| Code::UNKNOWN)
    }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        driver()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        map(address, bytes as u64, offset, handle)
    }
    fn cuMemUnmap(address: u64, bytes: usize) {
        driver()?;
        unmap(address, bytes as u64)
    }
    fn cuMemSetAccess(address: u64, bytes: usize, list: *const Access, count: usize) {
        driver()?;
        for index in 0..count {
            let access = get(list.wrapping_add(index))?;
            if access.location.kind != ON_DEVICE {
                return Err(Code::INVALID_VALUE);
            }
            device(access.location.id)?;
            give_access(address, bytes as u64, access.flags)?;
        }
        Ok(())
    }
    fn cuMemGetAccess(flags: *mut u64, _location: *const Location, address: u64) {
        driver()?;
        let vmm = vmm();
        let (start, mapping) = vmm.mappings.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        if address - start >= mapping.bytes {
            return Err(Code::INVALID_VALUE);
        }
        put(flags, u64::from(mapping.flags))
    }
    fn cuMemGetAllocationPropertiesFromHandle(to: *mut Properties, handle: u64) {
        driver()?;
        let vmm = vmm();
        let physical = vmm.physical.get(&handle).ok_or(Code::INVALID_VALUE)?;
        put(to, Properties {
            kind: PINNED,
            handle_kinds: physical.handle_kinds,
            location: Location { kind: ON_DEVICE, id: physical.device },
            windows: std::ptr::null_mut(),
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }
    fn cuMemRetainAllocationHandle(to: *mut u64, address: *mut c_void) {
        driver()?;
        let address = address as u64;
        let mut vmm = vmm();
        let (start, mapping) = vmm.mappings.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        if address - start >= mapping.bytes {
            return Err(Code::INVALID_VALUE);
        }
        let handle = mapping.handle;
        vmm.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)?.handles += 1;
        put(to, handle)
    }
    fn cuMemExportToShareableHandle(to: *mut i32, handle: u64, kind: u32, flags: u64) {
        driver()?;
        let vmm = vmm();
        let physical = vmm.physical.get(&handle).ok_or(Code::INVALID_VALUE)?;
        if kind != FILE_DESCRIPTOR || physical.handle_kinds & FILE_DESCRIPTOR == 0 || flags != 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let copy = physical.file.try_clone().map_err(|_| Code::OUT_OF_MEMORY)?;
        put(to, copy.into_raw_fd())
    }
    fn cuMemImportFromShareableHandle(to: *mut u64, given: *mut c_void, kind: u32) {
        driver()?;
        let number = i32::try_from(given as usize).map_err(|_| Code::INVALID_VALUE)?;
        if kind != FILE_DESCRIPTOR || number < 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let file = BorrowedFd::borrow_raw(number)
            .try_clone_to_owned()
            .map_err(|_| Code::INVALID_VALUE)?;
        let length = rustix::fs::fstat(&file).map_err(|_| Code::INVALID_VALUE)?.st_size;
        let bytes = u64::try_from(length).unwrap_or(0);
        if !whole_blocks(bytes) {
            return Err(Code::INVALID_VALUE);
        }
        let handle = next_handle();
        let physical = Physical {
            file,
            bytes,
            device: devices()?[0].ordinal,
            handle_kinds: FILE_DESCRIPTOR,
            handles: 1,
            mappings: 0,
            ours: false,
        };
        vmm().physical.insert(handle, physical);
        put(to, handle)
    }
}
