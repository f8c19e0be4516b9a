//! Processes of this node, as `/proc` shows them.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its pid in this PID namespace.
    pub pid: u32,
    /// Time from the machine's boot to its start, to a hundredth of a second, rounded down.
    pub started: Duration,
}

/// Resident memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The present value in KiB.
    pub resident: u64,
    /// The highest value so far in KiB.
    pub peak: u64,
}

/// KiB in MiB.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

/// Time since the machine's boot.
#[must_use]
pub fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    // The clock starts at zero, and its nanoseconds are less than a second.
    Duration::new(
        now.tv_sec.unsigned_abs(),
        u32::try_from(now.tv_nsec).unwrap_or_default(),
    )
}

/// The processes that run a program of this name, oldest first.
pub fn running(program: &str) -> anyhow::Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("/proc")? {
        let Some(pid) = entry?
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // The process has ended.
        let Ok(command) = std::fs::read(format!("/proc/{pid}/cmdline")) else {
            continue;
        };
        if program_of(&command) == Some(program)
            && let Some(started) = started(pid)
        {
            found.push(Process { pid, started });
        }
    }
    found.sort_unstable_by_key(|process| process.started);
    Ok(found)
}

fn program_of(cmdline: &[u8]) -> Option<&str> {
    let first = cmdline.split(|byte| *byte == 0).next()?;
    Path::new(std::str::from_utf8(first).ok()?)
        .file_name()?
        .to_str()
}

fn started(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    start_ticks(&stat).map(of_ticks)
}

fn of_ticks(ticks: u64) -> Duration {
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// `starttime` of proc(5)'s stat.
fn start_ticks(stat: &str) -> Option<u64> {
    field(stat, 22)
}

/// `utime` and `stime` of proc(5)'s stat.
fn cpu_ticks(stat: &str) -> Option<u64> {
    Some(field(stat, 14)? + field(stat, 15)?)
}

/// A field of proc(5)'s stat, counted from 1. The second field is a name in parentheses, which may contain any character.
fn field(stat: &str, nth: usize) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(nth - 3)?.parse().ok()
}

impl Process {
    /// Whether it still runs.
    #[must_use]
    pub fn is_alive(self) -> bool {
        started(self.pid) == Some(self.started)
    }

    /// The CPU time of all its threads so far, to a hundredth of a second.
    pub fn cpu_time(self) -> anyhow::Result<Duration> {
        let path = format!("/proc/{}/stat", self.pid);
        let stat = std::fs::read_to_string(&path).context(path.clone())?;
        let ticks = cpu_ticks(&stat).with_context(|| format!("{path} has no utime and stime"))?;
        Ok(of_ticks(ticks))
    }

    pub fn memory(self) -> anyhow::Result<Memory> {
        let path = format!("/proc/{}/status", self.pid);
        let status = std::fs::read_to_string(&path).context(path.clone())?;
        let size = |name| kib(&status, name).with_context(|| format!("{path} has no {name}"));
        Ok(Memory {
            resident: size("VmRSS")?,
            peak: size("VmHWM")?,
        })
    }
}

fn kib(status: &str, name: &str) -> Option<u64> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        let stat = format!("7 (a) b (c)) {}", fields.join(" "));
        assert_eq!(start_ticks(&stat), Some(22));
        assert_eq!(cpu_ticks(&stat), Some(14 + 15));
        assert_eq!(start_ticks("7 (a"), None);
    }

    #[test]
    fn this_process_is_found_alive_and_has_memory() {
        let own = std::env::args().next().unwrap();
        let name = program_of(own.as_bytes()).unwrap();
        let found = running(name).unwrap();
        let me = found
            .iter()
            .find(|process| process.pid == std::process::id())
            .unwrap();
        assert!(me.is_alive());
        assert!(me.started <= since_boot());
        let memory = me.memory().unwrap();
        assert!(memory.resident > 0 && memory.resident <= memory.peak);
    }
}
