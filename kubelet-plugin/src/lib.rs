//! ResourceClaim to ready device: the node's half of Tranche.
#![forbid(unsafe_code)]

pub mod args;
pub mod discover;
pub mod driver_state;
pub mod executor;
pub mod fs;
pub mod install;
pub mod inventory;
pub mod journal;
pub mod layout;
pub mod locks;
pub mod nvml;
pub mod root;
