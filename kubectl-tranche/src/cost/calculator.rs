//! `cost calculator`: jobs on whole GPUs against the same jobs on shares. Needs no cluster.

use serde::Serialize;
use tranche_driver::cost::{Calculator, CalculatorError};

use super::Dollars;
use crate::output::{Block, Tone, View};

/// What is shown.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// Jobs, each on a GPU of its own today.
    pub gpus: u32,
    /// Jobs that share a GPU.
    pub tenants: u32,
    /// How much longer a job takes in its share, percent.
    pub overhead: u32,
    /// What an hour of a job's work costs on a GPU of its own.
    pub before: Dollars,
    /// What the same work costs in a share.
    pub after: Dollars,
    /// The change, percent.
    pub change: f64,
    /// GPU-hours a day that are free for others.
    pub freed_gpu_hours: u64,
}

/// Compares.
pub fn compare(calculator: Calculator) -> Result<Comparison, CalculatorError> {
    let result = calculator.calculate()?;
    Ok(Comparison {
        gpus: calculator.gpus,
        tenants: calculator.tenants,
        overhead: calculator.overhead,
        before: Dollars(result.before),
        after: Dollars(result.after),
        change: tenths(result.change),
        freed_gpu_hours: result.freed,
    })
}

#[expect(clippy::cast_precision_loss, reason = "tenths of a percent are small")]
fn tenths(change: i64) -> f64 {
    change as f64 / 10.0
}

impl View for Comparison {
    fn blocks(&self, _: bool) -> Vec<Block> {
        let sign = if self.change < 0.0 { "−" } else { "+" };
        vec![
            Block::plain(format!(
                "{} jobs, {} to a GPU, each {} % longer in its share:",
                self.gpus, self.tenants, self.overhead
            )),
            Block::Line(
                Tone::Heading,
                format!(
                    "{} → {} per job-hour, {sign}{:.0} %, {} GPU-hours a day free for others",
                    self.before,
                    self.after,
                    self.change.abs(),
                    self.freed_gpu_hours
                ),
            ),
        ]
    }
}
