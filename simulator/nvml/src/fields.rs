//! `nvmlDeviceGetFieldValues`: the fields that are simulated.

use std::sync::atomic::Ordering;
use std::time::SystemTime;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlFieldValue_t, nvmlValue_t};
use tranche_simulator_machine::description::Architecture;
use tranche_simulator_machine::layout::{GpuState, NvLinkCounter};

use crate::code::Code;
use crate::export::export;
use crate::sensors;
use crate::state::{Device, device};

/// `nvmlValueType_t`
const UNSIGNED_INT: u32 = 1;
const UNSIGNED_LONG_LONG: u32 = 3;

/// nvml.h: the `scopeId` that stands for all NVLinks together.
const ALL_LINKS: u32 = u32::MAX;

/// The type and value of a field. `scope` is the link, for the fields that are counted by link.
fn field_value(device: Device, field: u32, scope: u32) -> Result<(u32, nvmlValue_t), Code> {
    let int = |value: u32| Ok((UNSIGNED_INT, nvmlValue_t { uiVal: value }));
    let long = |value: u64| Ok((UNSIGNED_LONG_LONG, nvmlValue_t { ullVal: value }));
    match field {
        // ECC mode now and after a reboot; errors, volatile and aggregate.
        1 | 2 => int(1),
        3..=28 => long(0),
        // NVLink's errors, for all links.
        38 => long(nvlink_errors(device, NvLinkCounter::FlitErrors)?),
        45 => long(nvlink_errors(device, NvLinkCounter::DataErrors)?),
        52 => long(nvlink_errors(device, NvLinkCounter::Replays)?),
        59 => long(nvlink_errors(device, NvLinkCounter::Recoveries)?),
        91 if device.state.nvlinks > 0 => int(device.state.nvlinks),
        // KiB of data.
        138 => long(nvlink_data(device, NvLinkCounter::Sent, scope)?),
        139 => long(nvlink_data(device, NvLinkCounter::Received, scope)?),
        // Temperature of the memory.
        82 => int(sensors::temperature(device.state)),
        // Energy in millijoules.
        83 => long(sensors::energy(device.state)),
        // Remapped rows: correctable, uncorrectable, pending, failed. Since Ampere.
        142..=145 if device.state.architecture < Architecture::Ampere as u32 => {
            Err(Code::NOT_SUPPORTED)
        }
        144 => int(device.state.remap_pending.load(Ordering::Relaxed)),
        145 => int(device.state.remap_failed.load(Ordering::Relaxed)),
        142 | 143 => int(0),
        // The recovery action.
        230 if GpuState::reports_recovery(device.shared.header.driver_version.as_str()) => {
            int(device.state.recovery_action.load(Ordering::Relaxed))
        }
        // Power: average, instant, and the limits.
        185 | 186 => int(sensors::power(device.state)),
        187 => int(device.state.power_limit_milliwatts / 2),
        188..=191 => int(device.state.power_limit_milliwatts),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

/// Blackwell has counters of recoveries instead, as nvml.h says of the fields by link (161 to 163).
fn nvlink_errors(device: Device, counter: NvLinkCounter) -> Result<u64, Code> {
    if device.state.architecture >= Architecture::Blackwell as u32 {
        return Err(Code::NOT_SUPPORTED);
    }
    device.state.nvlink(counter).ok_or(Code::NOT_SUPPORTED)
}

/// The traffic is spread evenly over the links.
fn nvlink_data(device: Device, counter: NvLinkCounter, scope: u32) -> Result<u64, Code> {
    let count = device.state.nvlink(counter).ok_or(Code::NOT_SUPPORTED)?;
    let links = device.state.nvlinks;
    match scope {
        ALL_LINKS => Ok(count),
        link if link < links => Ok(count / u64::from(links)),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

export! {
    fn nvmlDeviceGetFieldValues(of: nvmlDevice_t, count: i32, values: *mut nvmlFieldValue_t) {
        let device = device(of)?;
        if values.is_null() || count < 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| i64::try_from(time.as_micros()).unwrap_or(i64::MAX));
        for index in 0..count.unsigned_abs() as usize {
            let entry = values.add(index);
            (*entry).timestamp = now;
            (*entry).latencyUsec = 0;
            match field_value(device, (*entry).fieldId, (*entry).scopeId) {
                Ok((kind, value)) => {
                    (*entry).valueType = kind;
                    (*entry).value = value;
                    (*entry).nvmlReturn = 0;
                }
                Err(code) => (*entry).nvmlReturn = code.0,
            }
        }
        Ok(())
    }
}
