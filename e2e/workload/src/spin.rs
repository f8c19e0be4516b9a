//! `spin`: keeps the GPU as busy as possible, and prints how busy it was.

use std::fmt;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use crate::gpu::Gpu;
use crate::kernel::{self, Kernel, Launch};
use crate::report::Report;

/// The time of the kernels between two marks; two marks are queued ahead, so that a busy CPU does
/// not leave the GPU idle.
const AHEAD: Duration = Duration::from_millis(20);

/// What to run.
#[derive(Args, Debug)]
pub struct Spin {
    /// How long a kernel takes
    #[arg(long, default_value = "1ms", value_parser = kernel::duration)]
    kernel: Duration,
    /// For how long to go on
    #[arg(long, default_value = "5s", value_parser = kernel::duration)]
    time: Duration,
    /// How to launch
    #[arg(long, value_enum, default_value_t = Launch::Plain)]
    launch: Launch,
    /// The device
    #[arg(long, default_value_t = 0)]
    device: usize,
}

/// The result.
#[derive(Debug, Serialize)]
struct Spun {
    device: usize,
    uuid: String,
    kernels: u64,
    seconds: f64,
    /// The time of the kernels that ran, in percent of the whole time.
    share: f64,
}

impl fmt::Display for Spun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device {}: {} kernels in {:.2} s, {:.1} % of the GPU's time",
            self.device, self.kernels, self.seconds, self.share
        )
    }
}

impl Spin {
    /// One line at the end.
    pub fn run(&self, report: Report) -> anyhow::Result<()> {
        let gpu = Gpu::open(self.device)?;
        let kernel = Kernel::new(&gpu, self.kernel, self.launch)?;
        // The first launch makes the driver load its lazy parts.
        kernel.launch()?;
        kernel::pass(&kernel.mark()?)?;

        let start = Instant::now();
        let (mut kernels, mut ran) = (0, 0);
        let mut former = None;
        while start.elapsed() < self.time {
            let mut launched = 0;
            while launched == 0 || self.kernel * launched < AHEAD {
                launched += u32::try_from(kernel.launch()?)?;
            }
            kernels += u64::from(launched);
            let mark = (kernel.mark()?, kernels);
            if let Some((mark, kernels)) = former.replace(mark) {
                kernel::pass(&mark)?;
                ran = kernels;
            }
        }
        if let Some((mark, kernels)) = former {
            kernel::pass(&mark)?;
            ran = kernels;
        }
        let seconds = start.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^52 kernels")]
        let busy = ran as f64 * self.kernel.as_secs_f64();
        report.print(&Spun {
            device: gpu.ordinal(),
            uuid: gpu.uuid()?,
            kernels: ran,
            seconds,
            share: 100.0 * busy / seconds,
        })
    }
}
