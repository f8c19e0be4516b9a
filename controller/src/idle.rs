//! Idle claims: named, and evicted where the policy says so (ADR 0043).
//!
//! ```text
//!  reconcile ─► asked: which nodes have GPUs whose policy asks ─► round: their plugins' /usage ─► claims that are idle
//!                                                                   │      facts: claim, pods, namespace
//!                                                                   ▼
//!                     writer: condition, events, evictions ◄── decision: one step for each claim, pure
//! ```
//!
//! Only the leader looks. Its only state is the time of each claim's notice, and the claim's condition has it as `lastTransitionTime`:
//! the next leader reads it there.

pub mod asked;
pub mod decision;
mod facts;
pub mod holder;
mod round;
pub mod state;
mod writer;

pub use asked::{Allowed, Asked};
pub use round::Idle;
