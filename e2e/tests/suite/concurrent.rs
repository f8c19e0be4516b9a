//! The tier `concurrent`: claims of any namespaces share a GPU through its MPS daemon.
//!
//! The daemon is NVIDIA's own; its clients are simulated.

use anyhow::ensure;
use tranche_api::tier::Tier;
use tranche_e2e::node::PLUGIN_DIR;
use tranche_e2e::{Case, Request, policy, run_on_a_node, wait, workload};

use crate::plugin::renew_plugin;

const GIB: u64 = 1 << 30;

/// Variables that a hostile tenant sets.
const HOSTILE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=70G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 \
                       CUDA_MPS_PIPE_DIRECTORY=/nowhere";

/// The process numbers of the GPU's daemon.
async fn daemons(case: &Case, gpu: &str) -> anyhow::Result<Vec<String>> {
    let command = format!("^/run/tranche/mps/{gpu}/driver/nvidia-cuda-mps-control");
    let search = format!("pgrep -f '{command}' || true");
    let found = case.node.shell(&search).await?;
    Ok(found.lines().map(str::to_owned).collect())
}

async fn compute_mode(case: &Case, gpu: &str) -> anyhow::Result<String> {
    let query = format!("nvidia-smi -i {gpu} --query-gpu=compute_mode --format=csv,noheader");
    Ok(case.node.shell(&query).await?.trim().to_owned())
}

/// Waits until the GPU has no daemon and its original compute mode, and nobody has a record of a change.
async fn restored(case: &Case, gpu: &str) -> anyhow::Result<()> {
    wait::for_answer("the GPU as it was", wait::USUAL, async || {
        let daemons = daemons(case, gpu).await?;
        let mode = compute_mode(case, gpu).await?;
        let list = format!("ls -d /run/tranche/mps/GPU-* {PLUGIN_DIR}/gpus/* 2>/dev/null || true");
        let files = case.node.shell(&list).await?;
        ensure!(
            daemons.is_empty() && mode == "Default" && files.is_empty(),
            "daemons {daemons:?}, compute mode {mode}, files {files:?}"
        );
        Ok(Some(()))
    })
    .await
}

#[test]
fn two_namespaces_share_a_gpus_daemon_until_the_last_claim_ends() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Concurrent, Tier::Exclusive]).await?;
        let gpu = case.gpus[0].uuid.as_str();
        let mut pods = Vec::new();
        for (name, gibs, threads, multiprocessors) in [("a", 8, "30", 40), ("b", 16, "60", 80)] {
            let namespace = case.namespace(name).await?;
            let request = Request::concurrent(&format!("{gibs}Gi"), threads).on(gpu);
            let pod = namespace.started("client", &request).await?;
            let data = pod.device_data().await?;
            ensure!(
                data["tier"] == "concurrent" && data["gpuUUID"] == gpu,
                "{data}"
            );
            let script = format!("{HOSTILE} exec tranche-workload --json info");
            for command in ["exec tranche-workload --json info", &script] {
                let output = pod.stdout(&["sh", "-c", command]).await?;
                let seen: Vec<workload::VisibleDevice> = workload::lines(&output)?;
                ensure!(
                    seen.len() == 1
                        && seen[0].uuid == gpu
                        && seen[0].total == gibs * GIB
                        && seen[0].multiprocessors == multiprocessors,
                    "`{command}`: {seen:?}"
                );
            }
            let filled = pod.fill(&[]).await?;
            ensure!(
                filled[0].filled <= gibs * GIB
                    && filled[0].filled > (gibs - 1) * GIB
                    && filled[0].refused > 0
                    && filled[0].errors == 0,
                "{filled:?}"
            );
            ensure!(daemons(case, gpu).await?.len() == 1);
            pods.push(pod);
        }
        ensure!(compute_mode(case, gpu).await? == "Exclusive_Process");

        // The GPU serves no other tier meanwhile.
        let namespace = case.namespace("whole").await?;
        let whole = namespace
            .idle("whole", &Request::exclusive().on(gpu))
            .await?;
        whole.has_no_room().await?;
        let daemon = daemons(case, gpu).await?;
        pods[0].delete().await?;
        ensure!(
            daemons(case, gpu).await? == daemon,
            "the other claim's stays"
        );
        pods[1].seen().await?;
        pods[1].delete().await?;
        whole.started().await?;
        restored(case, gpu).await?;
        whole.fill(&[]).await?;
        Ok(())
    })
}

/// MPS limits each process, the shim their sum.
#[test]
fn the_processes_of_a_claim_have_its_memory_together() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Concurrent]).await?;
        let namespace = case.namespace("sum").await?;
        let request = Request::concurrent("8Gi", "50");
        let pod = namespace
            .running("client", &request, &workload::hold("6Gi"))
            .await?;
        pod.next_beat().await?;
        let filled = pod.fill(&[]).await?;
        ensure!(
            filled[0].filled <= 2 * GIB && filled[0].filled > 0 && filled[0].refused > 0,
            "{filled:?}"
        );
        let beat = pod.next_beat().await?;
        ensure!(beat.errors == 0, "{beat:?}");
        Ok(())
    })
}

#[test]
fn a_killed_daemon_fails_its_clients_and_then_serves_new_ones() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Concurrent]).await?;
        let gpu = case.gpus[0].uuid.as_str();
        let namespace = case.namespace("killed").await?;
        let request = Request::concurrent("8Gi", "30").on(gpu);
        let victim = namespace
            .running("victim", &request, &workload::hold("4Gi"))
            .await?;
        let bystander = namespace.idle("bystander", &request).await?;
        victim.next_beat().await?;
        bystander.started().await?;
        let before = daemons(case, gpu).await?;
        ensure!(before.len() == 1, "{before:?}");
        case.node
            .shell(&format!("kill -KILL {}", before[0]))
            .await?;
        let logs = wait::for_answer("the victim's failure", wait::USUAL, async || {
            let logs = victim.logs().await?;
            Ok(logs.contains("tranche-workload:").then_some(logs))
        })
        .await?;
        ensure!(logs.contains("CUDA_ERROR_MPS_RPC_FAILURE"), "{logs}");
        wait::for_answer("another daemon", wait::USUAL, async || {
            let now = daemons(case, gpu).await?;
            Ok((now.len() == 1 && now != before).then_some(()))
        })
        .await?;
        // An existing pod can start programs again, and a new pod works.
        let late = namespace.started("late", &request).await?;
        for pod in [&bystander, &late] {
            let filled = pod.fill(&[]).await?;
            ensure!(
                filled[0].filled > 7 * GIB && filled[0].errors == 0,
                "{}: {filled:?}",
                pod.name()
            );
        }
        for pod in [victim, bystander, late] {
            pod.delete().await?;
        }
        restored(case, gpu).await
    })
}

/// Daemons continue to run while the plugin is away.
#[test]
fn a_killed_plugin_costs_clients_nothing() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        renew_plugin(case);
        policy::tiers(case, &[Tier::Concurrent]).await?;
        let gpu = case.gpus[0].uuid.as_str();
        let namespace = case.namespace("plugin").await?;
        let request = Request::concurrent("8Gi", "30").on(gpu);
        let neighbour = namespace
            .running("neighbour", &request, &workload::hold("4Gi"))
            .await?;
        let before = neighbour.next_beat().await?;
        let daemon = daemons(case, gpu).await?;
        let starting = namespace.idle("pod", &request);
        let pod = case
            .node
            .kill_plugin_in_a_prepare(starting, async |pod| pod.claim().await)
            .await?;
        pod.started_within(wait::TRIED_AGAIN).await?;
        let after = neighbour.next_beat().await?;
        ensure!(
            after.beat > before.beat && after.errors == 0 && daemons(case, gpu).await? == daemon,
            "{before:?}, then {after:?}"
        );
        pod.delete().await?;
        neighbour.delete().await?;
        restored(case, gpu).await
    })
}
