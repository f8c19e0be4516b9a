//! All partitions of a GPU, from what its driver reports.
//!
//! **What a partition takes.** Every memory slice of its placement, some of the compute slices, which are
//! interchangeable, and engines for copies and media. So a set of partitions fits on the GPU if no memory slice is taken
//! twice, and no sum exceeds what the GPU has.
//!
//! **The order.** The scheduler takes the first device that fits. Profiles are sorted by their memory, then by their
//! compute slices, so that a claim for an amount of memory gets the smallest partition that has it. The placements of a
//! profile are tried from the last to the first: the profiles with the most compute slices can begin only at the first
//! slices, which so stay free the longest. On an H100 the first `1g.10gb` is at slice 6: it leaves 4 slices for a
//! `4g.40gb` and two of the others for a `2g.20gb`.

use std::collections::BTreeSet;

use tranche_api::mig::{MigEngines, MigGeometry, MigProfile};
use tranche_api::quantity::CountError;

use super::{Placement, Profile, ProfileError};

/// Slices and engines: all of a GPU, or those that a partition takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slices {
    /// Compute slices.
    pub compute: u32,
    /// A bit for each memory slice.
    pub memory: u32,
    /// The other engines, in the order of [`ENGINES`].
    pub engines: [u32; ENGINES.len()],
}

/// The kinds of engines besides the multiprocessors, by the names of their counters.
pub const ENGINES: [&str; 5] = [
    "copy-engines",
    "decoders",
    "encoders",
    "jpeg-engines",
    "ofa-engines",
];

const fn counts(engines: &MigEngines) -> [u32; ENGINES.len()] {
    let MigEngines {
        copy,
        decoders,
        encoders,
        jpeg,
        ofa,
    } = *engines;
    [copy, decoders, encoders, jpeg, ofa]
}

/// One possible GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Its profile.
    pub profile: Profile,
    /// The first of its memory slices.
    pub start: u8,
    /// Its memory, bytes.
    pub memory: u64,
    /// Its streaming multiprocessors.
    pub multiprocessors: u32,
    /// What it takes of the GPU.
    pub slices: Slices,
}

/// Bytes of a partition that the driver reserves for itself. NVML does not report them for an instance that does not
/// exist yet; `nvidia-smi` shows less than 50 MiB in use on idle ones.
const RESERVED: u64 = 64 << 20;

impl Partition {
    /// Bytes that all programs together can have in it.
    #[must_use]
    pub const fn available_memory(&self) -> u64 {
        self.memory.saturating_sub(RESERVED)
    }
}

/// How MIG divides a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// All that the GPU has.
    pub whole: Slices,
    /// All partitions, in the order in which they are offered.
    pub partitions: Vec<Partition>,
}

/// Why the driver's report cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// A name that is not a profile's.
    #[error("{0}")]
    Name(#[from] ProfileError),
    /// A profile that is reported twice.
    #[error("profile {0} is there twice")]
    Twice(Profile),
    /// A number out of its range.
    #[error("profile {profile}: {field} is {found}, must be {expected}")]
    Number {
        /// The profile.
        profile: Profile,
        /// The field.
        field: &'static str,
        /// What it is.
        found: u32,
        /// What it may be.
        expected: &'static str,
    },
    /// The memory is not a count of bytes.
    #[error("profile {profile}: memory {problem}")]
    Memory {
        /// The profile.
        profile: Profile,
        /// Why.
        problem: CountError,
    },
}

/// The most memory slices that a GPU can have here.
const MOST_SLICES: u32 = u32::BITS;

impl Slices {
    /// What is left of this without `taken`; `None` if `taken` is more.
    #[must_use]
    pub fn less(self, taken: Self) -> Option<Self> {
        let mut engines = [0; ENGINES.len()];
        for (left, (has, takes)) in engines
            .iter_mut()
            .zip(self.engines.into_iter().zip(taken.engines))
        {
            *left = has.checked_sub(takes)?;
        }
        let is_there = taken.memory & !self.memory == 0;
        is_there.then_some(Self {
            compute: self.compute.checked_sub(taken.compute)?,
            memory: self.memory & !taken.memory,
            engines,
        })
    }
}

impl Geometry {
    /// Checks the driver's report, and sorts the partitions. A profile without placements has no partition.
    pub fn read(reported: &MigGeometry) -> Result<Self, GeometryError> {
        let mut kinds = Vec::new();
        let mut seen = BTreeSet::new();
        for profile in &reported.profiles {
            let kind = Kind::read(profile)?;
            if !seen.insert(kind.profile) {
                return Err(GeometryError::Twice(kind.profile));
            }
            kinds.push(kind);
        }
        let whole = kinds.iter().fold(Slices::default(), Kind::widen);
        kinds.sort_by_key(|kind| {
            // Of partitions with equal memory and compute, those without further engines come first.
            let slices = kind.slices;
            let engines = slices
                .engines
                .iter()
                .map(|count| u64::from(*count))
                .sum::<u64>();
            (kind.memory, slices.compute, engines, kind.profile)
        });
        let partitions = kinds.iter().flat_map(Kind::partitions).collect();
        Ok(Self { whole, partitions })
    }

    /// The partition at a placement.
    #[must_use]
    pub fn partition(&self, Placement { start, profile }: Placement) -> Option<&Partition> {
        let mut partitions = self.partitions.iter();
        partitions.find(|it| (it.profile, it.start) == (profile, start))
    }
}

/// A profile with its placements.
struct Kind {
    profile: Profile,
    memory: u64,
    multiprocessors: u32,
    /// With the memory slices of a placement at 0.
    slices: Slices,
    starts: BTreeSet<u8>,
    instances: u32,
}

impl Kind {
    fn read(reported: &MigProfile) -> Result<Self, GeometryError> {
        let profile: Profile = reported.name.parse()?;
        let number = |field, found, expected| GeometryError::Number {
            profile,
            field,
            found,
            expected,
        };
        let compute = reported.compute_slices;
        if compute != u32::from(profile.compute_slices) {
            return Err(number("computeSlices", compute, "as in the name"));
        }
        let size = reported.memory_slices;
        if !(1..=MOST_SLICES).contains(&size) {
            return Err(number("memorySlices", size, "1 to 32"));
        }
        let mut starts = BTreeSet::new();
        for start in &reported.placements {
            let fits = start
                .checked_add(size)
                .is_some_and(|end| end <= MOST_SLICES);
            match u8::try_from(*start) {
                Ok(start) if fits => starts.insert(start),
                _ => return Err(number("placements", *start, "at most 32 less memorySlices")),
            };
        }
        let memory = reported.memory.to_count();
        Ok(Self {
            profile,
            memory: memory.map_err(|problem| GeometryError::Memory { profile, problem })?,
            multiprocessors: reported.multiprocessors,
            slices: Slices {
                compute,
                memory: u32::MAX >> (MOST_SLICES - size),
                engines: counts(&reported.engines),
            },
            starts,
            instances: reported.instances,
        })
    }

    /// `whole`, enlarged as far as needed for as many instances of this profile as the driver reports.
    fn widen(whole: Slices, kind: &Self) -> Slices {
        let mut wider = whole;
        wider.compute = wider.compute.max(kind.slices.compute);
        for start in &kind.starts {
            wider.memory |= kind.slices.memory << start;
        }
        for (has, takes) in wider.engines.iter_mut().zip(kind.slices.engines) {
            *has = takes.saturating_mul(kind.instances.max(1)).max(*has);
        }
        wider
    }

    /// From the last placement to the first.
    fn partitions(&self) -> impl Iterator<Item = Partition> {
        self.starts.iter().rev().map(|start| Partition {
            profile: self.profile,
            start: *start,
            memory: self.memory,
            multiprocessors: self.multiprocessors,
            slices: Slices {
                memory: self.slices.memory << start,
                ..self.slices
            },
        })
    }
}

#[cfg(test)]
mod tests;
