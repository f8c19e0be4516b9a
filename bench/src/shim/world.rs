//! An environment of a program, in its own mount namespace.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use rustix::mount::{MountFlags, mount, mount_bind, mount_remount};
use serde::Serialize;
use tranche_shim_core::compute::{Refill, refill};
use tranche_shim_core::{AccountPage, CapPage, ComputePolicy, paths};

use super::probe;

/// The files that programs find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum World {
    /// As in a container with the installed driver.
    Bare,
    /// As in a container with a capped share of every GPU.
    Capped,
    /// The same, but the shares have all of the GPUs' time: launches are counted, not priced.
    WholeTime,
}

/// The measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Measure {
    /// Seconds of a program without CUDA, for programs one after another.
    Load,
    /// Seconds of a program that initialises CUDA, for programs one after another.
    Init,
    /// Seconds until all of `count` such programs, started at once, have ended.
    Crowd,
    /// Nanoseconds of calls, in `count` concurrent processes.
    Calls,
    /// Launches per second of a program that launches as fast as it can.
    Rate,
}

/// The world's command line; only [`super::run`] uses it.
#[derive(Clone, Debug, clap::Args)]
pub struct WorldArgs {
    /// The environment
    #[arg(value_enum)]
    world: World,
    /// The measurement
    #[arg(value_enum)]
    measure: Measure,
    /// The number of programs or processes
    count: usize,
    /// The folder of the shim's libraries
    #[arg(long)]
    shim_dir: PathBuf,
    /// Percent of each GPU's time
    #[arg(long, default_value_t = CORES)]
    cores: u8,
    #[command(flatten)]
    rate: probe::RateArgs,
}

/// Less than 100, so that launches are priced.
const CORES: u8 = 99;

/// The GPU time that a share is granted.
#[derive(Clone, Copy)]
enum Grant {
    /// Its cores.
    Cores,
    /// More time than is ever used, to measure a launch's cost without its wait.
    Endless,
}

/// The folder of the pages of the first GPU's share, below a world's root.
pub fn pages_of_first_gpu() -> PathBuf {
    std::env::temp_dir().join("gpu-0")
}

/// The command line for a world.
pub fn arguments(world: World, measure: Measure, count: usize) -> [String; 4] {
    let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
        value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    };
    [
        "shim-world".to_owned(),
        name(&|| clap::ValueEnum::to_possible_value(&world)),
        name(&|| clap::ValueEnum::to_possible_value(&measure)),
        count.to_string(),
    ]
}

const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
const OURS: &str = "/usr/lib/tranche";
const PRELOAD: &str = "/etc/ld.so.preload";
/// The library folder of Debian's driver.
const DRIVER: &str = "/usr/lib/x86_64-linux-gnu";
/// More memory than all probes and their contexts have at a time.
const LIMIT: u64 = 16 << 30;

/// Makes the world, measures, and prints the answer as JSON.
pub fn run(args: &WorldArgs) -> anyhow::Result<()> {
    // Read before the shim covers the driver.
    let gpus = probe::gpus()?;
    let folder = layer().context("making a container's file system")?;
    if args.world != World::Bare {
        let grant = match args.measure {
            Measure::Calls => Grant::Endless,
            _ => Grant::Cores,
        };
        let cores = match args.world {
            World::WholeTime => 100,
            World::Bare | World::Capped => args.cores,
        };
        cap(&folder, &args.shim_dir, &gpus, cores, grant)
            .context("making a capped container's file system")?;
    }
    let answer = match args.measure {
        Measure::Load => json(&one_after_another(args.count, || {
            Ok(Command::new("/bin/true"))
        })?),
        Measure::Init => json(&one_after_another(args.count, || probe_command("init"))?),
        Measure::Crowd => json(&[crowd(args.count)?]),
        Measure::Calls => calls(args.count),
        Measure::Rate => rate(args.rate),
    }?;
    println!("{answer}");
    Ok(())
}

fn json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string(value)?)
}

/// Mounts an overlay over the node's libraries and settings, like that of a container's file system. Returns the folder with the
/// files that are written to it.
fn layer() -> anyhow::Result<PathBuf> {
    let folder = std::env::temp_dir();
    mount("tmpfs", &folder, "tmpfs", MountFlags::empty(), c"mode=0755")
        .with_context(|| format!("tmpfs on {}", folder.display()))?;
    for (over, name) in [("/usr/lib", "lib"), ("/etc", "etc")] {
        let (upper, work) = (folder.join(name), folder.join(format!("{name}.work")));
        fs::create_dir(&upper)?;
        fs::create_dir(&work)?;
        let folders = format!(
            "lowerdir={over},upperdir={},workdir={}",
            upper.display(),
            work.display()
        );
        let options = CString::new(folders)?;
        mount(
            "overlay",
            over,
            "overlay",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .with_context(|| format!("overlay on {over}"))?;
    }
    Ok(folder)
}

/// Puts all files where a capped container has them; see docs/architecture.md.
fn cap(folder: &Path, shim: &Path, gpus: &[String], cores: u8, grant: Grant) -> anyhow::Result<()> {
    fs::create_dir_all(format!("{OURS}/driver"))?;
    for library in LIBRARIES {
        let (ours, theirs) = (shim.join(library), format!("{DRIVER}/{library}"));
        fs::copy(&theirs, format!("{OURS}/driver/{library}")).context(theirs.clone())?;
        let installed = format!("{OURS}/{library}");
        fs::copy(&ours, &installed).with_context(|| format!("{}", ours.display()))?;
        fs::remove_file(&theirs)?;
        File::create(&theirs)?;
        mount_bind(&installed, &theirs).context(theirs.clone())?;
    }
    for (index, gpu) in gpus.iter().enumerate() {
        pages(folder, &format!("gpu-{index}"), gpu, cores, grant)?;
    }
    let list: String = LIBRARIES
        .map(|library| format!("{OURS}/{library}\n"))
        .concat();
    Ok(fs::write(PRELOAD, list)?)
}

/// A share's two pages, on tmpfs.
fn pages(folder: &Path, key: &str, gpu: &str, cores: u8, grant: Grant) -> anyhow::Result<()> {
    let mut cap = CapPage {
        gpu_uuid: gpu,
        memory_limit: Some(LIMIT),
        resident_limit: None,
        context_memory: 0,
        cores: Some(cores),
        mps_threads: None,
        compute_policy: ComputePolicy::Strict,
        claim_uid: "00000000-0000-4000-8000-000000000000",
        device_key: key,
    }
    .encode()
    .map_err(|error| anyhow::anyhow!("cap page of {gpu}: {error}"))?;
    if let Grant::Endless = grant {
        let endless = Refill {
            rate: 1_000_000_000_000,
            until: u64::MAX,
            ..Refill::default()
        };
        let turn = refill::OFFSET;
        cap[turn..turn + 8].copy_from_slice(&1u64.to_le_bytes());
        let copy = turn + refill::offset_of_turn(1);
        cap[copy..copy + refill::COPY_LEN].copy_from_slice(&endless.encode());
    }
    let share = Path::new(paths::SHARES).join(key);
    fs::create_dir_all(&share)?;
    fs::create_dir(folder.join(key))?;
    for (page, content, mode, flags) in [
        (
            paths::CAP,
            &cap[..],
            0o444,
            MountFlags::BIND | MountFlags::RDONLY,
        ),
        (
            paths::ACCOUNT,
            AccountPage::initial(),
            0o666,
            MountFlags::BIND,
        ),
    ] {
        let source = folder.join(key).join(page);
        fs::write(&source, content)?;
        fs::set_permissions(&source, fs::Permissions::from_mode(mode))?;
        let target = share.join(page);
        File::create(&target)?;
        mount_bind(&source, &target).with_context(|| format!("{}", target.display()))?;
        mount_remount(&target, flags, "").with_context(|| format!("{}", target.display()))?;
    }
    Ok(())
}

fn rate(of: probe::RateArgs) -> anyhow::Result<String> {
    let done = probe_command("rate")?
        .args(of.arguments())
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(done.status.success(), "a probe: {}", done.status);
    Ok(String::from_utf8(done.stdout)?.trim().to_owned())
}

fn probe_command(what: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("this program's path")?);
    command.args(["shim-probe", what]);
    Ok(command)
}

/// Seconds from each program's start to its end.
fn one_after_another(
    count: usize,
    command: impl Fn() -> anyhow::Result<Command>,
) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let mut command = command()?;
        let start = Instant::now();
        let status = command.status().with_context(|| format!("{command:?}"))?;
        times.push(start.elapsed().as_secs_f64());
        ensure!(status.success(), "{command:?}: {status}");
    }
    Ok(times)
}

/// Seconds from the first program's start to the last one's end.
fn crowd(count: usize) -> anyhow::Result<f64> {
    let start = Instant::now();
    let children = (0..count)
        .map(|_| Ok(probe_command("init")?.spawn()?))
        .collect::<anyhow::Result<Vec<Child>>>()?;
    for mut child in children {
        let status = child.wait()?;
        ensure!(
            status.success(),
            "one of {count} that initialise CUDA: {status}"
        );
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Starts `count` probes, makes them begin together, and joins their results in a JSON list.
fn calls(count: usize) -> anyhow::Result<String> {
    let mut children = (0..count)
        .map(|_| {
            let mut command = probe_command("calls")?;
            Ok(command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?)
        })
        .collect::<anyhow::Result<Vec<Child>>>()?;
    let mut outputs = Vec::with_capacity(count);
    for child in &mut children {
        let output = child.stdout.take().context("a probe's output")?;
        outputs.push(BufReader::new(output).lines());
    }
    let next = |output: &mut dyn Iterator<Item = std::io::Result<String>>| {
        output
            .next()
            .context("a probe ended early")?
            .context("a probe's output")
    };
    for output in &mut outputs {
        let line = next(output)?;
        ensure!(line == probe::READY, "a probe said {line}");
    }
    for child in &mut children {
        let input = child.stdin.as_mut().context("a probe's input")?;
        input.write_all(b"\n")?;
    }
    let answers = outputs
        .iter_mut()
        .map(|output| next(output))
        .collect::<Result<Vec<_>, _>>()?;
    for mut child in children {
        let status = child.wait()?;
        ensure!(status.success(), "a probe: {status}");
    }
    Ok(format!("[{}]", answers.join(",")))
}
