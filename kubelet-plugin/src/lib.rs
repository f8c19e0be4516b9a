//! ResourceClaim to ready device: the node's half of Tranche.
#![forbid(unsafe_code)]

pub mod args;
pub mod claims;
pub mod discover;
pub mod dra;
pub mod driver_state;
pub mod executor;
pub mod fs;
pub mod install;
pub mod inventory;
pub mod journal;
pub mod layout;
pub mod ledger;
pub mod locks;
pub mod metrics;
pub mod nvml;
pub mod preparer;
pub mod proto;
pub mod registration;
pub mod root;
pub mod sockets;
