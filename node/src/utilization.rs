//! The utilization of GPUs, in total and by process.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime};

use tranche_shim_runtime::sys;

use crate::nvml::{Driver, KeptNvml, Nvml, NvmlError, ProcessMemory, ProcessSample};

/// How busy GPUs are.
pub trait Utilization {
    /// The part of the last period in which the GPU worked, 0 to 1; `None` if it is not known, as in MIG mode.
    fn whole(&mut self, gpu_uuid: &str) -> Option<f64>;

    /// The same by process, since the last answer.
    fn by_process(&mut self, gpu_uuid: &str) -> ByProcess;

    /// Closes what is open, because the next call is not expected soon.
    fn close(&mut self) {}
}

/// How busy a GPU is by process.
#[derive(Clone, Debug, PartialEq)]
pub enum ByProcess {
    /// Not known: no NVML, or NVML does not report it (MIG, vGPU).
    Unknown,
    /// The driver has not sampled since the last answer.
    NothingNew,
    /// What the driver has sampled.
    Answer(Answer),
}

/// What the driver has sampled of a GPU's processes since the last answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The time of the last answer, `CLOCK_MONOTONIC` in nanoseconds.
    pub from: u64,
    /// The time of the newest sample.
    pub to: u64,
    /// By PID of the host, the part of that time in which the GPU worked for the process, 0 to 1. A
    /// process that is not listed has none.
    pub processes: Vec<(u32, f64)>,
    /// The same for the time in which the process's memory was read or written.
    pub copies: Vec<(u32, f64)>,
}

/// The longest time that an answer describes, in microseconds: the driver samples every 1/6 s to 1 s, and
/// an answer may come later. In more time the GPU was idle.
const LONGEST_MICROS: u64 = 1_500_000;

/// The time that an answer describes after the GPU was idle: the shortest time between two samples.
const AFTER_IDLE_MICROS: u64 = 1_000_000 / 6;

/// The utilization as NVML reports it, as soon as NVML can be opened.
#[derive(Debug)]
pub struct NvmlUtilization {
    nvml: KeptNvml,
    last: BTreeMap<String, Last>,
}

/// A GPU's last answer, in microseconds since 1970.
#[derive(Debug, Default)]
struct Last {
    /// Its newest sample's time, by the driver's clock; 0 for none.
    stamp: u64,
    /// When it was read.
    read: u64,
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
        let age = if age > 2_000_000 { 0 } else { age };
        self.monotonic.saturating_sub(age * 1000)
    }
}

impl Last {
    /// The time after which samples are new; 0 for all of them. After a clock was set back, all later samples are older
    /// than the last answer.
    fn since(&mut self, now: Moment) -> u64 {
        if now.micros < self.read {
            self.stamp = 0;
        }
        self.read = now.micros;
        self.stamp
    }

    /// The answer with these samples. NVML has one sample for each process that worked since the last answer, with its
    /// part of all that time (`nvmlDeviceGetProcessUtilization` in nvml.h).
    fn note(&mut self, now: Moment, samples: &[ProcessSample]) -> ByProcess {
        let before = self.stamp;
        let Some(newest) = samples.iter().map(|sample| sample.at).max() else {
            return ByProcess::NothingNew;
        };
        if newest <= before {
            return ByProcess::NothingNew;
        }
        self.stamp = newest;
        if before == 0 {
            // A part of everything that the driver remembers.
            return ByProcess::NothingNew;
        }
        let length = match newest - before {
            length if length > LONGEST_MICROS => AFTER_IDLE_MICROS,
            length => length,
        };
        let to = now.of_sample(newest);
        let part = |percent: u32| f64::from(percent.min(100)) / 100.0;
        ByProcess::Answer(Answer {
            from: to.saturating_sub(length * 1000),
            to,
            processes: samples
                .iter()
                .map(|sample| (sample.pid, part(sample.percent)))
                .collect(),
            copies: samples
                .iter()
                .map(|sample| (sample.pid, part(sample.copies)))
                .collect(),
        })
    }
}

impl NvmlUtilization {
    /// For the NVML of `driver`, which is opened at the first call.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>) -> Self {
        Self {
            nvml: KeptNvml::new(driver),
            last: BTreeMap::new(),
        }
    }

    /// For an NVML that is open.
    #[must_use]
    pub fn of(nvml: Box<dyn Nvml>) -> Self {
        Self {
            nvml: KeptNvml::of(nvml),
            last: BTreeMap::new(),
        }
    }

    /// Whether NVML is open.
    pub(crate) fn is_open(&self) -> bool {
        self.nvml.is_open()
    }

    /// Closes NVML after a call failed that every driver supports.
    pub(crate) fn close_failed(&mut self, now: Instant) {
        self.nvml.close_failed(now);
    }

    /// How much memory each process holds on a GPU; `None` if that is not known.
    pub fn process_memory(&mut self, gpu_uuid: &str) -> Option<Vec<ProcessMemory>> {
        self.open().ok()?.processes(gpu_uuid).ok()
    }

    pub(crate) fn open(&mut self) -> Result<&dyn Nvml, NvmlError> {
        self.nvml.get(Instant::now())
    }
}

impl Utilization for NvmlUtilization {
    fn close(&mut self) {
        self.nvml.close();
        self.last.clear();
    }

    fn whole(&mut self, gpu_uuid: &str) -> Option<f64> {
        match self.open().ok()?.utilization_rates(gpu_uuid) {
            Ok([percent, _]) => Some(f64::from(percent.min(100)) / 100.0),
            // A GPU in MIG mode.
            Err(NvmlError::NotSupported { .. }) => None,
            Err(_) => {
                self.nvml.close_failed(Instant::now());
                None
            }
        }
    }

    fn by_process(&mut self, gpu_uuid: &str) -> ByProcess {
        let last = self.last.entry(gpu_uuid.to_owned()).or_default();
        let since = last.since(Moment::now());
        let Ok(samples) = self
            .open()
            .and_then(|nvml| nvml.process_utilization(gpu_uuid, since))
        else {
            return ByProcess::Unknown;
        };
        let last = self.last.entry(gpu_uuid.to_owned()).or_default();
        last.note(Moment::now(), &samples)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use tranche_api::sharing_policy::Interval;
    use tranche_driver::gpu_state::{Actual, Change, ComputeMode};

    use super::*;
    use crate::devices::DeviceNodes;
    use crate::nvml::{ChangeError, Description, GpuUse, Opened, Traces};
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
                pass: None,
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

        fn utilization_rates(&self, gpu_uuid: &str) -> Result<[u32; 2], NvmlError> {
            match (self.works, gpu_uuid) {
                (true, "here") => Ok([50, 0]),
                (true, "partitioned") => Err(NvmlError::NotSupported {
                    call: "nvmlDeviceGetUtilizationRates",
                    object: gpu_uuid.into(),
                }),
                _ => Err(NvmlError::Root("gone".into())),
            }
        }

        fn xids(&self, _: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
            Ok(Vec::new())
        }

        fn health(&self, _: &str) -> Result<tranche_driver::health::Report, NvmlError> {
            unreachable!("nobody asks")
        }

        fn usage(&self, _: &str) -> Result<GpuUse, NvmlError> {
            unreachable!("nobody asks")
        }

        fn process_utilization(&self, _: &str, _: u64) -> Result<Vec<ProcessSample>, NvmlError> {
            Err(NvmlError::Root("not supported".into()))
        }

        fn processes(&self, _: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
            unreachable!("nobody asks")
        }

        fn used_memory(&self, _: &str) -> Result<Option<u64>, NvmlError> {
            unreachable!("nobody asks")
        }

        fn mig_state(&self, _: &str) -> Result<Actual, NvmlError> {
            unreachable!("nobody asks")
        }

        fn change_mig(&self, _: &str, _: &Change) -> Result<(), ChangeError> {
            unreachable!("nobody asks")
        }

        fn minor(&self, _: &str) -> Result<u32, NvmlError> {
            unreachable!("nobody asks")
        }

        fn compute_mode(&self, _: &str) -> Result<ComputeMode, NvmlError> {
            unreachable!("nobody asks")
        }

        fn set_compute_mode(&self, _: &str, _: ComputeMode) -> Result<(), NvmlError> {
            unreachable!("nobody asks")
        }

        fn time_slice(&self, _: &str) -> Result<Interval, NvmlError> {
            unreachable!("nobody asks")
        }

        fn set_time_slice(&self, _: &str, _: Interval) -> Result<(), NvmlError> {
            unreachable!("nobody asks")
        }
    }

    #[test]
    fn an_nvml_that_fails_is_opened_anew_but_not_all_the_time() {
        let driver = Replaced::default();
        let mut utilization = NvmlUtilization::new(Box::new(driver.clone()));
        let opened = || driver.opened.load(Ordering::SeqCst);
        let later = |utilization: &mut NvmlUtilization| {
            utilization.nvml.pass(Duration::from_secs(20));
        };
        assert_eq!((utilization.whole("here"), opened()), (None, 1));
        later(&mut utilization);
        assert_eq!(utilization.whole("here"), None);
        assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 2));
        // A GPU that is gone does not affect the others, nor does a call that not every driver
        // supports.
        for _ in 0..3 {
            assert_eq!(utilization.whole("elsewhere"), None);
            assert_eq!(utilization.by_process("here"), ByProcess::Unknown);
            assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 2));
        }
        later(&mut utilization);
        assert_eq!(utilization.by_process("here"), ByProcess::Unknown);
        assert_eq!(utilization.whole("partitioned"), None);
        assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 2));
        assert_eq!(utilization.whole("elsewhere"), None);
        assert_eq!((utilization.whole("here"), opened()), (Some(0.5), 3));
    }

    const START: u64 = 1_700_000_000_000_000;

    /// This many milliseconds after the start.
    fn moment(millis: u64) -> Moment {
        Moment {
            micros: START + millis * 1000,
            monotonic: (5000 + millis) * 1_000_000,
        }
    }

    /// From, to and the parts by PID.
    type Noted = (u64, u64, Vec<(u32, f64)>);

    /// The answer that is read at `millis`.
    fn noted(last: &mut Last, millis: u64, samples: &[(u32, u64, u32)]) -> Option<Noted> {
        last.since(moment(millis));
        let sample = |&(pid, millis, percent): &(u32, u64, u32)| ProcessSample {
            pid,
            at: START + millis * 1000,
            percent,
            copies: 0,
        };
        let samples: Vec<_> = samples.iter().map(sample).collect();
        match last.note(moment(millis), &samples) {
            ByProcess::Answer(answer) => {
                let millis = |nanos: u64| (nanos + 500_000) / 1_000_000 - 5000;
                Some((millis(answer.from), millis(answer.to), answer.processes))
            }
            _ => None,
        }
    }

    /// The driver samples about six times a second and may name one process in each sample.
    #[test]
    fn an_answer_describes_the_time_since_the_one_before() {
        let mut last = Last::default();
        // The first answer covers everything that the driver remembers.
        assert_eq!(noted(&mut last, 1000, &[(1, 1000, 30)]), None);
        assert_eq!(
            noted(&mut last, 1250, &[(2, 1167, 60), (1, 1167, 5)]),
            Some((1000, 1167, vec![(2, 0.6), (1, 0.05)]))
        );
        assert_eq!(noted(&mut last, 1300, &[]), None);
        // A process that is not named did nothing; its next sample covers the time since then.
        assert_eq!(
            noted(&mut last, 1350, &[(1, 1334, 100)]),
            Some((1167, 1334, vec![(1, 1.0)]))
        );
        assert_eq!(
            noted(&mut last, 1510, &[(2, 1501, 100)]),
            Some((1334, 1501, vec![(2, 1.0)]))
        );
        // Two samples in one answer: each process has its part of the time of both.
        assert_eq!(
            noted(&mut last, 1900, &[(2, 1668, 50), (1, 1835, 150)]),
            Some((1501, 1835, vec![(2, 0.5), (1, 1.0)]))
        );
        assert_eq!(noted(&mut last, 1950, &[(1, 1835, 50)]), None);
        // A sample every second comes a little late.
        assert_eq!(
            noted(&mut last, 2850, &[(1, 2838, 40)]),
            Some((1835, 2838, vec![(1, 0.4)]))
        );
        // The GPU was idle.
        assert_eq!(
            noted(&mut last, 9000, &[(1, 9000, 40)]),
            Some((8833, 9000, vec![(1, 0.4)]))
        );
    }

    #[test]
    fn a_clock_that_is_set_back_or_is_another_one_is_lived_with() {
        let mut last = Last::default();
        noted(&mut last, 10_000, &[(1, 10_000, 30)]);
        assert!(noted(&mut last, 10_200, &[(1, 10_167, 30)]).is_some());
        // Set back by five seconds: the next answer begins anew.
        assert_eq!(last.since(moment(5200)), 0);
        assert_eq!(noted(&mut last, 5300, &[(1, 5300, 30)]), None);
        assert!(noted(&mut last, 5500, &[(1, 5467, 30)]).is_some());
        // A driver whose clock begins at its start: the newest sample was taken now.
        let mut last = Last::default();
        for (at, is_first) in [(4_711_000, true), (4_878_000, false)] {
            let sample = ProcessSample {
                pid: 1,
                at,
                percent: 10,
                copies: 0,
            };
            last.since(moment(1000));
            match last.note(moment(1000), &[sample]) {
                ByProcess::Answer(answer) => {
                    assert_eq!((answer.to, is_first), (moment(1000).monotonic, false));
                }
                other => assert_eq!((other, is_first), (ByProcess::NothingNew, true)),
            }
        }
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
