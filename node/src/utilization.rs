//! The utilization of GPUs, in total and by process.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::nvml::{Driver, Nvml, ProcessMemory, ProcessSample};

/// How busy GPUs are.
pub trait Utilization {
    /// The part of the last period in which the GPU worked, 0 to 1; `None` if it is not known.
    fn whole(&mut self, gpu_uuid: &str) -> Option<f64>;

    /// The same by process, with PIDs of the host; a process that is not listed has none. `None` if
    /// it is not known: without NVML, and where NVML does not report it (MIG, vGPU).
    fn by_process(&mut self, gpu_uuid: &str) -> Option<Vec<(u32, f64)>>;

    /// Closes what is open, because the next call is not expected soon.
    fn close(&mut self) {}
}

/// The interval between attempts to open NVML. Shares have their cores also without it.
const RETRY: Duration = Duration::from_secs(10);

/// How long a process's sample is valid. The driver samples every 1/6 s to 1 s, each process separately: a
/// process that is missing in an answer was not sampled again, but need not be idle.
const HOLD: Duration = Duration::from_secs(1);

/// The utilization as NVML reports it, as soon as NVML can be opened.
#[derive(Debug)]
pub struct NvmlUtilization {
    driver: Option<Box<dyn Driver>>,
    opened: Option<Box<dyn Nvml>>,
    tried: Option<Instant>,
    last: BTreeMap<String, Last>,
}

/// The last samples of a GPU's processes.
#[derive(Debug, Default)]
struct Last {
    /// The newest one's time, by the driver's clock.
    stamp: u64,
    processes: BTreeMap<u32, Sample>,
}

/// The last sample of a process.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Its time, by the driver's clock.
    at: u64,
    /// When it was read.
    seen: Instant,
    /// 0 to 1.
    part: f64,
}

impl Last {
    /// Records the samples that are newer than the last ones.
    fn note(&mut self, now: Instant, samples: Vec<ProcessSample>) {
        for ProcessSample { pid, at, percent } in samples {
            self.stamp = self.stamp.max(at);
            let sample = Sample {
                at,
                seen: now,
                part: f64::from(percent.min(100)) / 100.0,
            };
            // The newest of several samples of a process.
            let known = self.processes.entry(pid).or_insert(sample);
            if known.at < at {
                *known = sample;
            }
        }
        self.processes
            .retain(|_, sample| now.duration_since(sample.seen) < HOLD);
    }

    fn parts(&self) -> Vec<(u32, f64)> {
        self.processes
            .iter()
            .map(|(pid, sample)| (*pid, sample.part))
            .collect()
    }
}

impl NvmlUtilization {
    /// With the NVML of `driver`, which is opened at the first call.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>) -> Self {
        Self {
            driver: Some(driver),
            opened: None,
            tried: None,
            last: BTreeMap::new(),
        }
    }

    /// With an open NVML.
    #[must_use]
    pub fn of(nvml: Box<dyn Nvml>) -> Self {
        Self {
            driver: None,
            opened: Some(nvml),
            tried: None,
            last: BTreeMap::new(),
        }
    }

    /// How much memory each process holds on a GPU; `None` where nobody knows.
    pub fn process_memory(&mut self, gpu_uuid: &str) -> Option<Vec<ProcessMemory>> {
        self.open()?.processes(gpu_uuid).ok()
    }

    fn open(&mut self) -> Option<&dyn Nvml> {
        if let (None, Some(driver)) = (&self.opened, &self.driver)
            && self.tried.is_none_or(|at| at.elapsed() > RETRY)
        {
            self.tried = Some(Instant::now());
            self.opened = driver.open().ok().map(|opened| opened.nvml);
        }
        self.opened.as_deref()
    }

    /// Closes NVML after a call failed that every driver supports: the driver may have been replaced,
    /// and an old NVML does not work with it. Not immediately after it was opened: such a call also
    /// fails for a GPU that is gone, and the other GPUs' figures are still needed.
    fn close_failed(&mut self) {
        if self.driver.is_some() && self.tried.is_none_or(|at| at.elapsed() > RETRY) {
            self.opened = None;
        }
    }
}

impl Utilization for NvmlUtilization {
    fn close(&mut self) {
        if self.driver.is_some() {
            self.opened = None;
            self.tried = None;
            self.last.clear();
        }
    }

    fn whole(&mut self, gpu_uuid: &str) -> Option<f64> {
        let Ok(percent) = self.open()?.utilization(gpu_uuid) else {
            self.close_failed();
            return None;
        };
        Some(f64::from(percent.min(100)) / 100.0)
    }

    fn by_process(&mut self, gpu_uuid: &str) -> Option<Vec<(u32, f64)>> {
        let since = self.last.get(gpu_uuid).map_or(0, |last| last.stamp);
        let samples = self.open()?.process_utilization(gpu_uuid, since).ok()?;
        let last = self.last.entry(gpu_uuid.to_owned()).or_default();
        last.note(Instant::now(), samples);
        Some(last.parts())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::devices::DeviceNodes;
    use crate::nvml::{Description, NvmlError, Opened, Traces};
    use crate::root::DriverRoot;

    /// A driver that was replaced once: an NVML that was opened before fails.
    #[derive(Clone, Debug, Default)]
    struct Replaced {
        opened: Arc<AtomicU32>,
        open: Arc<AtomicU32>,
    }

    /// The number of the opening; the count of open handles decreases when it is closed.
    #[derive(Debug)]
    struct Handle {
        works: bool,
        open: Arc<AtomicU32>,
    }

    impl Drop for Handle {
        fn drop(&mut self) {
            self.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl Driver for Replaced {
        fn open(&self) -> Result<Opened, NvmlError> {
            let root = DriverRoot::open(std::path::Path::new("/"))?;
            self.open.fetch_add(1, Ordering::SeqCst);
            Ok(Opened {
                nvml: Box::new(Handle {
                    works: self.opened.fetch_add(1, Ordering::SeqCst) > 0,
                    open: Arc::clone(&self.open),
                }),
                nodes: DeviceNodes::find(&root, &root)?,
                root,
            })
        }

        fn traces(&self) -> Traces {
            Traces::default()
        }
    }

    impl Nvml for Handle {
        fn describe(&self) -> Result<Description, NvmlError> {
            unreachable!("nobody asks")
        }

        fn utilization(&self, gpu_uuid: &str) -> Result<u32, NvmlError> {
            match (self.works, gpu_uuid) {
                (true, "here") => Ok(50),
                _ => Err(NvmlError::Root("gone".into())),
            }
        }

        fn process_utilization(&self, _: &str, _: u64) -> Result<Vec<ProcessSample>, NvmlError> {
            Err(NvmlError::Root("not supported".into()))
        }

        fn processes(&self, _: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
            unreachable!("nobody asks")
        }

        fn used_memory(&self, _: &str) -> Result<u64, NvmlError> {
            unreachable!("nobody asks")
        }
    }

    #[test]
    fn an_nvml_that_fails_is_opened_anew_but_not_all_the_time() {
        let driver = Replaced::default();
        let mut utilization = NvmlUtilization::new(Box::new(driver.clone()));
        let opened = || driver.opened.load(Ordering::SeqCst);
        let later = |utilization: &mut NvmlUtilization| {
            utilization.tried = Instant::now().checked_sub(RETRY * 2);
        };
        assert_eq!((utilization.whole("here"), opened()), (None, 1));
        later(&mut utilization);
        assert_eq!(utilization.whole("here"), None);
        assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 2));
        // A GPU that is gone does not affect the others, nor does a call that not every driver
        // supports.
        for _ in 0..3 {
            assert_eq!(utilization.whole("elsewhere"), None);
            assert_eq!(utilization.by_process("here"), None);
            assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 2));
        }
        later(&mut utilization);
        assert_eq!(utilization.by_process("here"), None);
        assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 2));
        assert_eq!(utilization.whole("elsewhere"), None);
        assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 3));
    }

    /// The driver samples each process separately: a process that is missing in one answer is not idle,
    /// but one that is missing for a second is.
    #[test]
    fn a_process_that_is_missing_from_one_answer_still_works() {
        let sample = |pid, at, percent| ProcessSample { pid, at, percent };
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        let mut last = Last::default();
        last.note(
            start,
            vec![sample(1, 100, 30), sample(2, 100, 60), sample(1, 90, 5)],
        );
        assert_eq!(last.parts(), [(1, 0.3), (2, 0.6)]);
        last.note(after(500), vec![sample(2, 200, 70)]);
        assert_eq!(last.parts(), [(1, 0.3), (2, 0.7)]);
        last.note(after(900), Vec::new());
        assert_eq!((last.parts().len(), last.stamp), (2, 200));
        last.note(after(1100), vec![sample(2, 300, 0)]);
        assert_eq!(last.parts(), [(2, 0.0)]);
        last.note(after(2200), Vec::new());
        assert_eq!(last.parts(), []);
    }

    #[test]
    fn an_nvml_that_nobody_asks_is_closed_and_opened_anew_at_once() {
        let driver = Replaced::default();
        let mut utilization = NvmlUtilization::new(Box::new(driver.clone()));
        let open = || driver.open.load(Ordering::SeqCst);
        assert_eq!((utilization.whole("here"), open()), (None, 1));
        utilization.close();
        assert_eq!(open(), 0);
        assert_eq!((utilization.whole("here"), open()), (Some(0.5), 1));
        utilization.close();
        utilization.close();
        assert_eq!(open(), 0);
    }
}
