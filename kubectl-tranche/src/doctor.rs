//! `doctor`: what is wrong with Tranche in a cluster, and the way out.

use serde::Serialize;

use crate::facts::Facts;
use crate::output::{Block, Tone, View};

mod checks;
mod components;
mod nodes;
pub(crate) mod pods;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Good,
    /// It could not be checked.
    Unknown,
    /// It works, and somebody should look at it.
    Warning,
    /// Something does not work.
    Error,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    pub check: &'static str,
    pub outcome: Outcome,
    pub message: String,
    /// What to do about it; empty where all is well.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub way_out: String,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// In the order of the checks.
    pub findings: Vec<Finding>,
}

/// Runs all checks.
#[must_use]
pub fn examine(facts: &Facts) -> Report {
    Report {
        findings: checks::all(facts),
    }
}

impl Report {
    /// Whether something does not work.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        let mut findings = self.findings.iter();
        findings.any(|it| it.outcome == Outcome::Error)
    }
}

impl View for Report {
    fn blocks(&self, _: bool) -> Vec<Block> {
        let mut blocks = Vec::new();
        for finding in &self.findings {
            let (tone, word) = match finding.outcome {
                Outcome::Good => (Tone::Good, "ok"),
                Outcome::Unknown => (Tone::Faint, "unknown"),
                Outcome::Warning => (Tone::Warning, "warning"),
                Outcome::Error => (Tone::Bad, "error"),
            };
            let line = format!("{word:<8} {}: {}", finding.check, finding.message);
            blocks.push(Block::Line(tone, line));
            if !finding.way_out.is_empty() {
                blocks.push(Block::plain(format!("         {}", finding.way_out)));
            }
        }
        blocks
    }
}

#[cfg(test)]
mod tests;
