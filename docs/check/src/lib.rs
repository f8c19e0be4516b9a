//! Pages and rules that follow from other files of this repository, and have to stay true to them.
//!
//! * [`sources`] finds the messages in the product's Rust sources, [`troubleshooting`] lays them out on their page.
//! * [`monitoring`] reads the alerts and the dashboards: their expressions, and the metrics that these need.
//!
//! `cargo run -p tranche-docs` writes the lists of docs/troubleshooting.md anew; this crate's tests check everything.
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
