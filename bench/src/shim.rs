//! The cost of the shim for programs of a capped container, compared with the same driver without the shim.
//!
//! ```text
//!  run ─► unshare ─► world (bare | capped): mounts ─► probe: a fresh process that calls the driver
//! ```
//!
//! Runs as root on a machine with a driver at `/`, real or simulated. Each world is a private mount namespace: the bare world is
//! unchanged, the capped world has the layout of a capped container. The worlds take turns. Times of calls are CPU times of the
//! calling thread, so that they do not include the kernel's scheduling when there are more processes than cores.

mod cuda;
mod probe;
mod time;
mod world;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde::de::DeserializeOwned;
use tranche_shim_core::cap;

use crate::row::Row;
use crate::stats::Spread;
pub use probe::ProbeArgs;
pub use world::WorldArgs;
use world::{Measure, World};

/// How much to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The folder of the shim's libcuda.so.1 and libnvidia-ml.so.1
    #[arg(long, default_value_os_t = installed())]
    shim_dir: PathBuf,
    /// How often the worlds take turns
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Processes started one after another, per turn
    #[arg(long, default_value_t = 40)]
    starts: usize,
    /// Processes started at once, for the last to be ready
    #[arg(long, default_value_t = 300)]
    crowd: usize,
}

/// The folder in which the plugin of this release installs its shim.
fn installed() -> PathBuf {
    Path::new("/var/lib/kubelet/plugins/gpu.tranche.dev/lib").join(cap::ABI.to_string())
}

/// Nanoseconds per call, by the name of the call.
type Calls = BTreeMap<String, f64>;

/// Runs all measurements.
pub fn run(args: &Args) -> anyhow::Result<Vec<Row>> {
    let mut rows = starts(args)?;
    for processes in PROCESSES {
        rows.extend(calls(args, processes)?);
    }
    rows.extend(time::run(args)?);
    Ok(rows)
}

/// Starts of processes: wall time, because users wait for a start.
fn starts(args: &Args) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (id, measure, unit) in [
        ("shim-load", Measure::Load, 1e3),
        ("shim-init", Measure::Init, 1e3),
        ("shim-init-300", Measure::Crowd, 1.0),
    ] {
        let (rounds, count) = match measure {
            Measure::Crowd => (3, args.crowd),
            _ => (args.rounds, args.starts),
        };
        let mut times: BTreeMap<World, Vec<f64>> = BTreeMap::new();
        for round in 1..=rounds {
            eprintln!("{id}, {round} of {rounds}");
            for world in [World::Bare, World::Capped] {
                let seconds: Vec<f64> = in_world(args, world, measure, count)?;
                times
                    .entry(world)
                    .or_default()
                    .extend(seconds.into_iter().map(|seconds| seconds * unit));
            }
        }
        let mut spread = |world| {
            Spread::of(times.remove(&world).unwrap_or_default()).context("nothing was measured")
        };
        let (bare, capped) = (spread(World::Bare)?, spread(World::Capped)?);
        // The value of a crowd is the time itself, that of a single process the added time.
        let value = match measure {
            Measure::Crowd => capped.p50,
            _ => capped.p50 - bare.p50,
        };
        rows.push(
            Row::new(id, value)
                .from(capped)
                .beside("bare driver", bare.p50)
                .beside("ratio", capped.p50 / bare.p50),
        );
    }
    Ok(rows)
}

/// Calls, made by `processes` processes at once.
fn calls(args: &Args, processes: usize) -> anyhow::Result<Vec<Row>> {
    let mut times: BTreeMap<World, BTreeMap<String, Vec<f64>>> = BTreeMap::new();
    for round in 1..=args.rounds {
        eprintln!(
            "calls by {processes} process(es), {round} of {}",
            args.rounds
        );
        for world in [World::Bare, World::Capped, World::WholeTime] {
            let by_process: Vec<Calls> = in_world(args, world, Measure::Calls, processes)?;
            for (call, nanoseconds) in by_process.into_iter().flatten() {
                times
                    .entry(world)
                    .or_default()
                    .entry(call)
                    .or_default()
                    .push(nanoseconds);
            }
        }
    }
    let mut rows = Vec::new();
    for &(name, world, call, counts) in CALLS {
        let spread = |world| {
            let values = times.get(&world).and_then(|calls| calls.get(call));
            Spread::of(values.cloned().unwrap_or_default())
                .with_context(|| format!("{call} was not measured"))
        };
        let (bare, ours) = (spread(World::Bare)?, spread(world)?);
        let (value, tail) = match counts {
            Counts::Added => (ours.p50 - bare.p50, ours.p99 - bare.p99),
            Counts::All => (ours.p50, ours.p99),
        };
        rows.push(
            Row::new(&id(name, processes), value)
                .from(ours)
                .beside("its 99th percentile", tail)
                .beside("bare driver", bare.p50)
                .beside("ratio", ours.p50 / bare.p50),
        );
    }
    Ok(rows)
}

/// How many processes call at once.
const PROCESSES: [usize; 4] = [1, 4, 16, 64];

/// The part of a call's time that a promise limits.
#[derive(Clone, Copy)]
enum Counts {
    /// The difference to the bare driver.
    Added,
    /// All of it, because the call does not reach the driver.
    All,
}

/// The promises' name, the world, the call, and the part of the time.
const CALLS: &[(&str, World, &str, Counts)] = &[
    ("shim-alloc", World::Capped, probe::ALLOC, Counts::Added),
    (
        "shim-alloc-live",
        World::Capped,
        probe::ALLOC_LIVE,
        Counts::Added,
    ),
    ("shim-refusal", World::Capped, probe::REFUSAL, Counts::All),
    (
        "shim-mem-info",
        World::Capped,
        probe::MEM_INFO,
        Counts::Added,
    ),
    (
        "shim-proc-address",
        World::Capped,
        probe::PROC_ADDRESS,
        Counts::Added,
    ),
    ("shim-launch", World::Capped, probe::LAUNCH, Counts::Added),
    (
        "shim-launch-whole-time",
        World::WholeTime,
        probe::LAUNCH,
        Counts::Added,
    ),
];

/// The promise of a call by `processes` processes at once.
fn id(name: &str, processes: usize) -> String {
    match processes {
        1 => name.to_owned(),
        many => format!("{name}-{many}"),
    }
}

/// Makes a world measure something `count` times, and returns its result.
fn in_world<T: DeserializeOwned>(
    args: &Args,
    world: World,
    measure: Measure,
    count: usize,
) -> anyhow::Result<T> {
    let command = world_command(args, world, measure, count)?;
    answer_of(command, &format!("{world:?} {measure:?}"))
}

/// Makes a world that measures something.
fn world_command(
    args: &Args,
    world: World,
    measure: Measure,
    count: usize,
) -> anyhow::Result<Command> {
    let this = std::env::current_exe().context("this program's path")?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "--"])
        .arg(this)
        .args(world::arguments(world, measure, count))
        .arg("--shim-dir")
        .arg(&args.shim_dir)
        // A container with one share, as most have: with several GPUs the shim asks the driver for the current one.
        .env("CUDA_VISIBLE_DEVICES", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    Ok(command)
}

fn answer_of<T: DeserializeOwned>(mut command: Command, what: &str) -> anyhow::Result<T> {
    let done = command.output().context("unshare")?;
    ensure!(done.status.success(), "{what}: {}", done.status);
    serde_json::from_slice(&done.stdout).with_context(|| format!("{what}: its answer"))
}

/// The world's part: called by [`run`] in its own namespace.
pub fn world(args: &WorldArgs) -> anyhow::Result<()> {
    world::run(args)
}

/// The probe's part: called by a world.
pub fn probe(args: &ProbeArgs) -> anyhow::Result<()> {
    probe::run(args)
}
