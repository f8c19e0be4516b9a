//! How busy GPUs are, and for whom.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::nvml::{Driver, Nvml, ProcessSample};

/// How busy GPUs are.
pub trait Utilization {
    /// How much of the last time the GPU worked, in parts of 1; `None` where nobody knows.
    fn whole(&mut self, gpu_uuid: &str) -> Option<f64>;

    /// How much of it for which process, by PID on the host; who is not listed has none. `None` where
    /// nobody knows: without NVML, and where it does not say (MIG, vGPU).
    fn by_process(&mut self, gpu_uuid: &str) -> Option<Vec<(u32, f64)>>;

    /// Nobody asks for a while: what is open for the answers is closed.
    fn close(&mut self) {}
}

/// From one attempt to open NVML to the next. Without it shares have their cores all the same.
const RETRY: Duration = Duration::from_secs(10);

/// For how long a process's sample is taken to hold. The driver samples every 1/6 s to 1 s, each process by
/// itself: one that is missing from an answer was not sampled anew since the last one, not idle.
const HOLD: Duration = Duration::from_secs(1);

/// What NVML says, as soon as there is one.
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
    /// When it was seen.
    seen: Instant,
    /// In parts of 1.
    part: f64,
}

impl Last {
    /// Notes what NVML says that is newer than what it said before.
    fn note(&mut self, now: Instant, samples: Vec<ProcessSample>) {
        for ProcessSample { pid, at, percent } in samples {
            self.stamp = self.stamp.max(at);
            let sample = Sample {
                at,
                seen: now,
                part: f64::from(percent.min(100)) / 100.0,
            };
            // Of several samples of a process the newest.
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
    /// By the NVML of `driver`, opened when it is needed first.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>) -> Self {
        Self {
            driver: Some(driver),
            opened: None,
            tried: None,
            last: BTreeMap::new(),
        }
    }

    /// By an NVML that is open.
    #[must_use]
    pub fn of(nvml: Box<dyn Nvml>) -> Self {
        Self {
            driver: None,
            opened: Some(nvml),
            tried: None,
            last: BTreeMap::new(),
        }
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

    /// After a call that every driver answers failed: the driver may be another one by now, which an
    /// NVML of before does not talk to. Not at once after it was opened: a GPU that is gone fails too,
    /// and the others' figures are wanted.
    fn give_up(&mut self) {
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
            self.give_up();
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
    use crate::nvml::{Description, NvmlError, Opened, ProcessMemory, Traces};
    use crate::root::DriverRoot;

    /// A driver that was replaced once: what was opened before fails.
    #[derive(Clone, Debug, Default)]
    struct Replaced {
        opened: Arc<AtomicU32>,
        open: Arc<AtomicU32>,
    }

    /// By which opening it was opened; counted down when it is closed.
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
        // A GPU that is gone does not take the others with it, nor does what not every driver answers.
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

    /// The driver samples each process by itself: who is missing from one answer is not idle, but who is
    /// missing for a second is.
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
