//! MIG: how a GPU can be partitioned. [`crate::partitions`] are those that it has.
//!
//! - [`model`]: the GPU instances and compute instances that a GPU model can have, and their placements, from NVIDIA's guide.
//! - [`rules`]: the placements that are free beside existing instances. Pure functions.
//! - [`words`]: the words of the shared page.
//! - [`capability`]: the files and device nodes that give access to instances, and their numbers.

pub mod capability;
pub mod model;
pub mod rules;
pub mod words;

pub use model::{ComputeProfile, GpuProfile, Model, ModelName};
