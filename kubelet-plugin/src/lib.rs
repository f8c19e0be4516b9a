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
//! [`app`] puts the parts together; [`layout`] has the paths. `tranche_node` has the code for the
//! driver and for shares in use, which the CLI uses too. Tests inject failures through [`fs`],
//! `tranche_service::Clock`, `tranche_node::nvml` and the `kube::Client` of the API server.
#![forbid(unsafe_code)]

pub mod api_server;
pub mod app;
pub mod args;
pub mod audit;
pub mod claims;
pub mod compute;
pub mod contexts;
pub mod dra;
pub mod driver_state;
pub mod events;
pub mod executor;
pub mod fs;
pub mod gpu_node;
pub mod gpu_records;
pub mod gpus;
pub mod http;
pub mod install;
pub mod journal;
pub mod layout;
pub mod ledger;
pub mod locks;
pub mod metrics;
pub mod mps;
pub mod orphans;
pub mod pod_resources;
pub mod preparer;
pub mod proto;
pub mod providers;
pub mod registration;
pub mod reporter;
mod rounds;
pub mod selinux;
pub mod sockets;
pub mod status;
pub mod sweep;
#[cfg(test)]
pub(crate) mod testing;
pub mod usage;
pub mod watchdog;

/// The field manager of this plugin's writes.
pub const FIELD_MANAGER: &str = "tranche-kubelet-plugin";
