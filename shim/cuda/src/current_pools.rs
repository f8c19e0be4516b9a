//! The pool from which each device allocates, as the driver has said, so that not every allocation asks.

use core::sync::atomic::{AtomicU64, Ordering};

use tranche_shim_core::paths::MAX_SHARES;

use crate::abi::CUresult;
use crate::device::Device;
use crate::driver::Call;

/// The pool from which each device allocates. All zeros means that the driver was not asked yet.
pub struct CurrentPools {
    /// The calls in progress that may change a current pool, in the low bits, and above them the number of those that have
    /// ended.
    switches: AtomicU64,
    /// By device: the pool's place + 1 in the low bits, and above it the number of switches when the driver was asked.
    places: [AtomicU64; MAX_SHARES],
}

/// The bits of a place, and of the number of calls in progress.
const LOW_BITS: u32 = 16;
const LOW: u64 = (1 << LOW_BITS) - 1;

impl CurrentPools {
    /// The state of the switches.
    #[inline]
    pub fn switches(&self) -> u64 {
        self.switches.load(Ordering::Acquire)
    }

    /// Whether no current pool changed since the switches had this state.
    #[inline]
    pub fn was_stable(&self, switches: u64) -> bool {
        switches & LOW == 0 && self.switches() == switches
    }

    /// The place of a device's current pool, if it is known in this state of the switches.
    #[inline]
    pub fn place(&self, device: &Device, switches: u64) -> Option<usize> {
        let found = self.places.get(usize::from(device.number))?;
        let found = found.load(Ordering::Relaxed);
        let place = usize::try_from(found & LOW).ok()?;
        let is_current = found ^ place as u64 == switches;
        is_current.then_some(place)?.checked_sub(1)
    }

    /// Notes a device's current pool, about which the driver was asked in a stable state of the switches.
    pub fn note(&self, device: &Device, switches: u64, place: usize) {
        if let Some(noted) = self.places.get(usize::from(device.number)) {
            noted.store(switches | (place as u64 + 1), Ordering::Relaxed);
        }
    }

    /// Makes a call that may change a current pool.
    pub fn switch(&self, driver: Call<'_>) -> CUresult {
        self.switches.fetch_add(1, Ordering::AcqRel);
        let result = driver.make();
        self.switches.fetch_add(LOW, Ordering::AcqRel);
        result
    }
}
