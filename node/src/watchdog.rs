//! The watchdog detects memory that bypasses the cap. Once a second it compares the memory of each
//! process as NVML reports it with the accounts of the GPU's shares.
//!
//! ```text
//!  NVML, by process ─────────────────┐
//!  /proc: processes::owner ──────────┼─► probe: Sample ─► compare: Findings ─► metrics, events, end
//!  account pages, before and after ──┘
//! ```
//!
//! Memory that is on a GPU and in no account bypassed the shim: by a static program, an image's own copy
//! of libcuda, or a forged page. The process's cgroup and mounts, which the container runtime made, give
//! its share; nothing that the process's programs write is used.
//!
//! Decisions are pure functions of what was read ([`compare`]), so that tests can try any
//! interleaving; [`probe`] reads, [`end`] ends processes.

pub mod compare;
pub mod contexts;
pub mod end;
pub mod probe;
#[cfg(test)]
mod tests;

use std::time::Duration;

/// The interval between samples. A bypass is reported after two.
pub const INTERVAL: Duration = Duration::from_secs(1);
