//! GPM: the activity of a GPU, or of a GPU instance, between two samples. Only on Hopper and newer, as nvml.h says.
//!
//! A sample has the time that kernels have run, and the counters of NVLink. Kernels compute nothing: only the multiprocessors are
//! in use, and memory as much as for `nvmlDeviceGetUtilizationRates`.

use std::sync::{Mutex, PoisonError};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpmMetric_t, nvmlGpmMetricsGet_t, nvmlGpmSample_t, nvmlGpmSupport_t,
};
use tranche_simulator_machine::description::Architecture;
use tranche_simulator_machine::layout::{GpuState, NvLinkCounter};
use tranche_simulator_machine::timeline::now;

use crate::code::Code;
use crate::export::{export, get, put};
use crate::state::{Device, device, library};

/// `NVML_GPM_METRIC_MAX` of driver 535.
const MOST_METRICS: u32 = 98;

#[derive(Clone, Copy)]
struct Content {
    gpu: usize,
    instance: Option<u32>,
    /// Nanoseconds of kernels by then.
    ran: u64,
    /// Nanoseconds.
    at: u64,
    /// Absent without NVLink.
    nvlink: Option<NvLinks>,
}

/// The traffic of a GPU's NVLinks up to a time.
#[derive(Clone, Copy)]
struct NvLinks {
    links: u32,
    /// Nanoseconds: the clock of kernels stands still while none runs.
    at: u64,
    /// KiB of all of them.
    received: u64,
    sent: u64,
}

impl NvLinks {
    fn of(state: &GpuState) -> Option<Self> {
        Some(Self {
            links: state.nvlinks,
            at: now(),
            received: state.nvlink(NvLinkCounter::Received)?,
            sent: state.nvlink(NvLinkCounter::Sent)?,
        })
    }
}

/// The allocated samples. A handle is a sample's number: it is never dereferenced.
static SAMPLES: Mutex<Vec<(usize, Option<Content>)>> = Mutex::new(Vec::new());

fn with_samples<T>(with: impl FnOnce(&mut Vec<(usize, Option<Content>)>) -> T) -> T {
    with(&mut SAMPLES.lock().unwrap_or_else(PoisonError::into_inner))
}

fn allocate() -> nvmlGpmSample_t {
    with_samples(|samples| {
        let number = samples.last().map_or(1, |(number, _)| number + 1);
        samples.push((number, None));
        std::ptr::without_provenance_mut(number)
    })
}

fn free(sample: nvmlGpmSample_t) -> Result<(), Code> {
    with_samples(|samples| {
        let before = samples.len();
        samples.retain(|(number, _)| *number != sample.addr());
        if samples.len() < before {
            Ok(())
        } else {
            Err(Code::INVALID_ARGUMENT)
        }
    })
}

fn fill(sample: nvmlGpmSample_t, content: Content) -> Result<(), Code> {
    with_samples(|samples| {
        let mut samples = samples.iter_mut();
        let found = samples.find(|(number, _)| *number == sample.addr());
        let (_, to) = found.ok_or(Code::INVALID_ARGUMENT)?;
        *to = Some(content);
        Ok(())
    })
}

fn content(sample: nvmlGpmSample_t) -> Result<Content, Code> {
    with_samples(|samples| {
        let mut samples = samples.iter();
        let found = samples.find(|(number, _)| *number == sample.addr());
        found
            .and_then(|(_, content)| *content)
            .ok_or(Code::INVALID_ARGUMENT)
    })
}

/// A GPU that has GPM.
fn supported(of: nvmlDevice_t) -> Result<Device, Code> {
    let device = device(of)?;
    if device.state.architecture < Architecture::Hopper as u32 {
        return Err(Code::NOT_SUPPORTED);
    }
    Ok(device)
}

fn sample(of: nvmlDevice_t, instance: Option<u32>, to: nvmlGpmSample_t) -> Result<(), Code> {
    let device = supported(of)?;
    let ((ran, at), nvlink) = match instance {
        None => (device.state.ran_by(), NvLinks::of(device.state)),
        // The same error as for an instance that does not exist. A MIG device has no NVLink.
        Some(id) => {
            let ran = device.state.instance_ran_by(id).ok_or(Code::NOT_FOUND)?;
            (ran, None)
        }
    };
    fill(
        to,
        Content {
            gpu: device.gpu,
            instance,
            ran,
            at,
            nvlink,
        },
    )
}

/// The value of a metric between two samples in the unit of nvml.h.
fn value(metric: u32, first: Content, second: Content) -> Result<f64, Code> {
    let busy = busy(first, second);
    match metric {
        // Graphics and multiprocessors.
        1 | 2 => Ok(busy),
        // Occupancy, and the memory's bandwidth.
        3 | 10 => Ok(busy / 2.0),
        // Integer and tensor units, floating point, PCIe in MiB/s, decoders, JPEG, optical flow.
        4..=9 | 11..=13 | 20 | 21 | 30..=37 | 40..=47 | 50 => Ok(0.0),
        60..=97 => nvlink(metric - 60, first, second).ok_or(Code::NOT_SUPPORTED),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

/// MiB per second, received and sent: first of all links, then of each link, with the traffic spread evenly.
#[expect(clippy::cast_precision_loss, reason = "a rate of it is wanted")]
fn nvlink(metric: u32, first: Content, second: Content) -> Option<f64> {
    let (from, to) = (first.nvlink?, second.nvlink?);
    let parts = match (metric / 2).checked_sub(1) {
        None => 1,
        Some(link) if link < to.links => to.links,
        Some(_) => return None,
    };
    let count = |it: NvLinks| {
        if metric.is_multiple_of(2) {
            it.received
        } else {
            it.sent
        }
    };
    let kib = count(to).saturating_sub(count(from)) as f64;
    let seconds = to.at.saturating_sub(from.at).max(1) as f64 / 1e9;
    Some(kib / 1024.0 / seconds / f64::from(parts))
}

#[expect(clippy::cast_precision_loss, reason = "a ratio of it is wanted")]
fn busy(first: Content, second: Content) -> f64 {
    let elapsed = second.at.saturating_sub(first.at);
    if elapsed == 0 {
        return 0.0;
    }
    let ran = second.ran.saturating_sub(first.ran);
    (100.0 * ran as f64 / elapsed as f64).min(100.0)
}

export! {
    fn nvmlGpmQueryDeviceSupport(of: nvmlDevice_t, support: *mut nvmlGpmSupport_t) {
        let device = device(of)?;
        if get((&raw const (*support).version).cast::<u32>())? != 1 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let is_supported = u32::from(device.state.architecture >= Architecture::Hopper as u32);
        put(support, nvmlGpmSupport_t { version: 1, isSupportedDevice: is_supported })
    }
    fn nvmlGpmSampleAlloc(to: *mut nvmlGpmSample_t) {
        library()?;
        if to.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(to, allocate())
    }
    fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) {
        library()?;
        free(sample)
    }
    fn nvmlGpmSampleGet(of: nvmlDevice_t, to: nvmlGpmSample_t) { sample(of, None, to) }
    fn nvmlGpmMigSampleGet(of: nvmlDevice_t, instance: u32, to: nvmlGpmSample_t) { sample(of, Some(instance), to) }
    fn nvmlGpmMetricsGet(request: *mut nvmlGpmMetricsGet_t) {
        library()?;
        if get((&raw const (*request).version).cast::<u32>())? != 1 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let count = get(&raw const (*request).numMetrics)?;
        let first = content(get(&raw const (*request).sample1)?)?;
        let second = content(get(&raw const (*request).sample2)?)?;
        if count > MOST_METRICS || (first.gpu, first.instance) != (second.gpu, second.instance) {
            return Err(Code::INVALID_ARGUMENT);
        }
        let metrics: *mut nvmlGpmMetric_t = (&raw mut (*request).metrics).cast();
        for index in 0..count as usize {
            let metric = metrics.add(index);
            match value((*metric).metricId, first, second) {
                Ok(value) => {
                    (*metric).value = value;
                    (*metric).nvmlReturn = 0;
                }
                Err(code) => (*metric).nvmlReturn = code.0,
            }
        }
        Ok(())
    }
}
