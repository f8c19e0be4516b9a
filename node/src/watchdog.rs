//! The watchdog: the second line of the cap. Once a second it compares what NVML says that each process
//! holds of a GPU with what the accounts of the GPU's shares say.
//!
//! ```text
//!  NVML, by process ─────────────────┐
//!  /proc: cgroup, mounts ─► owner ───┼─► probe: Sample ─► compare: Findings ─► metrics, events, end
//!  account pages, before and after ──┘
//! ```
//!
//! What is on a GPU and in no account went around the shim: by a static program, by an image's own copy of
//! libcuda, by a forged page. It is attributed to a share by what the container runtime gave the process,
//! its cgroup and its mounts, and not by anything that the process's programs write.
//!
//! Decisions are pure functions of what was read ([`compare`]), so that they can be tried against any
//! interleaving; [`probe`] reads, [`end`] acts.

pub mod compare;
pub mod contexts;
pub mod end;
pub mod owner;
pub mod probe;
#[cfg(test)]
mod tests;

use std::time::Duration;

/// From one sample to the next. A bypass is named after two.
pub const INTERVAL: Duration = Duration::from_secs(1);
