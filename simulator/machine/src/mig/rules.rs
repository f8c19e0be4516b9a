//! Which further instances fit on a GPU.

use super::model::{ComputeProfile, Engines, GpuProfile, Model};

/// A placed GPU instance.
pub type Placed = (&'static GpuProfile, u32);

fn overlaps((start, size): (u32, u32), (other, other_size): (u32, u32)) -> bool {
    start < other + other_size && other < start + size
}

impl Engines {
    /// What is left after `taken`; `None` if it is more than there is.
    fn without(self, taken: Self) -> Option<Self> {
        Some(Self {
            copy: self.copy.checked_sub(taken.copy)?,
            decoders: self.decoders.checked_sub(taken.decoders)?,
            encoders: self.encoders.checked_sub(taken.encoders)?,
            jpeg: self.jpeg.checked_sub(taken.jpeg)?,
            optical_flow: self.optical_flow.checked_sub(taken.optical_flow)?,
        })
    }
}

/// The compute slices and engines that `placed` leaves; `None` if they take more than there is.
fn left(model: &'static Model, placed: &[Placed]) -> Option<(u32, Engines)> {
    let whole = model.whole();
    let start = (whole.slices, whole.engines);
    placed.iter().try_fold(start, |(slices, engines), (it, _)| {
        Some((slices.checked_sub(it.slices)?, engines.without(it.engines)?))
    })
}

/// Whether a GPU instance of `profile` can be made at `start` beside `placed`.
#[must_use]
pub fn fits(
    model: &'static Model,
    placed: &[Placed],
    profile: &'static GpuProfile,
    start: u32,
) -> bool {
    let place = (start, profile.size);
    let is_free = placed
        .iter()
        .all(|(other, at)| !overlaps(place, (*at, other.size)));
    let mut with = placed.to_vec();
    with.push((profile, start));
    let equal = with.iter().filter(|(it, _)| it.kind == profile.kind);
    profile.starts.contains(&start)
        && is_free
        && equal.count() <= profile.instances as usize
        && left(model, &with).is_some()
}

/// Where the driver places a GPU instance if the caller does not choose.
#[must_use]
pub fn choose(
    model: &'static Model,
    placed: &[Placed],
    profile: &'static GpuProfile,
) -> Option<u32> {
    let mut starts = profile.starts.iter().copied();
    starts.find(|start| fits(model, placed, profile, *start))
}

/// How many more GPU instances of `profile` can be made.
#[must_use]
pub fn remaining(model: &'static Model, placed: &[Placed], profile: &'static GpuProfile) -> u32 {
    // Placements of one profile do not overlap, so any order gives the same number.
    let mut placed = placed.to_vec();
    let mut count = 0;
    while let Some(start) = choose(model, &placed, profile) {
        placed.push((profile, start));
        count += 1;
    }
    count
}

/// Whether a compute instance of `profile` can be made at `start` beside `placed` (start and slices of each).
#[must_use]
pub fn compute_fits(placed: &[(u32, u32)], profile: &ComputeProfile, start: u32) -> bool {
    profile.starts().any(|it| it == start)
        && placed
            .iter()
            .all(|other| !overlaps((start, profile.slices), *other))
}

/// How many more compute instances of `profile` can be made.
#[must_use]
pub fn compute_remaining(placed: &[(u32, u32)], profile: &ComputeProfile) -> u32 {
    let free = profile
        .starts()
        .filter(|start| compute_fits(placed, profile, *start));
    u32::try_from(free.count()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mig::model::ModelName;
    use proptest::prelude::*;

    const ALL: [ModelName; 7] = [
        ModelName::A30,
        ModelName::A100Gb40,
        ModelName::A100Gb80,
        ModelName::H100,
        ModelName::H200,
        ModelName::B200,
        ModelName::RtxPro6000,
    ];

    /// Makes the instances by name, each at a start or where the driver puts it.
    fn layout(model: ModelName, names: &[(&str, Option<u32>)]) -> Option<Vec<Placed>> {
        let model = Model::of(model);
        names
            .iter()
            .try_fold(Vec::new(), |mut placed, (name, start)| {
                let profile = model.profiles.iter().find(|it| it.name == *name).unwrap();
                let start = match start {
                    Some(start) if fits(model, &placed, profile, *start) => *start,
                    Some(_) => return None,
                    None => choose(model, &placed, profile)?,
                };
                placed.push((profile, start));
                Some(placed)
            })
    }

    fn by_slices(model: ModelName, slices: &[(u32, u32)]) -> bool {
        let table = Model::of(model);
        let names: Vec<_> = slices
            .iter()
            .map(|(slices, start)| {
                let is_it = |it: &&GpuProfile| it.slices == *slices && it.kind < 5;
                (
                    table.profiles.iter().find(is_it).unwrap().name,
                    Some(*start),
                )
            })
            .collect();
        layout(model, &names).is_some()
    }

    /// The rows of the guide's figures "Profiles on A100" and "Profiles on H100": slices and start of each instance.
    #[test]
    fn every_layout_of_the_guide_can_be_made() {
        let halves: [&[(u32, u32)]; 6] = [
            &[(4, 0)],
            &[(3, 0)],
            &[(2, 0), (2, 2)],
            &[(2, 0), (1, 2), (1, 3)],
            &[(1, 0), (1, 1), (2, 2)],
            &[(1, 0), (1, 1), (1, 2), (1, 3)],
        ];
        let rest: [&[(u32, u32)]; 3] = [&[(3, 4)], &[(2, 4), (1, 6)], &[(1, 4), (1, 5), (1, 6)]];
        for model in [ModelName::A100Gb40, ModelName::A100Gb80, ModelName::H100] {
            assert!(by_slices(model, &[(7, 0)]));
            for first in halves {
                for second in rest {
                    let row = [first, second].concat();
                    assert!(by_slices(model, &row), "{model:?} {row:?}");
                }
            }
        }
    }

    #[test]
    fn impossible_layouts_cannot_be_made() {
        for model in [ModelName::A100Gb40, ModelName::A100Gb80, ModelName::H100] {
            let name = |slices: u32| {
                let it = |it: &&GpuProfile| it.slices == slices && it.kind < 5;
                Model::of(model).profiles.iter().find(it).unwrap().name
            };
            let [one, two, three, four] = [1, 2, 3, 4].map(name);
            let make = |names: &[&str]| {
                let names: Vec<_> = names.iter().map(|name| (*name, None)).collect();
                layout(model, &names).is_some()
            };
            assert!(make(&[two; 3]) && !make(&[two; 4]));
            assert!(make(&[two, two, two, one]));
            // Two halves of the memory are taken, though a compute slice is left.
            assert!(make(&[three, three]) && !make(&[three, three, one]));
            assert!(!make(&[four, four]) && !make(&[four, three, one]));
            assert!(make(&[one; 7]) && !make(&[one; 8]));
            // The guide's example: 3g has to come first.
            assert!(make(&[three, one, two, one]) && !make(&[one, one, two, three]));
        }
    }

    #[test]
    fn media_engines_are_counted() {
        let make = |model, names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name, None)).collect();
            layout(model, &names).is_some()
        };
        assert!(!make(ModelName::H100, &["1g.10gb+me", "1g.10gb+me"]));
        assert!(make(ModelName::H100, &["1g.10gb+me", "1g.10gb"]));
        assert!(!make(ModelName::A30, &["2g.12gb+me", "1g.6gb+me"]));
        let rtx = ModelName::RtxPro6000;
        assert!(!make(rtx, &["1g.24gb+me.all", "1g.24gb"]));
        assert!(make(rtx, &["1g.24gb+me.all", "1g.24gb-me", "2g.48gb-me"]));
        assert!(make(
            rtx,
            &["1g.24gb", "1g.24gb+gfx", "1g.24gb+me", "1g.24gb"]
        ));
    }

    #[test]
    fn placements_are_chosen_in_the_drivers_order() {
        let starts = |model, names: &[&str]| -> Vec<u32> {
            let names: Vec<_> = names.iter().map(|name| (*name, None)).collect();
            let placed = layout(model, &names).unwrap();
            placed.iter().map(|(_, start)| *start).collect()
        };
        // The guide's examples.
        let a100 = ModelName::A100Gb40;
        assert_eq!(starts(a100, &["3g.20gb", "3g.20gb"]), [4, 0]);
        assert_eq!(
            starts(a100, &["3g.20gb", "1g.5gb", "2g.10gb", "1g.5gb"]),
            [4, 0, 2, 1]
        );
        assert_eq!(
            starts(
                a100,
                &["2g.10gb", "1g.5gb", "1g.5gb", "1g.5gb", "1g.5gb", "1g.5gb"]
            ),
            [4, 6, 0, 1, 2, 3]
        );
        assert_eq!(starts(ModelName::RtxPro6000, &["1g.24gb"; 4]), [0, 3, 6, 9]);
    }

    proptest! {
        /// Random creations and destructions: places never overlap, sums never exceed the GPU, and what is said to remain can
        /// be made.
        #[test]
        fn instances_never_exceed_the_gpu(
            model in 0usize..ALL.len(),
            steps in proptest::collection::vec((0usize..12, 0u32..14, any::<bool>()), 0..60),
        ) {
            let model = Model::of(ALL[model]);
            let mut placed: Vec<Placed> = Vec::new();
            for (pick, start, create) in steps {
                if !create {
                    if !placed.is_empty() {
                        placed.swap_remove(pick % placed.len());
                    }
                    continue;
                }
                let profile = &model.profiles[pick % model.profiles.len()];
                let remaining = remaining(model, &placed, profile);
                prop_assert_eq!(remaining > 0, choose(model, &placed, profile).is_some());
                if fits(model, &placed, profile, start) {
                    prop_assert!(remaining > 0);
                    placed.push((profile, start));
                }
                let whole = model.whole();
                for place in 0..whole.size {
                    let holders = placed.iter().filter(|(it, at)| (*at..at + it.size).contains(&place));
                    prop_assert!(holders.count() <= 1);
                }
                let sum = |of: fn(&GpuProfile) -> u32| placed.iter().map(|(it, _)| of(it)).sum::<u32>();
                prop_assert!(sum(|it| it.slices) <= whole.slices);
                prop_assert!(sum(|it| it.multiprocessors) <= whole.multiprocessors);
                prop_assert!(sum(|it| it.engines.decoders) <= whole.engines.decoders);
                prop_assert!(sum(|it| it.engines.optical_flow) <= whole.engines.optical_flow);
                prop_assert!(placed.iter().map(|(it, _)| it.memory_mib).sum::<u64>() <= whole.memory_mib);
                let mut ids: Vec<_> = placed.iter().map(|(it, at)| it.instance_id(whole, *at)).collect();
                ids.sort_unstable();
                ids.dedup();
                prop_assert_eq!(ids.len(), placed.len());
            }
        }
    }
}
