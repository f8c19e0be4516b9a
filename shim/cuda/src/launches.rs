//! What a process knows of its launches.

use core::sync::atomic::AtomicU64;

use tranche_shim_core::compute::{Batch, Costs};
use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_runtime::sys;

use crate::measure::Measuring;
use crate::share::Device;

/// What a process knows of its launches. All zeros is nothing.
pub struct Launches {
    /// For each device, some: a thread uses the same one every time.
    batches: [[Batch; BATCHES]; MAX_SHARES],
    /// What its shapes take.
    pub costs: Costs,
    /// Launches that are being measured.
    pub measuring: Measuring,
    /// Captures of streams into graphs that are under way, at most: nobody says when one ended with its stream or
    /// context. While there are any, every launch asks its stream.
    pub captures: AtomicU64,
    /// When a launch last began that had to ask the share.
    pub begun: AtomicU64,
}

const BATCHES: usize = 8;

impl Launches {
    /// The calling thread's batch.
    #[inline]
    pub fn batch(&self, device: &Device) -> &Batch {
        let own = sys::thread().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let nth = own as usize % BATCHES;
        &self.batches[usize::from(device.number) % MAX_SHARES][nth]
    }
}
