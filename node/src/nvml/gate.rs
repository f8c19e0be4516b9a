//! Keeps NVML closed while a GPU changes its kernel driver.
//!
//! NVML may hold every GPU open that it has seen, and an open GPU cannot be taken from its driver. While any part of
//! this process has NVML open, every part gets the GPUs that NVML found when it started, without one that has come back
//! since.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Driver, NvmlError, Opened, Traces};

/// How long [`Patient`] waits: longer than one change takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Shut while a GPU changes its kernel driver. Clones are the same gate.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The number of [`Shut`] values that keep it shut.
    shut: u32,
    /// The number of open NVMLs that close when it is shut.
    open: u32,
}

/// Keeps a gate shut until it is dropped.
#[derive(Debug)]
pub struct Shut(Gate);

/// One NVML that is open: dropped after it.
#[derive(Debug)]
pub struct Pass(Gate);

impl Gate {
    /// Shuts it. Several callers may; it opens after the last of them.
    #[must_use]
    pub fn shut(&self) -> Shut {
        self.state().shut += 1;
        Shut(self.clone())
    }

    fn is_shut(&self) -> bool {
        self.state().shut > 0
    }

    fn pass(&self) -> Option<Pass> {
        let mut state = self.state();
        (state.shut == 0).then(|| {
            state.open += 1;
            Pass(self.clone())
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes those that wait for it.
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.0.changed.notify_all();
    }

    /// Waits for the wanted state, but not longer than `patience`.
    fn wait(&self, patience: Duration, is_wanted: impl Fn(&State) -> bool) -> bool {
        let waits = |state: &mut State| !is_wanted(state);
        let waited = self
            .0
            .changed
            .wait_timeout_while(self.state(), patience, waits);
        let (_state, result) = waited.unwrap_or_else(PoisonError::into_inner);
        !result.timed_out()
    }
}

impl Shut {
    /// Waits until all holders of an open NVML have closed it, but not longer than `patience`. Returns whether they
    /// have.
    #[must_use]
    pub fn wait_for_closed(&self, patience: Duration) -> bool {
        self.0.wait(patience, |state| state.open == 0)
    }
}

impl Drop for Shut {
    fn drop(&mut self) {
        self.0.change(|state| state.shut -= 1);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.change(|state| state.open -= 1);
    }
}

/// A driver for those that keep NVML open. It cannot be opened while the gate is shut, and its traces change then, so
/// that a [`KeptNvml`](super::KeptNvml) closes its NVML.
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
        let why = || "NVML stays closed while a GPU changes its kernel driver".to_owned();
        let pass = self.gate.pass().ok_or_else(|| NvmlError::Root(why()))?;
        Ok(Opened {
            pass: Some(pass),
            ..self.driver.open()?
        })
    }

    fn traces(&self) -> Traces {
        let mut traces = self.driver.traces();
        if self.gate.is_shut() {
            traces.0.push(("gate".into(), "shut".to_owned()));
        }
        traces
    }
}

/// A driver for those that open NVML for a moment to see all GPUs: they wait while the gate is shut.
#[derive(Debug)]
pub struct Patient {
    driver: Box<dyn Driver>,
    gate: Gate,
}

impl Patient {
    /// `driver` behind `gate`.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>, gate: Gate) -> Self {
        Self { driver, gate }
    }
}

impl Driver for Patient {
    fn open(&self) -> Result<Opened, NvmlError> {
        // A change that takes this long must not hide the other GPUs.
        let _ = self.gate.wait(PATIENCE, |state| state.shut == 0);
        self.driver.open()
    }

    fn traces(&self) -> Traces {
        self.driver.traces()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::thread;
    use std::time::Instant;

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

    #[test]
    fn shutting_waits_for_users_and_describing_waits_for_shutting() {
        let gate = Gate::default();
        let gpus = || Box::new(MigGpus::new(Description::default(), Path::new("/")));
        let gated = Gated::new(gpus(), gate.clone());
        let open = gated.open().unwrap();
        let shut = gate.shut();
        assert!(gated.open().is_err());
        assert!(!shut.wait_for_closed(Duration::ZERO));
        thread::scope(|scope| {
            let describes = scope.spawn(|| Patient::new(gpus(), gate.clone()).open().is_ok());
            let closed = scope.spawn(move || {
                let closed = shut.wait_for_closed(PATIENCE);
                (closed, shut)
            });
            drop(open);
            let (closed, shut) = closed.join().unwrap();
            assert!(closed);
            assert!(
                !describes.is_finished(),
                "described while the gate was shut"
            );
            drop(shut);
            assert!(describes.join().unwrap());
        });
    }
}
