//! The node's GPU driver, and the maintenance of shares in use.
//!
//! ```text
//!  layouts ─► root ─┬─► devices ──► the driver's device nodes; capabilities ──► those of a partition
//!                   ├─► nvml::search ─► libnvidia-ml ──► nvml ──► inventory ──► what GPUs there are
//!                   │   nvml::Session: the one that stays open, of one thread
//!                   │                   kernel's sys tree ──► vgpu ──► what of them are, or are made into, vGPUs
//!                   ├─► discover ──► the driver's files for containers
//!                   └─► libcuda ──► untested: functions that the shim has no row for
//!
//!  account pages ──► page ──► snapshots for metrics
//!       ▲              ├────► sweep: reclaims slots of dead processes
//!       │ ├────► sampler ─► compute: the GPU time that each share is granted ─► cap pages
//!       │              └────► watchdog: memory that NVML reports and no account has
//!  /proc ──► containers: which processes still have a claim's devices
//! ```
//!
//! The node plugin and `tranche run` both use it. It does not know Kubernetes, and it does not trust
//! account pages: the tenant can write them.
#![forbid(unsafe_code)]

pub mod capabilities;
pub mod compute;
pub mod containers;
pub mod devices;
pub mod discover;
pub mod inventory;
pub mod layouts;
mod mountinfo;
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
