//! The cost of the shim for programs of a capped container, compared with the same driver without it, and the part of a
//! GPU's time that shares get: the probe of the shim's tests, in their containers. Needs root, `make shim simulator`, and the
//! probe in this program's profile.
//!
//! Programs with and without the shim take turns. Times of calls are CPU times of the calling thread, so that more
//! processes than cores do not measure the scheduler.

use std::collections::BTreeMap;
use std::process::{Child, Command};
use std::time::Instant;

use anyhow::{Context, ensure};
use tranche_shim_core::{ComputePolicy, Priority};
use tranche_shim_tests::gpu_time::contended;
use tranche_shim_tests::priority::requests_beside;
use tranche_shim_tests::{DRIVER, Driver, Machine, Probe, World, probe_path};

use crate::row::Row;
use crate::stats::Spread;

/// How much to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// How often programs with and without the shim take turns
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Processes started one after another, per turn
    #[arg(long, default_value_t = 40)]
    starts: usize,
    /// Processes started at once, for the last to be ready
    #[arg(long, default_value_t = 300)]
    crowd: usize,
    /// Requests with high priority, alone and beside each neighbour
    #[arg(long, default_value_t = 500)]
    requests: u64,
}

/// Measures all of it.
pub fn run(args: &Args) -> anyhow::Result<Vec<Row>> {
    let mut rows = gpu_time();
    rows.push(priority(args));
    // The container of most users: with several GPUs the shim asks the driver which one is current.
    let world = World::new(Driver::Machine(Machine::Simple, 1));
    rows.extend(starts(args, &world)?);
    for processes in PROCESSES {
        rows.extend(calls(args, &world, processes)?);
    }
    Ok(rows)
}

/// What stands before the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Shim {
    /// Nothing.
    None,
    /// The shim of a capped share, whose launches are priced.
    Capped,
    /// The same, and the share has all of the GPU's time: launches are counted, not priced.
    WholeTime,
}

/// More than all probes have at a time.
const LIMIT: u64 = 16 << 30;

impl Shim {
    /// Measures programs that load the driver in the given way.
    fn turn(
        self,
        world: &World,
        measure: impl FnOnce(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let cores = match self {
            Self::None => {
                world.without_preload();
                let measured = measure(DRIVER);
                world.with_preload();
                return measured;
            }
            Self::Capped => 99,
            Self::WholeTime => 100,
        };
        let gpu = &world.node().gpus()[0].uuid;
        let strict = ComputePolicy::Strict;
        let share = world.share_of_time("gpu-0", gpu, Some(LIMIT), Some(cores), strict);
        // More than is ever used: the cost of a launch is measured, not its wait.
        share.grant(1_000_000_000_000);
        let measured = measure("name");
        world.remove(&share);
        measured
    }
}

/// Which part of a time a promise is about.
#[derive(Clone, Copy)]
enum Counts {
    /// The difference to the bare driver.
    Added,
    /// All of it.
    All,
}

/// Times of calls or programs, by name.
#[derive(Default)]
struct Times(BTreeMap<(Shim, String), Vec<f64>>);

impl Times {
    fn add(&mut self, shim: Shim, name: &str, time: f64) {
        self.0
            .entry((shim, name.to_owned()))
            .or_default()
            .push(time);
    }

    fn row(&self, id: &str, shim: Shim, name: &str, counts: Counts) -> anyhow::Result<Row> {
        let spread = |shim| {
            let times = self.0.get(&(shim, name.to_owned()));
            Spread::of(times.cloned().unwrap_or_default())
                .with_context(|| format!("{name} was not measured"))
        };
        let (bare, ours) = (spread(Shim::None)?, spread(shim)?);
        let (value, tail) = match counts {
            Counts::Added => (ours.p50 - bare.p50, ours.p99 - bare.p99),
            Counts::All => (ours.p50, ours.p99),
        };
        Ok(Row::new(id, value)
            .from(ours)
            .beside("its 99th percentile", tail)
            .beside("bare driver", bare.p50)
            .beside("ratio", ours.p50 / bare.p50))
    }
}

/// Starts of processes: wall time, because users wait for a start.
fn starts(args: &Args, world: &World) -> anyhow::Result<Vec<Row>> {
    let program = || world.command("/bin/true");
    let initialises = |how: &str| {
        let mut command = world.command(probe_path());
        command.args([how, "init"]);
        command
    };
    let mut times = Times::default();
    for round in 1..=args.rounds {
        eprintln!("starts, {round} of {}", args.rounds);
        for shim in [Shim::None, Shim::Capped] {
            shim.turn(world, |how| {
                for _ in 0..args.starts {
                    times.add(shim, "load", 1e3 * seconds_of(1, program)?);
                    times.add(shim, "init", 1e3 * seconds_of(1, || initialises(how))?);
                }
                if round <= 3 {
                    let last = seconds_of(args.crowd, || initialises(how))?;
                    times.add(shim, "crowd", last);
                }
                Ok(())
            })?;
        }
    }
    Ok(vec![
        times.row("shim-load", Shim::Capped, "load", Counts::Added)?,
        times.row("shim-init", Shim::Capped, "init", Counts::Added)?,
        times.row("shim-init-300", Shim::Capped, "crowd", Counts::All)?,
    ])
}

/// Seconds from the start of so many programs at once to the last one's end.
fn seconds_of(count: usize, program: impl Fn() -> Command) -> anyhow::Result<f64> {
    let start = Instant::now();
    let children = (0..count)
        .map(|_| program().spawn().context("a program"))
        .collect::<anyhow::Result<Vec<Child>>>()?;
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "one of {count} programs: {status}");
    }
    Ok(start.elapsed().as_secs_f64())
}

/// How many processes call at once.
const PROCESSES: [usize; 4] = [1, 4, 16, 64];
/// Allocations that live during `alloc-free-live`.
const LIVE: usize = 10_000;

/// The promises' name, behind what, the call, and what counts: all of it where the driver is not called.
const CALLS: [(&str, Shim, &str, Counts); 10] = [
    ("shim-alloc", Shim::Capped, "alloc-free", Counts::Added),
    (
        "shim-alloc-live",
        Shim::Capped,
        "alloc-free-live",
        Counts::Added,
    ),
    ("shim-refusal", Shim::Capped, "refusal", Counts::All),
    ("shim-mem-info", Shim::Capped, "mem-info", Counts::Added),
    (
        "shim-proc-address",
        Shim::Capped,
        "proc-address",
        Counts::Added,
    ),
    ("shim-launch", Shim::Capped, "launch", Counts::Added),
    (
        "shim-launch-whole-time",
        Shim::WholeTime,
        "launch",
        Counts::Added,
    ),
    (
        "shim-async-pair",
        Shim::Capped,
        "alloc-free-async",
        Counts::Added,
    ),
    ("shim-sync-pools", Shim::Capped, "sync-pools", Counts::Added),
    (
        "shim-mem-info-pools",
        Shim::Capped,
        "mem-info-pools",
        Counts::Added,
    ),
];

/// Calls, made by `processes` processes at once.
fn calls(args: &Args, world: &World, processes: usize) -> anyhow::Result<Vec<Row>> {
    let mut times = Times::default();
    for round in 1..=args.rounds {
        eprintln!(
            "calls by {processes} process(es), {round} of {}",
            args.rounds
        );
        for shim in [Shim::None, Shim::Capped, Shim::WholeTime] {
            shim.turn(world, |how| {
                let mut probes: Vec<_> = (0..processes).map(|_| world.probe(how)).collect();
                for probe in &mut probes {
                    probe.must("init");
                    probe.must("primary 0");
                    // With one byte in use all of the memory is too much, and only a look at what is left can tell.
                    probe.must("alloc 1");
                }
                for probe in &mut probes {
                    let total = probe.must("info").number(1);
                    probe.send(&format!("cpu-cost {LIVE} {total}"));
                }
                for answer in probes.iter_mut().map(Probe::receive) {
                    for pair in answer.values.chunks_exact(2) {
                        times.add(shim, &pair[0], pair[1].parse()?);
                    }
                }
                Ok(())
            })?;
        }
    }
    CALLS
        .iter()
        .map(|&(name, shim, call, counts)| {
            let id = match processes {
                1 => name.to_owned(),
                many => format!("{name}-{many}"),
            };
            times.row(&id, shim, call, counts)
        })
        .collect()
}

/// The difference between shares' GPU time and their cores, alone and beside each other.
fn gpu_time() -> Vec<Row> {
    let mut farthest = (0.0, 0, 0.0);
    // Long kernels need a longer measurement.
    for (micros, millis) in [(10, 5_000), (1_000, 5_000), (100_000, 20_000)] {
        for cores in [5, 10, 25, 50, 75] {
            let parts = parts_of_gpu(&[cores], micros, 2_000, millis);
            let off = (parts[0] - f64::from(cores)).abs();
            if off > farthest.0 {
                farthest = (off, cores, f64::from(micros));
            }
        }
    }
    let (off, cores, micros) = farthest;
    let alone = Row::new("compute-alone", off)
        .beside("at percent", f64::from(cores))
        .beside("kernels of µs", micros);
    let unequal = parts_of_gpu(&[30, 70], 1_000, 5_000, 10_000);
    let off = (unequal[0] - 30.0).abs().max((unequal[1] - 70.0).abs());
    let contended = Row::new("compute-contended", off)
        .beside("30 has", unequal[0])
        .beside("70 has", unequal[1]);
    let equal = parts_of_gpu(&[25; 4], 1_000, 5_000, 10_000);
    let (sum, squares) = equal.iter().fold((0.0, 0.0), |(sum, squares), part| {
        (sum + part, squares + part * part)
    });
    let jain = Row::new("compute-jain", sum * sum / (4.0 * squares)).beside("sum", sum);
    vec![alone, contended, jain]
}

/// Percent of the GPU's time for shares of so many cores beside each other, whose programs launch kernels of so many
/// microseconds, for `millis` milliseconds after `settles` others.
fn parts_of_gpu(cores: &[u8], micros: u32, settles: u64, millis: u64) -> Vec<f64> {
    eprintln!("shares of {cores:?} percent, kernels of {micros} µs");
    let kernel = format!("sim_busy_{micros}us");
    let shares: Vec<_> = cores
        .iter()
        .map(|&cores| (cores, ComputePolicy::Strict, kernel.as_str()))
        .collect();
    contended(Machine::Simple, settles, millis, &shares).0
}

/// The times of a request of 2 ms beside a program that launches as much as it may, by that program's priority.
fn priority(args: &Args) -> Row {
    let low = Priority::Low { floor: 0 };
    let [alone, normal, low] = [None, Some(Priority::Normal), Some(low)].map(|neighbour| {
        eprintln!("{} requests beside {neighbour:?}", args.requests);
        requests_beside(neighbour, args.requests)
    });
    #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
    let millis = |micros: u64| micros as f64 / 1e3;
    Row::new("priority-p99", millis(low.p99) / millis(alone.p99))
        .beside("alone, ms", millis(alone.p99))
        .beside("beside a low share", millis(low.p99))
        .beside("beside a normal share", millis(normal.p99))
        .beside("medians", millis(alone.p50))
        .beside("low", millis(low.p50))
        .beside("normal", millis(normal.p50))
}
