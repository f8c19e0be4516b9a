//! `copy`: copies bytes to the device, on the device, and back.

use std::fmt;
use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;

use crate::amount::Amount;
use crate::gpu::{Gpu, Refusal, Way};
use crate::pattern;
use crate::report::Report;

/// What to copy.
#[derive(Args, Debug)]
pub struct Copy {
    /// How much
    #[arg(long, default_value = "16Mi")]
    bytes: Amount,
    /// The device; all of them, one after another, where absent
    #[arg(long)]
    device: Option<usize>,
}

/// The result.
#[derive(Debug, Serialize)]
struct Copied {
    device: usize,
    uuid: String,
    bytes: u64,
    milliseconds: u64,
    /// Bytes that differ from those sent.
    errors: u64,
}

impl fmt::Display for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device {}: {} there, across and back in {} ms, {} wrong bytes",
            self.device,
            Amount(self.bytes),
            self.milliseconds,
            self.errors
        )
    }
}

impl Copy {
    /// A line for each device.
    pub fn run(&self, report: Report) -> anyhow::Result<()> {
        let len = usize::try_from(self.bytes.0)?;
        for gpu in Gpu::open_all(self.device)? {
            let sent = pattern::bytes(gpu.ordinal() as u64, len);
            let start = Instant::now();
            let mut there = gpu
                .take(self.bytes, Way::Device)
                .map_err(Refusal::into_error)?;
            let mut across = gpu
                .take(self.bytes, Way::Device)
                .map_err(Refusal::into_error)?;
            there.write(0, &sent)?;
            across.copy(&there, len)?;
            let errors = pattern::differences(&sent, &across.read(0, len)?);
            there.free()?;
            across.free()?;
            report.print(&Copied {
                device: gpu.ordinal(),
                uuid: gpu.uuid()?,
                bytes: self.bytes.0,
                milliseconds: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
                errors,
            })?;
            ensure!(errors == 0, "{errors} bytes are not as sent");
        }
        Ok(())
    }
}
