//! All decisions about GPUs, as pure synchronous functions: what a node offers, and what to do for
//! a claim.
//!
//! ```text
//!  GpuNode.status ─► inventory ─┐
//!                               ├─► slices::plan ──────► SlicePlan        (controller executes it)
//!  SharingPolicy ──► policy ────┘
//!
//!  ResourceClaim ──► claim ─────┬─► preparation::plan ─► PreparationPlan  (kubelet-plugin executes it)
//!  GPUs as NVML sees them now ──┘            │
//!                                            ├─► journal::ClaimRecord ► the plan and how far it got
//!                                            ├─► gpu_state ──► what a GPU needs for all its claims
//!                                            ├─► audit ──► who had what from when to when
//!                                            └─► claim_spec, metadata ──► the claim's CDI spec, what its containers can read
//!
//!  NVML's reports, Xids ─► health ─► a GPU's condition and taint
//!  what claims hold ─► stranded ─► what nobody can have of a GPU
//!  pods without a claim ─► extended_resources ─► the claim that the scheduler looks for
//! ```
//!
//! A plan is a value. Nothing here reads a file, a clock or the API server.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod audit;
pub mod cdi;
pub mod claim;
pub mod claim_spec;
pub mod class;
pub mod competing_drivers;
pub mod extended_resources;
pub mod gpu;
pub mod gpu_state;
pub mod health;
pub mod journal;
pub mod metadata;
pub mod mig;
pub mod moment;
pub mod oversubscription;
pub mod pod;
pub mod policy;
pub mod preparation;
pub mod slices;
pub mod stranded;
pub mod usage;
pub mod vfio;

#[cfg(test)]
mod testing;
