//! Serves the API `usage.gpu.tranche.dev`: who uses which part of which GPU now, for people and tools with their own rights. It
//! writes nothing. The API server forwards requests (an APIService), as with `metrics.k8s.io`; every replica answers.
//!
//! ```text
//!  API server ─► server ─► front_proxy (is it the API server, and for whom) ─► request (what is asked)
//!                  ├─► nodes ─► tranche_node_usage ─► the node plugins' /usage
//!                  ├─► claims ─► which claims there are
//!                  └─► resources: objects and tables            documents: discovery
//! ```
//!
//! [`trust`] follows the ConfigMap with which the API server says who it is. [`health`] answers the kubelet, on a port of its own.
#![forbid(unsafe_code)]

mod args;
mod claims;
mod documents;
mod front_proxy;
mod health;
mod nodes;
mod request;
mod resources;
mod server;
mod trust;

use clap::Parser;

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    args::Args::parse().run().await
}
