//! The use of GPUs over the last hour, by minute: pure. The caller passes the current minute.

use std::collections::BTreeMap;

use crate::usage::{NodeGpu, Usage, Used};

/// The number of minutes kept.
pub const MINUTES: usize = 60;
const MIB: u64 = 1 << 20;

/// The last hour of all GPUs.
#[derive(Clone, Debug, Default)]
pub struct History {
    gpus: BTreeMap<NodeGpu, Hour>,
    /// The minute of the last readings.
    now: u64,
}

/// The last hour of a GPU. It takes the same memory after its first reading as after an hour, so that the page does not run out of
/// memory later.
#[derive(Clone, Debug)]
struct Hour {
    /// The mean of each minute, at the minute's number modulo [`MINUTES`].
    means: Box<[Mean; MINUTES]>,
    /// The minute of its last reading.
    at: u64,
    /// The readings of this minute.
    sum: Sum,
}

/// The mean of a minute's readings. It is small because a thousand nodes have half a million of them.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    /// MiB.
    memory: Option<u32>,
    /// Percent of the GPU's time.
    time: Option<u8>,
}

/// The readings of a minute, added up.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    readings: u32,
    memory: u64,
    timed: u32,
    time: f64,
}

/// A value for each minute, the oldest first; `None` where there was no reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Bytes, the mean of the minute.
    pub memory: Vec<Option<u64>>,
    /// Percent of the GPU's time, the mean of the minute.
    pub time: Vec<Option<u8>>,
}

/// Whether there are new readings of the use since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Read {
    /// There are none.
    #[default]
    No,
    /// There are: the use is new, the last hour is about the same.
    Again,
    /// There are, with the first of a minute: the last hour is new, too.
    FirstOfMinute,
}

impl History {
    /// Adds readings. `minute` counts from any time and never decreases.
    pub fn add(&mut self, minute: u64, usage: &Usage) -> Read {
        let is_first = minute > self.now || self.gpus.is_empty();
        self.now = self.now.max(minute);
        for (gpu, used) in &usage.gpus {
            let hour = self.gpus.entry(gpu.clone());
            hour.or_insert_with(|| Hour::new(self.now))
                .add(self.now, used);
        }
        let now = self.now;
        self.gpus.retain(|_, hour| now - hour.at < MINUTES as u64);
        if is_first {
            Read::FirstOfMinute
        } else {
            Read::Again
        }
    }

    /// A GPU's last hour; `None` without a reading in it.
    #[must_use]
    pub fn of(&self, gpu: &NodeGpu) -> Option<Lines> {
        let hour = self.gpus.get(gpu)?;
        let minutes = (self.now + 1).saturating_sub(MINUTES as u64)..=self.now;
        let means = minutes.map(|minute| hour.mean(minute));
        let (memory, time) = means
            .map(|it| (it.memory.map(|mib| u64::from(mib) * MIB), it.time))
            .unzip();
        Some(Lines { memory, time })
    }
}

impl Hour {
    fn new(at: u64) -> Self {
        Self {
            means: Box::new([Mean::default(); MINUTES]),
            at,
            sum: Sum::default(),
        }
    }

    fn add(&mut self, minute: u64, used: &Used) {
        if minute > self.at {
            // The minutes between had no reading.
            let passed = (self.at + 1..=minute).take(MINUTES);
            passed.for_each(|minute| self.means[slot(minute)] = Mean::default());
            self.at = minute;
            self.sum = Sum::default();
        }
        self.sum.add(used);
        self.means[slot(minute)] = self.sum.mean();
    }

    /// The mean of one of the last minutes.
    fn mean(&self, minute: u64) -> Mean {
        if minute > self.at {
            return Mean::default();
        }
        self.means[slot(minute)]
    }
}

fn slot(minute: u64) -> usize {
    usize::try_from(minute % MINUTES as u64).unwrap_or_default()
}

impl Sum {
    fn add(&mut self, used: &Used) {
        self.readings += 1;
        self.memory = self.memory.saturating_add(used.memory);
        if let Some(time) = used.time {
            self.timed += 1;
            self.time += time;
        }
    }

    fn mean(&self) -> Mean {
        let memory = self.memory.checked_div(self.readings.into());
        Mean {
            memory: memory.map(|bytes| u32::try_from(bytes / MIB).unwrap_or(u32::MAX)),
            time: (self.timed > 0).then(|| percent(self.time / f64::from(self.timed))),
        }
    }
}

/// Whole percent, because people do not see smaller changes.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is between 0 and 100"
)]
pub fn percent(value: f64) -> u8 {
    value.clamp(0.0, 100.0).round() as u8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::gpu;

    fn usage(memory: u64, time: Option<f64>) -> Usage {
        let used = Used {
            memory,
            time,
            ..Used::default()
        };
        Usage {
            gpus: [(gpu('a', 0), used)].into(),
            ..Usage::default()
        }
    }

    #[test]
    fn a_minute_is_the_mean_of_its_readings_and_empty_without_any() {
        let mut history = History::default();
        let read = [
            history.add(100, &usage(10 * MIB, Some(20.0))),
            history.add(100, &usage(30 * MIB, Some(40.0))),
            history.add(102, &usage(50 * MIB, None)),
        ];
        assert_eq!(
            read,
            [Read::FirstOfMinute, Read::Again, Read::FirstOfMinute]
        );
        let lines = history.of(&gpu('a', 0)).unwrap();
        assert_eq!(lines.memory.len(), 60);
        assert_eq!(lines.memory[57..], [Some(20 * MIB), None, Some(50 * MIB)]);
        assert_eq!(lines.time[57..], [Some(30), None, None]);
        assert_eq!(history.of(&gpu('b', 0)), None);
    }

    #[test]
    fn the_hour_of_a_gpu_always_takes_less_than_a_kilobyte() {
        let of_means = size_of::<Mean>() * MINUTES;
        let NodeGpu { node, uuid } = gpu('a', 0);
        let of_gpu = size_of::<NodeGpu>() + node.len() + uuid.len();
        assert!(of_means + size_of::<Hour>() + of_gpu < 1000);
    }

    #[test]
    fn a_gpu_without_a_reading_for_an_hour_is_forgotten() {
        let mut history = History::default();
        history.add(3, &usage(MIB, None));
        history.add(62, &Usage::default());
        assert_eq!(history.of(&gpu('a', 0)).unwrap().memory[0], Some(MIB));
        history.add(63, &Usage::default());
        assert_eq!(history.of(&gpu('a', 0)), None);
    }

    proptest! {
        #[test]
        fn each_minute_of_the_last_hour_is_kept_and_no_other(steps in prop::collection::vec(0..70_u64, 1..40)) {
            let mut history = History::default();
            let mut minute = 0;
            let mut read = std::collections::BTreeSet::new();
            for step in steps {
                minute += step;
                read.insert(minute);
                history.add(minute, &usage(minute * MIB, None));
                let lines = history.of(&gpu('a', 0)).unwrap();
                prop_assert!(lines.memory.len() <= MINUTES);
                for (nth, memory) in (0..).zip(lines.memory.iter().rev()) {
                    // The value of each reading is its minute.
                    let wanted = read.get(&(minute - nth)).map(|it| it * MIB);
                    prop_assert_eq!(*memory, wanted);
                }
            }
        }
    }
}
