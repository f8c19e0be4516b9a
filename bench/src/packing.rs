//! How many GPUs claims need when kube-scheduler's allocator places them in the order of our devices.
//!
//! ```text
//!  sizes of a trace, random lives ─┬─► the allocator, slices as planned ───┐
//!  (lives)                         ├─► the allocator, slices reversed ─────┼─► GPUs in use, free parts of them
//!                                  │       (scheduled)                     │      (place)
//!                                  └─► best fit, which sees all GPUs ──────┘
//!                                        (capped, partitions)
//! ```

mod capped;
mod lives;
mod partitions;
mod place;
mod scheduled;

pub use scheduled::h100s;

use crate::row::Row;

/// How much is simulated.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Runs, each with random numbers of its own
    #[arg(long, default_value_t = 10)]
    runs: u64,
    /// Claims that end in a run, each followed by new ones
    #[arg(long, default_value_t = 500)]
    ends: usize,
}

/// Measures.
pub fn run(args: Args) -> anyhow::Result<Vec<Row>> {
    let mut rows = capped::run(args)?;
    rows.extend(partitions::run(args)?);
    Ok(rows)
}
