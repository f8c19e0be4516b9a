//! The kernels that are known to fit: their context has enough local memory for them, and it is charged.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tranche_shim_runtime::lock::Guarded;

use crate::abi::CUfunction;
use crate::device::Device;

/// The kernels that are known to fit. All zeros means none.
pub struct Fitting {
    /// The kernels, by a hash of the handle.
    known: [Set; SETS],
    /// The epoch, at its place in an entry.
    epoch: AtomicU64,
    /// For each device, the contexts that exist or that a call creates; the primary context counts once.
    contexts: [AtomicU32; 256],
    /// A bit for each device whose primary context was counted.
    primaries: AtomicU64,
    /// Locked while the charge of a context changes, but never while the driver is called.
    pub charges: Guarded<()>,
}

/// Kernels with the same hash: handles, each with the device and the epoch in which it was found to fit.
#[repr(C, align(32))]
struct Set([AtomicU64; WAYS]);

const SETS: usize = 2048;
const WAYS: usize = 4;

/// Above the addresses of user space: the epoch, then the device's number.
const EPOCH: u64 = 1 << 48;
const DEVICE_SHIFT: u32 = 58;
const EPOCHS: u64 = 1 << DEVICE_SHIFT;

/// A kernel that fits in an epoch.
#[derive(Clone, Copy)]
pub struct Fit {
    hash: usize,
    value: u64,
}

impl Fitting {
    /// Whether a kernel is known to fit on a device.
    #[inline]
    pub fn knows(&self, device: &Device, handle: CUfunction) -> bool {
        let Fit { hash, value } = self.fit(device, handle);
        let Set(ways) = &self.known[hash % SETS];
        ways.iter().any(|way| way.load(Ordering::Relaxed) == value)
    }

    /// The entry that says that a kernel fits in this epoch.
    #[inline]
    pub fn fit(&self, device: &Device, handle: CUfunction) -> Fit {
        let handle = handle as u64;
        // An entry that was never written is 0, which is no handle in any epoch.
        let epoch = self.epoch.load(Ordering::Relaxed);
        let hash = (handle.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize;
        Fit {
            hash,
            value: handle ^ epoch ^ u64::from(device.number) << DEVICE_SHIFT,
        }
    }

    /// Notes that a kernel fits. It is found first; the one that was found first is the second, and so on.
    pub fn note(&self, Fit { hash, mut value }: Fit) {
        let Set(ways) = &self.known[hash % SETS];
        for way in ways {
            value = way.swap(value, Ordering::Relaxed);
            if value == 0 {
                break;
            }
        }
    }

    /// Forgets all kernels, by a new epoch.
    pub fn forget(&self) {
        let next = |epoch: u64| Some((epoch + EPOCH) % EPOCHS);
        let former = self
            .epoch
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        if former.is_ok_and(|former| next(former) == Some(0)) {
            for place in self.known.iter().flat_map(|Set(ways)| ways) {
                place.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Whether a device has one context at most.
    pub fn has_one_context(&self, device: &Device) -> bool {
        self.contexts(device).load(Ordering::Relaxed) <= 1
    }

    /// Whether any context of a device is known.
    #[inline]
    pub fn has_contexts(&self, device: &Device) -> bool {
        self.contexts(device).load(Ordering::Relaxed) != 0
    }

    /// Notes that a device's primary context is retained.
    pub fn add_primary(&self, device: &Device) {
        let bit = 1 << (device.number % 64);
        if self.primaries.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.add_context(device);
        }
    }

    /// Notes that a device's primary context has ended.
    pub fn end_primary(&self, device: &Device) {
        let bit = 1 << (device.number % 64);
        if self.primaries.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            self.end_context(device);
        }
    }

    /// Notes that a context is created on a device.
    pub fn add_context(&self, device: &Device) {
        self.contexts(device).fetch_add(1, Ordering::Relaxed);
        self.forget();
    }

    /// Notes that a context has ended, or was not created.
    pub fn end_context(&self, device: &Device) {
        let less = |count: u32| count.checked_sub(1);
        let _ = self
            .contexts(device)
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn contexts(&self, device: &Device) -> &AtomicU32 {
        &self.contexts[usize::from(device.number)]
    }
}
