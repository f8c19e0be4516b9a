//! What both libraries of the shim stand on: the real driver's library behind each symbol, the
//! container's cap pages, the system calls for both, and one line on stderr when they are not right.
//!
//! - [`mod@library`]: a symbol's way to the real library, resolved at its first call;
//! - [`names`]: what our own functions are called;
//! - [`loader`]: `dlopen` and its kind, of whatever C library this program has;
//! - [`shares`]: which GPUs this container may use, and how much of each;
//! - [`accounts`]: how much of a share is held, and by dead processes;
//! - [`sys`]: files, mappings and their locks;
//! - [`lock`]: a lock between threads;
//! - [`complain`]: the one line.
//!
//! Nothing here runs when the library is loaded, which it is into every process of the container:
//! all begins with the first call of a driver function. No thread, no allocator, no signal handler.
#![no_std]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!(
    "the shim forwards calls in x86_64 assembly, for Linux: add this architecture's \
     `forward!` and `forward_to` in shim/runtime/src/library.rs"
);

pub mod accounts;
pub mod complain;
pub mod library;
pub mod loader;
pub mod lock;
pub mod names;
pub mod shares;
pub mod sys;
