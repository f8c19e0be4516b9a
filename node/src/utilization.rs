//! The utilization of GPUs, in total and by process.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use tranche_shim_runtime::sys;

use crate::compute::evidence::Worked;
use crate::nvml::{Driver, Nvml, ProcessMemory, ProcessSample};

/// How busy GPUs are.
pub trait Utilization {
    /// The part of the last period in which the GPU worked, 0 to 1; `None` if it is not known.
    fn whole(&mut self, gpu_uuid: &str) -> Option<f64>;

    /// The samples since the last call, with PIDs of the host; a process without a sample did not
    /// work, or its sample comes later. `None` if they are not known: without NVML, and where NVML
    /// does not report them (MIG, vGPU).
    fn by_process(&mut self, gpu_uuid: &str) -> Option<Vec<(u32, Worked)>>;

    /// Closes what is open, because the next call is not expected soon.
    fn close(&mut self) {}
}

/// The interval between attempts to open NVML. Shares have their cores also without it.
const RETRY: Duration = Duration::from_secs(10);

/// The longest time that a sample describes, in microseconds. The driver samples every 1/6 s to 1 s.
const LONGEST_SAMPLE_MICROS: u64 = 1_000_000;

/// The time that a sample describes if the driver has not sampled anything in the second before it.
const FIRST_SAMPLE_MICROS: u64 = 1_000_000 / 6;

/// The utilization as NVML reports it, as soon as NVML can be opened.
#[derive(Debug)]
pub struct NvmlUtilization {
    driver: Option<Box<dyn Driver>>,
    opened: Option<Box<dyn Nvml>>,
    tried: Option<Instant>,
    last: BTreeMap<String, Last>,
}

/// The times of a GPU's last samples, by the driver's clock, in microseconds.
#[derive(Debug, Default)]
struct Last {
    /// The newest.
    stamp: u64,
    /// The last one of each process in the last second: the driver samples each process separately.
    processes: BTreeMap<u32, u64>,
}

/// A moment by the driver's clock, microseconds since 1970, and by `CLOCK_MONOTONIC`, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Moment {
    micros: u64,
    monotonic: u64,
}

impl Moment {
    fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            micros: since.map_or(0, |since| {
                u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
            }),
            monotonic: sys::now(),
        }
    }

    /// The monotonic time of a sample that was just read. It is at most two seconds old, or else the
    /// driver has another clock.
    fn of_sample(self, at: u64) -> u64 {
        let age = self.micros.saturating_sub(at);
        let age = if age > 2 * LONGEST_SAMPLE_MICROS {
            0
        } else {
            age
        };
        self.monotonic.saturating_sub(age * 1000)
    }
}

impl Last {
    /// The samples that are newer than the last ones, each with the time that it describes: since the
    /// process's last sample or, for a process without one, since the GPU's.
    fn note(&mut self, now: Moment, mut samples: Vec<ProcessSample>) -> Vec<(u32, Worked)> {
        let before = self.stamp;
        samples.sort_by_key(|sample| sample.at);
        let mut news = Vec::with_capacity(samples.len());
        for ProcessSample { pid, at, percent } in samples {
            let last = self.processes.insert(pid, at).unwrap_or(before);
            let length = match at.saturating_sub(last) {
                0 => continue,
                length if length > LONGEST_SAMPLE_MICROS => FIRST_SAMPLE_MICROS,
                length => length,
            };
            self.stamp = self.stamp.max(at);
            let to = now.of_sample(at);
            let worked = Worked {
                from: to.saturating_sub(length * 1000),
                to,
                part: f64::from(percent.min(100)) / 100.0,
            };
            news.push((pid, worked));
        }
        let oldest = self.stamp.saturating_sub(LONGEST_SAMPLE_MICROS);
        self.processes.retain(|_, at| *at >= oldest);
        news
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

    fn by_process(&mut self, gpu_uuid: &str) -> Option<Vec<(u32, Worked)>> {
        let since = self.last.get(gpu_uuid).map_or(0, |last| last.stamp);
        let samples = self.open()?.process_utilization(gpu_uuid, since).ok()?;
        let last = self.last.entry(gpu_uuid.to_owned()).or_default();
        Some(last.note(Moment::now(), samples))
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

    /// The driver samples each process separately, and need not sample all of them at a time.
    #[test]
    fn a_sample_describes_the_time_since_the_one_before() {
        let sample = |pid, at, percent| ProcessSample { pid, at, percent };
        let start = 1_700_000_000_000_000;
        let mut last = Last::default();
        // Read `late` microseconds after the newest; in milliseconds after the start.
        let mut note = |late, samples: &[(u32, u64, u32)]| {
            let at = |millis| start + millis * 1000;
            let newest = samples.iter().map(|(_, millis, _)| *millis).max().unwrap();
            let now = Moment {
                micros: at(newest) + late,
                monotonic: (5000 + newest) * 1_000_000 + late * 1000,
            };
            let samples = samples
                .iter()
                .map(|(pid, millis, percent)| sample(*pid, at(*millis), *percent));
            let found = last.note(now, samples.collect());
            let millis = |nanos: u64| (nanos + 500_000) / 1_000_000 - 5000;
            found
                .into_iter()
                .map(|(pid, worked)| (pid, millis(worked.from), millis(worked.to), worked.part))
                .collect::<Vec<_>>()
        };
        // Nothing is known of the time before the first.
        assert_eq!(note(0, &[(1, 1000, 30)]), [(1, 833, 1000, 0.3)]);
        assert_eq!(
            note(90_000, &[(2, 1167, 60), (1, 1167, 5)]),
            [(2, 1000, 1167, 0.6), (1, 1000, 1167, 0.05)]
        );
        // The second process is missing once, and its next sample is for the whole time.
        assert_eq!(note(0, &[(1, 1333, 10)]), [(1, 1167, 1333, 0.1)]);
        assert_eq!(
            note(0, &[(1, 1500, 10), (2, 1500, 70)]),
            [(1, 1333, 1500, 0.1), (2, 1167, 1500, 0.7)]
        );
        // Several samples of a process, in any order; the same one again is nothing new.
        assert_eq!(
            note(0, &[(1, 2000, 30), (1, 1800, 20), (2, 1500, 70)]),
            [(1, 1500, 1800, 0.2), (1, 1800, 2000, 0.3)]
        );
        // After more than a second without a sample.
        assert_eq!(note(0, &[(2, 4000, 120)]), [(2, 3833, 4000, 1.0)]);
        assert_eq!(last.processes.len(), 1);
        // A driver with another clock.
        let now = Moment {
            micros: start,
            monotonic: 9_000_000_000,
        };
        let mut last = Last::default();
        let found = last.note(now, vec![sample(1, 4711, 10)]);
        assert_eq!(found[0].1.to, now.monotonic);
        let found = last.note(now, vec![sample(1, start + 90_000_000, 10)]);
        assert_eq!(found[0].1.to, now.monotonic);
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
