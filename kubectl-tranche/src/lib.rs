//! `kubectl tranche`: who has which part of which GPU, what is free, what it costs, and what is wrong.
//!
//! ```text
//!  args ─► cluster ─► snapshot ─► model ─► get, top, map, cost, …  ─► output
//!          (I/O)      (objects,   (pure)   (one file per command,     (table, wide, JSON, YAML)
//!                      gaps)                pure: model -> value)
//! ```
//!
//! `doctor` and `collect` need more than objects: `cluster` reads [`facts`] and [`evidence`] for them in the same way.
//!
//! Data flows to the right, and so do imports; only `run` knows all modules. A [`snapshot::Gap`] is a resource that the caller may
//! not read or the API server does not serve: one line says what is missing and how to get it, and the rest works.
//!
//! A command is a file with a function from the [`model`] (or the [`snapshot`]) to a value that implements [`output::View`], a
//! variant in [`args::Command`], and an arm in `run.rs`, which names the [`snapshot::Resource`]s that it reads.
#![forbid(unsafe_code)]

pub mod args;
pub mod cluster;
pub mod collect;
pub mod cordon;
pub mod cost;
pub mod doctor;
pub mod evidence;
pub mod explain;
pub mod facts;
pub mod get;
pub mod map;
pub mod model;
pub mod money;
pub mod output;
mod pods;
pub mod recommend;
mod run;
mod serving;
pub mod snapshot;
#[cfg(test)]
pub(crate) mod testing;
pub mod top;
pub mod ui;
pub mod usage;
mod version;
mod watch;

pub use run::run;
