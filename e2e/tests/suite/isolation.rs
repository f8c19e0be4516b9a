//! What a neighbour on the same GPU can take, slow down or crash in each tier: the rows of `docs/isolation.md`.
//!
//! A victim and a neighbour run side by side. The neighbour allocates all memory that it can, keeps the GPU busy, and runs a kernel
//! that writes to memory which is not allocated. The test measures what the victim still has.

use anyhow::{Context, ensure};
use serde::Deserialize;
use tranche_api::tier::{Isolation, Tier};
use tranche_e2e::{Case, PodHandle, Request, policy, run_on_a_node, wait, workload};

use crate::compute::spin_with;

const PAGE: &str = include_str!("../../../docs/isolation.md");
const GIB: u64 = 1 << 30;
/// Memory that the neighbour leaves, for the blocks in which the driver allocates.
const LEFT: u64 = 16 << 20;
/// How much less the victim may have than alone: percent of its memory, and percent of the GPU's time.
const PERCENT: u64 = 2;
const POINTS: f64 = 5.0;

/// Two pods on one GPU, or on neighbouring GPUs for tiers that have a GPU alone.
struct Pair {
    victim: PodHandle,
    neighbour: PodHandle,
}

/// Whether the victim keeps its memory, its compute time and its programs beside a neighbour.
#[derive(Debug, PartialEq)]
struct Kept {
    memory: bool,
    compute: bool,
    fault: bool,
}

#[derive(Debug, Deserialize)]
struct Faulted {
    errors: [String; 2],
}

/// A program that runs in a pod until [`Self::end`].
struct Background<'a> {
    pod: &'a PodHandle,
    pid: String,
}

const OUTPUT: &str = "/tmp/background";

impl<'a> Background<'a> {
    /// Starts it and waits for its first line.
    async fn start(pod: &'a PodHandle, command: &str) -> anyhow::Result<Self> {
        let script = format!("{command} >{OUTPUT} 2>&1 & echo $!");
        let pid = pod.stdout(&["sh", "-c", &script]).await?.trim().to_owned();
        let started = Self { pod, pid };
        wait::for_answer(command, wait::USUAL, async || {
            let output = started.output().await?;
            Ok(output.contains('\n').then_some(()))
        })
        .await?;
        Ok(started)
    }

    async fn output(&self) -> anyhow::Result<String> {
        self.pod.stdout(&["cat", OUTPUT]).await
    }

    /// Ends it and returns its output.
    async fn end(self) -> anyhow::Result<String> {
        // A program that has ended may stay in the process table, because nobody waits for it.
        let script = format!(
            "kill {0}; while grep -q '^State:.[^Z]' /proc/{0}/status; do sleep 0.1; done 2>/dev/null",
            self.pid
        );
        self.pod.exec(&["sh", "-c", &script]).await?;
        self.output().await
    }
}

/// Bytes that a pod can allocate.
async fn filled(pod: &PodHandle) -> anyhow::Result<u64> {
    let exit = pod.exec(&["tranche-workload", "--json", "fill"]).await?;
    if exit.stderr.contains("OUT_OF_MEMORY") {
        return Ok(0);
    }
    let filled: Vec<workload::Filled> = workload::lines(&exit.ok()?)?;
    ensure!(filled.len() == 1 && filled[0].errors == 0, "{filled:?}");
    Ok(filled[0].filled)
}

impl Pair {
    async fn of(case: &Case, tier: Tier) -> anyhow::Result<Self> {
        policy::tiers(case, &[tier]).await?;
        let namespace = case.namespace(tier.as_str()).await?;
        let on = |gpu: usize| case.gpus[gpu].uuid.as_str();
        let [first, second] = match tier {
            Tier::Exclusive => [0, 1].map(|gpu| Request::exclusive().on(on(gpu))),
            Tier::Partition => ["3g.40gb", "4g.40gb"].map(|profile| {
                Request::of(tier).that(&format!(
                    "device.attributes['gpu.tranche.dev'].profile == '{profile}' && \
                     device.attributes['gpu.tranche.dev'].parentUUID == '{}'",
                    on(0)
                ))
            }),
            Tier::Capped => ["30", "60"].map(|cores| Request::capped("8Gi", cores).on(on(0))),
            Tier::Concurrent => {
                ["30", "60"].map(|threads| Request::concurrent("8Gi", threads).on(on(0)))
            }
            _ => [0, 0].map(|gpu| Request::of(tier).on(on(gpu))),
        };
        let victim = namespace.idle("victim", &first).await?;
        // While the scheduler binds a pod it counts its share twice: docs/architecture.md.
        victim.started().await?;
        let neighbour = namespace.idle("neighbour", &second).await?;
        neighbour.started().await?;
        Ok(Self { victim, neighbour })
    }

    /// The neighbour holds all the memory that it gets.
    async fn memory(&self) -> anyhow::Result<bool> {
        let alone = filled(&self.victim).await?;
        let free = self.neighbour.seen().await?[0].free;
        let hold = format!("tranche-workload --json hold --bytes {}", free - LEFT);
        let holder = Background::start(&self.neighbour, &hold).await?;
        let beside = filled(&self.victim).await?;
        let beats: Vec<workload::Beat> = workload::lines(&holder.end().await?)?;
        ensure!(beats.iter().all(|beat| beat.errors == 0), "{beats:?}");
        println!("memory: {beside} bytes of {alone}");
        Ok(beside >= alone / 100 * (100 - PERCENT))
    }

    /// Clients of MPS have different multiprocessors. Simulated clients still take turns, so only real GPUs show the time of each.
    async fn multiprocessors(&self) -> anyhow::Result<bool> {
        let all = 132;
        let spins = "sh -c 'echo; exec tranche-workload --json spin --time 60s'";
        let busy = Background::start(&self.neighbour, spins).await?;
        let victim = self.victim.seen().await?[0].multiprocessors;
        let neighbour = self.neighbour.seen().await?[0].multiprocessors;
        busy.end().await?;
        println!("compute: {victim} and {neighbour} of {all} multiprocessors");
        Ok(victim >= all * 30 / 100 && victim + neighbour <= all)
    }

    /// The neighbour keeps the GPU busy.
    async fn compute(&self, tier: Tier) -> anyhow::Result<bool> {
        if tier == Tier::Concurrent {
            return self.multiprocessors().await;
        }
        // These tests run beside others. The median of eight seconds is that of seconds in which the machine goes on.
        let spin = async || spin_with(&self.victim, "10ms", "8s").await;
        let alone = spin().await?;
        let spins = "sh -c 'echo; exec tranche-workload --json spin --time 60s'";
        let busy = Background::start(&self.neighbour, spins).await?;
        let beside = spin().await?;
        busy.end().await?;
        println!("compute: {beside:.1} % of the time, alone {alone:.1} %");
        Ok(beside >= alone - POINTS)
    }

    /// A kernel of the neighbour writes to memory that is not allocated.
    async fn fault(&self) -> anyhow::Result<bool> {
        let hold = "tranche-workload --json hold --bytes 1Gi --beat 100";
        let holder = Background::start(&self.victim, hold).await?;
        let command = ["tranche-workload", "--json", "fault"];
        let fault: Faulted = serde_json::from_str(&self.neighbour.stdout(&command).await?)?;
        ensure!(
            fault.errors == ["CUDA_ERROR_ILLEGAL_ADDRESS"; 2],
            "{fault:?}"
        );
        let before = holder.output().await?.lines().count();
        let after = wait::for_answer("the victim after the fault", wait::USUAL, async || {
            let output = holder.output().await?;
            let has_failed = output.contains("tranche-workload:");
            Ok((has_failed || output.lines().count() > before + 2).then_some(output))
        })
        .await?;
        let is_kept = match workload::lines::<workload::Beat>(&after) {
            Ok(beats) => beats.last().context("no heartbeat")?.errors == 0,
            Err(_) => false,
        };
        holder.end().await?;
        println!(
            "fault: {}",
            if is_kept {
                "not noticed"
            } else {
                "ended the victim"
            }
        );
        // The pods can use their GPU again after the fault.
        for pod in [&self.victim, &self.neighbour] {
            ensure!(filled(pod).await? > GIB);
        }
        Ok(is_kept)
    }
}

/// Runs the experiments, and compares the results with the tier's promise and with the page.
async fn shown(case: &Case, tier: Tier) -> anyhow::Result<()> {
    let pair = Pair::of(case, tier).await?;
    let kept = Kept {
        memory: pair.memory().await?,
        compute: pair.compute(tier).await?,
        fault: pair.fault().await?,
    };
    let is_kept = |isolation: Isolation| isolation != Isolation::None;
    let promised = Kept {
        memory: is_kept(tier.memory_isolation()),
        compute: is_kept(tier.compute_isolation()),
        fault: is_kept(tier.fault_isolation()),
    };
    ensure!(kept == promised, "{tier}: {kept:?}, promised {promised:?}");
    let word = |kept| if kept { "kept" } else { "lost" };
    let by = match tier {
        Tier::Concurrent => " (multiprocessors; time on silicon)",
        _ => "",
    };
    let row = format!(
        "| {tier} | {} | {}{by} | {} |",
        word(kept.memory),
        word(kept.compute),
        word(kept.fault)
    );
    println!("{row}");
    ensure!(PAGE.contains(&row), "docs/isolation.md has no row {row}");
    Ok(())
}

#[test]
fn an_exclusive_gpu_has_no_neighbours() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| shown(case, Tier::Exclusive).await)
}

#[test]
fn a_partition_keeps_its_memory_time_and_processes() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| shown(case, Tier::Partition).await)
}

#[test]
fn a_capped_share_keeps_its_memory_time_and_processes() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| shown(case, Tier::Capped).await)
}

#[test]
fn a_concurrent_share_keeps_its_limits_and_shares_faults() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| shown(case, Tier::Concurrent).await)
}

#[test]
fn a_timeshared_gpu_keeps_processes_apart_and_nothing_else() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| shown(case, Tier::Timeshared).await)
}
