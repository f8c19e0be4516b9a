//! The library of the end-to-end suite.
//!
//! ```text
//!  case::run ─► turn ─► Case: alone on the cluster, or on a node ─► Namespace ─► claims, Pods ─► exec, workload
//!      │                                         └─► Node: the machine, through the container engine
//!      └─ afterwards: diagnosis if it failed, everything removed, a check that all is as it was before
//! ```
//!
//! The tests are in `tests/suite/`, a file for each subject. They need the cluster of `make cluster-up`, which `KUBECONFIG` names,
//! and exclusive use of its GPUs. A test runs alone, or beside tests on other nodes (`run_on_a_node`). Tests wait with watches and do
//! not sleep. The tests of `e2e/api`, which need no node, use this library, too (`run_on_a_hollow_node`).
#![forbid(unsafe_code)]

pub mod account;
pub mod browser;
pub mod case;
#[cfg(test)]
mod core_list;
pub mod diagnosis;
pub mod exec;
mod fingerprint;
pub mod kubectl;
mod limits;
pub mod namespace;
pub mod node;
pub mod pod;
pub mod policy;
pub mod prometheus;
pub mod pulse;
mod record;
pub mod request;
mod shell;
pub mod system;
pub mod tool;
mod turn;
pub mod version;
pub mod wait;
pub mod workload;

pub use browser::Browser;
pub use case::{Case, run, run_on_a_hollow_node, run_on_a_node};
pub use namespace::Namespace;
pub use pod::PodHandle;
pub use request::Request;

/// The namespace that the chart is installed in.
pub const SYSTEM: &str = "tranche-system";
