//! The traffic of GPUs over NVLinks: the rate between two readings of NVML's counters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::struct_wrappers::device::FieldValueSample;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

/// nvml.h: the `scopeId` for the sum of all links. nvml-wrapper always asks for link 0.
const ALL_LINKS: u32 = u32::MAX;

/// How many counters are read.
const COUNT: i32 = 2;

/// The counters of data, in KiB (nvml.h). They have no headers in them.
const FIELDS: [u32; COUNT as usize] = [
    sys::field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    sys::field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
];

/// The shortest time between two readings, as for GPM.
const LEAST: Duration = Duration::from_millis(100);

/// The last reading of each GPU.
#[derive(Debug)]
pub struct NvLinks {
    nvml: Arc<Nvml>,
    last: Mutex<BTreeMap<String, Reading>>,
}

/// The data that a GPU has sent and received up to a time.
#[derive(Clone, Copy, Debug)]
struct Reading {
    kib: u64,
    at: Instant,
}

impl Reading {
    /// Bytes per second since an earlier reading; `None` if the counters began anew, as at a reset of the GPU.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate that is not negative"
    )]
    fn rate_since(self, earlier: Self) -> Option<u64> {
        let kib = self.kib.checked_sub(earlier.kib)?;
        let seconds = self.at.duration_since(earlier.at).as_secs_f64();
        Some((kib as f64 * 1024.0 / seconds).round() as u64)
    }
}

impl NvLinks {
    /// Without any reading yet.
    #[must_use]
    pub fn new(nvml: Arc<Nvml>) -> Self {
        Self {
            nvml,
            last: Mutex::default(),
        }
    }

    /// Bytes per second that the GPU has sent and received over all of its NVLinks since its last reading. `None` at the first
    /// reading, and shortly after one.
    ///
    /// # Errors
    /// `NotSupported` for a GPU without NVLink.
    pub fn read(&self, device: &Device<'_>, uuid: &str) -> Result<Option<u64>, NvmlError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let at = Instant::now();
        let earlier = last.get(uuid).copied();
        if earlier.is_some_and(|it| at.duration_since(it.at) < LEAST) {
            return Ok(None);
        }
        let now = Reading {
            kib: self.counted(device)?,
            at,
        };
        last.insert(uuid.to_owned(), now);
        Ok(earlier.and_then(|earlier| now.rate_since(earlier)))
    }

    /// KiB that were sent and received.
    fn counted(&self, device: &Device<'_>) -> Result<u64, NvmlError> {
        let get = self
            .nvml
            .lib()
            .nvmlDeviceGetFieldValues
            .as_ref()
            .map_err(|_| NvmlError::FunctionNotFound)?;
        let mut values = FIELDS.map(|field| {
            // SAFETY: of integers and a union of numbers, so all zeros is a value.
            let mut value: sys::nvmlFieldValue_t = unsafe { std::mem::zeroed() };
            value.fieldId = field;
            value.scopeId = ALL_LINKS;
            value
        });
        // SAFETY: it is used while NVML is started, and never freed.
        let handle = unsafe { device.handle() };
        // SAFETY: the device is of this NVML, which writes as many values as it is told there are.
        nvml_try(unsafe { get(handle, COUNT, values.as_mut_ptr()) })?;
        values.into_iter().map(count).sum()
    }
}

/// The value of a field, or why it has none.
fn count(value: sys::nvmlFieldValue_t) -> Result<u64, NvmlError> {
    match FieldValueSample::try_from(value)?.value? {
        SampleValue::U32(count) => Ok(count.into()),
        SampleValue::U64(count) => Ok(count),
        _ => Err(NvmlError::UnexpectedVariant(value.valueType)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_spans_two_readings_and_is_unknown_after_a_reset() {
        let start = Instant::now();
        let reading = |kib, seconds| Reading {
            kib,
            at: start + Duration::from_secs(seconds),
        };
        let first = reading(1_000, 0);
        assert_eq!(
            reading(1_000 + (3 << 20), 2).rate_since(first),
            Some(3 << 29)
        );
        assert_eq!(reading(1_000, 5).rate_since(first), Some(0));
        assert_eq!(reading(999, 5).rate_since(first), None);
    }
}
