//! A daemon's default limits: the most that any of its clients may have.
//!
//! Each container has its own, lower limits, which the shim sets in the process before the driver is called. The defaults hold for a
//! process that runs without the shim.
//!
//! A limit names the device by its index in the daemon's own view, which is always 0: the daemon sees one device. To a command with
//! a UUID the daemon of driver 535 answers nothing, sets nothing, and removes the limit of index 0. It also answers nothing to a
//! wrong value. So each limit is read back.

use serde::{Deserialize, Serialize};

/// The device's index in the daemon's view.
const DEVICE: u32 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Percent of the GPU's threads that a client may use, 1 to 100.
    pub thread_percentage: u8,
    /// MiB of device memory that a client may hold, at least 1; `None` for no limit.
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

/// Why limits do not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// Out of range.
    #[error("threadPercentage {0}: not within 1 to 100")]
    ThreadPercentage(u8),
    /// Out of range.
    #[error("memoryMiB 0: set 1 or more, or leave it out for no limit")]
    Memory,
    /// The daemon answers something else than what was set.
    #[error("the MPS control daemon was asked for {asked:?} and answers {found:?} when asked back")]
    NotSet { asked: String, found: String },
}

/// A command that sets a limit, and the question whose answer proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub set: String,
    pub get: String,
    expected: Expected,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Percentage(u8),
    Memory(Option<u64>),
}

impl Limits {
    /// Refuses limits that the daemon would refuse without a message.
    pub fn check(self) -> Result<Self, LimitError> {
        if !(1..=100).contains(&self.thread_percentage) {
            return Err(LimitError::ThreadPercentage(self.thread_percentage));
        }
        if self.memory_mib == Some(0) {
            return Err(LimitError::Memory);
        }
        Ok(self)
    }

    /// The commands that set them.
    #[must_use]
    pub fn settings(self) -> [Setting; 2] {
        // 0M removes a limit.
        let memory = self.memory_mib.unwrap_or(0);
        [
            Setting {
                set: format!(
                    "set_default_active_thread_percentage {}",
                    self.thread_percentage
                ),
                get: "get_default_active_thread_percentage".to_owned(),
                expected: Expected::Percentage(self.thread_percentage),
            },
            Setting {
                set: format!("set_default_device_pinned_mem_limit {DEVICE} {memory}M"),
                get: format!("get_default_device_pinned_mem_limit {DEVICE}"),
                expected: Expected::Memory(self.memory_mib),
            },
        ]
    }
}

impl Setting {
    /// Whether the answer to [`get`](Self::get) says that it is set.
    pub fn check(&self, answer: &str) -> Result<(), LimitError> {
        let answer = answer.trim();
        let holds = match self.expected {
            // It answers with one decimal.
            Expected::Percentage(percent) => answer.parse() == Ok(f64::from(percent)),
            Expected::Memory(None) => answer.is_empty(),
            Expected::Memory(Some(mib)) => is_memory(answer, mib),
        };
        if holds {
            return Ok(());
        }
        Err(LimitError::NotSet {
            asked: self.set.clone(),
            found: answer.to_owned(),
        })
    }
}

/// The daemon of driver 535 prints whole GiB from 1 GiB on, and drops the rest: 4607M is 4G.
fn is_memory(answer: &str, mib: u64) -> bool {
    let parse = |unit| answer.strip_suffix(unit)?.parse::<u64>().ok();
    match (parse('G'), parse('M')) {
        (Some(gib), _) => gib == mib / 1024,
        (_, Some(found)) => found == mib,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{LimitError, Limits};

    #[test]
    fn an_answer_that_is_not_the_limit_is_refused() {
        let [threads, memory] = Limits {
            thread_percentage: 30,
            memory_mib: Some(4607),
        }
        .settings();
        assert_eq!(memory.set, "set_default_device_pinned_mem_limit 0 4607M");
        for answer in ["30.0\n", "30"] {
            assert_eq!(threads.check(answer), Ok(()));
        }
        for answer in ["4G\n", "4607M"] {
            assert_eq!(memory.check(answer), Ok(()));
        }
        for answer in ["", "100.0", "30.5", "x"] {
            assert!(threads.check(answer).is_err(), "{answer}");
        }
        for answer in ["", "5G", "4606M", "4607", "G", "0M"] {
            assert!(memory.check(answer).is_err(), "{answer}");
        }
    }

    #[test]
    fn no_limit_is_an_empty_answer() {
        let [_, memory] = Limits {
            thread_percentage: 100,
            memory_mib: None,
        }
        .settings();
        assert_eq!(memory.check("\n"), Ok(()));
        assert!(memory.check("4G").is_err());
    }

    #[test]
    fn limits_out_of_range_are_refused() {
        let limits = |thread_percentage, memory_mib| Limits {
            thread_percentage,
            memory_mib,
        };
        assert!(limits(1, None).check().is_ok());
        assert!(limits(100, Some(1)).check().is_ok());
        assert_eq!(
            limits(0, None).check(),
            Err(LimitError::ThreadPercentage(0))
        );
        assert_eq!(
            limits(101, None).check(),
            Err(LimitError::ThreadPercentage(101))
        );
        assert_eq!(limits(1, Some(0)).check(), Err(LimitError::Memory));
    }
}
