//! The compute share: GPU time as a second currency, in nanoseconds.
//!
//! ```text
//!  node ──Refill──► cap page ──granted(now)──┐
//!                                            ▼ position ≤ granted ?
//!  launch ─► price of its shape ─► batch ─► Account::take ──no──► wait for the deficit
//!               ▲ Costs                       └──yes──► position += batch
//!               └────── measured by events ◄── the driver
//! ```
//!
//! - [`refill`]: what the node grants, as a straight line over the clock, so that every nanosecond
//!   is granted, and the grant continues if the node dies;
//! - [`bucket`]: how much of it the share has used, one number for all its processes;
//! - [`batch`]: how much of it a process has taken in advance, so that a launch costs a few nanoseconds;
//! - [`costs`]: the measured GPU time of a launch by its shape: kernel, grid and block, or graph;
//! - [`overhead`]: what measuring adds to a measured time;
//! - [`kernels`]: measurements of a kernel with any grid, from which a new shape's cost is predicted;
//! - [`collective`]: the kernels that never wait;
//! - [`priority`]: the launches that wait for other shares of the GPU.
//!
//! The share pays when it launches, before the launch's time is known. What it takes beyond its grant is a
//! debt for which the next launches wait, each at most [`WAIT_NANOS`]; a larger debt is carried, and
//! repaid at half the rate. An unused grant of up to [`BURST_NANOS`] is kept.

pub mod batch;
pub mod bucket;
pub mod collective;
pub mod costs;
pub mod kernels;
#[cfg(loom)]
mod model;
pub mod overhead;
pub mod priority;
pub mod refill;

pub use batch::Batch;
pub use bucket::Bucket;
pub use costs::{Costs, LaunchSeries, Price, Shape};
pub use refill::{Refill, RefillPage};

/// Parts of a whole: rates and scales are in millionths.
pub const WHOLE: u64 = 1_000_000;

/// The rate of one percent of a GPU's time.
pub const PERCENT: u64 = WHOLE / 100;

/// How much unused grant is kept: what is granted in so many nanoseconds.
pub const BURST_NANOS: u64 = 100_000_000;

/// The longest that one launch waits for its share's debt, in nanoseconds. With kernels of up to `r / (1 - r)` of
/// this, a share gets its rate `r`; with longer ones, of `k`, it gets at most `k / (k + WAIT_NANOS)` of the GPU.
pub const WAIT_NANOS: u64 = 10_000_000_000;

/// The largest carried debt: what is granted in so many nanoseconds. The rest is cancelled, so that a
/// corrupted number does not persist.
pub const CARRIED_NANOS: u64 = 600_000_000_000;

/// `nanos` × `millionths` / 1,000,000, at most `u64::MAX`.
#[must_use]
pub const fn part(nanos: u64, millionths: u64) -> u64 {
    (nanos / WHOLE)
        .saturating_mul(millionths)
        .saturating_add((nanos % WHOLE).saturating_mul(millionths) / WHOLE)
}
