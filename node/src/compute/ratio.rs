//! The ratio of the GPU's work to the charges.

use super::{PERIOD_NANOS, as_f64};

/// Averages of the measured and the charged utilization, 0 to 1.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Averages {
    pub worked: f64,
    pub charged: f64,
}

/// The weight of a period of [`PERIOD_NANOS`] in the averages: they cover some seconds, because a launch
/// of seconds is charged in one step and runs in many, and because a driver that names one process in
/// each sample is right on average only.
const WEIGHT: f64 = 0.03;

impl Averages {
    /// Adds a step of `elapsed` nanoseconds.
    pub fn add(&mut self, elapsed: u64, worked: f64, charged: f64) {
        let weight = (WEIGHT * as_f64(elapsed) / as_f64(PERIOD_NANOS)).min(1.0);
        self.worked += (worked - self.worked) * weight;
        self.charged += (charged - self.charged) * weight;
    }

    /// Measured by charged; `None` if there was too little work.
    pub fn ratio(self) -> Option<f64> {
        let enough = self.worked >= 0.002 && self.charged >= 0.0005;
        enough.then(|| self.worked / self.charged)
    }
}
