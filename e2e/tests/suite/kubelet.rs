//! The kubelet restarts: it loses the state in its memory and deletes the slices.

use anyhow::ensure;
use kube::ResourceExt;
use kube::api::Api;
use tranche_api::gpu_node::GpuNode;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::node::{MACHINE, kill_containers};
use tranche_e2e::pulse::Stopwatch;
use tranche_e2e::{Case, Request, run, run_on_a_node, system, wait, workload};

use crate::plugin::renew_plugin;

#[test]
fn a_kubelet_restart_leaves_pods_alone_and_slices_come_back() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("kubelet").await?;
        let hold = workload::hold("8Gi");
        let holder = namespace
            .running("holder", &Request::capped("10Gi", "10"), &hold)
            .await?;
        let before = holder.started().await?;
        let last = holder.next_beat().await?;
        let old = case.plugin().published().await?;
        let epoch = system::epoch(&case.plugin().gpu_node().await?);

        let clock = Stopwatch::start();
        let nodes: Api<GpuNode> = Api::all(case.client.clone());
        let registered = async {
            wait::for_one(
                nodes,
                case.node.name(),
                "a new registration",
                wait::USUAL,
                |node| (system::epoch(node?) > epoch).then(|| clock.by_the_pulse()),
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
                    (fresh && slices.len() == old.len()).then(|| clock.by_the_pulse())
                })
                .await
        };
        let restarted = case.node.shell("systemctl restart kubelet");
        let (_, registered, published) = tokio::try_join!(restarted, registered, published)?;
        let took = published.saturating_sub(registered);
        println!("slices back {took:?} after the registration");
        ensure!(
            took.as_secs() < wait::REPUBLISHED.seconds(),
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

        // The claim of the running pod is still charged, and a new pod may join it.
        let claim = holder.claim().await?.name_any();
        let second = namespace
            .pod("second", &[Source::Claim(&claim)], &IDLE)
            .await?;
        second.started().await?;
        let filled = second.fill(&[]).await?;
        // 2 GiB are left, and the context of the second pod takes 512 MiB of them.
        ensure!(filled[0].filled == 1536 << 20, "{filled:?}");
        Ok(())
    })
}

/// A script that changes what a boot changes for us: no container runs, `/run` is empty, kube-proxy's table is gone (1.37 loses an
/// element of a table that it finds), and the kernel has probed the GPUs in the order of `minors`, or in the usual order if it is
/// empty. The node's own processes start again.
fn boot(minors: &str) -> String {
    format!(
        "systemctl stop kubelet
        {}
        systemctl stop nvidia-sim-persistenced.service nvidia-sim-persistenced.socket
        findmnt --raw --noheadings --output TARGET | grep '^/run/tranche/' | sort --reverse | xargs --no-run-if-empty umount --lazy
        rm -rf /run/tranche/shares /var/run/cdi/gpu.tranche.dev-*
        nft delete table ip kube-proxy || true
        sed -i '/^minors = /d' {MACHINE}
        {minors}
        systemctl start nvidia-sim-persistenced.socket nvidia-sim-persistenced.service
        systemctl start kubelet",
        kill_containers("")
    )
}

#[test]
fn claims_keep_their_gpus_when_the_order_of_gpus_changes() -> anyhow::Result<()> {
    // On the first node, which runs containerd. CRI-O has no process for a pod's sandbox, so the script would not end the sandbox as a boot
    // does, and the kubelet would not prepare the claims again.
    run(async |case: &Case| {
        renew_plugin(case);
        let namespace = case.namespace("boot").await?;
        let [first, second] = &case.gpus[..] else {
            anyhow::bail!("two GPUs, not {:?}", case.gpus);
        };
        let mut pods = Vec::new();
        for (name, gpu) in [("one", first), ("two", second)] {
            let request = Request::exclusive().on(&gpu.uuid);
            namespace.template(name, &request.spec()).await?;
            let mut object = manifest(name, &[Source::Template(name)], &IDLE);
            object["spec"]["restartPolicy"] = "Always".into();
            let pod = namespace.pod_from(object).await?;
            pod.started().await?;
            ensure!(pod.seen().await?[0].uuid == gpu.uuid, "{name}");
            pods.push((pod, gpu));
        }
        let restarts = |pod: &k8s_openapi::api::core::v1::Pod| {
            let status = pod.status.clone().unwrap_or_default();
            let mut containers = status.container_statuses.unwrap_or_default();
            containers
                .pop()
                .map_or(0, |container| container.restart_count)
        };
        let node = case.node.clone();
        let plugin = case.plugin();
        case.afterwards("the usual order of the GPUs", async move {
            node.shell(&boot("")).await?;
            plugin.ready(None).await.map(|_| ())
        });
        let swapped = format!(
            "sed -i '1i minors = [{}, {}]' {MACHINE}",
            second.minor, first.minor
        );
        let epoch = system::epoch(&case.plugin().gpu_node().await?);
        case.node.shell(&boot(&swapped)).await?;

        // The inventory has the new minor numbers, still in the order of the PCI addresses.
        let (name, uuids) = (case.node.name(), [first.uuid.clone(), second.uuid.clone()]);
        let minors = [second.minor, first.minor];
        let nodes: Api<GpuNode> = Api::all(case.client.clone());
        let what = "swapped minor numbers of a plugin that is registered anew";
        wait::for_one(nodes, name, what, wait::USUAL, |node| {
            let inventory = node?.status.as_ref()?.inventory.as_ref()?;
            let registered = system::epoch(node?) > epoch;
            let found: Vec<_> = inventory
                .gpus
                .iter()
                .map(|g| (g.uuid.clone(), g.minor))
                .collect();
            let expected: Vec<_> = uuids.iter().cloned().zip(minors).collect();
            (registered && found == expected).then_some(())
        })
        .await?;
        for (pod, gpu) in &pods {
            let pods = namespace.pods();
            wait::for_one(
                pods,
                pod.name(),
                "its container again",
                wait::TRIED_AGAIN,
                |found| (restarts(found?) > 0).then_some(()),
            )
            .await?;
            pod.started().await?;
            let seen = pod.seen().await?;
            ensure!(
                seen.len() == 1 && seen[0].uuid == gpu.uuid,
                "{}: {seen:?}",
                pod.name()
            );
        }
        Ok(())
    })
}
