//! What a node knows of its driver, and what it does for the shares that are in use.
//!
//! ```text
//!  layouts ─► root ─┬─► devices ──► the driver's device nodes
//!                   ├─► nvml::search ─► libnvidia-ml ──► nvml ──► inventory ──► what GPUs there are
//!                   ├─► discover ──► what containers get of the driver
//!                   └─► libcuda ──► untested: functions that the shim has no row for
//!
//!  account pages ──► page ──► snapshots for metrics
//!       ▲              ├────► sweep: slots of the dead are given back
//!       │              ├────► sampler ─► compute: what each share is granted of its GPU's time ─► cap pages
//!       │              └────► watchdog: what NVML says and no account has
//!  /proc ──► containers: which processes still have a claim's devices
//! ```
//!
//! The node plugin and `tranche run` both stand on it. Nothing here knows of Kubernetes, and nothing
//! believes what is in an account page: the tenant can write it.
#![forbid(unsafe_code)]

pub mod compute;
pub mod containers;
pub mod devices;
pub mod discover;
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
pub mod utilization;
pub mod watchdog;
pub mod withheld;
