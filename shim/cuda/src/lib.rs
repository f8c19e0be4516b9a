//! `libcuda.so.1` as a capped container sees it: the driver, with the memory of its share.
//!
//! The library carries the driver's SONAME and comes first in `/etc/ld.so.preload`, so the loader
//! gives it to every `dlopen("libcuda.so.1")`, every `-lcuda` and every ctypes load; the same file
//! lies where the driver's own would. It exports all that any driver exports. Most of it passes
//! straight through (`symbols.txt`); the rest is here:
//!
//! ```text
//!  program ─► hooks ─► memory: reserve ─► the real driver ─► commit or roll back
//!               │├───► launch: pay GPU time, or wait for it ─► the real driver, measured now and then
//!               │         └► process: this process's slot in each share's account, its pointers
//!               └► resolve: cuGetProcAddress hands out our functions for the driver's
//! ```
//!
//! - `abi`: the driver's types and error codes;
//! - `driver`: the real functions, and the stubs that pass;
//! - `hooks`: one row per function that does more;
//! - `memory`: what the rows for memory do;
//! - `launch`: what the rows for launches do;
//! - `measure`: how long launches take, by events around some of them;
//! - `process`: this process, and how it stays itself across `fork`;
//! - `share`: the shares it joined, and what they leave;
//! - `resolve`: what `cuGetProcAddress` hands out.
//!
//! What is charged: the memory that a program asks for, to the share of the GPU it will lie on, as
//! the driver takes it: in whole blocks (2 MiB), but for allocations of at most half a block, which
//! the driver puts together. A program may always have the last byte of its cap, and byte cap + 1 is
//! `CUDA_ERROR_OUT_OF_MEMORY`; what it cannot have is twice its cap of its neighbours' memory by
//! asking for a block and a byte at a time. Memory from a pool counts by the byte: the pool has
//! taken its blocks before.
//!
//! Not charged are contexts and the driver's own needs. They depend on the GPU's model and the
//! driver, so the node keeps them back before it offers memory, and a share's cap is wholly the
//! program's: `cuMemGetInfo` says that its total is the cap, and all of it free at first.
#![no_std]
#![expect(
    non_camel_case_types,
    reason = "the driver's functions are spelled as in cuda.h"
)]

mod abi;
mod driver;
mod hooks;
mod launch;
mod measure;
mod memory;
mod process;
mod resolve;
mod share;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    tranche_shim_runtime::sys::abort()
}
