//! Capped shares of a MIG partition.

use anyhow::{Context, ensure};
use serde_json::Value;
use tranche_api::tier::Tier;
use tranche_e2e::{Case, Request, policy, run_on_a_node, wait, workload};

const GIB: u64 = 1 << 30;

fn field<'a>(data: &'a Value, name: &str) -> anyhow::Result<&'a str> {
    data[name]
        .as_str()
        .with_context(|| format!("no {name} in {data}"))
}

#[test]
fn two_shares_of_a_partition_keep_their_caps_beside_another_partition() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let tiers = [Tier::Capped, Tier::Partition, Tier::Exclusive];
        policy::shared_partitions(case, &tiers, &["3g.40gb"]).await?;
        let namespace = case.namespace("shared").await?;
        // Whole GPUs have no profile.
        let on = |profile: &str| {
            format!(
                "device.attributes['gpu.tranche.dev'].type == 'mig' && \
                 device.attributes['gpu.tranche.dev'].profile == '{profile}' && \
                 device.attributes['gpu.tranche.dev'].parentUUID == '{}'",
                case.gpus[0].uuid
            )
        };
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
        let second = namespace.idle("second", &share("15Gi", "60")).await?;
        second.started().await?;
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

        // All of its time is given away, and nobody gets all of the partition.
        let third = namespace.idle("third", &share("1Gi", "10")).await?;
        third.has_no_room().await?;
        let all = Request::of(Tier::Partition).that(&on("3g.40gb"));
        let all = namespace.idle("all", &all).await?;
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
