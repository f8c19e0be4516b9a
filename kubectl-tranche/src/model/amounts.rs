//! How much of a GPU is allocated, in numbers that can be added up over tiers.

use serde::Serialize;
use tranche_api::Tier;

use super::{Gpu, Room};

/// How much of one or several GPUs is allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    pub memory: u64,
    /// The part that claims have, bytes. A whole GPU, or one in a tier without sizes, counts in full.
    pub allocated_memory: u64,
    /// The free part that no further claim can get beside what is allocated, bytes.
    pub stranded_memory: u64,
    /// Percent of all GPUs, 100 for each.
    pub cores: u64,
    /// The part that claims have. For a GPU in partitions: compute slices as percent of the GPU, rounded.
    pub allocated_cores: u64,
    /// The free part that no further claim can get beside what is allocated.
    pub stranded_cores: u64,
}

const ALL_CORES: u64 = 100;

impl Gpu {
    /// How much of it is allocated.
    #[must_use]
    pub fn amounts(&self) -> Amounts {
        let whole = Amounts {
            memory: self.memory,
            cores: ALL_CORES,
            ..Amounts::default()
        };
        match &self.room {
            Room::All | Room::NotOffered => whole,
            Room::Nothing | Room::Places { .. } => Amounts {
                allocated_memory: self.memory,
                allocated_cores: ALL_CORES,
                ..whole
            },
            Room::Shares(room) => Amounts {
                allocated_memory: room.memory.saturating_sub(room.free_memory),
                stranded_memory: room.stranded_memory,
                allocated_cores: room.cores.saturating_sub(room.free_cores),
                stranded_cores: room.stranded_cores,
                ..whole
            },
            Room::Slices(room) => {
                let of_memory = |slices| part(self.memory, slices, room.memory);
                let of_cores = |slices| part(ALL_CORES, slices, room.compute);
                Amounts {
                    allocated_memory: self.held_memory(),
                    stranded_memory: of_memory(room.stranded_memory),
                    allocated_cores: of_cores(room.compute.saturating_sub(room.free_compute)),
                    stranded_cores: of_cores(room.stranded_compute),
                    ..whole
                }
            }
            Room::Unknown => Amounts {
                allocated_memory: self.held_memory(),
                allocated_cores: self.tenants().filter_map(|it| it.device.cores).sum(),
                ..whole
            },
        }
    }

    fn held_memory(&self) -> u64 {
        let held = self.held.iter().map(|held| match held.tier {
            Tier::Partition | Tier::Exclusive | Tier::Passthrough => held.memory,
            _ => held
                .tenants
                .iter()
                .filter_map(|it| it.device.memory)
                .sum::<u64>(),
        });
        held.sum()
    }
}

fn part(of: u64, slices: u32, whole: u32) -> u64 {
    let whole = u64::from(whole).max(1);
    (of.saturating_mul(slices.into()) + whole / 2) / whole
}

impl std::ops::Add for Amounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            memory: self.memory + other.memory,
            allocated_memory: self.allocated_memory + other.allocated_memory,
            stranded_memory: self.stranded_memory + other.stranded_memory,
            cores: self.cores + other.cores,
            allocated_cores: self.allocated_cores + other.allocated_cores,
            stranded_cores: self.stranded_cores + other.stranded_cores,
        }
    }
}

impl std::iter::Sum for Amounts {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), std::ops::Add::add)
    }
}
