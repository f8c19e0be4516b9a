//! All addresses that CUDA knows in this process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::code::Code;
use crate::object::Object;
use crate::pool::Pool;

/// The kind of memory at an address.
#[derive(Debug, Clone, Copy)]
pub enum MemoryKind {
    /// Memory of a GPU, from its heap.
    Device,
    /// Memory of a GPU, from a pool.
    Pooled(&'static Object<Pool>),
    /// Managed memory, for host and GPUs. It takes GPU memory while it is `resident`.
    Managed,
    /// Memory of a graph, charged by the graph pool.
    Graph,
    /// Host memory that CUDA allocated.
    Host,
    /// Host memory that the program registered.
    Registered,
    /// Reserved addresses with a physical allocation mapped to them.
    Mapped,
}

/// A stretch of addresses.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    /// The length in bytes, as the program asked.
    pub bytes: u64,
    pub kind: MemoryKind,
    /// The ordinal of its GPU.
    pub device: i32,
    /// The id of its context; 0 for memory without one.
    pub context: u64,
    /// A number that no other region has.
    pub id: u64,
    /// Whether bytes were written. If so, host memory must be returned.
    pub touched: bool,
    /// Whether `cuMemFreeAsync` has freed it in a stream that has not reached the free yet.
    pub freed: bool,
    /// Whether it is managed memory on the GPU.
    pub resident: bool,
}

impl Region {
    pub fn new(bytes: u64, kind: MemoryKind, device: i32, context: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            bytes,
            kind,
            device,
            context,
            id,
            touched: false,
            freed: false,
            resident: false,
        }
    }

    /// Whether it is memory of a GPU.
    pub fn on_device(&self) -> bool {
        matches!(
            self.kind,
            MemoryKind::Device | MemoryKind::Pooled(_) | MemoryKind::Graph | MemoryKind::Mapped
        )
    }
}

/// Regions by address.
pub type Regions = BTreeMap<u64, Region>;

/// All regions of this process.
pub fn regions() -> MutexGuard<'static, Regions> {
    static REGIONS: Mutex<Regions> = Mutex::new(BTreeMap::new());
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The region that `address` is in, and its first address.
pub fn containing(regions: &mut Regions, address: u64) -> Option<(u64, &mut Region)> {
    let (start, region) = regions.range_mut(..=address).next_back()?;
    (address - start < region.bytes).then_some((*start, region))
}

/// Checks that `bytes` from `address` are device memory. `write` also marks them as written.
pub fn check(address: u64, bytes: u64, write: bool) -> Result<(), Code> {
    if bytes == 0 {
        return Ok(());
    }
    let mut regions = regions();
    let mut at = address;
    let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    // Neighbouring mappings of reserved addresses count as one.
    while at < end {
        let (start, region) = containing(&mut regions, at).ok_or(Code::INVALID_VALUE)?;
        region.touched |= write;
        at = start + region.bytes;
        if at < end && !matches!(region.kind, MemoryKind::Mapped) {
            return Err(Code::INVALID_VALUE);
        }
    }
    Ok(())
}

/// As [`check`], for a pointer that may also be host memory unknown to CUDA.
pub fn check_unified(address: u64, bytes: u64, write: bool) -> Result<(), Code> {
    let known = containing(&mut regions(), address).is_some();
    if known {
        check(address, bytes, write)
    } else {
        Ok(())
    }
}
