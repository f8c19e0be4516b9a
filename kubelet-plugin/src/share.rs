//! Held shares: their compute time, their usage, and the search for memory outside of their caps.

pub mod compute;
pub mod held_device;
pub mod last_findings;
pub mod sweep;
pub mod usage;
pub mod watchdog;
