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
    /// The median of this share over full seconds, which a short stop of the machine does not change.
    median: f64,
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

/// The share of each second.
#[derive(Debug, Default)]
struct Seconds {
    from: Duration,
    /// Kernels that had ended by then.
    ended: u64,
    shares: Vec<f64>,
}

impl Seconds {
    /// Adds a count of ended kernels.
    fn note(&mut self, kernel: Duration, elapsed: Duration, ended: u64) {
        let seconds = elapsed.saturating_sub(self.from);
        if seconds >= Duration::from_secs(1) {
            self.shares.push(share(kernel, ended - self.ended, seconds));
            (self.from, self.ended) = (elapsed, ended);
        }
    }

    /// The median; `None` if less than a second has passed.
    fn median(mut self) -> Option<f64> {
        self.shares.sort_by(f64::total_cmp);
        self.shares.get(self.shares.len() / 2).copied()
    }
}

/// The time of the kernels, in percent of the time that passed.
fn share(kernel: Duration, kernels: u64, passed: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^52 kernels")]
    let busy = kernels as f64 * kernel.as_secs_f64();
    100.0 * busy / passed.as_secs_f64()
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
        let mut seconds = Seconds::default();
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
                seconds.note(self.kernel, start.elapsed(), ran);
            }
        }
        if let Some((mark, kernels)) = former {
            kernel::pass(&mark)?;
            ran = kernels;
        }
        let passed = start.elapsed();
        let share = share(self.kernel, ran, passed);
        report.print(&Spun {
            device: gpu.ordinal(),
            uuid: gpu.uuid()?,
            kernels: ran,
            seconds: passed.as_secs_f64(),
            share,
            median: seconds.median().unwrap_or(share),
        })
    }
}
