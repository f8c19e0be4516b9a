//! ResourceClaim to ready device: the node's half of Tranche.
//!
//! ```text
//!  kubelet ── registration ──────────────────┐ epoch
//!     │                                      ├──► gpu_node ──► GpuNode.status
//!     │   tranche_node ──► driver_state ──────┘
//!     │                           │
//!     └─ dra ──► preparer ◄───────────┘──► driver::preparation::plan ──► executor ──► pages, CDI
//!                  │  ▲                                                     │
//!                  │  └── ledger ◄────────────────────────────────────── journal
//!                  ├──► aftermath ──► claim.status.devices, events on pods
//!  kubelet ◄── pod_resources ◄── orphans ──► unprepare
//! ```
//!
//! [`app`] puts the parts together; [`layout`] says where things lie. What a node knows of its driver
//! and does for the shares in use is `tranche_node`'s; [`sweep`] asks it for every held share.
//! [`fs`], [`clock`] and `tranche_node::nvml` are the seams at which tests script failures, and the API
//! server is a `kube::Client`.
#![forbid(unsafe_code)]

pub mod aftermath;
pub mod api_server;
pub mod app;
pub mod args;
pub mod claims;
pub mod clock;
pub mod compute;
pub mod contexts;
pub mod dra;
pub mod driver_state;
pub mod events;
pub mod executor;
pub mod fs;
pub mod gpu_node;
pub mod http;
pub mod install;
pub mod journal;
pub mod layout;
pub mod ledger;
pub mod locks;
pub mod metrics;
pub mod orphans;
pub mod pod_resources;
pub mod preparer;
pub mod proto;
pub mod providers;
pub mod registration;
pub mod selinux;
pub mod sockets;
pub mod status;
pub mod sweep;
#[cfg(test)]
pub(crate) mod testing;
pub mod watchdog;

/// By this name the API server knows what this plugin wrote.
pub const FIELD_MANAGER: &str = "tranche-kubelet-plugin";
