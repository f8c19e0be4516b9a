//! Checks pages and rules that must agree with other files of this repository.
//!
//! * [`sources`] finds the messages in the product's Rust sources, [`troubleshooting`] writes them to their page.
//! * [`monitoring`] reads the expressions of the alerts and dashboards, and the metrics that they need.
//!
//! `cargo run -p tranche-docs` updates the lists of docs/troubleshooting.md; this crate's tests check everything.
#![forbid(unsafe_code)]

pub mod monitoring;
pub mod sources;
pub mod troubleshooting;

use std::path::PathBuf;

/// The root of the repository.
#[must_use]
pub fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
