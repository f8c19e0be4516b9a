//! The plugin's gRPC calls, timed over its socket as the kubelet makes them.
//!
//! In turn with every Prepare, it times one GET of the same claim and one durable write of a file of a journal's size: the two
//! necessary steps of every Prepare.

mod left;
mod probe;
mod tiers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::future::{join_all, try_join_all};
use futures::{StreamExt, TryStreamExt, stream};

use crate::claims::{self, Placement};
use crate::cluster::{Cluster, unless_interrupted};
use crate::dra::{ClaimId, Plugin};
use crate::pods;
use crate::process::{Process, running};
use crate::row::Row;
use crate::stats::{Spread, count, ms};
use left::Folders;
use probe::Probe;

/// How much to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The plugin's folder, with its socket and its journal
    #[arg(long, default_value = "/var/lib/kubelet/plugins/gpu.tranche.dev")]
    plugin_dir: PathBuf,
    /// Where the share pages are
    #[arg(long, default_value = "/run/tranche/shares")]
    shares_dir: PathBuf,
    /// Where the CDI specs are
    #[arg(long, default_value = "/var/run/cdi")]
    cdi_dir: PathBuf,
    /// Claims that are held in the second half
    #[arg(long, default_value_t = 200)]
    held: usize,
    /// Prepares one after another, in each half
    #[arg(long, default_value_t = 400)]
    samples: usize,
    /// Prepares one after another, in each tier
    #[arg(long, default_value_t = 100)]
    of_tier: usize,
    /// Rounds with several Prepares at once
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// How long the workers run, seconds
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// The image of a pod that runs before: it must be on the node and have a shell
    #[arg(long, default_value = "tranche/workload:dev")]
    image: String,
}

/// The most concurrent callers, and the number of timed claims.
const WORKERS: usize = 32;
const FEW: usize = 8;
/// The number of callers that prepare and release the held claims.
const AT_ONCE: usize = 8;

/// Measures, and then removes all objects, even if it fails or is interrupted.
pub async fn run(args: &Args, cluster: &Cluster) -> anyhow::Result<Vec<Row>> {
    let plugin = Plugin::connect(&args.plugin_dir.join("dra.sock")).await?;
    let gpus = cluster.shareable_gpus().await?;
    let placement = Placement::new(&gpus, WORKERS, args.held);
    cluster.make_namespace().await?;
    let mut load = Load {
        args,
        cluster,
        plugin,
        timed: Vec::new(),
        held: Vec::new(),
        of_tiers: Vec::new(),
        spare: gpus[gpus.len() - 1].clone(),
    };
    let measured = unless_interrupted(load.measure(&placement)).await;
    eprintln!("Releasing everything");
    let left = load.clean_up().await;
    let mut rows = measured?;
    rows.push(Row::new("prepare-left", count(left?)));
    Ok(rows)
}

#[derive(Debug)]
struct Load<'a> {
    args: &'a Args,
    cluster: &'a Cluster,
    plugin: Plugin,
    timed: Vec<ClaimId>,
    held: Vec<ClaimId>,
    of_tiers: Vec<ClaimId>,
    /// The GPU that no timed claim has, by its exclusive device.
    spare: Arc<str>,
}

impl Load<'_> {
    async fn measure(&mut self, placement: &Placement) -> anyhow::Result<Vec<Row>> {
        eprintln!(
            "Creating and allocating {} claims",
            placement.timed.len() + placement.held.len()
        );
        pods::warm_up(self.cluster, &self.args.image).await?;
        self.timed = claims::make(self.cluster, "timed", &placement.timed).await?;
        self.held = claims::make(self.cluster, "held", &placement.held).await?;
        let probe = Probe::new(self.cluster, &self.args.plugin_dir)?;
        // Warms up connections and libraries.
        self.at_once(WORKERS, 1).await?;

        let mut rows = Vec::new();
        self.half(&probe, "prepare", &mut rows).await?;
        eprintln!("{WORKERS} workers for {} s", self.args.seconds);
        self.cycles(&probe, &mut rows).await?;

        self.tiers(&probe, &mut rows).await?;

        eprintln!("Preparing {} claims, to be held", self.held.len());
        stream::iter(&self.held)
            .map(|claim| self.plugin.prepare(claim))
            .buffer_unordered(AT_ONCE)
            .try_collect::<Vec<()>>()
            .await?;
        self.half(&probe, "prepare-held", &mut rows).await?;
        Ok(rows)
    }

    /// Times calls one after another, and several at once.
    async fn half(&self, probe: &Probe, id: &str, rows: &mut Vec<Row>) -> anyhow::Result<()> {
        eprintln!("{} Prepares, one after another", self.args.samples);
        let one = self.one_after_another(probe).await?;
        let prepare = spread(&one.prepare)?;
        let (get, write) = (spread(&one.get)?, spread(&one.write)?);
        for (name, value, get, write) in [
            ("p50", prepare.p50, get.p50, write.p50),
            ("p99", prepare.p99, get.p99, write.p99),
        ] {
            rows.push(
                Row::new(&format!("{id}-{name}"), value)
                    .from(prepare)
                    .beside("one GET of the claim", get)
                    .beside("one journalled write", write),
            );
        }
        rows.push(Row::new(&format!("{id}-above-get"), prepare.p50 - get.p50));
        if id == "prepare" {
            let unprepare = spread(&one.unprepare)?;
            rows.push(Row::new("unprepare-p50", unprepare.p50).from(unprepare));
        }
        for together in [FEW, WORKERS] {
            eprintln!("{together} Prepares at once");
            let last = spread(&self.at_once(together, self.args.rounds).await?)?;
            let gets = spread(
                &probe
                    .gets_at_once(&self.timed[..together], self.args.rounds)
                    .await?,
            )?;
            rows.push(
                Row::new(&format!("{id}-{together}"), last.p50)
                    .from(last)
                    .beside("as many GETs at once, the last", gets.p50),
            );
        }
        Ok(())
    }

    async fn one_after_another(&self, probe: &Probe) -> anyhow::Result<Times> {
        let mut times = Times::default();
        for claim in self.timed.iter().cycle().take(self.args.samples) {
            times.get.push(probe.get(claim).await?);
            times.write.push(probe.write()?);
            times.prepare.push(timed(self.plugin.prepare(claim)).await?);
            times
                .unprepare
                .push(timed(self.plugin.unprepare(claim)).await?);
        }
        Ok(times)
    }

    /// The time until the last of `together` Prepares is answered, in each round.
    async fn at_once(&self, together: usize, rounds: usize) -> anyhow::Result<Vec<Duration>> {
        let claims = &self.timed[..together];
        let mut last = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            last.push(
                timed(try_join_all(
                    claims.iter().map(|claim| self.plugin.prepare(claim)),
                ))
                .await?,
            );
            try_join_all(claims.iter().map(|claim| self.plugin.unprepare(claim))).await?;
        }
        Ok(last)
    }

    /// Every worker repeatedly prepares and unprepares its own claim.
    async fn cycles(&self, probe: &Probe, rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let duration = Duration::from_secs(self.args.seconds);
        let before = [cpu_time(PLUGIN)?, cpu_time(RUNTIME)?];
        let start = Instant::now();
        let workers = self.timed.iter().map(|claim| {
            let (plugin, claim) = (self.plugin.clone(), claim.clone());
            tokio::spawn(async move {
                let (mut times, mut failures) = (Vec::new(), Vec::new());
                while start.elapsed() < duration {
                    let cycle = async {
                        plugin.prepare(&claim).await?;
                        plugin.unprepare(&claim).await
                    };
                    match timed(cycle).await {
                        Ok(time) => times.push(time),
                        Err(failure) => failures.push(failure),
                    }
                }
                (times, failures)
            })
        });
        let (mut times, mut failures) = (Vec::new(), Vec::new());
        for worker in join_all(workers).await {
            let (some_times, some_failures) = worker?;
            times.extend(some_times);
            failures.extend(some_failures);
        }
        let elapsed = start.elapsed().as_secs_f64();
        let after = [cpu_time(PLUGIN)?, cpu_time(RUNTIME)?];
        let of_cycle = |which: usize| {
            ms(after[which].saturating_sub(before[which])) / count(times.len().max(1))
        };
        for failure in failures.iter().take(3) {
            eprintln!("  failed: {failure:#}");
        }
        let gets = probe
            .gets_per_second(&self.timed, Duration::from_secs(3))
            .await?;
        let all = spread(&times)?;
        rows.push(
            Row::new("cycles-rate", count(times.len()) / elapsed)
                .beside("GETs of a claim by as many callers, /s", gets),
        );
        rows.push(Row::new("cycles-p99", all.p99).from(all));
        rows.push(Row::new("cycles-failed", count(failures.len())));
        rows.push(Row::new("cycles-cpu", of_cycle(0)));
        rows.push(Row::new("cycles-runtime-cpu", of_cycle(1)));
        Ok(())
    }

    /// Releases every claim, removes it, and counts the files that are left.
    async fn clean_up(&self) -> anyhow::Result<usize> {
        let all: Vec<_> = self
            .timed
            .iter()
            .chain(&self.held)
            .chain(&self.of_tiers)
            .collect();
        // With a new connection, because the measurement may have failed when the plugin restarted.
        let plugin = Plugin::connect(&self.args.plugin_dir.join("dra.sock")).await?;
        let released: anyhow::Result<Vec<()>> = stream::iter(&all)
            .map(|claim| plugin.unprepare(claim))
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await;
        let folders = Folders {
            journal: self.args.plugin_dir.join("claims"),
            shares: self.args.shares_dir.clone(),
            cdi: self.args.cdi_dir.clone(),
        };
        let left = folders.left(all.iter().map(|claim| claim.uid.as_str()))?;
        for path in left.iter().take(10) {
            eprintln!("  left: {}", path.display());
        }
        self.cluster.remove_namespace().await?;
        released.context("releasing the claims")?;
        Ok(left.len())
    }
}

const PLUGIN: &str = "tranche-kubelet-plugin";
const RUNTIME: &str = "containerd";

/// The CPU time of a program's processes on this node.
fn cpu_time(program: &str) -> anyhow::Result<Duration> {
    let processes = running(program)?;
    ensure!(!processes.is_empty(), "{program} does not run here");
    let times = processes.into_iter().map(Process::cpu_time);
    times.sum()
}

#[derive(Debug, Default)]
struct Times {
    get: Vec<Duration>,
    write: Vec<Duration>,
    prepare: Vec<Duration>,
    unprepare: Vec<Duration>,
}

async fn timed<T>(call: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<Duration> {
    let start = Instant::now();
    call.await?;
    Ok(start.elapsed())
}

fn spread(times: &[Duration]) -> anyhow::Result<Spread> {
    Spread::of(times.iter().copied().map(ms).collect()).context("nothing was measured")
}
