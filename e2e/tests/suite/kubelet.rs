//! The kubelet starts again: it forgets what it did not write down, and wipes the slices.

use std::time::{Duration, Instant};

use anyhow::ensure;
use kube::ResourceExt;
use kube::api::Api;
use tranche_api::gpu_node::GpuNode;
use tranche_e2e::namespace::{IDLE, Source};
use tranche_e2e::{Case, Request, run, system, wait};

/// From the plugin's registration to whole pools.
const REPUBLISHED: Duration = Duration::from_secs(5);

#[test]
fn a_kubelet_restart_leaves_pods_alone_and_slices_come_back() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("kubelet").await?;
        let hold = [
            "tranche-workload",
            "--json",
            "hold",
            "--bytes",
            "8Gi",
            "--beat",
            "100",
        ];
        let holder = namespace
            .running("holder", &Request::capped("10Gi", "10"), &hold)
            .await?;
        let before = holder.started().await?;
        let last = holder.next_beat().await?;
        let old = case.plugin().published().await?;
        let epoch = system::epoch(&case.plugin().gpu_node().await?);

        let nodes: Api<GpuNode> = Api::all(case.client.clone());
        let registered = async {
            wait::for_one(
                nodes,
                case.node.name(),
                "a new registration",
                wait::USUAL,
                |node| (system::epoch(node?) > epoch).then(Instant::now),
            )
            .await
        };
        let published = async {
            case.plugin()
                .slices("new slices", wait::USUAL, |slices| {
                    let slices = system::complete(slices)?;
                    let fresh = slices.iter().all(|(name, slice)| {
                        old.get(name).is_none_or(|old| old.uid() != slice.uid())
                    });
                    (fresh && slices.len() == old.len()).then(Instant::now)
                })
                .await
        };
        let restarted = case.node.shell("systemctl restart kubelet");
        let (_, registered, published) = tokio::try_join!(restarted, registered, published)?;
        let took = published.saturating_duration_since(registered);
        println!("slices back {took:?} after the registration");
        ensure!(
            took < REPUBLISHED,
            "slices back only {took:?} after the registration"
        );

        let beat = holder.next_beat().await?;
        ensure!(
            beat.beat > last.beat && beat.errors == 0 && beat.moved == 0,
            "{last:?} {beat:?}"
        );
        let after = namespace.pods().get(holder.name()).await?;
        let started = |pod: &k8s_openapi::api::core::v1::Pod| {
            let status = pod.status.clone().unwrap_or_default();
            let container = status.container_statuses.unwrap_or_default().remove(0);
            (container.container_id, container.restart_count)
        };
        ensure!(
            started(&before) == started(&after),
            "restarted: {:?}",
            after.status
        );

        // The claim that runs on is still charged, and a new pod may still join it.
        let claim = holder.claim().await?.name_any();
        let second = namespace
            .pod("second", &[Source::Claim(&claim)], &IDLE)
            .await?;
        second.started().await?;
        let filled = second.fill(&[]).await?;
        // 2 GiB are left, and the second's context takes 512 MiB of them.
        ensure!(filled[0].filled == 1536 << 20, "{filled:?}");
        Ok(())
    })
}
