//! `info`: the devices that the driver reports.

use std::fmt;

use serde::Serialize;

use crate::amount::Amount;
use crate::gpu::Gpu;
use crate::report::Report;

/// A device as a CUDA program sees it.
#[derive(Debug, Serialize)]
struct DeviceInfo {
    device: usize,
    uuid: String,
    name: String,
    /// `cuDeviceTotalMem`, bytes.
    total: u64,
    /// `cuMemGetInfo`, bytes.
    free: u64,
    /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
    multiprocessors: u32,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device {}: {}, {}, {} of {} free",
            self.device,
            self.name,
            self.uuid,
            Amount(self.free),
            Amount(self.total)
        )
    }
}

/// A line for each device.
pub fn run(report: Report) -> anyhow::Result<()> {
    for gpu in Gpu::open_all(None)? {
        let (free, total) = gpu.memory()?;
        let seen = DeviceInfo {
            device: gpu.ordinal(),
            uuid: gpu.uuid()?,
            name: gpu.name()?,
            total: gpu.total()?,
            free,
            multiprocessors: gpu.multiprocessors()?,
        };
        anyhow::ensure!(
            total == seen.total,
            "device {}: cuMemGetInfo says {total} bytes, cuDeviceTotalMem {}",
            seen.device,
            seen.total
        );
        report.print(&seen)?;
    }
    Ok(())
}
