//! `info`: the devices that the driver reports.

use std::fmt;
use std::thread;

use clap::Args;
use serde::Serialize;

use crate::amount::Amount;
use crate::gpu::Gpu;
use crate::report::Report;

/// The options.
#[derive(Args, Debug)]
pub struct Info {
    /// Then keep the contexts, and nothing else, until a signal
    #[arg(long)]
    stay: bool,
}

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

impl Info {
    /// A line for each device.
    pub fn run(&self, report: Report) -> anyhow::Result<()> {
        let gpus = Gpu::open_all(None)?;
        for gpu in &gpus {
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
        if !self.stay {
            return Ok(());
        }
        loop {
            thread::park();
        }
    }
}
