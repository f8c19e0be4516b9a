//! An NVML that several parts of the process have open. Each call has a deadline, see [`super::deadline`].
//!
//! ```text
//!  compute shares, every 0.1 s ─┐             ┌─► a GPU's thread ──┐
//!  watchdog, every second ──────┼─► session ──┼─► a GPU's thread ──┼─► NVML
//!  usage, every second ─────────┤             └─► one for the rest ┘
//!  health, every second ────────┘
//! ```
//!
//! It is open while at least one part has it open: health keeps it, because Xids are reported only while it is. A GPU's calls come
//! one after another, in the order of the callers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tranche_api::sharing_policy::Interval;
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};
use tranche_driver::health::Report;

use super::deadline::{Call, Hangs, Pending, Threads};
use super::{
    BrokenGpu, ChangeError, Description, Driver, GpuUse, Nvml, NvmlError, Opened, Outline, Pass,
    ProcessMemory, ProcessSample, Traces,
};
use crate::devices::DeviceNodes;
use crate::root::DriverRoot;

/// How long NVML may take to start, and to stop. Without nvidia-persistenced it powers up each GPU, for about a second.
const START: Duration = Duration::from_secs(20);
/// How long a call that reads may take. The first one after an idle time powers the GPU up.
const READ: Duration = Duration::from_secs(10);
/// How long a change of a GPU may take.
const CHANGE: Duration = Duration::from_secs(20);

/// The object of a call that waits for events of several GPUs. It withholds none of them.
pub const EVENTS: &str = "events";

/// How long a sampler waits for an answer: a GPU that takes longer must not delay the samples of the others.
pub const OF_SAMPLERS: Duration = Duration::from_secs(2);

/// How long a caller that closes NVML waits for that. A call that hangs must not keep the plugin from its end.
const CLOSE: Duration = Duration::from_secs(2);

/// A driver whose NVML is opened once, however many callers have it open. Clones are the same.
#[derive(Clone, Debug)]
pub struct Session {
    driver: Arc<dyn Driver>,
    threads: Threads,
    /// How long callers wait for a call.
    patience: Duration,
    open: Arc<Mutex<Weak<OpenNvml>>>,
    /// The GPUs of the last description.
    known: Arc<Mutex<KnownIndices>>,
}

/// The number of GPUs, and their UUIDs by index.
type KnownIndices = (u32, BTreeMap<u32, String>);

/// An open NVML. It is closed before the pass ends.
#[derive(Debug)]
struct OpenNvml {
    nvml: Box<dyn Nvml>,
    root: DriverRoot,
    nodes: DeviceNodes,
    _pass: Option<Pass>,
}

/// One caller that has it open.
#[derive(Debug)]
struct Lease {
    session: Session,
    /// Present until it is dropped.
    open: Option<Arc<OpenNvml>>,
}

impl Session {
    /// For the NVML of `driver`; not opened yet. `hangs` gets its calls. Callers wait for a call as long as it may take.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, hangs: &Hangs) -> Self {
        Self {
            driver,
            threads: Threads::new(hangs.clone()),
            patience: Duration::MAX,
            open: Arc::default(),
            known: Arc::default(),
        }
    }

    /// With callers that wait only so long.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    fn start(&self) -> Result<OpenNvml, NvmlError> {
        let driver = Arc::clone(&self.driver);
        let call = Call {
            object: "",
            name: "nvmlInit_v2",
            limit: START,
        };
        let Opened {
            nvml,
            root,
            nodes,
            pass,
        } = self
            .threads
            .begin(call, START, move || driver.open())?
            .wait()??;
        Ok(OpenNvml {
            nvml,
            root,
            nodes,
            _pass: pass,
        })
    }

    fn known(&self) -> MutexGuard<'_, KnownIndices> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Driver for Session {
    fn open(&self) -> Result<Opened, NvmlError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let now = if let Some(now) = open.upgrade() {
            now
        } else {
            let now = Arc::new(self.start()?);
            *open = Arc::downgrade(&now);
            now
        };
        drop(open);
        let (root, nodes) = (now.root.clone(), now.nodes.clone());
        Ok(Opened {
            nvml: Box::new(Lease {
                session: self.clone(),
                open: Some(now),
            }),
            root,
            nodes,
            pass: None,
        })
    }

    fn traces(&self) -> Traces {
        self.driver.traces()
    }
}

impl Lease {
    fn begin<T: Send + 'static>(
        &self,
        call: Call<'_>,
        work: impl FnOnce(&dyn Nvml) -> T + Send + 'static,
    ) -> Result<Pending<T>, NvmlError> {
        let Self { session, open } = self;
        let open = open.clone();
        let closed = || NvmlError::Root("NVML is closed".into());
        let open = open.ok_or_else(closed)?;
        let patience = session.patience.min(call.limit);
        session
            .threads
            .begin(call, patience, move || work(&*open.nvml))
    }

    fn read<T: Send + 'static>(
        &self,
        object: &str,
        name: &'static str,
        work: impl FnOnce(&dyn Nvml) -> T + Send + 'static,
    ) -> Result<T, NvmlError> {
        let call = Call {
            object,
            name,
            limit: READ,
        };
        self.begin(call, work)?.wait()
    }

    fn change<T: Send + 'static>(
        &self,
        object: &str,
        name: &'static str,
        work: impl FnOnce(&dyn Nvml) -> T + Send + 'static,
    ) -> Result<T, NvmlError> {
        let call = Call {
            object,
            name,
            limit: CHANGE,
        };
        self.begin(call, work)?.wait()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The last one closes NVML: a call of the driver. When this returns, NVML is closed if nobody else has it open and no
        // call hangs.
        if let Some(last) = self.open.take().and_then(Arc::into_inner) {
            let call = Call {
                object: "",
                name: "nvmlShutdown",
                limit: START,
            };
            let closing = self.session.threads.post(call, CLOSE, move || drop(last));
            let _ = closing.and_then(Pending::wait);
        }
    }
}

impl Nvml for Lease {
    /// All GPUs at the same time, so that several that hang take no longer than one.
    fn describe(&self) -> Result<Description, NvmlError> {
        let outline = self.outline()?;
        let by_index = {
            let mut known = self.session.known();
            if known.0 != outline.count {
                // With another driver or machine, the indices may mean other GPUs.
                *known = (outline.count, BTreeMap::new());
            }
            known.1.clone()
        };
        let begun: Vec<_> = (0..outline.count)
            .map(|index| {
                let name = by_index.get(&index).cloned();
                let name = name.unwrap_or_else(|| format!("index {index}"));
                let call = Call {
                    object: &name,
                    name: "nvmlDeviceGetHandleByIndex_v2",
                    limit: READ,
                };
                (
                    index,
                    self.begin(call, move |nvml| nvml.describe_gpu(index)),
                )
            })
            .collect();
        let mut description = Description::of(&outline);
        for (index, pending) in begun {
            match pending.and_then(Pending::wait) {
                Ok(Ok(gpu)) => description.gpus.push(gpu),
                Ok(Err(broken)) => description.broken.push(broken),
                Err(error) => description.broken.push(BrokenGpu {
                    index,
                    uuid: by_index.get(&index).cloned(),
                    error,
                }),
            }
        }
        let described = description.gpus.iter();
        let described = described.map(|gpu| (gpu.index, gpu.uuid.clone()));
        self.session.known().1.extend(described);
        Ok(description)
    }

    fn outline(&self) -> Result<Outline, NvmlError> {
        self.read("", "nvmlDeviceGetCount_v2", |nvml| nvml.outline())?
    }

    fn minor(&self, gpu_uuid: &str) -> Result<u32, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetMinorNumber", move |nvml| {
            nvml.minor(&gpu)
        })?
    }

    fn process_utilization(
        &self,
        gpu_uuid: &str,
        since: u64,
    ) -> Result<Vec<ProcessSample>, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetProcessUtilization", move |nvml| {
            nvml.process_utilization(&gpu, since)
        })?
    }

    fn processes(&self, gpu_uuid: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        let name = "nvmlDeviceGetComputeRunningProcesses_v3";
        self.read(gpu_uuid, name, move |nvml| nvml.processes(&gpu))?
    }

    fn used_memory(&self, gpu_uuid: &str) -> Result<Option<u64>, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetMemoryInfo_v2", move |nvml| {
            nvml.used_memory(&gpu)
        })?
    }

    fn utilization_rates(&self, gpu_uuid: &str) -> Result<[u32; 2], NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetUtilizationRates", move |nvml| {
            nvml.utilization_rates(&gpu)
        })?
    }

    fn xids(&self, gpus: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        let gpus: Vec<String> = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
        self.read(EVENTS, "nvmlEventSetWait_v2", move |nvml| {
            nvml.xids(&gpus.iter().map(String::as_str).collect::<Vec<_>>())
        })?
    }

    fn health(&self, gpu_uuid: &str) -> Result<Report, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetFieldValues", move |nvml| {
            nvml.health(&gpu)
        })?
    }

    fn usage(&self, gpu_uuid: &str) -> Result<GpuUse, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetMemoryInfo_v2", move |nvml| {
            nvml.usage(&gpu)
        })?
    }

    fn mig_state(&self, gpu_uuid: &str) -> Result<Actual, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetMigMode", move |nvml| {
            nvml.mig_state(&gpu)
        })?
    }

    fn change_mig(&self, gpu_uuid: &str, change: &Change) -> Result<(), ChangeError> {
        let (gpu, change) = (gpu_uuid.to_owned(), *change);
        let name = match change {
            Change::SwitchMigMode { .. } => "nvmlDeviceSetMigMode",
            Change::CreateInstance(_) => "nvmlDeviceCreateGpuInstanceWithPlacement",
            Change::CreateComputeInstance { .. } => "nvmlGpuInstanceCreateComputeInstance",
            Change::DestroyComputeInstance { .. } => "nvmlComputeInstanceDestroy",
            Change::DestroyInstance { .. } => "nvmlGpuInstanceDestroy",
        };
        self.change(gpu_uuid, name, move |nvml| nvml.change_mig(&gpu, &change))?
    }

    fn compute_mode(&self, gpu_uuid: &str) -> Result<ComputeMode, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.read(gpu_uuid, "nvmlDeviceGetComputeMode", move |nvml| {
            nvml.compute_mode(&gpu)
        })?
    }

    fn set_compute_mode(&self, gpu_uuid: &str, mode: ComputeMode) -> Result<(), NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.change(gpu_uuid, "nvmlDeviceSetComputeMode", move |nvml| {
            nvml.set_compute_mode(&gpu, mode)
        })?
    }

    fn time_slice(&self, gpu_uuid: &str) -> Result<Interval, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.change(gpu_uuid, "nvidia-smi compute-policy", move |nvml| {
            nvml.time_slice(&gpu)
        })?
    }

    fn set_time_slice(&self, gpu_uuid: &str, interval: Interval) -> Result<(), NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.change(gpu_uuid, "nvidia-smi compute-policy", move |nvml| {
            nvml.set_time_slice(&gpu, interval)
        })?
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::nvml::{Gate, Gated};
    use crate::testing::MigGpus;

    /// Counts how often NVML was opened.
    #[derive(Debug)]
    struct Counting(Gated, AtomicU32);

    impl Driver for Counting {
        fn open(&self) -> Result<Opened, NvmlError> {
            self.1.fetch_add(1, Ordering::SeqCst);
            self.0.open()
        }

        fn traces(&self) -> Traces {
            self.0.traces()
        }
    }

    #[test]
    fn a_gpu_that_hangs_leaves_the_others_and_comes_back() {
        let gpus = MigGpus::two_h100(Path::new("/"));
        let hangs = Hangs::default();
        let session = Session::new(Arc::new(gpus.clone()), &hangs);
        let opened = session.open().unwrap();
        let all = opened.nvml.describe().unwrap();
        let [first, second] = [0, 1].map(|gpu: usize| all.gpus[gpu].uuid.clone());
        gpus.hang(&second, true);
        let lease = session.open().unwrap();
        let uuid = second.clone();
        let sampler = std::thread::spawn(move || lease.nvml.mig_state(&uuid));
        gpus.wait_for_hang();
        hangs.let_time_pass(&second);
        let given_up = sampler.join().unwrap();
        assert!(matches!(given_up, Err(NvmlError::Hangs { .. })));
        let described = opened.nvml.describe().unwrap();
        let there: Vec<_> = described.gpus.iter().map(|gpu| &gpu.uuid).collect();
        assert_eq!(there, [&first]);
        let broken = &described.broken[0];
        assert_eq!((broken.index, broken.uuid.as_ref()), (1, Some(&second)));
        assert!(matches!(broken.error, NvmlError::Hangs { .. }));
        assert!(opened.nvml.mig_state(&first).is_ok());
        gpus.hang(&second, false);
        while !hangs.now().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(opened.nvml.describe().unwrap(), all);
    }

    #[test]
    fn an_nvml_that_does_not_start_is_given_up_and_closed_when_it_has() {
        let gate = Gate::default();
        let gpus = MigGpus::two_h100(Path::new("/"));
        let gated = Gated::new(Box::new(gpus.clone()), gate.clone());
        let hangs = Hangs::default();
        let session = Session::new(Arc::new(gated), &hangs);
        gpus.hang("", true);
        let second = session.clone();
        let waits = std::thread::spawn(move || second.open().map(drop));
        gpus.wait_for_hang();
        hangs.let_time_pass("");
        let given_up = waits.join().unwrap();
        assert!(matches!(given_up, Err(NvmlError::Hangs { .. })));
        // At once, because the first attempt still hangs.
        assert!(matches!(session.open(), Err(NvmlError::Hangs { .. })));
        gpus.hang("", false);
        while !hangs.now().is_empty() {
            std::thread::yield_now();
        }
        assert!(gate.shut().wait_for_closed(START));
        assert!(session.open().is_ok());
    }

    #[test]
    fn whoever_closes_it_does_not_wait_for_a_call_that_hangs() {
        let gpus = MigGpus::two_h100(Path::new("/"));
        let session = Session::new(Arc::new(gpus.clone()), &Hangs::default());
        let opened = session.open().unwrap();
        let uuid = opened.nvml.describe().unwrap().gpus[0].uuid.clone();
        let other = session.open().unwrap();
        gpus.hang(&uuid, true);
        let asked = uuid.clone();
        let asks = std::thread::spawn(move || other.nvml.mig_state(&asked).map(drop));
        gpus.wait_for_hang();
        drop(opened);
        assert!(!asks.is_finished());
        gpus.hang(&uuid, false);
        assert_eq!(asks.join().unwrap(), Ok(()));
    }

    #[test]
    fn nvml_is_open_once_until_the_last_who_has_it_open_closes_it() {
        let gate = Gate::default();
        let gpus = MigGpus::new(Description::default(), Path::new("/"));
        let gated = Gated::new(Box::new(gpus), gate.clone());
        let driver = Arc::new(Counting(gated, AtomicU32::new(0)));
        let session = Session::new(Arc::clone(&driver) as _, &Hangs::default());
        let is_closed = || gate.shut().wait_for_closed(Duration::ZERO);
        let first = session.open().unwrap();
        let second = session.clone().open().unwrap();
        assert_eq!(first.nvml.describe(), second.nvml.describe());
        assert_eq!(driver.1.load(Ordering::SeqCst), 1);
        drop(first);
        assert!(!is_closed());
        assert!(second.nvml.describe().is_ok());
        drop(second);
        assert!(is_closed());
        drop(session.open().unwrap());
        assert_eq!(driver.1.load(Ordering::SeqCst), 2);
        // An open that fails leaves nothing open.
        let shut = gate.shut();
        assert!(session.open().is_err());
        drop(shut);
        assert!(session.open().is_ok());
    }
}
