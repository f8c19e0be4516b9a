//! One measured value, as a line of JSON and as a line for people.

use std::fmt;
use std::io::Write;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::promise::{self, Bound, Promise};
use crate::stats::Spread;

/// A comparison value from the same run, because machines vary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Against {
    pub what: String,
    /// The value in the row's unit.
    pub value: f64,
}

/// A measured value of a promise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub id: String,
    /// The value in the promise's unit.
    pub value: f64,
    /// The distribution of the values behind it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// Comparison values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub against: Vec<Against>,
}

impl Row {
    /// A value of the promise `id`.
    #[must_use]
    pub fn new(id: &str, value: f64) -> Self {
        Self {
            id: id.to_owned(),
            value,
            spread: None,
            against: Vec::new(),
        }
    }

    /// Adds the distribution of the values behind it.
    #[must_use]
    pub fn from(mut self, spread: Spread) -> Self {
        self.spread = Some(spread);
        self
    }

    /// Adds a comparison value.
    #[must_use]
    pub fn beside(mut self, what: &str, value: f64) -> Self {
        self.against.push(Against {
            what: what.to_owned(),
            value,
        });
        self
    }

    fn promise(&self) -> anyhow::Result<&'static Promise> {
        promise::find(&self.id).with_context(|| {
            format!(
                "{}: no promise has this id; was it measured by another version?",
                self.id
            )
        })
    }

    /// Whether the promise is kept.
    pub fn is_kept(&self) -> anyhow::Result<bool> {
        Ok(self.promise()?.bound.is_kept_by(self.value))
    }

    /// A line for people.
    pub fn line(&self) -> anyhow::Result<String> {
        let promise = self.promise()?;
        let (bound, verdict) = match promise.bound {
            Bound::Open => (String::new(), ""),
            bound if bound.is_kept_by(self.value) => (bound.to_string(), "pass"),
            bound => (bound.to_string(), "MISS"),
        };
        Ok(format!(
            "{:<54} {:>9} {:<6} {:>7} {:<4} {self}",
            promise.what,
            short(self.value),
            promise.unit,
            bound,
            verdict
        )
        .trim_end()
        .to_owned())
    }
}

/// The text beside the value.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some(spread) = self.spread {
            parts.push(format!(
                "n={}, {}–{}, p99 {}",
                spread.samples,
                short(spread.min),
                short(spread.max),
                short(spread.p99)
            ));
        }
        parts.extend(
            self.against
                .iter()
                .map(|against| format!("{}: {}", against.what, short(against.value))),
        );
        f.write_str(&parts.join("; "))
    }
}

/// At most three significant digits.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 10.0 => format!("{value:.2}"),
        v if v < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// The outputs of rows: JSON on stdout, one per line, and text on stderr.
pub fn emit(rows: &[Row]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for row in rows {
        writeln!(out, "{}", serde_json::to_string(row)?)?;
        eprintln!("  {}", row.line()?);
    }
    Ok(out.flush()?)
}

/// Prints the files of rows, in the order of the promises. Returns whether all targets are met.
pub fn report(files: &[std::path::PathBuf]) -> anyhow::Result<bool> {
    let mut rows = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
        for (number, line) in text.lines().enumerate() {
            let row: Row = serde_json::from_str(line)
                .with_context(|| format!("{}:{}", file.display(), number + 1))?;
            rows.push(row);
        }
    }
    let mut kept = true;
    for promise in promise::PROMISES {
        for row in rows.iter().filter(|row| row.id == promise.id) {
            println!("{}", row.line()?);
            kept &= row.is_kept()?;
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_reads_back_as_it_was_written() {
        let row = Row::new("prepare-p50", 1.25)
            .from(Spread::of(vec![1.0, 1.25, 2.0]).unwrap())
            .beside("one GET", 0.9);
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row);
    }

    #[test]
    fn a_line_says_target_verdict_and_what_to_judge_it_by() {
        let line = Row::new("prepare-p50", 3.0)
            .beside("one GET", 0.9)
            .line()
            .unwrap();
        assert!(line.contains("≤ 2 MISS"), "{line}");
        assert!(line.contains("one GET: 0.90"), "{line}");
        let line = Row::new("prepare-p50", 2.0).line().unwrap();
        assert!(line.contains("pass"), "{line}");
    }

    #[test]
    fn a_row_of_another_version_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.jsonl");
        std::fs::write(&file, "{\"id\":\"gone\",\"value\":1}\nnonsense\n").unwrap();
        let error = format!("{:#}", report(&[file]).unwrap_err());
        assert!(error.contains("x.jsonl:2"), "{error}");
        assert!(
            Row::new("gone", 1.0)
                .line()
                .unwrap_err()
                .to_string()
                .contains("gone")
        );
    }
}
