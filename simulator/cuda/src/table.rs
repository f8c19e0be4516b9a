//! The exported functions for each name of `cuGetProcAddress`, by CUDA version; `build.rs` makes the list.

use std::ffi::c_void;

/// A function, and the CUDA version from which its name means it (1000 × major + 10 × minor).
#[derive(Debug, Clone, Copy)]
pub struct Version {
    pub since: i32,
    pub function: Address,
}

/// The address of an exported function. Only addresses are taken, so the functions' types do not matter.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub *const c_void);
// SAFETY: the address of code, never written through.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// A name and its functions, oldest first.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub name: &'static str,
    /// For the legacy default stream.
    pub legacy: &'static [Version],
    /// For the per-thread default stream; empty if there is no difference.
    pub per_thread: &'static [Version],
}

include!(concat!(env!("OUT_DIR"), "/table.rs"));
