//! Calls under way that make, end or change contexts. Such calls must know of each other.

use core::sync::atomic::{AtomicU64, Ordering};

use tranche_shim_core::Underway;
use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_core::physical::Mark;
use tranche_shim_core::table::stamped;
use tranche_shim_runtime::lock::Guarded;

use crate::abi::CUcontext;
use crate::device::Device;
use crate::stream::current_context;

/// A process's contexts. All zeros means none.
pub struct Contexts {
    /// Locked while the result of a call is noted; never while the driver is called.
    pub noting: Guarded<Endings>,
    /// Calls that set a limit.
    pub limits: Underway,
    /// For each device, calls after which its primary context may be there, or gone.
    primaries: [Underway; MAX_SHARES],
    /// How many calls so far may have ended contexts.
    ended: AtomicU64,
}

/// An instant before a context ended.
#[derive(Clone, Copy, Default)]
pub struct Ending {
    /// What was allocated in it is stamped with this number or less ([`Contexts::stamp`]).
    pub ended: u64,
    /// What it showed was noted before.
    pub mark: Mark,
}

/// For each device, the last instant at which a call began to end its primary context, which was there.
pub struct Endings([(bool, Ending); MAX_SHARES]);

impl Endings {
    /// What is allocated in contexts that get the handle of the primary one is younger than that.
    pub fn note(&mut self, device: &Device, ending: Ending) {
        let (known, last) = &mut self.0[usize::from(device.number) % MAX_SHARES];
        *last = Ending {
            ended: last.ended.max(ending.ended),
            mark: last.mark.max(ending.mark),
        };
        *known = true;
    }

    /// `None` where no call ended it.
    pub fn last(&self, device: &Device) -> Option<Ending> {
        let (known, last) = self.0[usize::from(device.number) % MAX_SHARES];
        known.then_some(last)
    }
}

impl Contexts {
    /// Calls that concern a device's primary context.
    pub fn primary(&self, device: &Device) -> &Underway {
        &self.primaries[usize::from(device.number) % MAX_SHARES]
    }

    /// Before a call at which contexts may end: what is allocated in them until now is stamped with this number or
    /// less, and what is allocated in contexts that get their handles is stamped with more.
    pub fn begin_end(&self) -> u64 {
        self.ended.fetch_add(1, Ordering::AcqRel)
    }

    /// A context for an entry of the table.
    #[inline]
    pub fn stamp(&self, context: CUcontext) -> u64 {
        if context == 0 {
            return 0;
        }
        stamped(context as u64, self.ended.load(Ordering::Acquire))
    }

    /// The calling thread's context, for an entry of the table.
    #[inline]
    pub fn current(&self) -> u64 {
        self.stamp(current_context())
    }
}
