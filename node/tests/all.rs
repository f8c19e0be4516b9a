//! The integration tests of this crate: one program, because linking one for each file takes longer than they do.
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

mod common;
mod compute_mode;
mod driver;
mod lease;
mod mig;
mod nvlink;
mod share;
mod time_slice;
mod vgpu;
