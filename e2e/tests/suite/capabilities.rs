//! Which of the driver's libraries a capped container has beside those of CUDA and NVML.

use anyhow::{Context as _, ensure};
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::json;
use tranche_api::SharingPolicy;
use tranche_api::gpu_node::GpuNode;
use tranche_e2e::{Case, PodHandle, Request, run, wait};

const FOLDER: &str = "/usr/lib/x86_64-linux-gnu";

/// Whether the container has the library for video encoding.
async fn has_encoder(pod: &PodHandle) -> anyhow::Result<bool> {
    let look = format!("ls {FOLDER}/libnvidia-encode.so.* >/dev/null 2>&1 && echo yes || echo no");
    Ok(pod.stdout(&["sh", "-c", &look]).await?.contains("yes"))
}

/// Adds a library for video encoding to the node's driver. The plugin checks the driver again because libcuda is
/// another file.
async fn add_encoder(case: &Case) -> anyhow::Result<()> {
    let find = format!(
        "cuda=$(readlink -f {FOLDER}/libcuda.so.1); encoder={FOLDER}/libnvidia-encode.so.${{cuda##*.so.}}"
    );
    let again = "cp -p $cuda $cuda.new; mv -f $cuda.new $cuda";
    let (node, remove) = (
        case.node.clone(),
        format!("{find}; rm -f $encoder; {again}"),
    );
    case.afterwards("the driver's libraries", async move {
        node.shell(&remove).await.map(drop)
    });
    let add = format!("{find}; cp $cuda $encoder; {again}");
    case.node.shell(&add).await?;
    let spec =
        "grep -q libnvidia-encode /var/run/cdi/gpu.tranche.dev-driver.json && echo yes || echo no";
    wait::for_answer(
        "the library in the driver's CDI spec",
        wait::USUAL,
        async || {
            let said = case.node.shell(spec).await?;
            Ok(said.contains("yes").then_some(()))
        },
    )
    .await
}

#[test]
fn a_policy_names_the_libraries_of_new_capped_claims() -> anyhow::Result<()> {
    run(async |case: &Case| {
        add_encoder(case).await?;
        let namespace = case.namespace("capabilities").await?;
        let gpu = &case.gpus[0];
        let share = Request::capped("1Gi", "10").on(&gpu.uuid);
        let before = namespace.idle("before", &share).await?;
        before.started().await?;
        ensure!(!has_encoder(&before).await?, "without a policy");

        let policies: Api<SharingPolicy> = Api::all(case.client.clone());
        let name = case.unique("video");
        let policy = |capabilities: &[&str]| {
            json!({
                "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy",
                "metadata": {"name": name},
                "spec": {
                    "priority": 1000, "tiers": ["exclusive", "capped", "timeshared"],
                    "capped": {"driverCapabilities": capabilities},
                },
            })
        };
        let apply = PatchParams::apply("e2e").force();
        for (wrong, word) in [
            (&["compute", "utility", "all"][..], "all"),
            (&["compute", "video"], "utility"),
        ] {
            let refused = policies
                .patch(&name, &apply, &Patch::Apply(&policy(wrong)))
                .await;
            let text = refused
                .map(drop)
                .map_or_else(|e| e.to_string(), |()| String::new());
            ensure!(
                text.contains("spec.capped.driverCapabilities") && text.contains(word),
                "{wrong:?}: {text:?}"
            );
        }
        let video = policy(&["compute", "utility", "video"]);
        policies.patch(&name, &apply, &Patch::Apply(&video)).await?;
        let (api, created) = (policies.clone(), name.clone());
        case.afterwards("the policy", async move {
            api.delete(&created, &DeleteParams::default()).await?;
            Ok(())
        });
        let gpu_nodes: Api<GpuNode> = Api::all(case.client.clone());
        wait::for_answer("the policy at the node", wait::USUAL, async || {
            let node = gpu_nodes.get(case.node.name()).await?;
            let published = node.status.and_then(|status| status.published);
            let gpus = published.context("something is published")?.gpus;
            let asked = gpus.iter().find(|asked| asked.uuid == gpu.uuid);
            let extra = asked.map(|asked| asked.capped.extra_driver_capabilities.clone());
            Ok((extra == Some(vec!["video".to_owned()])).then_some(()))
        })
        .await?;
        let after = namespace.idle("after", &share).await?;
        after.started().await?;
        ensure!(has_encoder(&after).await?, "by the policy");
        ensure!(!has_encoder(&before).await?, "of a running container");
        Ok(())
    })
}
