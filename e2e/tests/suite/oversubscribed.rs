//! Capped shares of a GPU whose memory a policy oversubscribes.

use anyhow::ensure;
use serde_json::json;
use tranche_e2e::{Case, Request, policy, run_on_a_node, workload};

const GIB: u64 = 1 << 30;

fn share(case: &Case, memory: &str, cores: &str) -> Request {
    Request::oversubscribed(memory, cores).on(&case.gpus[0].uuid)
}

/// Two shares of 60 GiB on a GPU of 80 GiB: each has its 60 GiB, half of it for memory that cannot move. Only claims that request
/// such a share get one.
#[test]
fn shares_have_more_memory_together_than_the_gpu() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::oversubscribe(case, 200).await?;
        let namespace = case.namespace("over").await?;
        let first = namespace
            .running("first", &share(case, "60Gi", "40"), &workload::hold("50Gi"))
            .await?;
        first.started().await?;
        let second = namespace
            .started("second", &share(case, "60Gi", "40"))
            .await?;
        let seen = second.seen().await?;
        ensure!(seen.len() == 1 && seen[0].total == 60 * GIB, "{seen:?}");

        for (way, gib) in [("device", 60), ("managed", 60), ("async", 30)] {
            let filled = second.fill(&["--way", way]).await?;
            ensure!(
                filled.len() == 1 && filled[0].filled == gib * GIB,
                "{way}: {filled:?}"
            );
            ensure!(
                filled[0].refused > 0 && filled[0].errors == 0,
                "{way}: {filled:?}"
            );
        }
        let held = first.next_beat().await?;
        ensure!(
            held.total == 60 * GIB && held.errors == 0 && held.moved == 0,
            "{held:?}"
        );
        let data = second.device_data().await?;
        let expected = json!({
            "tier": "capped", "memory": "60Gi",
            "memoryOversubscription": 200, "residentMemory": "30Gi",
        });
        for (field, value) in expected.as_object().into_iter().flatten() {
            ensure!(data[field] == *value, "{field}: {data}");
        }
        let environment = second.stdout(&["env"]).await?;
        ensure!(
            environment.contains("_MEMORY=60Gi\n")
                && environment.contains("_RESIDENT_MEMORY=30Gi\n"),
            "{environment}"
        );

        // Only 34 GiB are left: 154 GiB minus 120.
        let third = namespace.idle("third", &share(case, "40Gi", "10")).await?;
        third.has_no_room().await?;
        third.delete().await?;
        let share = Request::capped("1Gi", "10").on(&case.gpus[0].uuid);
        let capped = namespace.idle("capped", &share).await?;
        capped.has_no_room().await?;
        for pod in [&first, &second, &capped] {
            pod.delete().await?;
        }
        Ok(())
    })
}

/// A change of the percentage does not disturb existing shares. The GPU takes shares with the new percentage when the last old share
/// is gone.
#[test]
fn a_change_of_the_percentage_waits_for_those_that_run() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("change").await?;
        let capped = |name: &'static str| {
            let request = Request::capped("4Gi", "10").on(&case.gpus[0].uuid);
            let namespace = &namespace;
            async move {
                namespace
                    .running(name, &request, &workload::hold("3Gi"))
                    .await
            }
        };
        let plain = capped("plain").await?;
        let before = plain.next_beat().await?;
        policy::oversubscribe(case, 150).await?;
        let over = namespace.idle("over", &share(case, "60Gi", "40")).await?;
        over.has_no_room().await?;
        let after = plain.next_beat().await?;
        ensure!(
            after.beat > before.beat && after.total == before.total && after.errors == 0,
            "{before:?}, {after:?}"
        );
        plain.delete().await?;
        over.started().await?;
        let filled = over.fill(&["--way", "async"]).await?;
        ensure!(filled[0].filled == 40 * GIB, "{filled:?}");
        over.delete().await?;
        Ok(())
    })
}
