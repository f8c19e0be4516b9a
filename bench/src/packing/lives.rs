//! The events on the node: shares of random sizes start, and random shares end.

/// Sizes of shares in thousandths of a GPU, with the number of each: the `gpu_milli` of the 3,078 tasks in Alibaba's GPU trace of
/// 2023 that request less than one GPU (`openb_pod_list_default.csv` of `cluster-trace-gpu-v2023`).
const SIZES: [(u32, u64); 20] = [
    (50, 7),
    (110, 24),
    (140, 1),
    (160, 74),
    (220, 62),
    (230, 140),
    (270, 4),
    (290, 1),
    (320, 328),
    (330, 7),
    (350, 6),
    (370, 47),
    (440, 2),
    (460, 128),
    (470, 750),
    (480, 19),
    (550, 72),
    (590, 75),
    (650, 253),
    (810, 1078),
];

/// An event on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The share with this number and this size in thousandths of a GPU starts.
    Start(usize, u32),
    /// The share with this number ends.
    End(usize),
}

/// Shares of random sizes start until `load` thousandths of a GPU are in use. Then random shares end, `ends` in total, and others
/// start.
pub fn lives(seed: u64, load: u32, ends: usize) -> Vec<Event> {
    let mut random = Random(seed);
    let mut events = Vec::new();
    let mut alive: Vec<(usize, u32)> = Vec::new();
    let mut started = 0;
    for _ in 0..=ends {
        while alive.iter().map(|(_, size)| size).sum::<u32>() < load {
            let size = random.size();
            alive.push((started, size));
            events.push(Event::Start(started, size));
            started += 1;
        }
        let which = random.below(alive.len() as u64);
        let (number, _) = alive.swap_remove(usize::try_from(which).unwrap_or_default());
        events.push(Event::End(number));
    }
    events
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn size(&mut self) -> u32 {
        let total: u64 = SIZES.iter().map(|(_, count)| count).sum();
        let mut at = self.below(total);
        for (size, count) in SIZES {
            if at < count {
                return size;
            }
            at -= count;
        }
        unreachable!("the counts add up to {total}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const LOAD: u32 = 16_000;

    #[test]
    fn sizes_come_as_often_as_in_the_trace() {
        let total: u64 = SIZES.iter().map(|(_, count)| count).sum();
        assert_eq!(total, 3078);
        let mut random = Random(0);
        let of_810 = (0..10_000).filter(|_| random.size() == 810).count();
        // 1078 of 3078 are 35 percent.
        assert!((3400..3600).contains(&of_810), "{of_810}");
    }

    #[test]
    fn shares_end_after_they_start_and_cores_are_whole_percents() {
        let mut alive = BTreeSet::new();
        for event in lives(1, LOAD, 50) {
            match event {
                Event::Start(number, size) => {
                    assert!(alive.insert(number));
                    assert_eq!(size % 10, 0);
                }
                Event::End(number) => assert!(alive.remove(&number)),
            }
        }
        assert!(alive.len() > 10);
        assert_eq!(lives(1, LOAD, 50), lives(1, LOAD, 50));
        assert_ne!(lives(1, LOAD, 50), lives(2, LOAD, 50));
    }
}
