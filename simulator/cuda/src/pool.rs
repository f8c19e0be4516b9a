//! Memory pools.
//!
//! A pool keeps freed blocks up to its release threshold, which is 0 unless the program sets it. Blocks above the
//! threshold return to the GPU at once. With [`Habit::FreesWait`] they return at the next synchronization, and memory
//! that a stream frees is in use until the stream reaches the free.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::device::{Device, devices};
use crate::driver::{self, driver, has};
use crate::heap::{BLOCK, Blocks, Heap};
use crate::host;
use crate::object::{Kind, Object};

/// A memory pool of one GPU.
#[derive(Debug)]
pub struct Pool {
    pub device: i32,
    /// Its own addresses, so that it shares no block with others.
    heap: Mutex<Heap>,
    usage: Mutex<Usage>,
    /// Frees whose streams have not reached them yet.
    pending: Mutex<Vec<PendingFree>>,
    /// `CU_MEMPOOL_ATTR_REUSE_*`: three switches, all on at first.
    pub reuse: [AtomicU64; 3],
}

/// The use of a pool, in bytes.
#[derive(Debug, Default)]
pub struct Usage {
    /// Allocated, as the program asked.
    pub used: u64,
    pub used_high: u64,
    /// Charged to the GPU, in whole blocks.
    pub reserved: u64,
    pub reserved_high: u64,
    /// The part of `reserved` that no allocation uses.
    kept: u64,
    /// How much may stay reserved without use.
    pub threshold: u64,
    /// The number of allocations. They outlive a pool that is destroyed.
    live: u64,
}

impl Usage {
    /// Returns to the GPU what is kept above `limit` reserved bytes, in whole blocks; returns the number of bytes.
    pub fn trim(&mut self, device: &Device, limit: u64) -> u64 {
        let unused = self.reserved.saturating_sub(limit).min(self.kept);
        let excess = unused - unused % BLOCK;
        if excess > 0 {
            self.kept -= excess;
            self.reserved -= excess;
            device.release(excess);
        }
        excess
    }
}

/// A pending free, which is due when its stream reaches it.
#[derive(Debug, Clone, Copy)]
pub struct PendingFree {
    pub address: u64,
    /// The allocation's id, which no later one at the address has.
    pub id: u64,
    /// The stream, by its address.
    pub stream: usize,
    /// The work that it comes after: a mark of a GPU, and a host function.
    pub after: (usize, u64),
    pub function: u64,
}

impl PendingFree {
    fn is_due(&self) -> bool {
        let (gpu, mark) = self.after;
        driver::has_reached(gpu, mark) && host::is_done(self.function)
    }
}

impl Kind for Pool {
    const TAG: u64 = 0x504f_4f00_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

/// All pools of this process. A destroyed pool stays as long as it has allocations.
static POOLS: Mutex<Vec<&'static Object<Pool>>> = Mutex::new(Vec::new());

impl Pool {
    /// Makes a pool of the GPU `device`.
    pub fn create(device: i32, blocks: Blocks) -> &'static Object<Self> {
        let pool = Object::create(Self {
            device,
            heap: Mutex::new(Heap::new(blocks)),
            usage: Mutex::default(),
            pending: Mutex::default(),
            reuse: [const { AtomicU64::new(1) }; 3],
        });
        POOLS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(pool);
        pool
    }

    pub fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `bytes` in blocks: first those that the pool keeps, then more from the GPU.
    pub fn charge(&self, device: &Device, bytes: u64) -> Result<(), Code> {
        let mut usage = self.usage();
        let again = bytes.min(usage.kept);
        device.charge(bytes - again)?;
        usage.kept -= again;
        usage.reserved += bytes - again;
        usage.reserved_high = usage.reserved_high.max(usage.reserved);
        Ok(())
    }

    fn pending(&self) -> MutexGuard<'_, Vec<PendingFree>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the frees that are due out of the list, and all of the stream `own` (its address): they come before
    /// whatever is queued in that stream next.
    pub fn take_due_frees(&self, own: Option<usize>) -> Vec<PendingFree> {
        self.pending()
            .extract_if(.., |free| own == Some(free.stream) || free.is_due())
            .collect()
    }

    /// Takes the oldest pending free out of the list.
    pub fn take_oldest_free(&self) -> Option<PendingFree> {
        let mut pending = self.pending();
        (!pending.is_empty()).then(|| pending.remove(0))
    }

    /// Adds a free that is due when its stream reaches it.
    pub fn add_pending_free(&self, free: PendingFree) {
        self.pending().push(free);
    }

    /// Returns to the GPU what the pool keeps above `limit` reserved bytes; returns the number of bytes.
    pub fn trim(&self, device: &Device, limit: u64) -> u64 {
        self.usage().trim(device, limit)
    }

    /// Returns to the GPU what the pool keeps above its release threshold.
    pub fn trim_to_threshold(&self, device: &Device) {
        let mut usage = self.usage();
        let threshold = usage.threshold;
        usage.trim(device, threshold);
    }

    /// Records an allocation of `bytes`.
    pub fn record_allocation(&self, bytes: u64) {
        let mut usage = self.usage();
        usage.used += bytes;
        usage.used_high = usage.used_high.max(usage.used);
        usage.live += 1;
    }
}

impl Object<Pool> {
    /// Records that an allocation of `bytes` was freed, and with it `blocks` bytes of whole blocks, which the pool keeps.
    pub fn record_free(&'static self, device: &Device, bytes: u64, blocks: u64) {
        let mut usage = self.usage();
        usage.used = usage.used.saturating_sub(bytes);
        usage.kept += blocks;
        usage.live = usage.live.saturating_sub(1);
        let threshold = usage.threshold;
        // A destroyed pool keeps nothing.
        if !has(Habit::FreesWait) || !self.is_alive() {
            usage.trim(device, threshold);
        }
        self.end_if_unused(usage);
    }

    /// Ends the handle. The pool itself ends with its last allocation, and keeps nothing until then.
    pub fn retire(&'static self, device: &Device) -> Result<(), Code> {
        let mut usage = self.usage();
        if !self.end_handle() {
            return Err(Code::INVALID_VALUE);
        }
        usage.threshold = 0;
        usage.trim(device, 0);
        self.end_if_unused(usage);
        Ok(())
    }

    /// Ends a pool that was destroyed and has no allocation. Both become true under the lock of `usage`, so one caller
    /// sees them.
    fn end_if_unused(&'static self, usage: MutexGuard<'_, Usage>) {
        let is_unused = usage.live == 0 && !self.is_alive();
        drop(usage);
        if !is_unused {
            return;
        }
        // SAFETY: it was destroyed, and has no allocation.
        unsafe { self.heap().unmap() };
        POOLS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|pool| !std::ptr::eq(*pool, self));
        // SAFETY: nothing allocates from it any more, so only one call frees the last allocation.
        unsafe { self.quarantine() };
    }
}

/// All pools of a GPU.
pub fn pools_of(device: &Device) -> Vec<&'static Object<Pool>> {
    let pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let of_device = pools.iter().filter(|pool| pool.device == device.ordinal);
    of_device.copied().collect()
}

/// The default pool and the current pool of a GPU.
#[derive(Debug)]
pub struct DevicePools {
    /// The pool that the driver made.
    pub default: &'static Object<Pool>,
    /// The pool of `cuMemAllocAsync`.
    pub current: Mutex<&'static Object<Pool>>,
}

impl DevicePools {
    pub fn of(device: &Device) -> Result<&'static Self, Code> {
        static ALL: OnceLock<Vec<DevicePools>> = OnceLock::new();
        let (driver, devices) = (driver()?, devices()?);
        let all = ALL.get_or_init(|| {
            let blocks = Blocks::of(&driver.shared.header);
            let default = devices
                .iter()
                .map(|device| Pool::create(device.ordinal, blocks));
            default
                .map(|default| DevicePools {
                    default,
                    current: Mutex::new(default),
                })
                .collect()
        });
        let index = usize::try_from(device.ordinal).map_err(|_| Code::INVALID_DEVICE)?;
        all.get(index).ok_or(Code::INVALID_DEVICE)
    }

    /// The pool of `cuMemAllocAsync`.
    pub fn current(&self) -> MutexGuard<'_, &'static Object<Pool>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
