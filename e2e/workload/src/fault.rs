//! `fault`: a kernel that writes to memory which is not allocated, and the error that the driver returns.

use std::fmt;

use clap::Args;
use serde::Serialize;

use crate::gpu::Gpu;
use crate::kernel;
use crate::report::Report;

/// What to run.
#[derive(Args, Debug)]
pub struct Fault {
    /// The device
    #[arg(long, default_value_t = 0)]
    device: usize,
}

/// The result.
#[derive(Debug, Serialize)]
struct Faulted {
    device: usize,
    uuid: String,
    /// The error's name, of the kernel and of the next call.
    errors: [String; 2],
}

impl fmt::Display for Faulted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}: {}", self.device, self.errors.join(", then "))
    }
}

impl Fault {
    /// One line.
    pub fn run(&self, report: Report) -> anyhow::Result<()> {
        let gpu = Gpu::open(self.device)?;
        let uuid = gpu.uuid()?;
        let kernel = kernel::Kernel::faulty(&gpu)?;
        let outcome = |result: anyhow::Result<()>| match result {
            Ok(()) => "CUDA_SUCCESS".to_owned(),
            Err(error) => format!("{:#}", error.root_cause()),
        };
        // The driver may report the fault in any call after the launch.
        let waited = kernel
            .launch()
            .and_then(|_| kernel.mark())
            .and_then(|mark| kernel::pass(&mark));
        report.print(&Faulted {
            device: gpu.ordinal(),
            uuid,
            errors: [outcome(waited), outcome(gpu.memory().map(drop))],
        })
    }
}
