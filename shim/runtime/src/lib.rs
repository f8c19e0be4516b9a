//! What both libraries of the shim need: forwarding to the real driver's library, the container's
//! cap pages, the system calls for both, and one line on stderr when something is wrong.
//!
//! - [`mod@library`]: forwards a symbol to the real library, resolved at its first call;
//! - [`names`]: the names of our own functions;
//! - [`loader`]: `dlopen` and related functions of this program's C library;
//! - [`container_shares`]: which GPUs this container may use, and how much of each;
//! - [`accounts`]: how much of a share is held, and by dead processes;
//! - [`sys`]: files, mappings and their locks;
//! - [`lock`]: a lock between threads;
//! - [`complain`]: the one line.
//!
//! The library is loaded into every process of the container, so nothing runs at load: everything
//! starts with the first call of a driver function. No thread, no allocator, no signal handler.
#![no_std]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!(
    "the shim forwards calls in x86_64 assembly, for Linux: add this architecture's \
     `forward!` and `forward_to` in shim/runtime/src/library.rs"
);

pub mod accounts;
pub mod complain;
pub mod container_shares;
pub mod library;
pub mod loader;
pub mod lock;
pub mod names;
pub mod sys;
