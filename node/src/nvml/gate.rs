//! Keeps NVML closed while a GPU changes its kernel driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Driver, NvmlError, Opened, Traces};

/// Shut while a GPU changes its kernel driver. NVML may have every GPU open that it has seen, and a GPU that is open is not taken from
/// its driver. Clones are the same gate.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<AtomicU32>);

/// Keeps a gate shut until it is dropped.
#[derive(Debug)]
pub struct Shut(Gate);

impl Gate {
    /// Shuts it. Several may, and it is open again after the last.
    #[must_use]
    pub fn shut(&self) -> Shut {
        self.0.fetch_add(1, Ordering::SeqCst);
        Shut(self.clone())
    }

    fn is_shut(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

impl Drop for Shut {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A driver for those that keep NVML open: it cannot be opened while the gate is shut, and its traces change then, so that a
/// [`KeptNvml`](super::KeptNvml) closes what it has.
#[derive(Debug)]
pub struct Gated {
    driver: Box<dyn Driver>,
    gate: Gate,
}

impl Gated {
    /// `driver` behind `gate`.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>, gate: Gate) -> Self {
        Self { driver, gate }
    }
}

impl Driver for Gated {
    fn open(&self) -> Result<Opened, NvmlError> {
        if self.gate.is_shut() {
            let why = "NVML stays closed while a GPU changes its kernel driver";
            return Err(NvmlError::Root(why.to_owned()));
        }
        self.driver.open()
    }

    fn traces(&self) -> Traces {
        let mut traces = self.driver.traces();
        if self.gate.is_shut() {
            traces.0.push(("gate".into(), "shut".to_owned()));
        }
        traces
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::nvml::{Description, KeptNvml};
    use crate::testing::MigGpus;

    #[test]
    fn a_kept_nvml_is_closed_while_the_gate_is_shut() {
        let gate = Gate::default();
        let gpus = MigGpus::new(Description::default(), Path::new("/"));
        let mut kept = KeptNvml::new(Box::new(Gated::new(Box::new(gpus), gate.clone())));
        let start = Instant::now();
        let mut is_open = |seconds| {
            let at = start + Duration::from_secs(seconds);
            kept.get(at).is_ok()
        };
        assert!(is_open(0));
        let first = gate.shut();
        let second = gate.shut();
        assert!(!is_open(2));
        drop(first);
        assert!(!is_open(30));
        drop(second);
        assert!(is_open(60));
    }
}
