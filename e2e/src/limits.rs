//! All time limits of the suite, in seconds of the pulse (`pulse.rs`): what a busy machine needs counts more than it has.
//!
//! A test says that something happens, and waits for it up to [`USUAL`]. How fast it happens is another test's: a benchmark's, or a
//! unit test's in paused time; here are the few promises of SPECIFICATION.md that only a cluster shows.

use std::time::Duration;

/// How long to wait, by the pulse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    seconds: u64,
}

/// It happens.
pub const USUAL: Limit = Limit::of(60);
/// What the kubelet tries a second time: that takes it more than a minute.
pub const TRIED_AGAIN: Limit = Limit::of(180);
/// Dozens of pods start or end on two cores.
pub const BURST: Limit = Limit::of(180);

/// The page shows what the API server has.
pub const LIVE: Limit = Limit::of(2);
/// After a registration the slices are there again.
pub const REPUBLISHED: Limit = Limit::of(5);
/// A deleted slice or GpuNode is there again.
pub const HEALED: Limit = Limit::of(10);
/// The usage API is served without the replica that was killed.
pub const SERVED_AGAIN: Limit = Limit::of(15);
/// The kubelet deletes the slices of a plugin that is gone: 30 s after its connection closed, and some more.
pub const WIPED: Limit = Limit::of(45);

/// So long nobody may write a slice of a plugin that is gone: with the 30 s before, the node has no plugin for more than 40 s.
pub const STILL_AWAY: Limit = Limit::of(11);
/// So long nobody may write where nothing changes.
pub const QUIET: Limit = Limit::of(15);

/// A test that is still waiting after so many times its limit ends: the machine, or the API server, does not come back.
const CEILING: u32 = 10;

impl Limit {
    const fn of(seconds: u64) -> Self {
        Self { seconds }
    }

    /// By the pulse.
    #[must_use]
    pub const fn seconds(self) -> u64 {
        self.seconds
    }

    /// By the clock, whatever the machine does.
    #[must_use]
    pub fn ceiling(self) -> Duration {
        Duration::from_secs(self.seconds) * CEILING
    }
}
