//! The kernels that are known to fit: their context has enough local memory for them, and it is charged.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tranche_shim_runtime::lock::Guarded;

use crate::abi::CUfunction;
use crate::device::Device;

/// The kernels that are known to fit. All zeros means none.
pub struct Fitting {
    /// Handles, each with the device and the epoch in which it was found to fit.
    known: [AtomicU64; KNOWN],
    /// The epoch, at its place in an entry.
    epoch: AtomicU64,
    /// How many contexts were created so far; a device's primary context counts once.
    pub contexts: AtomicU32,
    /// A bit for each device whose primary context was counted.
    primaries: AtomicU64,
    /// Locked while the charge of a context changes, but never while the driver is called.
    pub charges: Guarded<()>,
}

const KNOWN: usize = 4096;

/// Above the addresses of user space: the epoch, then the device's number.
const EPOCH: u64 = 1 << 48;
const DEVICE_SHIFT: u32 = 58;
const EPOCHS: u64 = 1 << DEVICE_SHIFT;

impl Fitting {
    /// Whether a kernel is known to fit on a device.
    #[inline]
    pub fn knows(&self, device: &Device, handle: CUfunction) -> bool {
        let (place, value) = self.place(device, handle);
        place.load(Ordering::Relaxed) == value
    }

    /// The place of a kernel in the table, and the value that says that it fits.
    #[inline]
    pub fn place(&self, device: &Device, handle: CUfunction) -> (&AtomicU64, u64) {
        let handle = handle as u64;
        // An entry that was never written is 0, which is no handle in any epoch.
        let epoch = self.epoch.load(Ordering::Relaxed);
        let value = handle ^ epoch ^ u64::from(device.number) << DEVICE_SHIFT;
        let hash = handle.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - KNOWN.ilog2());
        #[expect(clippy::cast_possible_truncation, reason = "below the table's length")]
        let place = &self.known[hash as usize % KNOWN];
        (place, value)
    }

    /// Notes that a kernel fits.
    pub fn note(&self, device: &Device, handle: CUfunction) {
        let (place, value) = self.place(device, handle);
        place.store(value, Ordering::Relaxed);
    }

    /// Forgets all kernels, by a new epoch.
    pub fn forget(&self) {
        let next = |epoch: u64| Some((epoch + EPOCH) % EPOCHS);
        let former = self
            .epoch
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        if former.is_ok_and(|former| next(former) == Some(0)) {
            for place in &self.known {
                place.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Notes that a device's primary context was retained.
    pub fn add_primary(&self, device: &Device) {
        let bit = 1 << (device.number % 64);
        if self.primaries.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.add_context();
        }
    }

    /// Notes that a context was created.
    pub fn add_context(&self) {
        self.contexts.fetch_add(1, Ordering::Relaxed);
        self.forget();
    }
}
