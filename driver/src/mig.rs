//! MIG: how a GPU is divided, and the names of partitions.
//!
//! A GPU instance takes whole slices: some of the GPU's compute slices, and adjacent memory slices
//! that begin at its placement. NVIDIA's MIG User Guide lists the profiles of every model; which a GPU has,
//! and where their instances may be placed, its driver reports.
//!
//! ```text
//!  profile    a profile's name
//!  geometry   all partitions of a GPU, what each takes of it, and in which order they are offered
//! ```

mod geometry;
mod profile;
#[cfg(any(test, feature = "testing"))]
pub mod tables;

pub use geometry::{ENGINES, Geometry, GeometryError, Partition, Slices};
pub use profile::{Engines, Profile, ProfileError};

#[cfg(test)]
pub(crate) use profile::tests::any_profile;

/// The memory slices of a model with so many compute slices; `None` where that is not known.
///
/// Source: NVIDIA's MIG User Guide, "Supported GPUs" and "Supported MIG Profiles". A100, H100, H200,
/// B200 and their like have 7 compute and 8 memory slices, A30 and RTX PRO 6000 have 4 and 4.
/// NVML reports the compute slices also without MIG mode; it reports memory slices only as the
/// placements of each profile.
#[must_use]
pub const fn memory_slices(compute_slices: u32) -> Option<u32> {
    match compute_slices {
        7 => Some(8),
        4 => Some(4),
        _ => None,
    }
}
