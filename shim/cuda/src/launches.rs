//! The data of a process about its launches.

use core::sync::atomic::AtomicU64;

use tranche_shim_core::compute::{Batch, Costs};
use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_runtime::sys;

use crate::device::Device;
use crate::measure::Measuring;

/// The data of a process about its launches. All zeros means none yet.
pub struct Launches {
    /// Several for each device; a thread always uses the same one.
    batches: [[Batch; BATCHES]; MAX_SHARES],
    /// How long launches of each shape take.
    pub costs: Costs,
    /// Launches that are being measured.
    pub measuring: Measuring,
    /// An upper bound of the stream captures in progress: the end of a capture with its stream or context is not noticed.
    /// While it is not 0, every launch asks the driver about its stream.
    pub captures: AtomicU64,
    /// When the last launch began that had to read the share's grant.
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
