//! Utilization, clocks, power and temperature. All are derived from how much the GPU runs.

use std::sync::atomic::Ordering;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlUtilization_t};
use tranche_simulator_machine::layout::GpuState;
use tranche_simulator_machine::timeline::now;

use crate::code::Code;
use crate::export::{export, export_constants, get, put, put_list};
use crate::state::device;

/// The clock of an idle GPU in MHz.
const IDLE_CLOCK: u32 = 345;

/// Percent of the last second in which a kernel ran.
pub fn utilization(gpu: &GpuState) -> u32 {
    gpu.utilization.load(Ordering::Relaxed)
}

/// Milliwatts: between idle power and the limit, in proportion to utilization.
pub fn power(gpu: &GpuState) -> u32 {
    let range = gpu
        .power_limit_milliwatts
        .saturating_sub(gpu.idle_milliwatts);
    gpu.idle_milliwatts + range / 100 * utilization(gpu)
}

/// Millijoules since the host started: idle power all the time, and the rest while kernels ran.
pub fn energy(gpu: &GpuState) -> u64 {
    let at = now();
    let range = gpu
        .power_limit_milliwatts
        .saturating_sub(gpu.idle_milliwatts);
    (u64::from(gpu.idle_milliwatts) * (at / 1_000_000) + u64::from(range) * (gpu.ran() / 1_000_000))
        / 1000
}

/// Degrees Celsius: 30 at no utilization, 70 at full.
pub fn temperature(gpu: &GpuState) -> u32 {
    30 + utilization(gpu) * 4 / 10
}

fn clock(gpu: &GpuState, kind: u32) -> Result<u32, Code> {
    match kind {
        // Graphics, SM and video follow the load; memory does not.
        0 | 1 | 3 if utilization(gpu) == 0 => Ok(IDLE_CLOCK),
        _ => highest_clock(gpu, kind),
    }
}

fn highest_clock(gpu: &GpuState, kind: u32) -> Result<u32, Code> {
    match kind {
        0 | 1 => Ok(gpu.sm_clock_mhz),
        2 => Ok(gpu.memory_clock_mhz),
        3 => Ok(gpu.sm_clock_mhz / 10 * 9),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// Exports the utilization of engines that no kernel uses: 0 % of a sampling period in microseconds.
macro_rules! export_idle_engines {
    ($($name:ident)+) => {
        export! {
            $(
                fn $name(of: nvmlDevice_t, percent: *mut u32, period: *mut u32) {
                    device(of)?;
                    put(percent, 0)?;
                    put(period, 167_000)
                }
            )+
        }
    };
}

export_idle_engines! {
    nvmlDeviceGetEncoderUtilization
    nvmlDeviceGetDecoderUtilization
    nvmlDeviceGetJpgUtilization
    nvmlDeviceGetOfaUtilization
}

export! {
    fn nvmlDeviceGetUtilizationRates(of: nvmlDevice_t, rates: *mut nvmlUtilization_t) {
        let state = device(of)?.state;
        // nvml.h: not supported on MIG-enabled GPUs.
        if state.is_partitioned() {
            return Err(Code::NOT_SUPPORTED);
        }
        let busy = utilization(state);
        put(rates, nvmlUtilization_t { gpu: busy, memory: busy / 2 })
    }
    fn nvmlDeviceGetTemperature(of: nvmlDevice_t, sensor: u32, degrees: *mut u32) {
        let state = device(of)?.state;
        if sensor != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(degrees, temperature(state))
    }
    fn nvmlDeviceGetTemperatureThreshold(of: nvmlDevice_t, kind: u32, degrees: *mut u32) {
        device(of)?;
        // Shutdown, slowdown, memory maximum, GPU maximum.
        put(degrees, *[92, 89, 95, 87].get(kind as usize).ok_or(Code::NOT_SUPPORTED)?)
    }
    fn nvmlDeviceGetFanSpeed(of: nvmlDevice_t, _percent: *mut u32) {
        // These boards have no fan.
        device(of)?;
        Err(Code::NOT_SUPPORTED)
    }
    fn nvmlDeviceGetPowerUsage(of: nvmlDevice_t, milliwatts: *mut u32) {
        put(milliwatts, power(device(of)?.state))
    }
    fn nvmlDeviceGetPowerManagementLimit(of: nvmlDevice_t, milliwatts: *mut u32) {
        put(milliwatts, device(of)?.state.power_limit_milliwatts)
    }
    fn nvmlDeviceGetPowerManagementDefaultLimit(of: nvmlDevice_t, milliwatts: *mut u32) {
        put(milliwatts, device(of)?.state.power_limit_milliwatts)
    }
    fn nvmlDeviceGetEnforcedPowerLimit(of: nvmlDevice_t, milliwatts: *mut u32) {
        put(milliwatts, device(of)?.state.power_limit_milliwatts)
    }
    fn nvmlDeviceGetPowerManagementLimitConstraints(of: nvmlDevice_t, least: *mut u32, most: *mut u32) {
        let limit = device(of)?.state.power_limit_milliwatts;
        put(least, limit / 2)?;
        put(most, limit)
    }
    fn nvmlDeviceGetClockInfo(of: nvmlDevice_t, kind: u32, mhz: *mut u32) {
        put(mhz, clock(device(of)?.state, kind)?)
    }
    fn nvmlDeviceGetMaxClockInfo(of: nvmlDevice_t, kind: u32, mhz: *mut u32) {
        put(mhz, highest_clock(device(of)?.state, kind)?)
    }
    fn nvmlDeviceGetMaxCustomerBoostClock(of: nvmlDevice_t, kind: u32, mhz: *mut u32) {
        put(mhz, highest_clock(device(of)?.state, kind)?)
    }
    fn nvmlDeviceGetClock(of: nvmlDevice_t, kind: u32, which: u32, mhz: *mut u32) {
        let state = device(of)?.state;
        // Current, application target, application default, customer boost.
        let value = if which == 0 { clock(state, kind) } else { highest_clock(state, kind) };
        put(mhz, value?)
    }
    fn nvmlDeviceGetApplicationsClock(of: nvmlDevice_t, kind: u32, mhz: *mut u32) {
        put(mhz, highest_clock(device(of)?.state, kind)?)
    }
    fn nvmlDeviceGetDefaultApplicationsClock(of: nvmlDevice_t, kind: u32, mhz: *mut u32) {
        put(mhz, highest_clock(device(of)?.state, kind)?)
    }
    fn nvmlDeviceGetSupportedMemoryClocks(of: nvmlDevice_t, count: *mut u32, mhz: *mut u32) {
        put_list(count, mhz, &[device(of)?.state.memory_clock_mhz])
    }
    fn nvmlDeviceGetSupportedGraphicsClocks(of: nvmlDevice_t, memory: u32, count: *mut u32, mhz: *mut u32) {
        let state = device(of)?.state;
        if memory != state.memory_clock_mhz {
            get(count)?;
            return Err(Code::NOT_FOUND);
        }
        put_list(count, mhz, &[state.sm_clock_mhz, IDLE_CLOCK])
    }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(of: nvmlDevice_t, reasons: *mut u64) {
        // An idle GPU has a reason, a busy one has none.
        put(reasons, u64::from(utilization(device(of)?.state) == 0))
    }
    fn nvmlDeviceGetSupportedClocksThrottleReasons(of: nvmlDevice_t, reasons: *mut u64) {
        device(of)?;
        put(reasons, 0x1ff)
    }
    fn nvmlDeviceGetPcieThroughput(of: nvmlDevice_t, _counter: u32, kib_per_second: *mut u32) {
        device(of)?;
        put(kib_per_second, 0)
    }
    fn nvmlDeviceGetTotalEnergyConsumption(of: nvmlDevice_t, millijoules: *mut u64) {
        put(millijoules, energy(device(of)?.state))
    }
}

export_constants! {
    nvmlDeviceGetNumFans = 0;
    nvmlDeviceGetPowerManagementMode = 1;
    nvmlDeviceGetPowerState = 0;
    nvmlDeviceGetPerformanceState = 0;
    nvmlDeviceGetPcieReplayCounter = 0;
}
