//! The node's part of Tranche: prepares the devices of ResourceClaims.
//!
//! ```text
//!  kubelet ── registration ──────────────────┐ epoch
//!     │                                      ├──► gpu_node ──► GpuNode.status
//!     │   tranche_node ──► driver_state ──────┘
//!     │                           │
//!     └─ dra ──► preparer ◄───────────┘──► driver::preparation::plan ──► executor ──► pages, CDI
//!                  │  ▲                                                     ├──► gpus ──► MIG mode and instances, MPS daemons (mps)
//!                  │  └── ledger ◄────────────────────────────────────── journal ──► audit
//!                  ├──► reporter ──► claim.status.devices, events on pods
//!  kubelet ◄── pod_resources ◄── orphans ──► unprepare
//! ```
//!
//! Each folder uses only those below it:
//!
//! | folder | has |
//! |---|---|
//! | [`app`] | puts the parts together |
//! | [`http`] | `/metrics`, `/usage`, `/healthz`, `/readyz` |
//! | [`claim`] | the kubelet's calls, Prepare and Unprepare, orphans |
//! | [`health`] | faults of GPUs: watches, checks, reports to pods, claims and the kubelet |
//! | [`share`] | compute time, usage and watchdog of held shares |
//! | [`cluster`] | the API server: claims, status, events, GpuNode |
//! | [`kubelet`] | its sockets |
//! | [`gpu`] | the driver's state; modes, partitions and daemons of the GPUs |
//! | [`ledger`] | which claim holds what: journal, audit trail |
//! | [`host`] | files, paths, installation |
//!
//! `tranche_node` has the code for the driver and for shares in use, which the CLI uses too. Tests inject
//! failures through [`host::fs`], `tranche_serving::Clock`, `tranche_node::nvml` and the `kube::Client` of the
//! API server.
#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    reason = "nobody imports this crate but its own program: a name that says all needs no line"
)]

pub mod app;
pub mod args;
pub mod claim;
pub mod cluster;
pub mod gpu;
pub mod health;
pub mod host;
pub mod http;
pub mod kubelet;
pub mod ledger;
pub mod locks;
pub mod metrics;
mod periodic;
pub mod share;
#[cfg(test)]
pub(crate) mod testing;

/// The field manager of this plugin's writes.
pub const FIELD_MANAGER: &str = "tranche-kubelet-plugin";
