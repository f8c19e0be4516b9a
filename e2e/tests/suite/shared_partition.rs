//! Shares of a MIG partition: capped, and concurrent.

use anyhow::{Context, ensure};
use serde_json::Value;
use tranche_api::tier::Tier;
use tranche_e2e::{Case, Request, policy, run_on_a_node, wait, workload};

const GIB: u64 = 1 << 30;

/// Selects the partitions of a profile on the test's GPU. Whole GPUs have no profile.
fn on(case: &Case, profile: &str) -> String {
    format!(
        "device.attributes['gpu.tranche.dev'].type == 'mig' && \
         device.attributes['gpu.tranche.dev'].profile == '{profile}' && \
         device.attributes['gpu.tranche.dev'].parentUUID == '{}'",
        case.gpus[0].uuid
    )
}

/// The process numbers of the MPS daemon of a MIG device.
async fn daemons(case: &Case, mig: &str) -> anyhow::Result<Vec<String>> {
    let command = format!("^/run/tranche/mps/{mig}/driver/nvidia-cuda-mps-control");
    let found = case
        .node
        .shell(&format!("pgrep -f '{command}' || true"))
        .await?;
    Ok(found.lines().map(str::to_owned).collect())
}

fn field<'a>(data: &'a Value, name: &str) -> anyhow::Result<&'a str> {
    data[name]
        .as_str()
        .with_context(|| format!("no {name} in {data}"))
}

#[test]
fn shares_of_a_partition_keep_caps_beside_another_partition() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let tiers = [Tier::Capped, Tier::Partition, Tier::Exclusive];
        policy::shared_partitions(case, &tiers, Tier::Capped, &["3g.40gb"]).await?;
        let namespace = case.namespace("shared").await?;
        let on = |profile: &str| on(case, profile);
        let whole = Request::of(Tier::Partition).that(&on("1g.10gb"));
        let beside = namespace
            .running("beside", &whole, &workload::hold("5Gi"))
            .await?;
        let before = beside.next_beat().await?;

        let share = |memory: &str, cores: &str| Request::capped(memory, cores).that(&on("3g.40gb"));
        let first = namespace
            .running("first", &share("12Gi", "40"), &workload::hold("10Gi"))
            .await?;
        first.started().await?;
        let second = namespace.started("second", &share("15Gi", "60")).await?;
        let (of_first, of_second) = (first.device_data().await?, second.device_data().await?);
        let mig = field(&of_first, "migUUID")?;
        ensure!(
            of_first["tier"] == "capped" && of_first["profile"] == "3g.40gb",
            "{of_first}"
        );
        ensure!(
            field(&of_second, "migUUID")? == mig,
            "two partitions: {of_first} and {of_second}"
        );

        // Programs see the MIG device, with the memory of the share.
        let seen = second.seen().await?;
        ensure!(seen.len() == 1 && seen[0].total == 15 * GIB, "{seen:?}");
        let listed = second.stdout(&["nvidia-smi", "-L"]).await?;
        ensure!(
            listed.matches("UUID: MIG-").count() == 1 && listed.contains(mig),
            "{listed}"
        );
        // The cap holds to the byte, while the other share and the other partition work.
        let filled = second.fill(&[]).await?;
        ensure!(
            filled.len() == 1 && filled[0].filled == 15 * GIB,
            "not 15 GiB exactly: {filled:?}"
        );
        ensure!(filled[0].refused > 0 && filled[0].errors == 0, "{filled:?}");
        let held = first.next_beat().await?;
        ensure!(
            held.total == 12 * GIB && held.errors == 0 && held.moved == 0,
            "{held:?}"
        );

        // All of its time is allocated, and no claim can get the whole partition.
        let third = namespace.idle("third", &share("1Gi", "10")).await?;
        third.has_no_room().await?;
        let partition = Request::of(Tier::Partition).that(&on("3g.40gb"));
        let all = namespace.idle("all", &partition).await?;
        all.has_no_room().await?;
        first.delete().await?;
        third.started().await?;
        ensure!(
            field(&third.device_data().await?, "migUUID")? == mig,
            "the partition of {of_first} was made again"
        );
        second.delete().await?;
        third.delete().await?;
        // The last one took the partition with it: its place can be had by one claim.
        all.started().await?;
        all.delete().await?;
        let after = beside.next_beat().await?;
        ensure!(
            after.beat > before.beat
                && after.uuid == before.uuid
                && after.errors == 0
                && after.moved == 0,
            "{before:?}, then {after:?}"
        );
        beside.delete().await?;
        case.node.no_claim_files(wait::USUAL).await?;
        case.node.undivided().await
    })
}

/// The daemon is NVIDIA's own; its clients are simulated.
#[test]
fn concurrent_shares_of_a_partition_have_its_own_daemon() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let tiers = [Tier::Concurrent, Tier::Partition, Tier::Exclusive];
        policy::shared_partitions(case, &tiers, Tier::Concurrent, &["3g.40gb"]).await?;
        let namespace = case.namespace("clients").await?;
        let whole = Request::of(Tier::Partition).that(&on(case, "1g.10gb"));
        let beside = namespace
            .running("beside", &whole, &workload::hold("5Gi"))
            .await?;
        let before = beside.next_beat().await?;

        // A 3g.40gb of the H100 has 60 multiprocessors.
        let mut pods = Vec::new();
        let mut migs = Vec::new();
        for (name, gibs, threads, multiprocessors) in
            [("first", 8, "40", 24), ("second", 12, "50", 30)]
        {
            let request =
                Request::concurrent(&format!("{gibs}Gi"), threads).that(&on(case, "3g.40gb"));
            let pod = namespace.started(name, &request).await?;
            let data = pod.device_data().await?;
            ensure!(
                data["tier"] == "concurrent" && data["profile"] == "3g.40gb",
                "{data}"
            );
            let mig = field(&data, "migUUID")?.to_owned();
            let seen = pod.seen().await?;
            ensure!(
                seen.len() == 1
                    && seen[0].total == gibs * GIB
                    && seen[0].multiprocessors == multiprocessors,
                "{seen:?}"
            );
            let filled = pod.fill(&[]).await?;
            ensure!(
                filled[0].filled <= gibs * GIB
                    && filled[0].filled > (gibs - 1) * GIB
                    && filled[0].refused > 0
                    && filled[0].errors == 0,
                "{filled:?}"
            );
            migs.push(mig);
            pods.push(pod);
        }
        ensure!(migs[0] == migs[1], "two partitions: {migs:?}");
        let daemon = daemons(case, &migs[0]).await?;
        ensure!(daemon.len() == 1, "{daemon:?}");
        // In EXCLUSIVE_PROCESS the partitions could not each have a server.
        let query = format!(
            "nvidia-smi -i {} --query-gpu=compute_mode --format=csv,noheader",
            case.gpus[0].uuid
        );
        let mode = case.node.shell(&query).await?;
        ensure!(mode.trim() == "Default", "{mode}");

        let partition = Request::of(Tier::Partition).that(&on(case, "3g.40gb"));
        let all = namespace.idle("all", &partition).await?;
        all.has_no_room().await?;
        let second = pods.remove(1);
        pods.remove(0).delete().await?;
        ensure!(
            daemons(case, &migs[0]).await? == daemon,
            "the other claim's stays"
        );
        second.seen().await?;

        // The supervisor restarts a killed daemon for the same device.
        case.node
            .shell(&format!("kill -KILL {}", daemon[0]))
            .await?;
        wait::for_answer("another daemon", wait::USUAL, async || {
            let now = daemons(case, &migs[0]).await?;
            Ok((now.len() == 1 && now != daemon).then_some(()))
        })
        .await?;
        let filled = second.fill(&[]).await?;
        ensure!(
            filled[0].filled > 11 * GIB && filled[0].errors == 0,
            "{filled:?}"
        );
        second.delete().await?;
        // The last one took the daemon and the partition with it: its place can be had by one claim.
        all.started().await?;
        ensure!(daemons(case, &migs[0]).await?.is_empty());
        all.delete().await?;
        let after = beside.next_beat().await?;
        ensure!(
            after.beat > before.beat
                && after.uuid == before.uuid
                && after.errors == 0
                && after.moved == 0,
            "{before:?}, then {after:?}"
        );
        beside.delete().await?;
        case.node.no_claim_files(wait::USUAL).await?;
        case.node.undivided().await
    })
}
