//! The node's GPU driver, and the maintenance of shares in use.
//!
//! ```text
//!  layouts ─► root ─┬─► devices ──► the driver's device nodes; capabilities ──► those of a partition
//!                   ├─► nvml::search ─► libnvidia-ml ──► nvml ──► inventory ──► what GPUs there are
//!                   │                   kernel's sys tree ──► vgpu ──► what of them are, or are made into, vGPUs
//!                   ├─► discover ──► the driver's files for containers
//!                   └─► libcuda ──► untested: functions that the shim has no row for
//!
//!  account pages ──► page ──► snapshots for metrics
//!       ▲              ├────► sweep: reclaims slots of dead processes
//!       │ ├────► sampler ─► compute: the GPU time that each share is granted ─► cap pages
//!       │              └────► watchdog: memory that NVML reports and no account has
//!  /proc ──► processes: which shares they use, to whom they belong, and which still have a claim's devices
//! ```
//!
//! One thread owns the NVML that stays open while shares are in use ([`nvml::Session`]).
//!
//! The node plugin and `tranche run` both use it. It does not know Kubernetes, and it does not trust
//! account pages: the tenant can write them.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod capabilities;
pub mod compute;
pub mod devices;
pub mod discover;
pub mod health;
pub mod inventory;
pub mod layouts;
pub mod nvml;
pub mod page;
pub mod processes;
pub mod root;
pub mod sampler;
pub mod sweep;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod untested;
pub mod usage;
pub mod utilization;
pub mod vfio;
pub mod vgpu;
pub mod watchdog;
pub mod withheld;
