//! The simulated machine: one state that every process and container of a host shares.
//!
//! ```text
//! machine file ──► Description ──► daemon writes Shared ──► fd over the socket ──► Attachment
//!   (TOML)          (checked)       (file on tmpfs)          (SCM_RIGHTS)          (mmap)
//! ```
//!
//! - [`description`]: what the machine file says.
//! - [`layout`]: the shared page, plain words and atomics only.
//! - [`ledger`]: who holds how much device memory; never more than the GPU has.
//! - [`timeline`]: when a GPU is busy, in virtual time.
//! - [`wire`]: the handshake between a library and the daemon.
//! - [`attach`]: the library's side of it, and [`root`]: where the driver root is.
//! - [`export`]: what both libraries make their functions with.
//!
//! The page is writable by every process that initialises CUDA, as a real GPU is
//! programmable by it: the simulator trusts its programs.

pub mod attach;
pub mod description;
pub mod export;
pub mod identity;
pub mod layout;
pub mod ledger;
pub mod root;
pub mod timeline;
pub mod wire;

pub use attach::{Access, AttachError, Attachment};
pub use description::{Description, DescriptionError, GpuDescription};
pub use layout::{GpuState, MAX_GPUS, MAX_PROCESSES, ProcessSlot, Shared};
pub use root::DriverRoot;
