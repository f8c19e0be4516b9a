//! The program in the pods, `tranche-workload --json` (`e2e/workload`), and its output.

use anyhow::Context;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The command that holds this much memory and prints a heartbeat ten times a second.
#[must_use]
pub fn hold(bytes: &str) -> [&str; 7] {
    [
        "tranche-workload",
        "--json",
        "hold",
        "--bytes",
        bytes,
        "--beat",
        "100",
    ]
}

/// A device as CUDA shows it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct VisibleDevice {
    /// Its number in the process.
    pub device: usize,
    /// `GPU-…`
    pub uuid: String,
    /// Bytes.
    pub total: u64,
    /// Bytes.
    pub free: u64,
    /// Multiprocessors that the process can use.
    pub multiprocessors: u32,
}

/// The result of `fill`.
#[derive(Clone, Debug, Deserialize)]
pub struct Filled {
    /// `GPU-…`
    pub uuid: String,
    /// Bytes.
    pub total: u64,
    /// Bytes held at the last refusal.
    pub filled: u64,
    /// The number of refusals.
    pub refused: u32,
    /// Bytes free after everything was freed.
    pub free_after: u64,
    /// Bytes that differ from what was written.
    pub errors: u64,
}

/// A heartbeat of `hold`.
#[derive(Clone, Debug, Deserialize)]
pub struct Beat {
    /// Its number, from 1.
    pub beat: u64,
    /// `GPU-…`
    pub uuid: String,
    /// Bytes held.
    pub held: u64,
    /// Bytes.
    pub free: u64,
    /// Bytes.
    pub total: u64,
    /// The number of errors so far.
    pub errors: u64,
    /// How often others changed the free or the total memory.
    pub moved: u64,
}

/// Reads JSON objects, one a line.
pub fn lines<T: DeserializeOwned>(text: &str) -> anyhow::Result<Vec<T>> {
    text.lines()
        .map(|line| {
            serde_json::from_str(line).with_context(|| format!("not what was expected: {line}"))
        })
        .collect()
}

/// The text of a field of a JSON object.
pub fn text<'a>(object: &'a Value, field: &str) -> anyhow::Result<&'a str> {
    let text = object[field].as_str();
    text.with_context(|| format!("no {field} in {object}"))
}
