//! How busy GPUs are, and for whom.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::nvml::{Driver, Nvml};

/// How busy GPUs are.
pub trait Utilization {
    /// How much of the last time the GPU worked, in parts of 1; `None` where nobody knows.
    fn whole(&mut self, gpu_uuid: &str) -> Option<f64>;

    /// How much of it for which process, by PID on the host; who is not listed has none. `None` where
    /// nobody knows.
    fn by_process(&mut self, gpu_uuid: &str) -> Option<Vec<(u32, f64)>>;
}

/// From one attempt at NVML to the next. Without it shares have their cores all the same.
const RETRY: Duration = Duration::from_secs(10);

/// For how long a sample is taken to hold. The driver samples every 1/6 s to 1 s.
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
#[derive(Debug)]
struct Last {
    /// The newest one's time, by the driver's clock.
    stamp: u64,
    /// When it was seen.
    seen: Instant,
    parts: Vec<(u32, f64)>,
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
            self.opened = driver.open().ok();
        }
        self.opened.as_deref()
    }
}

impl Utilization for NvmlUtilization {
    fn whole(&mut self, gpu_uuid: &str) -> Option<f64> {
        let percent = self.open()?.utilization(gpu_uuid).ok()?;
        Some(f64::from(percent.min(100)) / 100.0)
    }

    fn by_process(&mut self, gpu_uuid: &str) -> Option<Vec<(u32, f64)>> {
        let since = self.last.get(gpu_uuid).map_or(0, |last| last.stamp);
        let samples = self.open()?.process_utilization(gpu_uuid, since).ok()?;
        let Some(newest) = samples.iter().map(|sample| sample.at).max() else {
            let last = self.last.get(gpu_uuid);
            let holds = last.filter(|last| last.seen.elapsed() < HOLD);
            return Some(holds.map_or_else(Vec::new, |last| last.parts.clone()));
        };
        // Of several samples of a process the newest.
        let mut parts: BTreeMap<u32, (u64, f64)> = BTreeMap::new();
        for sample in samples {
            let part = (sample.at, f64::from(sample.percent.min(100)) / 100.0);
            let known = parts.entry(sample.pid).or_insert(part);
            if known.0 < sample.at {
                *known = part;
            }
        }
        let parts: Vec<_> = parts
            .into_iter()
            .map(|(pid, (_, part))| (pid, part))
            .collect();
        self.last.insert(
            gpu_uuid.to_owned(),
            Last {
                stamp: newest,
                seen: Instant::now(),
                parts: parts.clone(),
            },
        );
        Some(parts)
    }
}
