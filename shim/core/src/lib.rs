//! What the node and a capped container say to each other, in two files per share.
//!
//! ```text
//!  kubelet-plugin ──encode──► cap      ──decode──► shim     how much a share may hold (read-only for it)
//!  kubelet-plugin ──initial─► account  ◄─reserve─► shim     how much it holds, by process (read-write)
//!        ▲──────snapshot────────┘
//! ```
//!
//! - [`paths`]: where both lie in a container;
//! - [`uuid`]: which GPU is meant: always by UUID, never by index;
//! - [`cap`]: the layout of the cap page;
//! - [`layout`]: the layout of the account page, for those who hold its bytes;
//! - [`account`]: the account page as live memory: reserve, release, reclaim, repair. Its
//!   documentation argues why no crash at any instruction can let a share past its cap;
//! - [`compute`]: the share's GPU time: what it was granted, what its launches take;
//! - [`pace`]: how often a process may look for dead ones;
//! - [`table`]: which device pointer was charged how much, for one process;
//! - [`blocks`]: which of the driver's blocks hold its small allocations;
//! - [`physical`]: its physical memory, and what uses it;
//! - [`pool_charge`]: what the driver keeps for a pool, and what of that is charged;
//! - [`underway`]: whether a call was alone of its kind;
//! - [`image`]: what a module takes.
//!
//! The crate is `no_std`, has no dependency and no unsafe code. Whoever maps an account page (the
//! shim) promises there that the memory is one; whoever reads a page's bytes promises nothing.
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

pub use account::{Account, Full, Locks, SlotIndex};
pub use blocks::Blocks;
pub use cap::{CapPage, ComputePolicy};
pub use error::{PageError, Part};
pub use layout::{AccountPage, AccountSnapshot, ProcessUsage};
pub use pace::Pace;
pub use physical::{Freed, Physical};
pub use pool_charge::PoolCharge;
pub use table::{Entry, Table};
pub use underway::Underway;
pub use uuid::GpuUuid;
