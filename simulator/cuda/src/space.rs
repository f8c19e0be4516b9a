//! Every address that CUDA knows in this process, and what it is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::code::Code;
use crate::object::Object;
use crate::pool::Pool;

/// What an address is.
#[derive(Debug, Clone, Copy)]
pub enum What {
    /// Memory of a GPU from its heap.
    Device,
    /// The same, from a pool.
    Pooled(&'static Object<Pool>),
    /// Managed memory: both sides may touch it. A GPU has it while it is `resident`.
    Managed,
    /// A graph's memory whose physical side the graph pool has.
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
    /// Length in bytes, as the program asked.
    pub bytes: u64,
    pub what: What,
    /// Ordinal of its GPU.
    pub device: i32,
    /// The id of its context; 0 for memory without one.
    pub context: u64,
    /// Tells it from earlier regions at the same address.
    pub id: u64,
    /// Whether bytes were ever written: then the host memory must be given back.
    pub touched: bool,
    /// Whether `cuMemFreeAsync` has freed it and its stream has not got there.
    pub freed: bool,
    /// Whether it is managed memory that the GPU has.
    pub resident: bool,
}

impl Region {
    pub fn new(bytes: u64, what: What, device: i32, context: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            bytes,
            what,
            device,
            context,
            id,
            touched: false,
            freed: false,
            resident: false,
        }
    }

    /// Whether the GPU is where it lives.
    pub fn on_device(&self) -> bool {
        matches!(
            self.what,
            What::Device | What::Pooled(_) | What::Graph | What::Mapped
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

/// Checks that `bytes` from `address` may be used as device memory; `write` also
/// marks them as written.
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
        if at < end && !matches!(region.what, What::Mapped) {
            return Err(Code::INVALID_VALUE);
        }
    }
    Ok(())
}

/// The same for a pointer that may also be plain host memory, of which CUDA knows
/// nothing.
pub fn check_unified(address: u64, bytes: u64, write: bool) -> Result<(), Code> {
    let known = containing(&mut regions(), address).is_some();
    if known {
        check(address, bytes, write)
    } else {
        Ok(())
    }
}
