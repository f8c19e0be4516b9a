//! `libcuda.so.1` as a capped container sees it: the driver, with the memory of its share.
//!
//! The library carries the driver's SONAME and comes first in `/etc/ld.so.preload`, so the loader
//! gives it to every `dlopen("libcuda.so.1")`, every `-lcuda` and every ctypes load; the same file
//! lies where the driver's own would. It exports all that any driver exports. Most of it passes
//! straight through (`symbols.txt`); the rest is here:
//!
//! ```text
//!  program ─► hooks ─► reserve in the share's account ─► the real driver ─► charge, or give back
//!               │         ├► memory, array, ipc: by pointer and handle  process: this process's slots,
//!               │         ├► vmm: by who holds it                       pointers and books
//!               │         ├► pool, graph: by what the driver keeps      share: the accounts
//!               │         └► context: what each takes
//!               ├───► launch: pay GPU time, or wait for it ─► the real driver, measured now and then
//!               └► resolve: cuGetProcAddress hands out our functions for the driver's
//! ```
//!
//! The files, from the driver up. Each uses only those that stand before it (`shim/tests/suite/layers.rs`):
//!
//! 1. the real driver: `abi` (its types and error codes), `driver` (its functions, and the stubs that pass), `stream`
//!    (streams, and what is current to a thread);
//! 2. shares and the process: `keys` (the numbers under which handles are noted), `share` (GPUs, and places in accounts), `measure` (how long launches take), `launches`,
//!    `fitting` (kernels whose local memory is charged), `reserves` (what the driver keeps), `contexts`, `mps`
//!    (this process as a client of MPS), `process` (this process, and how it stays itself across a fork);
//! 3. charging: `account` (reserving from shares), `exports` (descriptors that keep memory), `settle` (asking the driver
//!    what it keeps), `charge` (reserve, ask, keep or give back), `source` (allocating from what the driver keeps);
//! 4. one file per family: `ipc`, `managed` (memory that the driver may move to the host), `memory`, `local` (the local
//!    memory that kernels need), `vmm`, `dma_buf`, `multicast`, `array`, `graph`, `pool`, `module`, `context`, `launch`;
//! 5. `resolve` (what look-ups hand out), `hooks` (one row per function that does more than pass).
//!
//! No lock is held while the driver is called: a tool's callback (CUPTI, compute-sanitizer) may run inside the call and
//! come back in. What must not come apart is noted in two halves, before the call and after it.
//!
//! What is charged: the memory that a program asks for, to the share of the GPU it will lie on, as
//! the driver takes it: in whole blocks (2 MiB). Of allocations of up to half a block the driver puts
//! several into one, and each such block is charged once; of pools and graphs it keeps more than it
//! gives out, and what it keeps is charged. So that the share never holds more than its cap, room for
//! the most that a call may take is reserved before the driver is asked, and what it did not take is
//! given back.
//!
//! A context takes memory too, which depends on the GPU's model and the driver: the node measured it
//! and wrote it into the page. The share has room for one beside its cap, so that the cap of a lone
//! process is wholly its own: `cuMemGetInfo` says that its total is the cap, and all of it free at
//! first. Every further context is charged. Stacks and heap of kernels by default are part of a context; a module's
//! variables and code are charged when it is loaded, by what its image says of them.
// A debug build unwinds, which needs std; nobody loads it.
#![cfg_attr(panic = "abort", no_std)]
#![expect(
    non_camel_case_types,
    reason = "the driver's functions are spelled as in cuda.h"
)]

mod abi;
mod account;
mod array;
mod charge;
mod context;
mod contexts;
mod dma_buf;
mod driver;
mod exports;
mod fitting;
mod graph;
mod hooks;
mod ipc;
mod keys;
mod launch;
mod launches;
mod local;
mod managed;
mod measure;
mod memory;
mod module;
mod mps;
mod multicast;
mod pool;
mod process;
mod reserves;
mod resolve;
mod settle;
mod share;
mod source;
mod stream;
mod vmm;

#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    tranche_shim_runtime::sys::abort()
}
