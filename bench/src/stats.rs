//! The distribution of measured values.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The distribution of measured values, in the unit of their row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The number of values, at least 1.
    pub samples: usize,
    pub min: f64,
    /// The median: half of the values are no larger.
    pub p50: f64,
    /// 99 of 100 values are no larger.
    pub p99: f64,
    pub max: f64,
}

impl Spread {
    /// The distribution of `values`; `None` without values.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        Some(Self {
            samples: values.len(),
            min: *values.first()?,
            p50: *values.get(rank(values.len(), 50))?,
            p99: *values.get(rank(values.len(), 99))?,
            max: *values.last()?,
        })
    }

    /// The distribution of times, in milliseconds.
    #[must_use]
    pub fn of_times(times: &[Duration]) -> Option<Self> {
        Self::of(times.iter().copied().map(ms).collect())
    }
}

/// The nearest rank: the index of the smallest value that `percent` of all `count` values do not exceed.
fn rank(count: usize, percent: usize) -> usize {
    (count * percent).div_ceil(100).saturating_sub(1)
}

/// A number of things.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub fn count(n: usize) -> f64 {
    n as f64
}

/// Milliseconds.
#[must_use]
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_definition() {
        let spread = Spread::of((1..=200).rev().map(f64::from).collect()).unwrap();
        assert_eq!(
            spread,
            Spread {
                samples: 200,
                min: 1.0,
                p50: 100.0,
                p99: 198.0,
                max: 200.0
            }
        );
        let one = Spread::of(vec![7.0]).unwrap();
        assert_eq!((one.min, one.p50, one.p99, one.max), (7.0, 7.0, 7.0, 7.0));
        assert_eq!(Spread::of(Vec::new()), None);
    }
}
