//! ResourceClaim to ready device: the node's half of Tranche.
#![forbid(unsafe_code)]

pub mod args;
pub mod discover;
pub mod fs;
pub mod inventory;
pub mod locks;
pub mod nvml;
pub mod root;
