//! A simulated `libcuda.so.1`: the CUDA driver API over the simulated machine.
//!
//! ```text
//! exported function ─► driver() ─► Context ─► Device ─┬─► heap + ledger   (memory)
//!      (api)           (cuInit)                       └─► stream + timeline (time)
//! ```
//!
//! Memory is real: a device pointer is the address of a private mapping, which takes host memory only when it is written,
//! and every copy moves bytes. Time is virtual: a kernel computes nothing but takes time of its GPU in the order of its
//! stream, and a thread that waits for it sleeps. A kernel's time is in its name (`sim_busy_250us`) or in the machine
//! file; see [`module`].
//!
//! The files, from the bottom up. Each uses only those listed before it (`shim/tests/suite/layers.rs`):
//!
//! 1. CUDA's terms: `code` (error codes), `object` (handles), `abi` (structs of cuda.h that several families use), `export`
//!    (how functions are exported);
//! 2. the process and its GPUs: `mps` (as a client of an MPS daemon), `driver` (the page, and what this process sees of it),
//!    `fault` (kernels that fault), `host` (work that the host does in a GPU's order), `heap` (addresses, and blocks of GPU
//!    memory), `graph_pool`, `device`, `heap_objects` (memory that `dma-buf`s keep);
//! 3. memory: `context`, `pool`, `space` (all known addresses), `memory` (allocation of all kinds), `managed`, `vmm`,
//!    `dma_buf`, `multicast`, `array`, `graph_memory`;
//! 4. work: `image` (which kernels an image has), `module` (modules and kernels), `launch`, `copy`, `fill`, `graph`,
//!    `capture`;
//! 5. time: `stream`, `event`, `work` (what a graph's node does in a stream), `ordered` (allocation in a stream's order),
//!    `lifecycle` (how contexts begin and end);
//! 6. `table` (names and versions of functions), `procaddress` (look-up in it), `api` (the exported functions, one file
//!    for each family).
//!
//! Names, signatures and error codes are those of cuda.h and of driver 535, where they are documented. Functions of cuda.h
//! that are not simulated return `CUDA_ERROR_NOT_SUPPORTED` (`api/absent.rs`).
#![allow(non_snake_case, reason = "cuda.h spells these names")]

mod abi;
mod api;
mod array;
mod capture;
mod code;
mod context;
mod copy;
mod device;
mod dma_buf;
mod driver;
mod event;
mod export;
mod fault;
mod fill;
mod graph;
mod graph_memory;
mod graph_pool;
mod heap;
mod heap_objects;
mod host;
mod image;
mod launch;
mod lifecycle;
mod managed;
mod memory;
mod module;
mod mps;
mod multicast;
mod object;
mod ordered;
mod pool;
mod procaddress;
mod space;
mod stream;
mod table;
mod vmm;
mod work;
