//! `spin`: keeps the GPU as busy as it lets itself be kept, and says how busy that was.

use std::fmt;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use crate::gpu::Gpu;
use crate::kernel::{self, Kernel, Launch};
use crate::report::Report;

/// Kernels between two marks take about so long, and two marks are ahead of the program: a busy CPU
/// must not leave the GPU idle.
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

/// What it got.
#[derive(Debug, Serialize)]
struct Spun {
    device: usize,
    uuid: String,
    kernels: u64,
    seconds: f64,
    /// The time of the kernels that ran, of the whole, in percent.
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
        // The first launch loads what the driver loads late.
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
        report.say(&Spun {
            device: gpu.ordinal(),
            uuid: gpu.uuid()?,
            kernels: ran,
            seconds,
            share: 100.0 * busy / seconds,
        })
    }
}
