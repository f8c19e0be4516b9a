//! The part of a GPU in use that no further claim can get.
//!
//! ```text
//!  a GPU in partitions   free slices that no set of the offered profiles can use beside what is held
//!  a GPU in shares       memory, where no cores or no places are left; cores, where no memory or no places are left
//! ```
//!
//! Two `3g.40gb` of an H100 take all of its memory slices, and 6 of its 7 compute slices: the seventh is stranded.
//! Stranded resources are free, and become usable again when the claims that are in the way end.

use std::collections::{BTreeMap, BTreeSet};

use crate::mig::{Geometry, Placement, Profile, Slices};

/// Numbers of a GPU's slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SliceCount {
    /// Compute slices.
    pub compute: u32,
    /// Memory slices.
    pub memory: u32,
}

/// What is left of a GPU in partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlicesLeft {
    /// All of the GPU.
    pub whole: SliceCount,
    /// What no partition takes.
    pub free: SliceCount,
    /// The part of the free slices that no set of further partitions can use. For compute and for memory separately,
    /// the set that uses most of it counts.
    pub stranded: SliceCount,
}

/// Partitions that cannot exist together on the GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldError {
    /// The GPU has no such partition.
    #[error("the GPU has no partition {} at slice {}", .0.profile, .0.start)]
    NoPartition(Placement),
    /// Another partition has some of its slices or engines.
    #[error("partition {} at slice {} does not fit beside the others that are held", .0.profile, .0.start)]
    DoesNotFit(Placement),
}

/// What is left of a GPU whose partitions `held` are in use, or belong to an administrator. `offered` are the profiles
/// of further partitions; empty for all.
pub fn of_partitions(
    geometry: &Geometry,
    offered: &BTreeSet<Profile>,
    held: &BTreeSet<Placement>,
) -> Result<SlicesLeft, HeldError> {
    let free = free_beside(geometry, held)?;
    let possible = geometry
        .partitions
        .iter()
        .filter(|it| offered.is_empty() || offered.contains(&it.profile));
    let mut best = Best {
        possible: possible.map(|it| it.slices).collect(),
        known: BTreeMap::new(),
    };
    let usable = best.of(free);
    let free = count(free);
    Ok(SlicesLeft {
        whole: count(geometry.whole),
        free,
        stranded: SliceCount {
            compute: free.compute.saturating_sub(usable.compute),
            memory: free.memory.saturating_sub(usable.memory),
        },
    })
}

/// What the partitions `held` leave of a GPU.
pub fn free_beside(geometry: &Geometry, held: &BTreeSet<Placement>) -> Result<Slices, HeldError> {
    let mut free = geometry.whole;
    for placement in held {
        let partition = geometry
            .partition(*placement)
            .ok_or(HeldError::NoPartition(*placement))?;
        free = free
            .less(partition.slices)
            .ok_or(HeldError::DoesNotFit(*placement))?;
    }
    Ok(free)
}

const fn count(slices: Slices) -> SliceCount {
    SliceCount {
        compute: slices.compute,
        memory: slices.memory.count_ones(),
    }
}

/// The most slices that sets of partitions use, by the free slices.
struct Best {
    possible: Vec<Slices>,
    known: BTreeMap<(u32, u32, [u32; 5]), SliceCount>,
}

impl Best {
    /// The lowest free memory slice is either left, or the first of a partition. Partitions take adjacent slices, so
    /// many sets leave the same slices free; these are counted once.
    fn of(&mut self, free: Slices) -> SliceCount {
        if free.memory == 0 {
            return SliceCount::default();
        }
        let key = (free.memory, free.compute, free.engines);
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let first = free.memory & free.memory.wrapping_neg();
        let mut best = self.of(Slices {
            memory: free.memory & !first,
            ..free
        });
        for taken in self.possible.clone() {
            let begins = taken.memory & taken.memory.wrapping_neg() == first;
            let Some(left) = free.less(taken).filter(|_| begins) else {
                continue;
            };
            let further = self.of(left);
            let taken = count(taken);
            best.compute = best.compute.max(taken.compute + further.compute);
            best.memory = best.memory.max(taken.memory + further.memory);
        }
        self.known.insert(key, best);
        best
    }
}

/// Amounts of a GPU, or of a partition, that claims share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Bytes.
    pub memory: u64,
    /// Percent of the GPU's time, or of its multiprocessors.
    pub cores: u64,
    /// Places for shares.
    pub sharers: u64,
}

/// What is left of a GPU in shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharesLeft {
    /// What no share has.
    pub free: Shares,
    /// The free memory in bytes that no further share can use.
    pub stranded_memory: u64,
    /// The free cores in percent that no further share can use.
    pub stranded_cores: u64,
}

/// What is left of a device with `whole` for its shares, which hold `held` together. `least` is the smallest share that
/// the policy allows.
#[must_use]
pub fn of_shares(whole: Shares, held: Shares, least: Shares) -> SharesLeft {
    let free = Shares {
        memory: whole.memory.saturating_sub(held.memory),
        cores: whole.cores.saturating_sub(held.cores),
        sharers: whole.sharers.saturating_sub(held.sharers),
    };
    // A share takes some of each.
    let none_fits =
        free.memory < least.memory || free.cores < least.cores || free.sharers < least.sharers;
    SharesLeft {
        free,
        stranded_memory: if none_fits { free.memory } else { 0 },
        stranded_cores: if none_fits { free.cores } else { 0 },
    }
}

#[cfg(test)]
mod tests;
