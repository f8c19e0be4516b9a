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
//!               │         ├► vmm: by what uses it                       pointers and charges
//!               │         ├► pool, graph: by what the driver keeps      device: GPUs, slots in accounts
//!               │         └► context: what each takes
//!               ├───► launch: pay GPU time, or wait for it ─► the real driver, measured now and then
//!               └► resolve: cuGetProcAddress returns our functions in place of the driver's
//! ```
//!
//! The files, from the driver up. Each uses only those listed before it (`shim/tests/suite/layers.rs`):
//!
//! 1. the real driver: `abi` (its types and error codes), `driver` (its functions, and the stubs that forward),
//!    `stream` (streams, and a thread's current context);
//! 2. shares and the process: `keys` (the numbers under which handles are noted), `kernel` (what is launched), `device`
//!    (GPUs, and slots in accounts), `event_pair` (two events around launches), `series` (many launches between two),
//!    `measure` (how long launches take), `launches`, `fitting` (kernels whose local memory is charged), `driver_pools` (pools and other memory that the driver keeps), `current_pools` (from which of them a
//!    device allocates), `contexts`, `libraries`, `ends` (calls that end what is charged), `mps` (this process as a client
//!    of MPS), `process` (this process, also after a fork), `collective` (kernels and graphs that never wait);
//! 3. charging: `device_shares` (reserving from a device's shares), `load` (launches that wait for other shares), `exports` (descriptors that keep memory), `pool_query`
//!    (asking the driver about a pool), `pool_end` (destroyed pools), `settle` (charging what the driver keeps), `reserve` (reserving, also for contexts that are noticed late), `charge` (reserve, ask, keep or give back), `pool_allocator` (allocating from
//!    what the driver keeps), `loading` (what modules and libraries need);
//! 4. one file per family: `ipc`, `managed` (memory that the driver may move to the host), `memory`, `local` (the local
//!    memory that kernels need), `vmm`, `dma_buf`, `multicast`, `array`, `graph`, `pool`, `module`, `context`, `capture`,
//!    `lookup` (of kernels), `launch`;
//! 5. `resolve` (what look-ups hand out), `hooks` (one row per function that does more than pass).
//!
//! No lock is held while the driver is called: a tool's callback (CUPTI, compute-sanitizer) may run inside the call and
//! call CUDA again. So each call is noted in two steps, before and after it.
//!
//! Memory is charged to the share of the GPU on which it will lie, in the whole blocks (2 MiB) in which the driver takes
//! it. The driver puts several allocations of up to half a block into one block, which is charged once. For pools and
//! graphs the driver keeps more than it gives out, and what it keeps is charged. The most that a call may take is
//! reserved before the driver is called, and the rest is given back afterwards. So a share never holds more than its cap.
//!
//! A context takes memory too. How much depends on the GPU's model and the driver: the node has measured it and written it
//! into the page. The share has room for one context beside its cap, so that a single process can use the whole cap:
//! `cuMemGetInfo` returns the cap as the total, and all of it is free at first. Every further context is charged. The
//! default stacks and heap of kernels are part of a context. A module's variables and code are charged when it is loaded,
//! by the sizes in its image.
// A debug build unwinds, which needs std; it is never loaded.
#![cfg_attr(panic = "abort", no_std)]
#![expect(
    non_camel_case_types,
    reason = "the driver's functions are spelled as in cuda.h"
)]

mod abi;
mod array;
mod capture;
mod charge;
mod collective;
mod context;
mod contexts;
mod current_pools;
mod device;
mod device_shares;
mod dma_buf;
mod driver;
mod driver_pools;
mod ends;
mod event_pair;
mod exports;
mod fitting;
mod graph;
mod hooks;
mod ipc;
mod kernel;
mod keys;
mod launch;
mod launches;
mod libraries;
mod load;
mod loading;
mod local;
mod lookup;
mod managed;
mod measure;
mod memory;
mod module;
mod mps;
mod multicast;
mod pool;
mod pool_allocator;
mod pool_end;
mod pool_query;
mod process;
mod reserve;
mod resolve;
mod series;
mod settle;
mod stream;
mod vmm;

#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    tranche_shim_runtime::sys::abort()
}
