//! `cost calculator`: compares jobs on whole GPUs with the same jobs on shares. Needs no cluster.

use serde::Serialize;

use super::Dollars;
use crate::money::Money;
use crate::output::{Block, Tone, View};

/// Jobs that have a GPU each, and how they would share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calculator {
    /// Jobs, each on a GPU of its own today.
    pub gpus: u32,
    /// A GPU's price for an hour.
    pub price: Money,
    /// How many of the jobs share one GPU, at least 1.
    pub tenants: u32,
    /// How much longer a job takes in its share, percent.
    pub overhead: u32,
}

/// Numbers that cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CalculatorError {
    /// No jobs share a GPU.
    #[error("tenants is 0: name how many jobs share a GPU, 1 or more")]
    NoTenants,
    /// The price is 0.
    #[error("the price is 0: name what a GPU costs for an hour")]
    NoPrice,
}

/// What sharing saves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
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
    /// What the same work costs in a share, with the overhead.
    pub after: Dollars,
    /// The change, percent; negative where sharing is cheaper.
    pub change: f64,
    /// GPU-hours a day that are free for others while all jobs run, rounded.
    pub freed_gpu_hours: u64,
}

const HOURS: u64 = 24;

pub fn compare(jobs: Calculator) -> Result<Comparison, CalculatorError> {
    if jobs.tenants == 0 {
        return Err(CalculatorError::NoTenants);
    }
    if jobs.price == Money::ZERO {
        return Err(CalculatorError::NoPrice);
    }
    let tenants = u64::from(jobs.tenants);
    let numerator = 100 + u128::from(jobs.overhead);
    let denominator = 100 * u128::from(jobs.tenants);
    let thousandths = i64::try_from(numerator * 1000 / denominator).unwrap_or(i64::MAX);
    let freed = HOURS * u64::from(jobs.gpus) * (tenants - 1);
    Ok(Comparison {
        gpus: jobs.gpus,
        tenants: jobs.tenants,
        overhead: jobs.overhead,
        before: Dollars(jobs.price),
        after: Dollars(jobs.price.part(numerator, denominator)),
        change: tenths(thousandths - 1000),
        freed_gpu_hours: (freed + tenants / 2) / tenants,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(gpus: u32, price: &str, tenants: u32, overhead: u32) -> Calculator {
        Calculator {
            gpus,
            price: price.parse().unwrap(),
            tenants,
            overhead,
        }
    }

    /// The published example: 10 GPUs at $3.50. Its inputs are not published; 4 tenants and 8 % overhead give its numbers.
    #[test]
    fn ten_gpus_at_three_and_a_half_dollars() {
        let result = compare(jobs(10, "3.50", 4, 8)).unwrap();
        assert_eq!(result.before.0.to_string(), "$3.50");
        assert_eq!(result.after.0.to_string(), "$0.95");
        assert_eq!((result.change, result.freed_gpu_hours), (-73.0, 180));
    }

    #[test]
    fn one_tenant_with_overhead_is_dearer() {
        let result = compare(jobs(3, "2", 1, 10)).unwrap();
        assert_eq!(result.after.0.to_string(), "$2.20");
        assert_eq!((result.change, result.freed_gpu_hours), (10.0, 0));
    }

    #[test]
    fn what_is_no_question_is_refused() {
        let refused = |price, tenants| compare(jobs(1, price, tenants, 0));
        assert_eq!(refused("0.000001", 0), Err(CalculatorError::NoTenants));
        assert_eq!(refused("0", 1), Err(CalculatorError::NoPrice));
    }
}
