//! Capped shares.

use anyhow::Context;
use serde_json::json;
use tranche_allocator_oracle::Scheduler;
use tranche_api::names::capacity;
use tranche_api::quantity::Quantity;
use tranche_api::tier::Tier;

use super::Args;
use super::lives::lives;
use super::place::{Placer, Sum, place, ratio};
use super::scheduled::{Node, claim};
use crate::row::Row;

/// GPUs of the node; more than the shares need.
const GPUS: u32 = 32;
/// The sum of the shares in use, in thousandths of a GPU.
const LOAD: u32 = 16_000;

pub fn run(args: Args) -> anyhow::Result<Vec<Row>> {
    let (node, policy) = Node::plan(GPUS, Tier::Capped)?;
    let first = node
        .slices
        .iter()
        .flat_map(|it| it.spec.devices.iter().flatten())
        .next();
    let memory = first
        .and_then(|it| it.capacity.as_ref()?.get(capacity::MEMORY))
        .context("a capped device without memory")?;
    let usable = Quantity::try_from(&memory.value)?.to_count()?;
    let step = policy.spec.capped.memory_step.to_count()?;
    let share = |number: usize, size: u32| {
        // Rounded down, so that shares that add up to a GPU fit in one.
        let part = usable / 1000 * u64::from(size);
        let memory = part - part % step;
        let request = json!({
            "deviceClassName": Tier::Capped.class_name(),
            "capacity": {"requests": {"memory": memory.to_string(), "cores": (size / 10).to_string()}},
        });
        claim(number, &request)
    };

    let mut scheduler = Scheduler::start()?;
    let (mut ours, mut reversed, mut best) = (Sum::default(), Sum::default(), Sum::default());
    for seed in 0..args.runs {
        let lives = lives(seed, LOAD, args.ends);
        node.measure(&mut scheduler, &lives, &share, [&mut ours, &mut reversed])?;
        place(&lives, &mut BestFit::default(), &mut best)?;
    }
    Ok(vec![
        Row::new("packing-capped", ratio(ours.gpus, best.gpus))
            .beside("reverse order", ratio(reversed.gpus, best.gpus)),
        Row::new("packing-capped-free", ours.free_percent())
            .beside("best fit", best.free_percent()),
    ])
}

/// The GPU that has the least left afterwards.
#[derive(Default)]
struct BestFit {
    /// Thousandths in use, by GPU.
    used: Vec<u32>,
}

impl Placer for BestFit {
    fn start(&mut self, _: usize, size: u32) -> anyhow::Result<usize> {
        let used = self.used.iter().copied().enumerate();
        let fitting = used.filter(|(_, used)| used + size <= 1000);
        let fullest = fitting.max_by_key(|(gpu, used)| (*used, std::cmp::Reverse(*gpu)));
        let gpu = fullest.map_or(self.used.len(), |(gpu, _)| gpu);
        if gpu == self.used.len() {
            self.used.push(0);
        }
        self.used[gpu] += size;
        Ok(gpu)
    }

    fn end(&mut self, _: usize, gpu: usize, size: u32) -> anyhow::Result<()> {
        self.used[gpu] -= size;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::lives::Event;
    use super::*;

    #[test]
    fn best_fit_fills_the_fullest_gpu_that_has_room() {
        let mut best = BestFit::default();
        let mut start = |number, size| best.start(number, size).unwrap();
        assert_eq!(start(0, 500), 0);
        assert_eq!(start(1, 700), 1);
        assert_eq!(start(2, 300), 1);
        assert_eq!(start(3, 300), 0);
        let mut sum = Sum::default();
        let events = [
            Event::Start(0, 600),
            Event::Start(1, 600),
            Event::End(0),
            Event::Start(2, 300),
        ];
        place(&events, &mut BestFit::default(), &mut sum).unwrap();
        // One GPU after the end, and one after the third start.
        assert_eq!((sum.gpus, sum.free), (2, 400 + 100));
    }
}
