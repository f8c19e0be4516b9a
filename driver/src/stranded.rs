//! The part of a GPU in use that no further claim can get.
//!
//! ```text
//!  a GPU in partitions   free slices that no set of the offered profiles can use beside what is held
//!  a GPU in shares       memory, where no cores or no places are left; cores, where no memory or no places are left
//! ```
//!
//! Two `3g.40gb` of an H100 take all of its memory slices, and 6 of its 7 compute slices: the seventh is stranded.
//! What is stranded is free, and comes back with the claims that are in the way.

use std::collections::{BTreeMap, BTreeSet};

use crate::gpu_state::Place;
use crate::mig::{Geometry, Profile, Slices};

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
    /// All that the GPU has.
    pub whole: SliceCount,
    /// What no partition has.
    pub free: SliceCount,
    /// Of what is free, what no set of further partitions can use. Compute and memory are each counted by the set that uses
    /// most of it.
    pub stranded: SliceCount,
}

/// Partitions that cannot be beside each other on the GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldError {
    /// The GPU has no such partition.
    #[error("the GPU has no partition {} at slice {}", .0.profile, .0.start)]
    NoPartition(Place),
    /// Another partition has slices or engines of it.
    #[error("partition {} at slice {} does not fit beside the others that are held", .0.profile, .0.start)]
    DoesNotFit(Place),
}

/// What is left of a GPU of which the partitions `held` are in use or are an administrator's. `offered` are the profiles of
/// which further ones may be made; all where it is empty.
pub fn of_partitions(
    geometry: &Geometry,
    offered: &BTreeSet<Profile>,
    held: &BTreeSet<Place>,
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
pub fn free_beside(geometry: &Geometry, held: &BTreeSet<Place>) -> Result<Slices, HeldError> {
    let mut free = geometry.whole;
    for place in held {
        let partition = geometry
            .partition(place.profile, place.start)
            .ok_or(HeldError::NoPartition(*place))?;
        free = free
            .less(partition.slices)
            .ok_or(HeldError::DoesNotFit(*place))?;
    }
    Ok(free)
}

const fn count(slices: Slices) -> SliceCount {
    SliceCount {
        compute: slices.compute,
        memory: slices.memory.count_ones(),
    }
}

/// The most slices that sets of partitions use, by what is free.
struct Best {
    possible: Vec<Slices>,
    known: BTreeMap<(u32, u32, [u32; 5]), SliceCount>,
}

impl Best {
    /// The lowest free memory slice is either left, or the first of a partition: partitions take adjacent slices, so
    /// what is still free is the same for many sets, and is counted once.
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
    /// Of what is free, the memory in bytes that no further share can have.
    pub stranded_memory: u64,
    /// Of what is free, the cores in percent that no further share can have.
    pub stranded_cores: u64,
}

/// What is left of a device with `whole` for its shares, of which they hold `held` together. `least` is the smallest share
/// that the policy allows.
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
