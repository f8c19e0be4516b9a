//! `serve`: a request now and then, as a service gets them, and how long each takes.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::Args;
use serde::Serialize;

use crate::gpu::Gpu;
use crate::kernel::{self, Kernel, Launch};
use crate::report::Report;

/// What a request is.
#[derive(Args, Debug)]
pub struct Serve {
    /// How long a kernel takes
    #[arg(long, default_value = "200us", value_parser = kernel::duration)]
    kernel: Duration,
    /// The kernels of a request: each is waited for before the next one is launched
    #[arg(long, default_value_t = 10)]
    kernels: u32,
    /// From the end of a request to the next one
    #[arg(long, default_value = "20ms", value_parser = kernel::duration)]
    pause: Duration,
    /// How many requests to do
    #[arg(long, default_value_t = 100)]
    requests: u32,
    /// The device
    #[arg(long, default_value_t = 0)]
    device: usize,
}

/// How long requests took, in milliseconds.
#[derive(Debug, Serialize)]
struct Served {
    device: usize,
    uuid: String,
    requests: u32,
    p50: f64,
    p90: f64,
    p99: f64,
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device {}: {} requests: p50 {:.1} ms, p90 {:.1} ms, p99 {:.1} ms",
            self.device, self.requests, self.p50, self.p90, self.p99
        )
    }
}

impl Serve {
    /// One line at the end.
    pub fn run(&self, report: Report) -> anyhow::Result<()> {
        ensure!(self.requests > 0, "--requests must be 1 or more");
        let gpu = Gpu::open(self.device)?;
        let kernel = Kernel::new(&gpu, self.kernel, Launch::Plain)?;
        // The first one makes the driver load its lazy parts.
        self.request(&kernel)?;
        let mut times = Vec::new();
        for _ in 0..self.requests {
            std::thread::sleep(self.pause);
            times.push(self.request(&kernel)?);
        }
        times.sort_unstable();
        let at = |percent: usize| {
            let time = times.get(times.len() * percent / 100).copied();
            time.unwrap_or_default().as_secs_f64() * 1000.0
        };
        report.print(&Served {
            device: gpu.ordinal(),
            uuid: gpu.uuid()?,
            requests: self.requests,
            p50: at(50),
            p90: at(90),
            p99: at(99),
        })
    }

    /// How long a request takes.
    fn request(&self, kernel: &Kernel) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for _ in 0..self.kernels {
            kernel.launch()?;
            kernel::pass(&kernel.mark()?)?;
        }
        Ok(start.elapsed())
    }
}
