//! The watchdog reports a program that bypasses the shim on its pod, and ends it if the policy says so.

use anyhow::ensure;
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, ListParams};
use serde_json::json;
use tranche_api::gpu_node::Gpu;
use tranche_e2e::{Case, PodHandle, Request, policy, run, run_on_a_node, wait};

/// A program that allocates 2 GiB with a copy of the driver's library under another name, which the shim does not cover.
pub const BYPASS: &str = "
    mkdir -p /tmp/own && cp /usr/lib/tranche/driver/libcuda.so.1 /tmp/own/libcuda.so.1 || exit 1
    ln -sf libcuda.so.1 /tmp/own/libcuda.so
    LD_PRELOAD=/tmp/own/libcuda.so.1 LD_LIBRARY_PATH=/tmp/own tranche-workload hold --bytes 2Gi --beat 100 \
        >/tmp/beats 2>&1 & echo $! >/tmp/pid
    until grep -q beat /tmp/beats; do kill -0 $(cat /tmp/pid) || { cat /tmp/beats; exit 1; }; usleep 20000; done";

/// The texts of the events `CapBypassed` and `CapBypassEnded` on a pod.
async fn events(case: &Case, pod: &PodHandle, namespace: &str) -> anyhow::Result<Vec<String>> {
    let api: Api<Event> = Api::namespaced(case.client.clone(), namespace);
    let events = api.list(&ListParams::default()).await?;
    let of_pod = |event: &&Event| {
        let regarding = event.regarding.as_ref().and_then(|r| r.name.as_deref());
        let reason = event.reason.as_deref().unwrap_or_default();
        reason.starts_with("CapBypass") && regarding == Some(pod.name())
    };
    let notes = events.items.iter().filter(of_pod);
    Ok(notes.filter_map(|event| event.note.clone()).collect())
}

/// Bypasses the shim in the pod, and waits for the event that names the GPU.
async fn is_named(case: &Case, pod: &PodHandle, namespace: &str, gpu: &Gpu) -> anyhow::Result<()> {
    pod.stdout(&["sh", "-c", BYPASS]).await?;
    let notes = wait::for_answer("an event on the pod", wait::USUAL, async || {
        let notes = events(case, pod, namespace).await?;
        Ok((!notes.is_empty()).then_some(notes))
    })
    .await?;
    ensure!(notes[0].contains(&gpu.uuid), "{notes:?}");
    Ok(())
}

/// Has the node measure a context on the GPU: before that it ends no process.
async fn is_measured(case: &Case, pod: &PodHandle, gpu: &Gpu) -> anyhow::Result<()> {
    pod.stdout(&[
        "sh",
        "-c",
        "tranche-workload info --stay >/tmp/info 2>&1 & echo $! >/tmp/stays",
    ])
    .await?;
    wait::for_answer("the size of a context", wait::USUAL, async || {
        let inventory = case
            .plugin()
            .gpu_node()
            .await?
            .status
            .and_then(|it| it.inventory);
        let gpus = inventory.iter().flat_map(|it| &it.gpus);
        let mut measured = gpus.filter(|it| it.uuid == gpu.uuid && it.context_memory.is_some());
        Ok(measured.next().map(|_| ()))
    })
    .await?;
    pod.stdout(&["sh", "-c", "kill $(cat /tmp/stays)"]).await?;
    Ok(())
}

#[test]
fn a_copied_libcuda_is_named_on_its_pod_and_by_policy_ended() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("watchdog").await?;
        let gpu = &case.gpus[0];
        let share = Request::capped("4Gi", "25").on(&gpu.uuid);
        let pod = namespace.started("pod", &share).await?;
        is_named(case, &pod, namespace.name(), gpu).await?;
        // It still runs, because the policy says Report.
        pod.stdout(&["sh", "-c", "kill -0 $(cat /tmp/pid)"]).await?;

        is_measured(case, &pod, gpu).await?;
        let name = policy::apply(case, "kill", &json!({"onBypass": "Kill"})).await?;
        policy::asked(case, gpu, |asked| asked.policy.as_ref() == Some(&name)).await?;
        wait::for_answer("the program's end", wait::USUAL, async || {
            let alive = pod.stdout(&[
                "sh",
                "-c",
                "kill -0 $(cat /tmp/pid) && echo alive || echo ended",
            ]);
            Ok(alive.await?.contains("ended").then_some(()))
        })
        .await?;
        wait::for_answer("an event of its end", wait::USUAL, async || {
            let notes = events(case, &pod, namespace.name()).await?;
            Ok(notes
                .iter()
                .any(|note| note.contains("was ended"))
                .then_some(()))
        })
        .await?;
        // The pod's own program still runs.
        pod.started().await?;
        Ok(())
    })
}

/// The second node runs CRI-O, whose cgroups have other names.
#[test]
fn a_copied_libcuda_is_named_on_a_pod_of_the_second_node() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let (_, gpus) = case.second_node().await?;
        let namespace = case.namespace("watchdog-2").await?;
        let share = Request::capped("4Gi", "25").on(&gpus[0].uuid);
        let pod = namespace.started("pod", &share).await?;
        is_named(case, &pod, namespace.name(), &gpus[0]).await
    })
}

#[test]
fn a_share_filled_to_its_cap_is_left_alone() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("watched").await?;
        let share = Request::capped("4Gi", "25").on(&case.gpus[0].uuid);
        let pod = namespace.started("pod", &share).await?;
        // For ten seconds, allocates everything and frees it.
        let fill = "end=$(($(date +%s) + 10)); while [ $(date +%s) -lt $end ]; do tranche-workload fill >/dev/null || exit 1; done";
        pod.stdout(&["sh", "-c", fill]).await?;
        let notes = events(case, &pod, namespace.name()).await?;
        ensure!(notes.is_empty(), "{notes:?}");
        Ok(())
    })
}
