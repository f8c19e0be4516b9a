//! A pod that ends leaves no files, and its share becomes free.

use anyhow::ensure;
use kube::api::DeleteParams;
use tranche_e2e::namespace::{IDLE, Source};
use tranche_e2e::{Case, Request, run_on_a_node, wait, workload};

#[test]
fn a_pod_deleted_by_force_frees_its_share() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("force").await?;
        let gpu = case.gpus[0].uuid.as_str();
        // Holds memory and ignores SIGTERM, so it ends only when killed.
        let stubborn = [
            "sh",
            "-c",
            "trap '' TERM; tranche-workload hold --bytes 60Gi",
        ];
        let share = Request::capped("70Gi", "60").on(gpu);
        let pod = namespace.running("stubborn", &share, &stubborn).await?;
        pod.started().await?;
        let files = case.node.claim_files().await?;
        ensure!(
            files.len() >= 4,
            "journal, CDI spec, cap and account of a share: {files:?}"
        );
        pod.delete_with(&DeleteParams::default().grace_period(0))
            .await?;
        // Its successor is prepared, and not refused, while the kubelet still ends it.
        let next = namespace.idle("next", &share).await?;
        next.started().await?;
        let refusals = next.events("PrepareFailed").await?;
        ensure!(refusals.is_empty(), "{refusals:?}");
        let filled = next.fill(&["--chunk", "1Gi"]).await?;
        ensure!(filled[0].filled == 70 << 30, "{filled:?}");
        next.delete().await?;
        case.node.no_claim_files(wait::USUAL).await
    })
}

#[test]
fn a_claim_of_the_same_name_is_another_claim() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("name").await?;
        for memory in ["2Gi", "4Gi"] {
            namespace
                .claim("gpu", &Request::capped(memory, "10").spec())
                .await?;
            let pod = namespace.pod("pod", &[Source::Claim("gpu")], &IDLE).await?;
            pod.started().await?;
            let shown = pod.nvidia_smi().await?;
            let expected = if memory == "2Gi" { 2048 } else { 4096 };
            ensure!(
                shown.len() == 1 && shown[0].1 == expected,
                "{memory}: {shown:?}"
            );
            pod.delete_with(&DeleteParams::default().grace_period(0))
                .await?;
            namespace
                .claims()
                .delete("gpu", &DeleteParams::default())
                .await?;
            wait::for_one(
                namespace.claims(),
                "gpu",
                "the claim gone",
                wait::USUAL,
                |claim| claim.is_none().then_some(()),
            )
            .await?;
            // The kubelet itself refuses the new claim as long as it knows the old one.
            case.node.no_claim_files(wait::USUAL).await?;
        }
        Ok(())
    })
}

#[test]
fn two_pods_of_one_claim_have_one_share() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("one").await?;
        namespace
            .claim("gpu", &Request::capped("4Gi", "10").spec())
            .await?;
        let hold = workload::hold("3Gi");
        let holder = namespace
            .pod("holder", &[Source::Claim("gpu")], &hold)
            .await?;
        let other = namespace
            .pod("other", &[Source::Claim("gpu")], &IDLE)
            .await?;
        holder.started().await?;
        other.started().await?;
        holder.beats().await?;
        let filled = other.fill(&[]).await?;
        ensure!(
            filled[0].filled == 512 << 20,
            "what the first pod left is 1 GiB, of which 512 MiB are the second's context: {filled:?}"
        );
        // The share exists as long as one of its pods.
        holder.delete().await?;
        let filled = other.fill(&[]).await?;
        ensure!(filled[0].filled == 4 << 30, "{filled:?}");
        Ok(())
    })
}

/// A tenant can write its account page: making it longer must not use up the node's memory.
#[test]
fn a_tenant_that_fills_its_account_page_takes_room_from_nobody() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("full").await?;
        let share = Request::capped("2Gi", "10").on(&case.gpus[0].uuid);
        let greedy = namespace.started("greedy", &share).await?;
        let fill = "cd /usr/lib/tranche/shares/*/ &&
            if head -c 4194304 /dev/zero >>account; then echo taken; else echo refused; fi";
        let output = greedy.stdout(&["sh", "-c", fill]).await?;
        ensure!(
            output.trim() == "refused",
            "4 MiB of the node's memory: {output}"
        );
        // In an endless loop, while other pods start, work and end.
        let endless = "(cd /usr/lib/tranche/shares/*/ && while :; do head -c 4194304 /dev/zero >>account; done) >/dev/null 2>&1 &";
        greedy.stdout(&["sh", "-c", endless]).await?;
        let neighbour = namespace.started("neighbour", &share).await?;
        let filled = neighbour.fill(&[]).await?;
        ensure!(filled[0].filled == 2 << 30, "{filled:?}");
        neighbour.delete().await?;
        greedy.delete().await?;
        case.node.no_claim_files(wait::USUAL).await?;
        let mounts = case
            .node
            .shell("grep -c /run/tranche/shares/ /proc/mounts || true")
            .await?;
        ensure!(mounts.trim() == "0", "{mounts} mounts are left");
        Ok(())
    })
}
