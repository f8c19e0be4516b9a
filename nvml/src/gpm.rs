//! GPM: how busy the units of a GPU were between two samples (`nvmlGpm…`, on Hopper and newer).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

/// The shortest time between two samples: NVML's own are that old (nvml.h, `nvmlGpmMetricsGet`).
const LEAST: Duration = Duration::from_millis(100);

/// A GPU by its UUID, or one of its GPU instances.
type Of = (String, Option<u32>);

/// The last sample of each GPU and GPU instance.
#[derive(Debug)]
pub struct Gpm {
    nvml: Arc<Nvml>,
    last: Mutex<BTreeMap<Of, Sample>>,
}

/// A sample that is kept.
#[derive(Debug)]
struct Sample {
    /// Invariant: a sample that the started NVML `nvml` has allocated, and that nobody else has.
    handle: sys::nvmlGpmSample_t,
    nvml: Arc<Nvml>,
    at: Instant,
}

// SAFETY: NVML is thread-safe (nvml.h), and a sample is memory of NVML that belongs to no thread.
unsafe impl Send for Sample {}

impl Sample {
    /// Lends the sample in the wrapper's type, which the borrower must not drop.
    fn lend(&self) -> GpmSample<'_> {
        // SAFETY: by the invariant, and whoever borrows gives the handle back (`into_handle`).
        unsafe { GpmSample::from_handle(&self.nvml, self.handle) }
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        drop(self.lend());
    }
}

impl Gpm {
    /// Without any sample yet.
    #[must_use]
    pub fn new(nvml: Arc<Nvml>) -> Self {
        Self {
            nvml,
            last: Mutex::default(),
        }
    }

    /// Samples a GPU, or one of its GPU instances, and returns the metrics since its last sample, in the units of nvml.h. Empty for the first sample, and
    /// shortly after one. A metric that the GPU does not have is left out.
    ///
    /// # Errors
    /// `NotSupported` and `FunctionNotFound` if the model or the driver does not have GPM.
    pub fn read(
        &self,
        device: &Device<'_>,
        uuid: &str,
        gpu_instance: Option<u32>,
        metrics: &[GpmMetricId],
    ) -> Result<Vec<(GpmMetricId, f64)>, NvmlError> {
        let of = (uuid.to_owned(), gpu_instance);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_new = |last: &Sample| now.duration_since(last.at) < LEAST;
        if last.get(&of).is_some_and(is_new) {
            return Ok(Vec::new());
        }
        let sample = match gpu_instance {
            None => device.gpm_sample()?,
            Some(id) => device.gpm_mig_sample(id)?,
        };
        let new = Sample {
            handle: sample.into_handle(),
            nvml: Arc::clone(&self.nvml),
            at: now,
        };
        let mut found = Vec::new();
        if let Some(old) = last.get(&of) {
            let (first, second) = (old.lend(), new.lend());
            let results = gpm_metrics_get(&self.nvml, &first, &second, metrics);
            let _ = (first.into_handle(), second.into_handle());
            let known = results?.into_iter().flatten();
            let values = known.map(|result| (result.metric_id, result.value));
            found.extend(values.filter(|(_, value)| value.is_finite()));
        }
        last.insert(of, new);
        Ok(found)
    }

    /// Forgets the samples of all other GPUs.
    pub fn keep(&self, is_kept: impl Fn(&str, Option<u32>) -> bool) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.retain(|(uuid, instance), _| is_kept(uuid, *instance));
    }
}
