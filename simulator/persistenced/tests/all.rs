//! The integration tests of this crate: one program, because linking one for each file takes longer than they do.
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

mod clients;
mod common;
mod faults;
mod kernel_fault;
mod memory;
mod mig;
