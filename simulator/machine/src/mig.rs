//! MIG: how a GPU is partitioned.
//!
//! - [`model`]: the GPU instances and compute instances that a GPU model can have, and their placements, from NVIDIA's guide.
//! - [`rules`]: the placements that are free beside existing instances. Pure functions.
//! - [`words`]: the words of the shared page; [`state`]: the instances that they describe.
//! - [`change`]: how the daemon creates and destroys instances, and how a process enters one.
//! - [`capability`]: the files and device nodes that give access to instances, and their numbers.

pub mod capability;
pub mod change;
pub mod model;
pub mod rules;
pub mod state;
pub mod words;

pub use change::InstanceError;
pub use model::{ComputeProfile, GpuProfile, Model, ModelName};
pub use state::{ComputeInstanceView, GpuInstanceView, Partition};
