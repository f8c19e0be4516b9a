//! The part of a GPU's time that a share gets: the rate of its launches divided by that of the same program alone and without a limit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, ensure};
use tranche_node::compute::PERIOD_NANOS;
use tranche_node::nvml::search::InstalledDriver;
use tranche_node::sampler::{Sampler, now};
use tranche_node::utilization::NvmlUtilization;

use super::probe::RateArgs;
use super::world::{Measure, World, pages_of_first_gpu};
use super::{Args, answer_of, world_command};
use crate::row::Row;

/// Percent of a GPU's time.
const CORES: [u8; 5] = [5, 10, 25, 50, 75];
/// Microseconds of kernels.
const KERNELS: [u64; 3] = [10, 1_000, 100_000];

/// The difference between shares' GPU time and their cores, alone and beside each other.
pub fn run(args: &Args) -> anyhow::Result<Vec<Row>> {
    let mut whole = BTreeMap::new();
    for micros in KERNELS {
        let of = rate_of(micros, 500, 2_000);
        whole.insert(micros, alone(args, World::Bare, &[], of)?);
    }
    let mut farthest = (0.0, 0, 0);
    for micros in KERNELS {
        for cores in CORES {
            eprintln!("a share of {cores} percent, kernels of {micros} µs");
            // Long kernels need a longer measurement.
            let of = rate_of(micros, 2_000, if micros > 10_000 { 20_000 } else { 5_000 });
            let cores_flag = [format!("--cores={cores}")];
            let rate = alone(args, World::Capped, &cores_flag, of)?;
            let off = (100.0 * rate / whole[&micros] - f64::from(cores)).abs();
            if off > farthest.0 {
                farthest = (off, cores, micros);
            }
        }
    }
    let (off, cores, micros) = farthest;
    #[expect(clippy::cast_precision_loss, reason = "small")]
    let alone = Row::new("compute-alone", off)
        .beside("at percent", f64::from(cores))
        .beside("kernels of µs", micros as f64);
    let unequal = together(args, &[30, 70], whole[&1_000])?;
    let off = (unequal[0] - 30.0).abs().max((unequal[1] - 70.0).abs());
    let contended = Row::new("compute-contended", off)
        .beside("30 has", unequal[0])
        .beside("70 has", unequal[1]);
    let equal = together(args, &[25; 4], whole[&1_000])?;
    let (sum, squares) = equal.iter().fold((0.0, 0.0), |(sum, squares), part| {
        (sum + part, squares + part * part)
    });
    let jain = Row::new("compute-jain", sum * sum / (4.0 * squares)).beside("sum", sum);
    Ok(vec![alone, contended, jain])
}

const fn rate_of(micros: u64, settle: u64, counted: u64) -> RateArgs {
    RateArgs {
        micros,
        settle,
        counted,
    }
}

/// Launches per second of a program alone.
fn alone(args: &Args, world: World, flags: &[String], of: RateArgs) -> anyhow::Result<f64> {
    let mut command = world_command(args, world, Measure::Rate, 1)?;
    command.args(flags).args(of.arguments());
    answer_of(command, &format!("{world:?} rate"))
}

/// Percent of the GPU's time that shares with these cores get beside each other, with the node's sampler, kernels of a millisecond
/// and time to settle.
fn together(args: &Args, cores: &[u8], whole: f64) -> anyhow::Result<Vec<f64>> {
    eprintln!("shares of {cores:?} percent beside each other");
    let mut worlds = cores
        .iter()
        .map(|cores| {
            let mut command = world_command(args, World::Capped, Measure::Rate, 1)?;
            command.arg(format!("--cores={cores}"));
            command.args(rate_of(1_000, 5_000, 10_000).arguments());
            command.spawn().context("unshare")
        })
        .collect::<anyhow::Result<Vec<Child>>>()?;
    // unshare becomes the world, so its PID is the world's.
    let folder = pages_of_first_gpu();
    let below = folder.strip_prefix("/").unwrap_or(&folder);
    let folders: Vec<PathBuf> = worlds
        .iter()
        .map(|world| PathBuf::from(format!("/proc/{}/root", world.id())).join(below))
        .collect();
    let driver = InstalledDriver::new(Path::new("/"), Some(Path::new("/")));
    let mut utilization = NvmlUtilization::new(Box::new(driver));
    let mut sampler = Sampler::new("/proc");
    loop {
        let mut running = false;
        for world in &mut worlds {
            running |= world.try_wait()?.is_none();
        }
        if !running {
            break;
        }
        // There is nothing to sample before a world is made and after it has ended.
        let made = |folder: &&PathBuf| folder.join("account").exists();
        let folders: Vec<PathBuf> = folders.iter().filter(made).cloned().collect();
        sampler.step(now(), &folders, &mut utilization);
        std::thread::sleep(Duration::from_nanos(PERIOD_NANOS));
    }
    worlds
        .into_iter()
        .map(|world| {
            let done = world.wait_with_output()?;
            ensure!(done.status.success(), "a world: {}", done.status);
            let rate: f64 = serde_json::from_slice(&done.stdout).context("a world's answer")?;
            Ok(100.0 * rate / whole)
        })
        .collect()
}
