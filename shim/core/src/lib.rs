//! The interface between the node and a capped container: two files per share.
//!
//! ```text
//!  kubelet-plugin ──encode──► cap      ──decode──► shim     how much a share may hold (read-only for the shim)
//!  kubelet-plugin ──initial─► account  ◄─reserve─► shim     how much it holds, by process (read-write)
//!        ▲──────snapshot────────┘
//! ```
//!
//! - [`paths`]: where both files are in a container;
//! - [`uuid`]: a GPU is always identified by its UUID, never by its index;
//! - [`cap`]: the layout of the cap page;
//! - [`layout`]: the layout of the account page, to read it from bytes;
//! - [`account`]: the account page as live memory: reserve, release, reclaim, repair. Its
//!   documentation argues why no crash at any instruction can let a share past its cap;
//! - [`compute`]: the share's GPU time: its grant, and what its launches take;
//! - [`load`]: the layout of the load page, which the shares of a GPU with a priority have in common;
//! - [`pace`]: how often a process may look for dead ones;
//! - [`table`]: the charge of each device pointer of a process;
//! - [`blocks`]: the driver's blocks that hold the process's small allocations;
//! - [`physical`]: the process's physical memory, and what uses it;
//! - [`pool_charge`]: the charge of what the driver keeps for a pool;
//! - [`underway`]: whether another call of the same kind ran at the same time;
//! - [`image`]: the memory that a module takes.
//!
//! The crate is `no_std`, has no dependency and no unsafe code. The code that maps an account page (the
//! shim) must guarantee that the memory is one; code that reads a page's bytes need not guarantee anything.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg(any(test, loom))]
extern crate std;

pub mod account;
pub mod blocks;
pub mod cap;
pub mod compute;
pub mod error;
pub mod image;
pub mod layout;
pub mod load;
mod map;
pub mod pace;
pub mod paths;
pub mod physical;
pub mod pool_charge;
mod sync;
pub mod table;
pub mod underway;
pub mod uuid;
mod ways;

pub use account::{Account, AccountFull, Locks, SlotIndex};
pub use blocks::Blocks;
pub use cap::{CapPage, ComputePolicy, Priority};
pub use error::{MessagePart, PageError};
pub use layout::{AccountPage, AccountSnapshot, ProcessUsage};
pub use pace::Pace;
pub use physical::{Freed, Physical};
pub use pool_charge::PoolCharge;
pub use table::{Entry, Table};
pub use underway::Underway;
pub use uuid::GpuUuid;
