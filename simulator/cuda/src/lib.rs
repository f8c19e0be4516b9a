//! A simulated `libcuda.so.1`: the CUDA driver API over the simulated machine.
//!
//! ```text
//! exported function ─► driver() ─► Context ─► Device ─┬─► heap + ledger   (memory)
//!   (export!)          (cuInit)                       └─► stream + timeline (time)
//! ```
//!
//! Memory is real: a device pointer is the address of a private mapping that
//! takes host memory only where it is written, and every copy moves bytes. Time is
//! virtual: a kernel computes nothing, it moves the end of its stream's and its
//! GPU's queue, and who waits sleeps. How long a kernel takes is in its name
//! (`sim_busy_250us`) or in the machine file; see [`module`].
//!
//! Names, signatures and error codes are cuda.h's and driver 535's; see there for
//! what they mean. Functions that exist in cuda.h and have no answer here say
//! `CUDA_ERROR_NOT_SUPPORTED` (`api/absent.rs`).
#![allow(non_snake_case, reason = "cuda.h spells these names")]

mod abi;
mod api;
mod array;
mod code;
mod context;
mod copy;
mod device;
mod driver;
mod event;
mod export;
mod fill;
mod graph;
mod graph_memory;
mod graph_pool;
mod heap;
mod host;
mod image;
mod launch;
mod lifecycle;
mod managed;
mod memory;
mod module;
mod object;
mod ordered;
mod pool;
mod procaddress;
mod space;
mod stream;
mod table;
mod vmm;
