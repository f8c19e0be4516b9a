//! `nvmlDeviceGetFieldValues`: the fields that are simulated.

use std::time::SystemTime;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlFieldValue_t, nvmlValue_t};
use tranche_simulator_machine::description::Architecture;

use crate::code::Code;
use crate::export::export;
use crate::sensors;
use crate::state::{Device, device};

/// `nvmlValueType_t`
const UNSIGNED_INT: u32 = 1;
const UNSIGNED_LONG_LONG: u32 = 3;

/// The type and value of a field.
fn field_value(device: Device, field: u32) -> Result<(u32, nvmlValue_t), Code> {
    let int = |value: u32| Ok((UNSIGNED_INT, nvmlValue_t { uiVal: value }));
    let long = |value: u64| Ok((UNSIGNED_LONG_LONG, nvmlValue_t { ullVal: value }));
    match field {
        // ECC mode now and after a reboot; errors, volatile and aggregate.
        1 | 2 => int(1),
        3..=28 => long(0),
        // Temperature of the memory.
        82 => int(sensors::temperature(device.state)),
        // Energy in millijoules.
        83 => long(sensors::energy(device.state)),
        // Remapped rows: correctable, uncorrectable, pending, failed. Since Ampere.
        142..=145 if device.state.architecture >= Architecture::Ampere as u32 => int(0),
        // Power: average, instant, and the limits.
        185 | 186 => int(sensors::power(device.state)),
        187 => int(device.state.power_limit_milliwatts / 2),
        188..=191 => int(device.state.power_limit_milliwatts),
        _ => Err(Code::NOT_SUPPORTED),
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
            match field_value(device, (*entry).fieldId) {
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
