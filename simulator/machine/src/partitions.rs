//! The partitions that a GPU has.
//!
//! - [`state`]: the instances that the words of the shared page describe.
//! - [`change`]: how the daemon creates and destroys instances, and how a process enters one.

pub mod change;
pub mod state;

pub use change::InstanceError;
pub use state::{ComputeInstanceView, GpuInstanceView, Partition};
