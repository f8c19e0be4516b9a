//! Chooses GPUs, and counts the cost.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;

use super::lives::Event;

/// GPUs in use and their free parts, summed over all moments.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    pub gpus: u64,
    pub free: u64,
}

impl Sum {
    /// The free part, in percent.
    pub fn free_percent(self) -> f64 {
        100.0 * ratio(self.free, 1000 * self.gpus)
    }
}

#[allow(clippy::cast_precision_loss)] // far below 2^52
pub fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// Chooses GPUs for shares.
pub trait Placer {
    /// The GPU of a new share.
    fn start(&mut self, number: usize, size: u32) -> anyhow::Result<usize>;
    fn end(&mut self, number: usize, gpu: usize, size: u32) -> anyhow::Result<()>;
}

/// Counts after each event, from the end of the first share on.
pub fn place(events: &[Event], place: &mut impl Placer, sum: &mut Sum) -> anyhow::Result<()> {
    let mut alive: BTreeMap<usize, (usize, u32)> = BTreeMap::new();
    let mut counting = false;
    for event in events {
        match *event {
            Event::Start(number, size) => {
                alive.insert(number, (place.start(number, size)?, size));
            }
            Event::End(number) => {
                let (gpu, size) = alive.remove(&number).context("a share ends twice")?;
                place.end(number, gpu, size)?;
                counting = true;
            }
        }
        if counting {
            let gpus: BTreeSet<usize> = alive.values().map(|(gpu, _)| *gpu).collect();
            let used: u64 = alive.values().map(|(_, size)| u64::from(*size)).sum();
            sum.gpus += gpus.len() as u64;
            sum.free += 1000 * gpus.len() as u64 - used;
        }
    }
    Ok(())
}
