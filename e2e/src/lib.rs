//! What the end-to-end suite is written with.
//!
//! ```text
//!  case::run ─► Case: the cluster to itself ─► Namespace ─► claims, Pods ─► exec, workload
//!      │                      └─► Node: what is on the machine, by the container engine
//!      └─ afterwards, whatever happened: diagnosis if it failed, everything removed, nothing left
//! ```
//!
//! The tests are in `tests/suite/`, a file for each subject. They need a cluster as `make cluster-up`
//! leaves it, by `KUBECONFIG`, and its GPUs for themselves: one test at a time holds them. What a
//! test waits for it watches; nothing sleeps.
#![forbid(unsafe_code)]

pub mod case;
pub mod diagnosis;
pub mod exec;
pub mod namespace;
pub mod node;
pub mod pod;
pub mod request;
pub mod system;
pub mod version;
pub mod wait;
pub mod workload;

pub use case::{Case, run};
pub use namespace::Namespace;
pub use pod::PodHandle;
pub use request::Request;

/// The namespace that the chart is installed in.
pub const SYSTEM: &str = "tranche-system";
