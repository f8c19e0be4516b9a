//! MIG: how a GPU is divided, and the names of partitions.
//!
//! A GPU instance takes whole slices: some of the GPU's compute slices, and adjacent memory slices that begin at its
//! placement. NVIDIA's MIG User Guide lists the profiles of every model. The driver reports which of them a GPU has,
//! and their possible placements.
//!
//! ```text
//!  profile    a profile's name
//!  placement  a profile and where a partition of it begins
//!  geometry   all partitions of a GPU, what each takes of it, and in which order they are offered
//! ```

mod geometry;
mod placement;
mod profile;
#[cfg(any(test, feature = "testing"))]
pub mod tables;

pub use geometry::{ENGINES, Geometry, GeometryError, Partition, Slices};
pub use placement::Placement;
pub use profile::{Engines, Profile, ProfileError};

#[cfg(test)]
pub(crate) use profile::tests::any_profile;
