//! Virtual memory management: physical allocations, reserved addresses, mappings.
//!
//! A physical allocation is an anonymous file, so that all its mappings, those of other processes too, have the same
//! bytes. It is charged to the GPU until its handles are released, its last mapping is removed, every descriptor that was
//! exported is closed, and every process that imported it has released it: each of these opens the file again with a shared
//! lock (`flock`), which the kernel drops when the last descriptor of that is closed in any process.
//!
//! A multicast object has handles and mappings like a physical allocation. It keeps the memory that is bound to it until that
//! is unbound, or until the object has no handle and no mapping.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, flock, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use tranche_simulator_machine::layout::Habit;

use crate::abi::{Location, ON_DEVICE};
use crate::code::Code;
use crate::device::{device, devices};
use crate::driver::has;
use crate::heap::BLOCK;
use crate::memory;
use crate::space::{MemoryKind, Region, regions};

/// cuda.h's `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    kind: u32,
    handle_kinds: u32,
    pub location: Location,
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
    pub location: Location,
    pub flags: u32,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub const FILE_DESCRIPTOR: u32 = 1;

pub struct Physical {
    pub file: OwnedFd,
    pub bytes: u64,
    pub device: i32,
    pub handle_kinds: u32,
    /// Handles not yet released, and mappings.
    pub handles: u32,
    pub mappings: u32,
    /// `dma-buf`s of it, and bindings to multicast objects.
    pub kept: u32,
    /// Whether descriptors of it were exported.
    pub is_exported: bool,
    /// Whether it is charged to this process. An imported one is charged to its exporter.
    pub is_charged: bool,
    /// The devices of a multicast object.
    pub team: Option<Team>,
}

/// The devices of a multicast object.
pub struct Team {
    /// How many devices it shall have.
    pub size: usize,
    pub devices: Vec<i32>,
    pub bound: Vec<Bound>,
}

/// Memory that is bound to a multicast object.
pub struct Bound {
    pub device: i32,
    pub offset: u64,
    pub bytes: u64,
    pub handle: u64,
}

/// A mapping of a physical allocation.
struct Mapping {
    bytes: u64,
    handle: u64,
    flags: u32,
}

pub struct Vmm {
    pub physical: BTreeMap<u64, Physical>,
    /// Reserved stretches by address.
    reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
}

pub fn vmm() -> MutexGuard<'static, Vmm> {
    static VMM: Mutex<Vmm> = Mutex::new(Vmm {
        physical: BTreeMap::new(),
        reserved: BTreeMap::new(),
        mappings: BTreeMap::new(),
    });
    VMM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notified when a device was added to a multicast object.
pub static ADDED: Condvar = Condvar::new();

/// Waits until a multicast object has all of its devices, as every use of it must.
pub fn wait_for_team(object: u64) -> Result<MutexGuard<'static, Vmm>, Code> {
    let mut vmm = vmm();
    loop {
        let team = vmm.team(object)?;
        if team.devices.len() == team.size {
            return Ok(vmm);
        }
        vmm = ADDED.wait(vmm).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Opens an allocation's file again.
fn open_again(file: BorrowedFd<'_>) -> Result<OwnedFd, Code> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|_| Code::OUT_OF_MEMORY)
}

/// Opens an allocation's file again, with a lock that keeps the allocation while that descriptor is open.
fn keep(file: BorrowedFd<'_>) -> Result<OwnedFd, Code> {
    let again = open_again(file)?;
    flock(&again, FlockOperation::LockShared).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(again)
}

pub fn next_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // 0 is not a handle; small numbers would hide programs' mistakes.
    NEXT.fetch_add(1, Ordering::Relaxed) << 12
}

pub fn whole_blocks(bytes: u64) -> bool {
    bytes != 0 && bytes.is_multiple_of(BLOCK)
}

/// Creates a physical allocation; its handle.
pub fn create(bytes: usize, properties: Properties) -> Result<u64, Code> {
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
        kept: 0,
        is_exported: false,
        is_charged: true,
        team: None,
    };
    vmm().physical.insert(handle, physical);
    Ok(handle)
}

impl Vmm {
    pub fn get(&mut self, handle: u64) -> Result<&mut Physical, Code> {
        self.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)
    }

    /// The mapping that `address` is in.
    fn mapping(&self, address: u64) -> Result<&Mapping, Code> {
        let before = self.mappings.range(..=address).next_back();
        let (start, mapping) = before.ok_or(Code::INVALID_VALUE)?;
        if address - start < mapping.bytes {
            Ok(mapping)
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    /// A multicast object's devices.
    pub fn team(&mut self, object: u64) -> Result<&mut Team, Code> {
        self.get(object)?.team.as_mut().ok_or(Code::INVALID_VALUE)
    }

    /// Ends a hold of an allocation by a `dma-buf` or a multicast object.
    pub fn let_go(&mut self, handle: u64) {
        if let Ok(physical) = self.get(handle) {
            physical.kept -= 1;
            self.free_unused(handle);
        }
    }

    /// Frees an allocation that nothing refers to any more.
    fn free_unused(&mut self, handle: u64) {
        let is_unused = self
            .physical
            .get(&handle)
            .is_some_and(|p| p.handles == 0 && p.mappings == 0 && p.kept == 0);
        let removed = is_unused.then(|| self.physical.remove(&handle)).flatten();
        let Some(mut physical) = removed else {
            return;
        };
        for bound in physical.team.take().into_iter().flat_map(|it| it.bound) {
            self.let_go(bound.handle);
        }
        if physical.is_charged
            && let Ok(device) = device(physical.device)
        {
            let free = move || device.release(physical.bytes);
            let exported = physical
                .is_exported
                .then(|| open_again(physical.file.as_fd()));
            match exported {
                Some(Ok(file))
                    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() =>
                {
                    // Waits until the kernel has closed the last descriptor.
                    std::thread::spawn(move || {
                        let wait = || flock(&file, FlockOperation::LockExclusive);
                        if rustix::io::retry_on_intr(wait).is_ok() {
                            free();
                        }
                    });
                }
                _ => free(),
            }
        }
    }

    /// The reservation that contains a range.
    fn reservation(&self, address: u64, bytes: u64) -> Option<u64> {
        let (start, length) = self.reserved.range(..=address).next_back()?;
        (address.checked_add(bytes)? <= start + length).then_some(*start)
    }
}

/// Replaces what is mapped at reserved addresses by a mapping without access.
fn vacate(address: u64, bytes: u64) -> Result<(), Code> {
    // SAFETY: the stretch is in a reservation of ours, and the caller no longer uses what is mapped there.
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

/// Reserves addresses; the first of them.
pub fn reserve(bytes: usize, alignment: usize) -> Result<u64, Code> {
    let alignment = (alignment as u64).max(BLOCK);
    let bytes = bytes as u64;
    if !whole_blocks(bytes) || !alignment.is_power_of_two() {
        return Err(Code::INVALID_VALUE);
    }
    let room = bytes.checked_add(alignment).ok_or(Code::OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address of the kernel's choice.
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
            // SAFETY: the two ends of the new mapping, which nothing else uses.
            let _ =
                unsafe { rustix::mm::munmap(from as *mut _, usize::try_from(length).unwrap_or(0)) };
        }
    }
    vmm().reserved.insert(aligned, bytes);
    Ok(aligned)
}

/// Maps a physical allocation at reserved addresses.
pub fn map(address: u64, bytes: u64, offset: usize, handle: u64) -> Result<(), Code> {
    if offset != 0 || !whole_blocks(bytes) || !address.is_multiple_of(BLOCK) {
        return Err(Code::INVALID_VALUE);
    }
    let is_object = vmm().team(handle).is_ok();
    let mut vmm = if is_object {
        wait_for_team(handle)?
    } else {
        vmm()
    };
    vmm.reservation(address, bytes).ok_or(Code::INVALID_VALUE)?;
    let taken = vmm.mappings.range(..address + bytes).next_back();
    if taken.is_some_and(|(start, mapping)| start + mapping.bytes > address) {
        return Err(Code::INVALID_VALUE);
    }
    let physical = vmm.get(handle)?;
    if bytes > physical.bytes || bytes < physical.bytes && has(Habit::WholeMaps) {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the stretch is reserved and free, and the file is as long, all checked above. There is no access before
    // `set_access`.
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
    let region = Region::new(bytes, MemoryKind::Mapped, physical.device, 0);
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

/// Removes the mappings of a range.
pub fn unmap(address: u64, bytes: u64) -> Result<(), Code> {
    let mut vmm = vmm();
    let inside: Vec<(u64, u64)> = vmm
        .mappings
        .range(address..address.saturating_add(bytes))
        .map(|(start, mapping)| (*start, mapping.bytes))
        .collect();
    // The range must consist of whole mappings.
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
            vmm.free_unused(mapping.handle);
        }
    }
    Ok(())
}

/// Sets the access to the mappings of a range: `CU_MEM_ACCESS_FLAGS_*`.
pub fn set_access(address: u64, bytes: u64, flags: u32) -> Result<(), Code> {
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

/// The access to the mapping that `address` is in: `CU_MEM_ACCESS_FLAGS_*`.
pub fn access(address: u64) -> Result<u32, Code> {
    Ok(vmm().mapping(address)?.flags)
}

/// Ends one handle of a physical allocation.
pub fn release(handle: u64) -> Result<(), Code> {
    let mut vmm = vmm();
    let physical = vmm.get(handle)?;
    physical.handles = physical.handles.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
    vmm.free_unused(handle);
    Ok(())
}

/// Adds a handle of the physical allocation that is mapped at `address`.
pub fn retain(address: u64) -> Result<u64, Code> {
    let mut vmm = vmm();
    let handle = vmm.mapping(address)?.handle;
    vmm.get(handle)?.handles += 1;
    Ok(handle)
}

/// Holds the physical allocation that is mapped at `address` for a `dma-buf`; its handle.
pub fn hold(address: u64) -> Result<u64, Code> {
    let mut vmm = vmm();
    let handle = vmm.mapping(address)?.handle;
    vmm.get(handle)?.kept += 1;
    Ok(handle)
}

/// Ends the hold of a physical allocation by a `dma-buf`.
pub fn let_go(handle: u64) {
    vmm().let_go(handle);
}

/// Ends a reservation in which nothing is mapped.
pub fn free_reserved(address: u64, bytes: usize) -> Result<(), Code> {
    let mut vmm = vmm();
    let length = bytes as u64;
    if vmm.reserved.get(&address) != Some(&length)
        || vmm
            .mappings
            .range(address..address + length)
            .next()
            .is_some()
    {
        return Err(Code::INVALID_VALUE);
    }
    vmm.reserved.remove(&address);
    // SAFETY: the reservation is ours and nothing is mapped in it.
    unsafe { rustix::mm::munmap(address as *mut _, bytes) }.map_err(|_| Code::UNKNOWN)
}

/// The properties with which a physical allocation was created.
pub fn properties(handle: u64) -> Result<Properties, Code> {
    let mut vmm = vmm();
    let physical = vmm.get(handle)?;
    if physical.team.is_some() {
        return Err(Code::INVALID_VALUE);
    }
    Ok(Properties {
        kind: PINNED,
        handle_kinds: physical.handle_kinds,
        location: Location {
            kind: ON_DEVICE,
            id: physical.device,
        },
        windows: std::ptr::null_mut(),
        compression: 0,
        rdma: 0,
        usage: 0,
        reserved: [0; 4],
    })
}

/// A file descriptor of a physical allocation, for another process.
pub fn export_file(handle: u64) -> Result<OwnedFd, Code> {
    let mut vmm = vmm();
    let physical = vmm.get(handle)?;
    if physical.handle_kinds & FILE_DESCRIPTOR == 0 {
        return Err(Code::INVALID_VALUE);
    }
    physical.is_exported = true;
    keep(physical.file.as_fd())
}

/// A handle of the physical allocation behind another process's file descriptor.
pub fn import_file(file: BorrowedFd<'_>) -> Result<u64, Code> {
    let file = keep(file).map_err(|_| Code::INVALID_VALUE)?;
    let length = rustix::fs::fstat(&file)
        .map_err(|_| Code::INVALID_VALUE)?
        .st_size;
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
        kept: 0,
        is_exported: false,
        is_charged: false,
        team: None,
    };
    vmm().physical.insert(handle, physical);
    Ok(handle)
}

/// The allocation that is mapped at `address`, and the offset of the address in it.
pub fn mapped_at(address: u64) -> Result<(u64, u64), Code> {
    let vmm = vmm();
    let handle = vmm.mapping(address)?.handle;
    let start = vmm.mappings.range(..=address).next_back();
    Ok((handle, start.map_or(0, |(start, _)| address - start)))
}
