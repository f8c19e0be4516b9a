//! A fresh process in a world: a small CUDA program that times its calls.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};

use super::cuda::{Cuda, Pointer};

/// The probe's command line; only a world uses it.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeArgs {
    /// What it does
    #[arg(value_enum)]
    what: What,
    #[command(flatten)]
    rate: RateArgs,
}

/// The kernel and the times of a rate.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct RateArgs {
    /// Microseconds of a kernel
    #[arg(long, default_value_t = 0)]
    pub micros: u64,
    /// Milliseconds of launches before they are counted
    #[arg(long, default_value_t = 0)]
    pub settle: u64,
    /// Milliseconds in which they are counted
    #[arg(long, default_value_t = 0)]
    pub counted: u64,
}

impl RateArgs {
    /// The command line.
    pub fn arguments(self) -> [String; 3] {
        [
            format!("--micros={}", self.micros),
            format!("--settle={}", self.settle),
            format!("--counted={}", self.counted),
        ]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// Loads the driver, initialises it, and ends.
    Init,
    /// Says that it is ready, waits for a line, times calls, and prints them as JSON.
    Calls,
    /// Launches as much as it may, and prints how many a second that are.
    Rate,
}

/// The line that a probe prints before it waits.
pub const READY: &str = "ready";

/// `cuMemAlloc` of a page and `cuMemFree`.
pub const ALLOC: &str = "alloc";
/// The same while there are many other allocations.
pub const ALLOC_LIVE: &str = "alloc-live";
/// `cuMemAlloc` of more memory than is left.
pub const REFUSAL: &str = "refusal";
/// `cuMemGetInfo`.
pub const MEM_INFO: &str = "mem-info";
/// `cuGetProcAddress`.
pub const PROC_ADDRESS: &str = "proc-address";
/// `cuLaunchKernel`.
pub const LAUNCH: &str = "launch";

const BLOCK: usize = 4096;
const LIVE: usize = 10_000;
/// Calls per reading of the clock, so that the cost of the reading does not matter.
const BATCH: u32 = 200;
const BATCHES: usize = 50;

/// The GPUs' UUIDs in the driver's order.
pub fn gpus() -> anyhow::Result<Vec<String>> {
    let cuda = Cuda::load()?;
    cuda.init()?;
    (0..cuda.device_count()?)
        .map(|ordinal| cuda.device_uuid(ordinal))
        .collect()
}

/// Runs the probe.
pub fn run(args: &ProbeArgs) -> anyhow::Result<()> {
    let cuda = Cuda::load()?;
    cuda.init()?;
    match args.what {
        What::Init => Ok(()),
        What::Calls => {
            cuda.use_first_device()?;
            let kernel = cuda.kernel_that_does_nothing()?;
            println!("{READY}");
            std::io::stdin().read_line(&mut String::new())?;
            println!("{}", serde_json::to_string(&calls(&cuda, kernel)?)?);
            Ok(())
        }
        What::Rate => {
            cuda.use_first_device()?;
            let kernel = cuda.kernel_that_works(args.rate.micros)?;
            rate(&cuda, kernel, args.rate.micros, args.rate.settle)?;
            let rate = rate(&cuda, kernel, args.rate.micros, args.rate.counted)?;
            println!("{}", serde_json::to_string(&rate)?);
            Ok(())
        }
    }
}

/// Launches per second over `millis` milliseconds. It waits for the GPU only after every 200 ms of the GPU's work, because the GPU is
/// idle while the program wakes up.
fn rate(cuda: &Cuda, kernel: Pointer, micros: u64, millis: u64) -> anyhow::Result<f64> {
    let start = Instant::now();
    let mut launches = 0u32;
    while start.elapsed() < Duration::from_millis(millis) {
        for _ in 0..(200_000 / micros.max(1)).clamp(1, 20_000) {
            cuda.launch(kernel)?;
            launches += 1;
        }
        cuda.synchronize()?;
    }
    Ok(f64::from(launches) / start.elapsed().as_secs_f64())
}

fn calls(cuda: &Cuda, kernel: Pointer) -> anyhow::Result<BTreeMap<&'static str, f64>> {
    let alloc_and_free = || {
        let pointer = cuda.alloc(BLOCK)?;
        cuda.free(pointer)
    };
    let (_, total) = cuda.mem_info()?;
    // With one byte in use, an allocation of the total is too much, which only a look at the rest can tell.
    let kept = cuda.alloc(1)?;
    let mut calls = BTreeMap::from([
        (ALLOC, timed(alloc_and_free)?),
        (REFUSAL, timed(|| cuda.refused(total))?),
        (MEM_INFO, timed(|| cuda.mem_info().map(drop))?),
        (PROC_ADDRESS, timed(|| cuda.proc_address(c"cuMemAlloc"))?),
        (LAUNCH, timed(|| cuda.launch(kernel))?),
    ]);
    let live = (0..LIVE)
        .map(|_| cuda.alloc(BLOCK))
        .collect::<Result<Vec<_>, _>>()?;
    calls.insert(ALLOC_LIVE, timed(alloc_and_free)?);
    for pointer in live.into_iter().chain([kept]) {
        cuda.free(pointer)?;
    }
    Ok(calls)
}

/// CPU nanoseconds of one call: the median of batches.
fn timed(call: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let mut batches = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let start = cpu_time();
        for _ in 0..BATCH {
            call()?;
        }
        batches.push(cpu_time().saturating_sub(start).as_secs_f64() * 1e9 / f64::from(BATCH));
    }
    batches.sort_by(f64::total_cmp);
    batches.get(BATCHES / 2).copied().context("no batch")
}

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        now.tv_sec.unsigned_abs(),
        u32::try_from(now.tv_nsec).unwrap_or_default(),
    )
}
