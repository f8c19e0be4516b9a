//! The audit trail of docs/audit.md.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde_json::Value;
use tranche_api::tier::Tier;
use tranche_e2e::node::PLUGIN_DIR;
use tranche_e2e::workload::text;
use tranche_e2e::{Case, Namespace, Request, policy, run_on_a_node, wait, workload};

use crate::plugin::renew_plugin;

const GIB: u64 = 1 << 30;
/// Pods that come and go around each kill.
const PODS: usize = 4;

/// A namespace's lines of the node's trail, the oldest first. It waits until all claims of the namespace have ended: the plugin
/// writes their ends a moment after their files are gone.
async fn trail(case: &Case, namespace: &Namespace) -> anyhow::Result<Vec<Value>> {
    wait::for_answer(
        "the end of each grant of the trail",
        wait::USUAL,
        async || {
            let lines = lines(case, namespace).await?;
            let grants = grants(&lines)?;
            let ended = !grants.is_empty() && grants.values().all(|(_, ends)| *ends > 0);
            Ok(ended.then_some(lines))
        },
    )
    .await
}

async fn lines(case: &Case, namespace: &Namespace) -> anyhow::Result<Vec<Value>> {
    let read =
        format!("cd {PLUGIN_DIR}/audit && cat $(ls -v -r audit.jsonl.* 2>/dev/null) audit.jsonl");
    let mut lines: Vec<Value> = workload::lines(&case.node.shell(&read).await?)?;
    lines.retain(|line| line["namespace"] == namespace.name());
    Ok(lines)
}

/// How often each grant begins and ends.
fn grants(lines: &[Value]) -> anyhow::Result<BTreeMap<&str, (u32, u32)>> {
    let mut grants: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    for line in lines {
        let (beginnings, ends) = grants.entry(text(line, "grant")?).or_default();
        match text(line, "event")? {
            "allocated" => *beginnings += 1,
            "released" => *ends += 1,
            "held" => {}
            other => anyhow::bail!("{other} in {line}"),
        }
    }
    Ok(grants)
}

/// The plugin is killed while pods start, run and end.
#[test]
fn each_grant_begins_and_ends_once_though_the_plugin_is_killed() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        renew_plugin(case);
        let namespace = case.namespace("audit").await?;
        let share = Request::capped("1Gi", "5").on(&case.gpus[0].uuid);
        let starting = async {
            let mut pods = Vec::new();
            for nth in 0..PODS {
                pods.push(namespace.idle(&format!("pod-{nth}"), &share).await?);
            }
            Ok(pods)
        };
        let pods = case
            .node
            .kill_plugin_in_a_prepare(starting, async |pods| pods[0].claim().await)
            .await?;
        for pod in &pods {
            pod.started_within(wait::BURST).await?;
        }
        case.plugin().ready(None).await?;
        let (first, others) = pods.split_first().context("no pod")?;
        first.delete().await?;
        case.node.kill_plugin().await?;
        for pod in others {
            pod.delete().await?;
        }
        case.plugin().ready(None).await?;
        case.node.no_claim_files(wait::USUAL).await?;

        let lines = trail(case, &namespace).await?;
        let grants = grants(&lines)?;
        ensure!(
            grants.len() == PODS && grants.values().all(|it| *it == (1, 1)),
            "{grants:?}"
        );
        for pod in &pods {
            let is_its = |line: &&Value| line["pods"][0]["name"] == pod.name();
            let ended = |line: &&Value| line["event"] == "released";
            let of_pod: Vec<_> = lines.iter().filter(is_its).collect();
            let end = of_pod.iter().copied().find(ended).context("no end")?;
            ensure!(
                end["tier"] == "capped"
                    && end["gpuUUID"] == case.gpus[0].uuid
                    && end["cap"]["memoryBytes"] == GIB
                    && end["cap"]["cores"] == 5
                    && end["node"] == case.node.name()
                    && text(end, "shareID")?.len() == 36
                    && text(end, "start")? < text(end, "time")?,
                "{end}"
            );
        }
        Ok(())
    })
}

#[test]
fn a_partition_is_named_by_its_mig_device() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Partition, Tier::Exclusive]).await?;
        let namespace = case.namespace("audit").await?;
        let pod = namespace
            .started("partition", &Request::profile("1g.10gb"))
            .await?;
        let got = pod.device_data().await?;
        pod.delete().await?;
        case.node.no_claim_files(wait::USUAL).await?;
        let lines = trail(case, &namespace).await?;
        let [begin, end] = &lines[..] else {
            anyhow::bail!("{lines:?}")
        };
        for line in [begin, end] {
            ensure!(
                line["migUUID"] == got["migUUID"]
                    && line["gpuUUID"] == got["gpuUUID"]
                    && line["profile"] == "1g.10gb",
                "{line}, and the claim has {got}"
            );
        }
        // Absent if the time was too short for the watchdog to see the GPU.
        let unowned = &end["heldAtEnd"]["unownedBytes"];
        ensure!(
            end["ended"] == "Unprepared" && (unowned.is_null() || *unowned == 0),
            "{end}"
        );
        Ok(())
    })
}
