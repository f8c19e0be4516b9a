//! The data of a process about its launches.

use core::sync::atomic::{AtomicU64, Ordering};

use tranche_shim_core::compute::priority::{Queue, Work};
use tranche_shim_core::compute::{Batch, Costs};
use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_runtime::lock::Guarded;
use tranche_shim_runtime::sys;

use crate::abi::CUcontext;
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
    /// The stream captures in progress.
    pub captures: Captures,
    /// When the last launch began that had to read the share's grant.
    pub begun: AtomicU64,
    loads: [Load; MAX_SHARES],
}

/// What the process has launched on a device of a priority. All zeros means nothing.
pub struct Load {
    /// With high priority.
    pub work: Work,
    /// With low priority.
    pub queue: Queue,
}

const BATCHES: usize = 8;

impl Launches {
    /// What the process has launched on a device.
    pub fn load(&self, device: &Device) -> &Load {
        &self.loads[usize::from(device.number) % MAX_SHARES]
    }

    /// The calling thread's batch.
    #[inline]
    pub fn batch(&self, device: &Device) -> &Batch {
        let own = sys::thread().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let nth = own as usize % BATCHES;
        &self.batches[usize::from(device.number) % MAX_SHARES][nth]
    }
}

/// The captures in progress. All zeros means none.
pub struct Captures {
    /// How many there are. While it is not 0, every launch asks the driver about its stream.
    count: AtomicU64,
    list: Guarded<List>,
}

struct List {
    known: [Capture; MOST],
    /// Captures for which there was no place. Their streams' ends are not noticed.
    others: u64,
}

/// The captures of a process whose streams are known.
const MOST: usize = 64;

/// A capture; all zeros mean a free place.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Capture {
    /// A number that stands for the stream.
    pub stream: u64,
    /// The stream's context.
    pub context: CUcontext,
}

impl Captures {
    /// Whether any stream is captured.
    #[inline]
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Adds a capture.
    #[inline(never)]
    pub fn add(&self, capture: Capture) {
        self.list.with(|list| {
            match list.known.iter_mut().find(|place| place.stream == 0) {
                Some(place) => *place = capture,
                None => list.others += 1,
            }
            self.count.fetch_add(1, Ordering::Relaxed);
        });
    }

    /// Removes a stream's capture, and returns its context. If it is not known, removes one of those that are not, if `any`.
    #[inline(never)]
    pub fn remove(&self, stream: u64, any: bool) -> Option<CUcontext> {
        self.list.with(|list| {
            let place = list.known.iter_mut().find(|place| place.stream == stream);
            if place.is_none() {
                list.others = list.others.checked_sub(1).filter(|_| any)?;
            }
            self.count.fetch_sub(1, Ordering::Relaxed);
            place.map(|place| core::mem::take(place).context)
        })
    }

    /// Forgets the captures of a context that has ended.
    pub fn forget(&self, context: CUcontext) {
        self.list.with(|list| {
            for place in &mut list.known {
                if place.stream != 0 && place.context == context {
                    place.stream = 0;
                    self.count.fetch_sub(1, Ordering::Relaxed);
                }
            }
        });
    }
}
