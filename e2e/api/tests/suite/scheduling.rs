//! Claims that get a GPU, and claims that wait for a release.

use anyhow::ensure;
use tranche_e2e::{Case, Request, run_on_a_hollow_node};

use crate::support::allocated;

#[test]
fn a_claim_for_a_full_gpu_waits_and_starts_after_a_release() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("full").await?;
        let gpu = case.gpus[0].uuid.as_str();
        let share = |memory, cores| Request::capped(memory, cores).on(gpu);
        let first = namespace.started("first", &share("40Gi", "40")).await?;
        namespace.started("second", &share("30Gi", "30")).await?;
        let by_memory = namespace.idle("memory", &share("20Gi", "10")).await?;
        let by_cores = namespace.idle("cores", &share("1Gi", "40")).await?;
        for waiting in [&by_memory, &by_cores] {
            waiting.has_no_room().await?;
        }
        first.delete().await?;
        by_memory.started().await?;
        by_cores.started().await?;
        Ok(())
    })
}

#[test]
fn more_than_a_gpu_has_never_fits() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("more").await?;
        let memory = namespace
            .idle("memory", &Request::capped("81Gi", "10"))
            .await?;
        memory.has_no_room().await?;
        Ok(())
    })
}

#[test]
fn tiers_exclude_each_other_on_one_gpu() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("tiers").await?;
        let gpu = case.gpus[0].uuid.as_str();
        let capped = Request::capped("1Gi", "1").on(gpu);
        let timeshared = Request::timeshared().on(gpu);
        let exclusive = Request::exclusive().on(gpu);
        for (holder, held, others) in [
            (
                "capped",
                &capped,
                [("timeshared", &timeshared), ("exclusive", &exclusive)],
            ),
            (
                "timeshared",
                &timeshared,
                [("capped", &capped), ("exclusive", &exclusive)],
            ),
            (
                "exclusive",
                &exclusive,
                [("capped", &capped), ("timeshared", &timeshared)],
            ),
        ] {
            let holding = namespace.started(holder, held).await?;
            let mut waiting = Vec::new();
            for (other, request) in others {
                let pod = namespace
                    .idle(&format!("{other}-beside-{holder}"), request)
                    .await?;
                pod.has_no_room().await?;
                waiting.push(pod);
            }
            for pod in waiting {
                pod.delete().await?;
            }
            holding.delete().await?;
        }
        Ok(())
    })
}

#[test]
fn a_claim_for_hardware_isolation_never_falls_back_to_software() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("hard").await?;
        let hard = Request::class("hard.gpu.tranche.dev");
        let part = namespace.started("part", &hard).await?;
        let claim = serde_json::to_string(&part.claim().await?.status)?;
        // The smallest device that hardware isolates.
        ensure!(claim.contains("-mig-1g10gb-"), "{claim}");
        namespace
            .started("share", &Request::capped("1Gi", "1"))
            .await?;
        // One GPU has room for partitions, but not for one of this size; the other GPU has room for shares only.
        let large = hard.with_memory("70Gi");
        namespace.idle("waits", &large).await?.has_no_room().await?;
        Ok(())
    })
}

#[test]
fn tiers_mix_on_a_node_and_exclusive_waits_for_a_free_gpu() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("mix").await?;
        let [one, two] = [case.gpus[0].uuid.as_str(), case.gpus[1].uuid.as_str()];
        namespace
            .started("capped", &Request::capped("10Gi", "10").on(one))
            .await?;
        let shared = namespace
            .started("timeshared", &Request::timeshared().on(two))
            .await?;
        let exclusive = namespace.idle("exclusive", &Request::exclusive()).await?;
        exclusive.has_no_room().await?;
        shared.delete().await?;
        exclusive.started().await?;
        let has = allocated(case, &namespace, Some("exclusive")).await?;
        ensure!(has.len() == 1 && has[0].uuid == two, "{has:?}");
        Ok(())
    })
}
