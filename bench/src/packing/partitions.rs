//! Partitions: sizes are rounded up to profiles of an H100.

use anyhow::Context;
use serde_json::json;
use tranche_allocator_oracle::Scheduler;
use tranche_api::names::DRIVER;
use tranche_api::tier::Tier;
use tranche_simulator_machine::mig::rules::{Placed, fits};
use tranche_simulator_machine::mig::{GpuProfile, Model, ModelName};

use super::Args;
use super::lives::{Event, lives};
use super::place::{Placer, Sum, place, ratio};
use super::scheduled::{Node, claim};
use crate::row::Row;

/// GPUs of the node; more than the partitions need.
const GPUS: u32 = 16;
/// The sum of the claims' sizes before rounding up, in thousandths of a GPU.
const LOAD: u32 = 6_000;
/// The profile with the fewest compute slices for each amount of memory, and its thousandths of a GPU's memory.
const PROFILES: [(&str, u32); 4] = [
    ("1g.10gb", 125),
    ("1g.20gb", 250),
    ("3g.40gb", 500),
    ("7g.80gb", 1000),
];

/// The smallest profile with at least `size`.
fn profile(size: u32) -> (&'static str, u32) {
    let fitting = PROFILES.into_iter().find(|(_, has)| *has >= size);
    fitting.unwrap_or(PROFILES[3])
}

pub fn run(args: Args) -> anyhow::Result<Vec<Row>> {
    let (node, _) = Node::plan(GPUS, Tier::Partition)?;
    let partition = |number: usize, size: u32| {
        let (name, _) = profile(size);
        let expression = format!("device.attributes[\"{DRIVER}\"].profile == \"{name}\"");
        let request = json!({
            "deviceClassName": Tier::Partition.class_name(),
            "selectors": [{"cel": {"expression": expression}}],
        });
        claim(number, &request)
    };

    let mut scheduler = Scheduler::start()?;
    let (mut ours, mut reversed, mut best) = (Sum::default(), Sum::default(), Sum::default());
    for seed in 0..args.runs {
        let lives = rounded(&lives(seed, LOAD, args.ends));
        node.measure(
            &mut scheduler,
            &lives,
            &partition,
            [&mut ours, &mut reversed],
        )?;
        place(&lives, &mut BestFit::new(), &mut best)?;
    }
    Ok(vec![
        Row::new("packing-partition", ratio(ours.gpus, best.gpus))
            .beside("reverse order", ratio(reversed.gpus, best.gpus)),
        Row::new("packing-partition-free", ours.free_percent())
            .beside("best fit", best.free_percent()),
    ])
}

/// The events with the sizes of profiles.
fn rounded(events: &[Event]) -> Vec<Event> {
    let round = |event: &Event| match *event {
        Event::Start(number, size) => Event::Start(number, profile(size).1),
        Event::End(number) => Event::End(number),
    };
    events.iter().map(round).collect()
}

/// Chooses the GPU with the most memory in use that has room for the profile, and on it the placement that leaves the most room. It
/// knows all GPUs and MIG's rules.
struct BestFit {
    model: &'static Model,
    /// The claims and their instances of each GPU.
    held: Vec<Vec<(usize, Placed)>>,
}

impl BestFit {
    fn new() -> Self {
        let model = Model::of(ModelName::H100);
        let held = (0..GPUS).map(|_| Vec::new()).collect();
        Self { model, held }
    }

    /// The placements of a profile beside these instances.
    fn places(&self, held: &[Placed], wanted: &'static GpuProfile) -> Vec<Placed> {
        let starts = wanted.starts.iter().map(|start| (wanted, *start));
        starts
            .filter(|(profile, start)| fits(self.model, held, profile, *start))
            .collect()
    }

    /// A score of what still fits: it grows with the number and size of further instances.
    fn room(&self, held: &[Placed]) -> u32 {
        let named = |name: &str| self.model.profiles.iter().find(move |it| it.name == name);
        let profiles = PROFILES
            .iter()
            .filter_map(|(name, size)| Some((named(name)?, size)));
        let room = profiles.map(|(profile, size)| {
            let places = self.places(held, profile).len();
            size * size * u32::try_from(places).unwrap_or(u32::MAX)
        });
        room.sum()
    }
}

impl Placer for BestFit {
    fn start(&mut self, number: usize, size: u32) -> anyhow::Result<usize> {
        let (name, _) = profile(size);
        let wanted = self
            .model
            .profiles
            .iter()
            .find(|it| it.name == name)
            .with_context(|| format!("no profile {name}"))?;
        let mut best = None;
        for (gpu, held) in self.held.iter().enumerate() {
            let held: Vec<Placed> = held.iter().map(|(_, placed)| *placed).collect();
            let used: u32 = held.iter().map(|(profile, _)| profile.size).sum();
            for placed in self.places(&held, wanted) {
                let after = [&held[..], &[placed]].concat();
                let key = (used, self.room(&after), std::cmp::Reverse(gpu));
                best = best.max(Some((key, placed.1)));
            }
        }
        let ((_, _, gpu), start) = best.context("the node has too few GPUs")?;
        self.held[gpu.0].push((number, (wanted, start)));
        Ok(gpu.0)
    }

    fn end(&mut self, number: usize, gpu: usize, _: u32) -> anyhow::Result<()> {
        self.held[gpu].retain(|(claim, _)| *claim != number);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_to_profiles() {
        assert_eq!(profile(125), ("1g.10gb", 125));
        assert_eq!(profile(126), ("1g.20gb", 250));
        assert_eq!(profile(470), ("3g.40gb", 500));
        assert_eq!(profile(550), ("7g.80gb", 1000));
        assert_eq!(
            rounded(&[Event::Start(3, 810), Event::End(3)]),
            [Event::Start(3, 1000), Event::End(3)]
        );
    }

    #[test]
    fn best_fit_keeps_places_for_large_profiles() {
        let mut best = BestFit::new();
        let mut start = |number, size| best.start(number, size).unwrap();
        // The small instances share a half, so that the large one fits beside them.
        for number in 0..3 {
            assert_eq!(start(number, 125), 0);
        }
        assert_eq!(start(3, 500), 0);
        assert_eq!(start(4, 500), 1);
        assert_eq!(start(5, 500), 1);
        assert_eq!(start(6, 1000), 2);
        best.end(6, 2, 1000).unwrap();
        assert_eq!(best.start(7, 1000).unwrap(), 2);
    }
}
