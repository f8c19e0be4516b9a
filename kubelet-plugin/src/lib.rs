//! ResourceClaim to ready device: the node's half of Tranche.
//!
//! ```text
//!  kubelet ── registration ──────────────────┐ epoch
//!     │                                      ├──► gpu_node ──► GpuNode.status
//!     │   nvml ──► inventory ──► driver_state ┘
//!     │            discover ──────┘   │
//!     └─ dra ──► preparer ◄───────────┘──► driver::preparation::plan ──► executor ──► pages, CDI
//!                  │  ▲                                                     │
//!                  │  └── ledger ◄────────────────────────────────────── journal
//!                  └──► aftermath ──► claim.status.devices, events on pods
//! ```
//!
//! [`app`] puts the parts together; [`layout`] says where things lie; [`fs`], [`nvml`] and [`clock`]
//! are the seams at which tests script failures, and the API server is a `kube::Client`.
#![forbid(unsafe_code)]

pub mod aftermath;
pub mod app;
pub mod args;
pub mod claims;
pub mod clock;
pub mod discover;
pub mod dra;
pub mod driver_state;
pub mod events;
pub mod executor;
pub mod fs;
pub mod gpu_node;
pub mod http;
pub mod install;
pub mod inventory;
pub mod journal;
pub mod layout;
pub mod ledger;
pub mod locks;
pub mod metrics;
pub mod nvml;
pub mod orphans;
pub mod preparer;
pub mod proto;
pub mod registration;
pub mod root;
pub mod sockets;
pub mod status;
#[cfg(test)]
pub(crate) mod testing;

/// By this name the API server knows what this plugin wrote.
pub const FIELD_MANAGER: &str = "tranche-kubelet-plugin";
