//! An NVML that stays open between questions.

use std::time::{Duration, Instant};

use super::{Driver, Nvml, NvmlError, Pass, Traces};

/// The shortest time between two attempts to open NVML.
const RETRY: Duration = Duration::from_secs(10);

/// How often the driver's traces are compared while NVML is open.
const CHECK: Duration = Duration::from_secs(1);

/// How long NVML stays closed after the traces changed. While any part of this process has NVML open, the loader and
/// nvmlInit give the same NVML to every part, with the GPUs that it found when it started: all parts must close it
/// first.
const SETTLE: Duration = Duration::from_secs(3);

/// Opens NVML when it is first needed, and keeps it until [`KeptNvml::close`], a failed call, or a change of the
/// driver's traces.
#[derive(Debug)]
pub struct KeptNvml {
    source: Source,
    /// The NVML is dropped before its pass.
    opened: Option<(Box<dyn Nvml>, Option<Pass>)>,
    /// No attempt to open NVML before this.
    not_before: Option<Instant>,
}

#[derive(Debug)]
enum Source {
    /// NVML was given, so it is never closed.
    Given,
    Driver {
        driver: Box<dyn Driver>,
        /// The driver's traces when NVML was opened, and when they were last compared.
        seen: Option<(Traces, Instant)>,
    },
}

impl KeptNvml {
    /// For the NVML of `driver`; not opened yet.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>) -> Self {
        let source = Source::Driver { driver, seen: None };
        Self {
            source,
            opened: None,
            not_before: None,
        }
    }

    /// For an NVML that is open and stays open.
    #[must_use]
    pub fn of(nvml: Box<dyn Nvml>) -> Self {
        Self {
            source: Source::Given,
            opened: Some((nvml, None)),
            not_before: None,
        }
    }

    /// NVML, if it is open or can be opened at `now`.
    pub fn get(&mut self, now: Instant) -> Result<&dyn Nvml, NvmlError> {
        if let Source::Driver { driver, seen } = &mut self.source {
            if self.opened.is_some()
                && let Some((traces, checked)) = seen
                && now.duration_since(*checked) >= CHECK
            {
                *checked = now;
                if driver.traces() != *traces {
                    self.opened = None;
                    self.not_before = Some(now + SETTLE);
                }
            }
            if self.opened.is_none() && self.not_before.is_none_or(|at| at <= now) {
                self.not_before = Some(now + RETRY);
                // Read before NVML starts, so that a change in between is seen.
                *seen = Some((driver.traces(), now));
                let opened = driver.open()?;
                self.opened = Some((opened.nvml, opened.pass));
            }
        }
        let closed = || NvmlError::Root("NVML could not be opened just now".into());
        let opened = self.opened.as_ref().map(|(nvml, _)| &**nvml);
        opened.ok_or_else(closed)
    }

    /// Closes NVML because nobody needs it, so that the driver can be unloaded.
    pub fn close(&mut self) {
        if let Source::Driver { .. } = self.source {
            self.opened = None;
            self.not_before = None;
        }
    }

    /// Closes NVML after a call failed that every driver supports: the driver may have been replaced, and an old NVML
    /// does not work with the new one. Right after it was opened it stays open: such a call also fails for a GPU that
    /// is gone, and the other GPUs' figures are still needed.
    pub fn close_failed(&mut self, now: Instant) {
        let is_old = self.not_before.is_none_or(|at| at <= now);
        if is_old && matches!(self.source, Source::Driver { .. }) {
            self.opened = None;
        }
    }

    /// Lets time pass.
    #[cfg(test)]
    pub(crate) fn pass(&mut self, time: Duration) {
        self.not_before = self.not_before.and_then(|at| at.checked_sub(time));
    }

    /// Whether NVML is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.opened.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::nvml::{Description, Opened};
    use crate::testing::MigGpus;

    /// Counts its openings; its traces are a version.
    #[derive(Clone, Debug, Default)]
    struct Versions {
        openings: Arc<Mutex<Vec<&'static str>>>,
        version: Arc<Mutex<&'static str>>,
    }

    impl Driver for Versions {
        fn open(&self) -> Result<Opened, NvmlError> {
            let version = *self.version.lock().unwrap();
            self.openings.lock().unwrap().push(version);
            MigGpus::new(Description::default(), Path::new("/")).open()
        }

        fn traces(&self) -> Traces {
            let version = *self.version.lock().unwrap();
            Traces(vec![("driver".into(), version.into())])
        }
    }

    #[test]
    fn an_nvml_of_before_is_closed_for_a_while_and_then_opened_anew() {
        let driver = Versions::default();
        let start = Instant::now();
        let mut kept = KeptNvml::new(Box::new(driver.clone()));
        let ask = |kept: &mut KeptNvml, at| kept.get(start + at).is_ok();
        let second = Duration::from_secs(1);
        *driver.version.lock().unwrap() = "550";
        for at in [0, 1, 2, 30] {
            assert!(ask(&mut kept, at * second), "{at}");
        }
        assert_eq!(*driver.openings.lock().unwrap(), ["550"]);
        *driver.version.lock().unwrap() = "580";
        assert!(!ask(&mut kept, 31 * second));
        assert!(!kept.is_open());
        assert!(!ask(&mut kept, 33 * second));
        assert!(ask(&mut kept, 34 * second));
        assert!(ask(&mut kept, 60 * second));
        assert_eq!(*driver.openings.lock().unwrap(), ["550", "580"]);
    }

    #[test]
    fn a_failed_call_closes_it_but_not_just_after_it_was_opened() {
        let driver = Versions::default();
        let start = Instant::now();
        let mut kept = KeptNvml::new(Box::new(driver));
        kept.get(start).unwrap();
        kept.close_failed(start + RETRY / 2);
        assert!(kept.is_open());
        kept.close_failed(start + RETRY);
        assert!(!kept.is_open());
        kept.get(start + RETRY).unwrap();
        kept.close();
        assert!(!kept.is_open());
        kept.get(start + RETRY).unwrap();
        assert!(kept.is_open());
    }
}
