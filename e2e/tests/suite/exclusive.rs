//! Tiers without a cap: whole GPUs, and no code of ours in the tenant's processes.

use anyhow::ensure;
use tranche_api::sharing_policy::Interval;
use tranche_e2e::{Case, PodHandle, Request, policy, run_on_a_node, wait};

/// Checks that neither a file nor a process of the pod has the shim.
async fn has_no_shim(pod: &PodHandle) -> anyhow::Result<()> {
    let script = "
        ls -d /etc/ld.so.preload /usr/lib/tranche/libcuda.so.1 /usr/lib/tranche/driver 2>/dev/null || true
        tranche-workload hold --bytes 1Mi --beat 100 >/tmp/beats & pid=$!
        until grep -q beat /tmp/beats; do usleep 20000; done
        echo maps; grep -o '/[^ ]*lib\\(cuda\\|nvidia-ml\\)[^ ]*' /proc/$pid/maps | sort -u
        kill $pid";
    let output = pod.stdout(&["sh", "-c", script]).await?;
    let (files, maps) = output.split_once("maps\n").unwrap_or((&output, ""));
    ensure!(files.is_empty(), "{} has {files}", pod.name());
    ensure!(
        !maps.contains("tranche") && maps.contains("libcuda.so"),
        "{} loads {maps}",
        pod.name()
    );
    Ok(())
}

#[test]
fn an_exclusive_pod_has_the_whole_gpu_and_no_shim() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("whole").await?;
        let pod = namespace.started("pod", &Request::exclusive()).await?;
        has_no_shim(&pod).await?;
        let seen = pod.seen().await?;
        ensure!(seen.len() == 1, "{seen:?}");
        let gpu = case.gpus.iter().find(|gpu| gpu.uuid == seen[0].uuid);
        let whole = gpu.map(|gpu| gpu.memory.to_count()).transpose()?;
        let shown = pod.nvidia_smi().await?;
        ensure!(
            shown.len() == 1 && shown[0].0 == seen[0].uuid && Some(shown[0].1 << 20) == whole,
            "nvidia-smi shows {shown:?}, the GPU has {whole:?} bytes"
        );
        Ok(())
    })
}

#[test]
fn timeshared_pods_have_the_same_gpu_and_no_shim() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("time").await?;
        let request = Request::timeshared().on(&case.gpus[0].uuid);
        let mut all = Vec::new();
        for name in ["one", "two"] {
            let pod = namespace.started(name, &request).await?;
            has_no_shim(&pod).await?;
            all.push(pod.nvidia_smi().await?);
        }
        ensure!(all[0] == all[1] && all[0].len() == 1, "{all:?}");
        Ok(())
    })
}

/// The real nvidia-smi on the node shows the length.
#[test]
fn time_slices_follow_the_policy_while_a_gpu_is_timeshared() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let uuid = &case.gpus[0].uuid;
        let list = format!("nvidia-smi compute-policy -i {uuid} -l");
        let shown = async |length: &str| {
            wait::for_answer("the length of time slices", wait::USUAL, async || {
                let listed = case.node.shell(&list).await?;
                ensure!(listed.contains(length), "not {length}: {listed}");
                Ok(Some(()))
            })
            .await
        };
        shown("Default").await?;
        policy::interval(case, Interval::Long).await?;
        let namespace = case.namespace("slices").await?;
        let request = Request::timeshared().on(uuid);
        let one = namespace.started("one", &request).await?;
        shown("Long").await?;
        let two = namespace.started("two", &request).await?;
        one.delete().await?;
        // The other share still needs it.
        shown("Long").await?;
        two.delete().await?;
        shown("Default").await
    })
}
