//! What a node knows of its driver, and what it does for the shares that are in use.
//!
//! ```text
//!  driver root ──► root ──► discover ──► what containers get of the driver
//!      ├─► libcuda ──► untested: functions that the shim has no row for
//!      └─► libnvidia-ml ──► nvml ──► inventory ──► what GPUs there are
//!
//!  account pages ──► page ──► snapshots for metrics
//!       ▲              ├────► sweep: slots of the dead are given back
//!       │              ├────► sampler ─► compute: what each share is granted of its GPU's time ─► cap pages
//!       │              └────► watchdog: what NVML says and no account has
//! ```
//!
//! The node plugin and `tranche run` both stand on it. Nothing here knows of Kubernetes, and nothing
//! believes what is in an account page: the tenant can write it.
#![forbid(unsafe_code)]

pub mod compute;
pub mod discover;
pub mod inventory;
pub mod nvml;
pub mod page;
pub mod processes;
pub mod root;
pub mod sampler;
pub mod sweep;
pub mod untested;
pub mod utilization;
pub mod watchdog;
