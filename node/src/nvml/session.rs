//! The NVML that stays open while claims hold GPUs. One thread owns it and makes all its calls, one after another, for
//! all samplers.
//!
//! ```text
//!  compute shares, every 0.1 s ─┐
//!  watchdog, every second ──────┼─► calls ─► the thread ─► NVML
//!  usage, every second ─────────┘
//! ```
//!
//! It is open while at least one sampler has it open. The thread alternates between the callers, so the shortest
//! interval waits for one call of each other caller and not for all of its calls.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tranche_api::sharing_policy::Interval;
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};

use super::{
    ChangeError, Description, Driver, GpuUse, Nvml, NvmlError, Opened, ProcessMemory,
    ProcessSample, Traces,
};
use crate::devices::DeviceNodes;
use crate::root::DriverRoot;

/// How long a caller that closes it waits for that. A call that hangs must not keep the plugin from its end.
const CLOSE: Duration = Duration::from_secs(2);

/// A driver whose NVML is opened once, however many callers have it open. Clones are the same.
#[derive(Clone, Debug)]
pub struct Session {
    driver: Arc<dyn Driver>,
    jobs: Jobs,
}

/// One caller that has it open.
#[derive(Debug)]
struct Lease(Jobs);

/// The way to the thread.
#[derive(Clone, Debug)]
struct Jobs(Arc<Mutex<Sender<Job>>>);

type Call = Box<dyn FnOnce(&dyn Nvml) + Send>;

enum Job {
    Open(SyncSender<Result<(DriverRoot, DeviceNodes), NvmlError>>),
    Call(Call),
    Close(SyncSender<()>),
}

impl Session {
    /// For the NVML of `driver`; not opened yet. The thread ends with the last clone.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        let (jobs, queue) = channel();
        let owned = Arc::clone(&driver);
        let thread = std::thread::Builder::new().name("nvml".into());
        // Without the thread nobody receives jobs, and every call is an error.
        let _ = thread.spawn(move || serve(&*owned, &queue));
        Self {
            driver,
            jobs: Jobs(Arc::new(Mutex::new(jobs))),
        }
    }
}

impl Driver for Session {
    fn open(&self) -> Result<Opened, NvmlError> {
        let (root, nodes) = self.jobs.ask(Job::Open)??;
        Ok(Opened {
            nvml: Box::new(Lease(self.jobs.clone())),
            root,
            nodes,
            pass: None,
        })
    }

    fn traces(&self) -> Traces {
        self.driver.traces()
    }
}

/// Owns NVML.
fn serve(driver: &dyn Driver, queue: &Receiver<Job>) {
    let mut opened: Option<Opened> = None;
    let mut leases = 0_usize;
    // The caller may be gone: then nobody needs the answer.
    for job in queue {
        match job {
            Job::Open(answer) => {
                let result = match opened.take() {
                    Some(opened) => Ok(opened),
                    None => driver.open(),
                };
                let _ = answer.send(result.map(|now| {
                    leases += 1;
                    let place = (now.root.clone(), now.nodes.clone());
                    opened = Some(now);
                    place
                }));
            }
            Job::Call(call) => {
                // A lease is dropped after its last call.
                if let Some(opened) = &opened {
                    call(&*opened.nvml);
                }
            }
            Job::Close(answer) => {
                leases = leases.saturating_sub(1);
                if leases == 0 {
                    opened = None;
                }
                let _ = answer.send(());
            }
        }
    }
}

impl Jobs {
    /// Waits for the thread's answer to a job. A time limit for calls of NVML belongs here.
    fn ask<T>(&self, job: impl FnOnce(SyncSender<T>) -> Job) -> Result<T, NvmlError> {
        let answer = self.send(job).recv().ok();
        answer.ok_or_else(|| NvmlError::Root("the thread that calls NVML has ended".into()))
    }

    /// The receiver of the answer. If the thread has ended it has no sender, so it returns at once.
    fn send<T>(&self, job: impl FnOnce(SyncSender<T>) -> Job) -> Receiver<T> {
        let (answer, answered) = sync_channel(1);
        let jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = jobs.send(job(answer));
        answered
    }
}

impl Lease {
    fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Nvml) -> T + Send + 'static,
    ) -> Result<T, NvmlError> {
        self.0.ask(|answer| {
            Job::Call(Box::new(move |nvml| {
                let _ = answer.send(call(nvml));
            }))
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // When this returns, NVML is closed if nobody else has it open and no call hangs.
        let _ = self.0.send(Job::Close).recv_timeout(CLOSE);
    }
}

impl Nvml for Lease {
    fn describe(&self) -> Result<Description, NvmlError> {
        self.call(|nvml| nvml.describe())?
    }

    fn minor(&self, gpu_uuid: &str) -> Result<u32, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.minor(&gpu))?
    }

    fn process_utilization(
        &self,
        gpu_uuid: &str,
        since: u64,
    ) -> Result<Vec<ProcessSample>, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.process_utilization(&gpu, since))?
    }

    fn processes(&self, gpu_uuid: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.processes(&gpu))?
    }

    fn used_memory(&self, gpu_uuid: &str) -> Result<Option<u64>, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.used_memory(&gpu))?
    }

    fn utilization_rates(&self, gpu_uuid: &str) -> Result<[u32; 2], NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.utilization_rates(&gpu))?
    }

    fn xids(&self, gpus: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        let gpus: Vec<String> = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
        self.call(move |nvml| nvml.xids(&gpus.iter().map(String::as_str).collect::<Vec<_>>()))?
    }

    fn usage(&self, gpu_uuid: &str) -> Result<GpuUse, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.usage(&gpu))?
    }

    fn mig_state(&self, gpu_uuid: &str) -> Result<Actual, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.mig_state(&gpu))?
    }

    fn change_mig(&self, gpu_uuid: &str, change: &Change) -> Result<(), ChangeError> {
        let (gpu, change) = (gpu_uuid.to_owned(), *change);
        self.call(move |nvml| nvml.change_mig(&gpu, &change))?
    }

    fn compute_mode(&self, gpu_uuid: &str) -> Result<ComputeMode, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.compute_mode(&gpu))?
    }

    fn set_compute_mode(&self, gpu_uuid: &str, mode: ComputeMode) -> Result<(), NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.set_compute_mode(&gpu, mode))?
    }

    fn time_slice(&self, gpu_uuid: &str) -> Result<Interval, NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.time_slice(&gpu))?
    }

    fn set_time_slice(&self, gpu_uuid: &str, interval: Interval) -> Result<(), NvmlError> {
        let gpu = gpu_uuid.to_owned();
        self.call(move |nvml| nvml.set_time_slice(&gpu, interval))?
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
    fn whoever_closes_it_does_not_wait_for_a_call_that_hangs() {
        let gpus = MigGpus::new(Description::default(), Path::new("/"));
        let session = Session::new(Arc::new(gpus));
        let opened = session.open().unwrap();
        let (go_on, told) = channel::<()>();
        let _hangs = session.jobs.send(|_: SyncSender<()>| {
            Job::Call(Box::new(move |_| told.recv().unwrap_or_default()))
        });
        let (ends, ended) = sync_channel(1);
        std::thread::spawn(move || {
            drop(opened);
            let _ = ends.send(());
        });
        assert!(ended.recv_timeout(10 * CLOSE).is_ok());
        drop(go_on);
    }

    #[test]
    fn nvml_is_open_once_until_the_last_who_has_it_open_closes_it() {
        let gate = Gate::default();
        let gpus = MigGpus::new(Description::default(), Path::new("/"));
        let gated = Gated::new(Box::new(gpus), gate.clone());
        let driver = Arc::new(Counting(gated, AtomicU32::new(0)));
        let session = Session::new(Arc::clone(&driver) as _);
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
