//! The GPU's utilization by the share, in percent of the share's cores.
//!
//! The driver reports the utilization by each process. The sum of the share's processes is divided by
//! the share's cores: a share of 25 % that uses all of it has a utilization of 100 %, independent of its
//! neighbours. Processes are identified by PID, which the driver gives in the caller's namespace.
//! Memory, encoder and decoder are not divided by cores: they are in percent of the GPU.

use core::ffi::c_uint;

use tranche_shim_runtime::sys;

use crate::abi::{
    Device, DynamicPstates, Enumeration, GpmSupport, Plain, Return, Sample, Utilization,
    UtilizationInfo, UtilizationInfos, Value,
};
use crate::buffer::Buffer;
use crate::driver::{index, typed};
use crate::processes::put;
use crate::users::Users;

/// The period of the driver's samples that are read, in microseconds: the same as for the driver's
/// own percentages.
const PERIOD: u64 = 1_000_000;
/// The most samples that are read: far more than the number of processes on a GPU.
const MOST: c_uint = 1 << 14;

/// The utilization of a GPU's last second by the shares of this container, in percent of the shares'
/// cores and of the GPU's memory interface.
struct Use {
    cores: u32,
    memory: u32,
}

impl Use {
    /// `None` if the GPU is not capped, or the driver does not report utilization by process (MIG,
    /// vGPU).
    fn of(device: Device) -> Result<Option<Self>, Return> {
        let Some(users) = Users::of(device)? else {
            return Ok(None);
        };
        let since = sys::wall_clock().saturating_sub(PERIOD);
        let (mut cores, mut memory) = (0u32, 0u32);
        let samples = &match Samples::query(device, since) {
            Ok(samples) => samples,
            Err(Return::NOT_SUPPORTED | Return::FUNCTION_NOT_FOUND) => return Ok(None),
            Err(code) => return Err(code),
        };
        for sample in samples.of(&users) {
            cores = cores.saturating_add(sample.sm);
            memory = memory.saturating_add(sample.memory);
        }
        Ok(Some(Self {
            cores: users.scaled(cores),
            memory: memory.min(100),
        }))
    }
}

/// The driver's samples of each process.
struct Samples {
    entries: Buffer<Sample>,
    len: usize,
}

impl Samples {
    fn query(device: Device, since: u64) -> Result<Self, Return> {
        let mut entries = Buffer::new(MOST as usize)?;
        let real = typed::<unsafe extern "C" fn(Device, *mut Sample, *mut c_uint, u64) -> Return>(
            index::nvmlDeviceGetProcessUtilization,
        );
        let mut len = MOST;
        // SAFETY: there is room for `len` entries.
        match unsafe { real(device, entries.room(), &raw mut len, since) } {
            Return::SUCCESS => Ok(Self {
                entries,
                len: len as usize,
            }),
            // No process did any work.
            Return::NOT_FOUND => Ok(Self { entries, len: 0 }),
            other => Err(other),
        }
    }

    /// The samples of the share's processes.
    fn of<'a>(&'a self, users: &'a Users) -> impl Iterator<Item = Sample> + 'a {
        self.entries
            .seen(self.len)
            .iter()
            .copied()
            .filter(move |sample| users.has(sample.pid))
    }
}

/// The driver's answer, corrected if the GPU has a cap and the driver reports utilization by process.
fn answer(device: Device, driver: impl FnOnce() -> Return, correct: impl FnOnce(Use)) -> Return {
    let result = driver();
    if result != Return::SUCCESS {
        return result;
    }
    match Use::of(device) {
        Ok(None) => result,
        Ok(Some(share)) => {
            correct(share);
            result
        }
        Err(code) => code,
    }
}

/// `nvmlDeviceGetUtilizationRates`.
pub fn rates(device: Device, to: *mut Utilization, driver: impl FnOnce() -> Return) -> Return {
    answer(device, driver, |share| {
        // SAFETY: the driver has just written to it.
        let rates = unsafe { &mut *to };
        (rates.gpu, rates.memory) = (share.cores, share.memory);
    })
}

/// `nvmlDeviceGetDynamicPstatesInfo`.
pub fn dynamic(device: Device, to: *mut DynamicPstates, driver: impl FnOnce() -> Return) -> Return {
    answer(device, driver, |share| {
        // SAFETY: the driver has just written to it.
        let states = unsafe { &mut *to };
        let [gpu, memory, ..] = &mut states.domains;
        for (domain, percent) in [(gpu, share.cores), (memory, share.memory)] {
            if domain.is_present != 0 {
                domain.percentage = percent;
            }
        }
    })
}

/// `nvmlDeviceGetSamples`: a share has no history, so each sample of GPU or memory is the share's
/// present value.
pub fn samples(
    device: Device,
    what: Enumeration,
    (kind, count, to): (*mut Enumeration, *mut c_uint, *mut Value),
    driver: impl FnOnce() -> Return,
) -> Return {
    /// `NVML_GPU_UTILIZATION_SAMPLES` and `NVML_MEMORY_UTILIZATION_SAMPLES`.
    const GPU: Enumeration = 1;
    const MEMORY: Enumeration = 2;
    /// `NVML_VALUE_TYPE_DOUBLE`; the others are whole numbers.
    const DOUBLE: Enumeration = 0;
    if !matches!(what, GPU | MEMORY) || to.is_null() {
        return driver();
    }
    answer(device, driver, |share| {
        let percent = if what == GPU {
            share.cores
        } else {
            share.memory
        };
        // SAFETY: the driver has just written to both, and to as many entries as it says.
        let (kind, entries) = unsafe {
            let count = count.read() as usize;
            (kind.read(), core::slice::from_raw_parts_mut(to, count))
        };
        let value = if kind == DOUBLE {
            f64::from(percent).to_ne_bytes()
        } else {
            u64::from(percent).to_ne_bytes()
        };
        for entry in entries {
            entry.value = value;
        }
    })
}

/// `nvmlGpmQueryDeviceSupport`: not supported for a share's GPU, because GPM counts the whole GPU.
pub fn gpm_support(device: Device, to: *mut GpmSupport, driver: impl FnOnce() -> Return) -> Return {
    let result = driver();
    if result != Return::SUCCESS {
        return result;
    }
    match Users::of(device) {
        Ok(None) => {}
        // SAFETY: the driver has just written to it.
        Ok(Some(_)) => unsafe { (*to).is_supported = 0 },
        Err(code) => return code,
    }
    result
}

/// `nvmlGpmSampleGet` and `nvmlGpmMigSampleGet`: as for a GPU without GPM.
pub fn gpm_sample(device: Device, driver: impl FnOnce() -> Return) -> Return {
    match Users::of(device) {
        Ok(None) => driver(),
        Ok(Some(_)) => Return::NOT_SUPPORTED,
        Err(code) => code,
    }
}

/// `nvmlDeviceGetProcessUtilization`.
///
/// # Safety
///
/// `count` is null or valid, and `to` null or valid for `*count` entries.
pub unsafe fn processes(
    device: Device,
    (to, count): (*mut Sample, *mut c_uint),
    since: u64,
    driver: impl FnOnce() -> Return,
) -> Return {
    if count.is_null() {
        return driver();
    }
    let answer = || {
        let Some(users) = Users::of(device)? else {
            return Ok(driver());
        };
        let mut theirs = Samples::query(device, since)?;
        let mut len = 0;
        let all = theirs.entries.first(theirs.len);
        for at in 0..all.len() {
            let sample = all[at];
            if users.has(sample.pid) {
                all[len] = Sample {
                    sm: users.scaled(sample.sm),
                    ..sample
                };
                len += 1;
            }
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { fill(count, to, &all[..len]) })
    };
    answer().unwrap_or_else(|code| code)
}

/// `nvmlDeviceGetProcessesUtilizationInfo`.
///
/// # Safety
///
/// `to` is null or valid, and its `to` null or valid for its `count` entries.
pub unsafe fn infos(
    index: usize,
    device: Device,
    to: *mut UtilizationInfos,
    driver: impl FnOnce() -> Return,
) -> Return {
    /// nvml.h's `NVML_STRUCT_VERSION`: the size, and the version above it.
    const FIRST: c_uint = (1 << 24) + 24;
    const { assert!(size_of::<UtilizationInfos>() == 24) };
    // SAFETY: the caller's promise; its first word is its version in all versions.
    let Some(version) = (unsafe { to.cast::<c_uint>().as_ref() }) else {
        return driver();
    };
    let version = *version;
    let answer = || {
        let Some(users) = Users::of(device)? else {
            return Ok(driver());
        };
        if version != FIRST {
            return Err(Return::ARGUMENT_VERSION_MISMATCH);
        }
        let mut theirs = Buffer::<UtilizationInfo>::new(MOST as usize)?;
        // SAFETY: not null, and of the version that has these fields.
        let mut asked = unsafe { to.read() };
        (asked.count, asked.to) = (MOST, theirs.room());
        let real = typed::<unsafe extern "C" fn(Device, *mut UtilizationInfos) -> Return>(index);
        // SAFETY: there is room for `count` entries.
        let found = match unsafe { real(device, &raw mut asked) } {
            Return::SUCCESS => asked.count as usize,
            Return::NOT_FOUND => 0,
            other => return Err(other),
        };
        let mut len = 0;
        let all = theirs.first(found);
        for at in 0..all.len() {
            let info = all[at];
            if users.has(info.pid) {
                all[len] = UtilizationInfo {
                    sm: users.scaled(info.sm),
                    ..info
                };
                len += 1;
            }
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { fill(&raw mut (*to).count, (*to).to, &all[..len]) })
    };
    answer().unwrap_or_else(|code| code)
}

/// As the driver returns samples: without any the result is "not found".
///
/// # Safety
///
/// `count` is valid, and `to` null or valid for `*count` entries.
unsafe fn fill<T: Plain>(count: *mut c_uint, to: *mut T, list: &[T]) -> Return {
    // SAFETY: the caller's promise.
    let result = unsafe { put(count, to, || list.iter().copied()) };
    if list.is_empty() {
        return Return::NOT_FOUND;
    }
    result
}
