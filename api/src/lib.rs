//! The API of Tranche: names, quantities and objects.
//!
//! ```text
//!  names ─────────► driver, classes, attributes, capacities, annotations
//!  tier ──────────► the six isolation tiers and their properties
//!  quantity ──────► exact arithmetic on Kubernetes quantities, in Go's canonical form
//!  share_config ──► the opaque parameters of a claim or class        (user  -> node)
//!  pci_address ───► the order of a node's GPUs
//!  mig ───────────► how MIG divides a GPU
//!  vgpu ──────────► a GPU that is a vGPU, or that hosts vGPUs
//!  gpu_node ──────► what a node's hardware can do                    (node  -> controller)
//!  withheld ──────► which GPUs are not offered, and why              (node, controller -> people)
//!  usage ─────────► who uses which part of a node's GPUs            (node  -> people)
//!  usage_api ─────► the same as API objects, of nodes and of claims  (controller -> people)
//!  conditions ────► the node's conditions in the Kubernetes style    (node, controller -> people)
//!  sharing_policy ► how the cluster's administrator offers GPUs      (admin -> controller)
//!  reference ─────► the page that lists the vocabulary
//! ```
//! This crate has no I/O, no clock, no client, and depends on no other crate of ours.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod conditions;
pub mod gpu_node;
pub mod mig;
#[macro_use]
pub mod names;
pub mod pci_address;
pub mod quantity;
pub mod reference;
pub mod share_config;
pub mod sharing_policy;
pub mod tier;
pub mod usage;
pub mod usage_api;
pub mod vgpu;
pub mod withheld;

pub use gpu_node::{GpuNode, GpuNodeSpec, GpuNodeStatus};
pub use pci_address::PciAddress;
pub use quantity::Quantity;
pub use share_config::ShareConfig;
pub use sharing_policy::{SharingPolicy, SharingPolicySpec};
pub use tier::Tier;
pub use withheld::WithheldGpu;
