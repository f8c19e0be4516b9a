//! The createContainer hook's work in a container's root, for the hook and for `tranche run`.
//!
//! ```text
//!  main ──► cover ──► libraries, compat ──► rootfs
//! ```
#![forbid(unsafe_code)]

pub mod compat;
pub mod cover;
pub mod libraries;
pub mod rootfs;
