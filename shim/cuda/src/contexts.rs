//! Calls in progress that create, end or change contexts. Such calls must know of each other.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tranche_shim_core::Underway;
use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_core::physical::Mark;
use tranche_shim_core::table::stamped;
use tranche_shim_runtime::lock::Guarded;

use crate::abi::{CUcontext, CUdevice};
use crate::device::Device;
use crate::driver::real;
use crate::keys::{Kind, key};
use crate::stream::current_context;

/// A process's contexts. All zeros means none.
pub struct Contexts {
    /// Locked while the result of a call is noted, but never while the driver is called.
    pub noting: Guarded<Endings>,
    /// Calls that set a limit.
    pub limits: Underway,
    /// Calls that create or end other contexts than primary ones.
    pub changing: Underway,
    /// For each device, the calls that may create or end its primary context.
    primaries: [Underway; MAX_SHARES],
    /// How many calls so far may have ended contexts.
    ended: AtomicU64,
    /// Whether a call has made green contexts. They have handles, and no memory that is known.
    has_green: AtomicBool,
}

/// An instant before a context ended.
#[derive(Clone, Copy, Default)]
pub struct Ending {
    /// What was allocated in it is stamped with this number or less ([`Contexts::stamp`]).
    pub ended: u64,
    /// Mappings to its arrays were noted before this instant.
    pub mark: Mark,
}

/// For each device, the last instant at which a call began to end its existing primary context.
pub struct Endings([(bool, Ending); MAX_SHARES]);

impl Endings {
    /// Notes an ending. Allocations in a later context with the same handle are younger.
    pub fn note(&mut self, device: &Device, ending: Ending) {
        let (known, last) = &mut self.0[usize::from(device.number) % MAX_SHARES];
        *last = Ending {
            ended: last.ended.max(ending.ended),
            mark: last.mark.max(ending.mark),
        };
        *known = true;
    }

    /// The last ending; `None` if there was none.
    pub fn last(&self, device: &Device) -> Option<Ending> {
        let (known, last) = self.0[usize::from(device.number) % MAX_SHARES];
        known.then_some(last)
    }
}

impl Contexts {
    /// Calls that may create or end a device's primary context.
    pub fn primary(&self, device: &Device) -> &Underway {
        &self.primaries[usize::from(device.number) % MAX_SHARES]
    }

    /// Notes that a call may make green contexts.
    pub fn add_green(&self) {
        self.has_green.store(true, Ordering::Relaxed);
    }

    /// Whether there may be green contexts.
    pub fn has_green(&self) -> bool {
        self.has_green.load(Ordering::Relaxed)
    }

    /// Must be called before a call that may end contexts. Allocations in these contexts are stamped with the returned
    /// number or less; allocations in later contexts with the same handles are stamped with more.
    pub fn begin_end(&self) -> u64 {
        self.ended.fetch_add(1, Ordering::AcqRel)
    }

    /// A context with its stamp, for an entry of the table.
    #[inline]
    pub fn stamp(&self, context: CUcontext) -> u64 {
        if context == 0 {
            return 0;
        }
        stamped(context as u64, self.ended.load(Ordering::Acquire))
    }

    /// The calling thread's context with its stamp, for an entry of the table.
    #[inline]
    pub fn current(&self) -> u64 {
        self.stamp(current_context())
    }
}

/// The key under which a device's primary context is noted. A device's handle may be 0.
pub fn primary_key(device: CUdevice) -> u64 {
    key(Kind::Primary, u64::from(device.unsigned_abs()) + 1)
}

/// The handle of a device's primary context, if there is one, by retaining it once more, which the driver may refuse after a
/// fault.
pub fn primary_handle(device: CUdevice) -> Option<CUcontext> {
    if !has_primary(device) {
        return None;
    }
    let mut context = 0;
    // SAFETY: writes to the local handle; the reference is given back at once.
    let result = unsafe {
        let result =
            real!(cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice))(&raw mut context, device);
        if result.is_ok() {
            real!(cuDevicePrimaryCtxRelease_v2: fn(CUdevice))(device);
        }
        result
    };
    result.is_ok().then_some(context)
}

/// Whether a device has a primary context.
pub fn has_primary(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: writes to the local numbers.
    let result = unsafe {
        real!(cuDevicePrimaryCtxGetState: fn(CUdevice, *mut u32, *mut i32))(
            device,
            &raw mut flags,
            &raw mut active,
        )
    };
    result.is_ok() && active != 0
}
