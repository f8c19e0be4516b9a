//! All time limits of the suite, in seconds of the pulse (`pulse.rs`), which are longer on a busy machine.
//!
//! Most tests check that something happens, and wait for it up to [`USUAL`]. Benchmarks and unit tests in paused time check how fast
//! it happens. The other limits are promises of SPECIFICATION.md that only a cluster shows.

use std::time::Duration;

/// How long to wait, by the pulse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    seconds: u64,
}

/// For all that must happen.
pub const USUAL: Limit = Limit::of(60);
/// For steps that the kubelet tries a second time, which takes more than a minute.
pub const TRIED_AGAIN: Limit = Limit::of(180);
/// For dozens of pods that start or end on two cores.
pub const BURST: Limit = Limit::of(180);

/// The page shows what the API server has.
pub const LIVE: Limit = Limit::of(2);
/// The slices exist again after a registration.
pub const REPUBLISHED: Limit = Limit::of(5);
/// A deleted slice or GpuNode exists again.
pub const HEALED: Limit = Limit::of(10);
/// The devices of a GPU with a fault are tainted.
pub const FAULT_TAINTED: Limit = Limit::of(5);
/// The status of a pod shows the fault of its GPU.
pub const FAULT_TOLD: Limit = Limit::of(10);
/// The usage API is served without the replica that was killed.
pub const SERVED_AGAIN: Limit = Limit::of(15);
/// The kubelet deletes the slices of a plugin that is gone, at least 30 s after its connection closed.
pub const WIPED: Limit = Limit::of(45);

/// The time in which nobody may write a slice of a plugin that is gone: with the 30 s before, the node has no plugin for more than
/// 40 s.
pub const STILL_AWAY: Limit = Limit::of(11);
/// The time in which nobody may write if nothing changes.
pub const QUIET: Limit = Limit::of(15);

/// A wait ends after this many times its limit by the clock: then the machine or the API server does not recover.
const CEILING: u32 = 10;

impl Limit {
    const fn of(seconds: u64) -> Self {
        Self { seconds }
    }

    /// The limit by the pulse.
    #[must_use]
    pub const fn seconds(self) -> u64 {
        self.seconds
    }

    /// The limit by the clock, whatever the machine does.
    #[must_use]
    pub fn ceiling(self) -> Duration {
        Duration::from_secs(self.seconds) * CEILING
    }
}
