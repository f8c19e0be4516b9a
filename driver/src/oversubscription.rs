//! Memory oversubscription: the capped shares of a GPU have more memory together than the GPU.
//!
//! Each share has a part of the GPU as its own. Memory beyond that part must be memory that the driver can move to the
//! host (ADR 0033). The parts of all shares together fit into the GPU.

/// The memory of all shares of a GPU together, in percent of its usable memory: 101 to 400.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Oversubscription(u16);

impl Oversubscription {
    /// The percentage without oversubscription.
    pub const NONE: u32 = 100;
    /// The most, in percent.
    pub const MOST: u32 = 400;

    /// `None` for a number that is not in 101 to 400 percent.
    #[must_use]
    pub fn new(percent: u32) -> Option<Self> {
        let is_more = Self::NONE < percent && percent <= Self::MOST;
        u16::try_from(percent).ok().filter(|_| is_more).map(Self)
    }

    /// In percent.
    #[must_use]
    pub const fn percent(self) -> u16 {
        self.0
    }

    /// The memory of all shares together, on a GPU with `usable` bytes for them: a multiple of `step` bytes.
    #[must_use]
    pub fn memory(self, usable: u64, step: u64) -> u64 {
        let all = u128::from(usable) * u128::from(self.0) / u128::from(Self::NONE);
        let all = u64::try_from(all).unwrap_or(u64::MAX);
        all - all % step
    }

    /// The part of the GPU that is the own of a share with `memory` bytes; at least one byte.
    #[must_use]
    pub fn part_on_gpu(self, memory: u64) -> u64 {
        let part = u128::from(memory) * u128::from(Self::NONE) / u128::from(self.0);
        u64::try_from(part).unwrap_or(memory).max(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_more_than_the_gpu_and_at_most_four_times_that() {
        assert_eq!([0, 100, 401, 65_736].map(Oversubscription::new), [None; 4]);
        let over = |percent| Oversubscription::new(percent).unwrap();
        assert_eq!([101, 400].map(|it| over(it).percent()), [101, 400]);
        assert_eq!(over(200).memory(40 << 30, 1 << 20), 80 << 30);
        assert_eq!(over(200).part_on_gpu(30 << 30), 15 << 30);
        assert_eq!(over(400).part_on_gpu(3), 1);
    }

    proptest! {
        /// However the memory is divided into shares, their parts together fit into the GPU.
        #[test]
        fn parts_are_within_the_gpu(
            percent in 101..=400_u32,
            step in prop::sample::select(vec![4_u64, 1000, 1 << 20, 1 << 30]),
            usable in 1..200_u64 << 30,
            cuts in prop::collection::vec(0..=1000_u64, 0..12),
        ) {
            let over = Oversubscription::new(percent).unwrap();
            let all = over.memory(usable, step);
            prop_assert!(all <= usable * 4 && all.is_multiple_of(step));
            let mut left = all;
            let mut parts = 0;
            for cut in cuts {
                let share = (left / step * cut / 1000) * step;
                if share > 0 {
                    let part = over.part_on_gpu(share);
                    prop_assert!(part < share);
                    (left, parts) = (left - share, parts + part);
                }
            }
            prop_assert!(parts <= usable);
        }
    }
}
