//! `dma-buf`s of device memory.
//!
//! The driver duplicates the whole memory objects of the range, and frees its duplicates when the last reference to the
//! `dma-buf` is gone (`nv-dmabuf.c` of NVIDIA's open kernel modules). Here a `dma-buf` is one end of a
//! socket pair: like a `dma-buf`, it cannot be opened again by its path in `/proc`, and the other end sees when its last
//! descriptor is closed, in any process. Nothing can be read, written or mapped by it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::code::Code;
use crate::device::device;
use crate::heap::BLOCK;
use crate::heap_objects;
use crate::memory::PAGE;
use crate::space::{MemoryKind, Regions, regions};
use crate::vmm;

/// A memory object that is held until this is dropped.
enum HeldObject {
    Heap(u64),
    Physical(u64),
}

impl Drop for HeldObject {
    fn drop(&mut self) {
        match self {
            Self::Heap(number) => heap_objects::let_go(*number),
            Self::Physical(handle) => vmm::let_go(*handle),
        }
    }
}

/// A memory object by its addresses.
struct Object {
    start: u64,
    end: u64,
    device: i32,
    is_mapped: bool,
}

/// The object at an address. For a small allocation it is the whole block.
fn object_at(regions: &Regions, address: u64) -> Option<Object> {
    let before = regions.range(..=address).next_back();
    let after = regions.range(address..).next();
    before.into_iter().chain(after).find_map(|(&from, region)| {
        let is_mapped = match region.kind {
            MemoryKind::Device => false,
            MemoryKind::Mapped => true,
            // cuda.h: ranges of cuMemAlloc, and of cuMemAddressReserve with all of it mapped.
            _ => return None,
        };
        let object = Object {
            start: from & !(BLOCK - 1),
            end: (from + region.bytes).next_multiple_of(BLOCK),
            device: region.device,
            is_mapped,
        };
        (object.start..object.end)
            .contains(&address)
            .then_some(object)
    })
}

/// Holds the objects of a range: one allocation, or adjacent mappings of one GPU's memory.
fn keep(start: u64, end: u64) -> Result<Vec<HeldObject>, Code> {
    let regions = regions();
    let first = object_at(&regions, start).ok_or(Code::INVALID_VALUE)?;
    if device(first.device)?.state.dma_buf == 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    if !first.is_mapped {
        if end > first.end {
            return Err(Code::INVALID_VALUE);
        }
        let number = heap_objects::hold(first.device, first.start, first.end - first.start);
        return Ok(vec![HeldObject::Heap(number)]);
    }
    let mut kept = Vec::new();
    let mut at = start;
    while at < end {
        let object = object_at(&regions, at).ok_or(Code::INVALID_VALUE)?;
        if !object.is_mapped || object.device != first.device {
            return Err(Code::INVALID_VALUE);
        }
        kept.push(HeldObject::Physical(vmm::hold(at)?));
        at = object.end;
    }
    Ok(kept)
}

/// A `dma-buf` of a range of addresses.
pub fn make(start: u64, bytes: u64) -> Result<OwnedFd, Code> {
    let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    if bytes == 0 || !start.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
        return Err(Code::INVALID_VALUE);
    }
    let kept = keep(start, end)?;
    let (given, mut own) = UnixStream::pair().map_err(|_| Code::OUT_OF_MEMORY)?;
    std::thread::spawn(move || {
        // Until the kernel has closed the last descriptor.
        let _ = std::io::copy(&mut own, &mut std::io::sink());
        drop(kept);
    });
    Ok(given.into())
}
