//! The use of GPUs over the last hour, by minute: pure. The caller says which minute it is.

use std::collections::{BTreeMap, VecDeque};

use crate::usage::{Usage, Used};

/// Minutes that are kept.
pub const MINUTES: u64 = 60;

/// The last hour of all GPUs.
#[derive(Clone, Debug, Default)]
pub struct History {
    gpus: BTreeMap<String, VecDeque<Minute>>,
    /// The minute of the last readings.
    now: u64,
}

/// The readings of a minute.
#[derive(Clone, Copy, Debug, Default)]
struct Minute {
    at: u64,
    readings: u32,
    memory: u64,
    timed: u32,
    time: f64,
}

/// A line for each minute, the oldest first; nothing where there was no reading.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    /// Bytes, the mean of the minute.
    pub memory: Vec<Option<u64>>,
    /// Percent of the GPU's time, the mean of the minute.
    pub time: Vec<Option<f64>>,
}

impl History {
    /// Takes readings in. `minute` counts from any time and does not go back.
    pub fn add(&mut self, minute: u64, usage: &Usage) {
        self.now = self.now.max(minute);
        for (uuid, used) in &usage.gpus {
            let minutes = self.gpus.entry(uuid.clone()).or_default();
            match minutes.back_mut() {
                Some(last) if last.at >= self.now => last.add(used),
                _ => {
                    let mut first = Minute {
                        at: self.now,
                        ..Minute::default()
                    };
                    first.add(used);
                    minutes.push_back(first);
                }
            }
        }
        let now = self.now;
        self.gpus.retain(|_, minutes| {
            while minutes.front().is_some_and(|it| it.at + MINUTES <= now) {
                minutes.pop_front();
            }
            !minutes.is_empty()
        });
    }

    /// A GPU's last hour; `None` without a reading in it.
    #[must_use]
    pub fn of(&self, uuid: &str) -> Option<Lines> {
        let minutes = self.gpus.get(uuid)?;
        let mut lines = Lines::default();
        for minute in (self.now + 1).saturating_sub(MINUTES)..=self.now {
            let read = minutes.iter().find(|it| it.at == minute);
            lines.memory.push(read.and_then(Minute::mean_memory));
            lines.time.push(read.and_then(Minute::mean_time));
        }
        Some(lines)
    }
}

impl Minute {
    fn add(&mut self, used: &Used) {
        self.readings += 1;
        self.memory = self.memory.saturating_add(used.memory);
        if let Some(time) = used.time {
            self.timed += 1;
            self.time += time;
        }
    }

    fn mean_memory(&self) -> Option<u64> {
        self.memory.checked_div(self.readings.into())
    }

    fn mean_time(&self) -> Option<f64> {
        (self.timed > 0).then(|| self.time / f64::from(self.timed))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usage(memory: u64, time: Option<f64>) -> Usage {
        let used = Used {
            memory,
            time,
            ..Used::default()
        };
        Usage {
            gpus: [("GPU-a".to_owned(), used)].into(),
            ..Usage::default()
        }
    }

    #[test]
    fn a_minute_is_the_mean_of_its_readings_and_one_without_readings_is_empty() {
        let mut history = History::default();
        history.add(100, &usage(10, Some(20.0)));
        history.add(100, &usage(30, Some(40.0)));
        history.add(102, &usage(50, None));
        let lines = history.of("GPU-a").unwrap();
        assert_eq!(lines.memory.len(), 60);
        assert_eq!(lines.memory[57..], [Some(20), None, Some(50)]);
        assert_eq!(lines.time[57..], [Some(30.0), None, None]);
        assert_eq!(history.of("GPU-b"), None);
    }

    proptest! {
        #[test]
        fn no_more_than_an_hour_is_kept(steps in prop::collection::vec(0..70_u64, 1..40)) {
            let mut history = History::default();
            let mut minute = 0;
            for step in steps {
                minute += step;
                history.add(minute, &usage(minute, None));
                let kept = &history.gpus["GPU-a"];
                prop_assert!(kept.len() as u64 <= MINUTES);
                let lines = history.of("GPU-a").unwrap();
                prop_assert_eq!(lines.memory.last(), Some(&Some(minute)));
                for (nth, memory) in lines.memory.iter().rev().enumerate() {
                    // The value of a reading is the minute that it was read in.
                    prop_assert!(memory.is_none_or(|it| it + nth as u64 == minute));
                }
            }
        }
    }
}
