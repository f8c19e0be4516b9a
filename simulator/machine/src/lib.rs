//! The simulated machine: one state that all processes and containers of a host share.
//!
//! ```text
//! machine file ──► Description ──► daemon writes Shared ──► fd over the socket ──► Attachment
//!   (TOML)          (checked)       (file on tmpfs)          (SCM_RIGHTS)          (mmap)
//! ```
//!
//! - [`description`]: the machine file.
//! - [`layout`]: the shared page, which has plain words and atomics only.
//! - [`ledger`]: how much device memory each process holds; together never more than the GPU has.
//! - [`timeline`]: when kernels run, in virtual time; [`turns`]: its words in the page.
//! - [`kernel_fault`]: faults of kernels, and which processes each reaches.
//! - [`mig`]: how a GPU can be partitioned; [`partitions`]: how it is.
//! - [`wire`]: the handshake between a library and the daemon.
//! - [`attach`]: the library's side of the handshake; [`root`]: the driver root.
//! - [`faults`]: failures and delays of calls, from a file.
//! - [`export`]: how both libraries export functions; [`version`]: the driver's version in their files.
//!
//! Every process that initialises CUDA can write the page: the simulator trusts its programs.
#![allow(missing_docs, reason = "only the simulator and tests use it")]

pub mod attach;
pub mod description;
pub mod export;
pub mod faults;
pub mod identity;
pub mod kernel_fault;
pub mod layout;
pub mod ledger;
pub mod mig;
pub mod partitions;
pub mod root;
pub mod timeline;
pub mod turns;
pub mod version;
pub mod wire;

pub use attach::{Access, AttachError, Attachment};
pub use description::{Description, DescriptionError, GpuDescription, MAX_GPUS};
pub use layout::{GpuState, ProcessSlot, Shared};
pub use root::DriverRoot;
pub use turns::MAX_PROCESSES;
pub use version::LibraryVersion;
