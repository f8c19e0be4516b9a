//! The driver's libraries of a capped container beside those of CUDA and NVML.

use anyhow::ensure;
use serde_json::json;
use tranche_e2e::{Case, PodHandle, Request, policy, run_on_a_node, wait};

const FOLDER: &str = "/usr/lib/x86_64-linux-gnu";

/// Whether the container has the library for video encoding.
async fn has_encoder(pod: &PodHandle) -> anyhow::Result<bool> {
    let list = format!("ls {FOLDER}/libnvidia-encode.so.* >/dev/null 2>&1 && echo yes || echo no");
    Ok(pod.stdout(&["sh", "-c", &list]).await?.contains("yes"))
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
            let output = case.node.shell(spec).await?;
            Ok(output.contains("yes").then_some(()))
        },
    )
    .await
}

#[test]
fn a_policy_names_the_libraries_of_new_capped_claims() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        add_encoder(case).await?;
        let namespace = case.namespace("capabilities").await?;
        let gpu = &case.gpus[0];
        let share = Request::capped("1Gi", "10").on(&gpu.uuid);
        let before = namespace.started("before", &share).await?;
        ensure!(!has_encoder(&before).await?, "without a policy");

        for (wrong, word) in [
            (&["compute", "utility", "all"][..], "all"),
            (&["compute", "video"], "utility"),
        ] {
            let capped = json!({"driverCapabilities": wrong});
            let refused = policy::apply(case, "video", &capped).await;
            let text = refused.map_or_else(|e| e.to_string(), |name| format!("{name} was created"));
            ensure!(
                text.contains("spec.capped.driverCapabilities") && text.contains(word),
                "{wrong:?}: {text:?}"
            );
        }
        let video = json!({"driverCapabilities": ["compute", "utility", "video"]});
        policy::apply(case, "video", &video).await?;
        policy::asked(case, gpu, |asked| {
            asked.capped.extra_driver_capabilities == ["video"]
        })
        .await?;
        let after = namespace.started("after", &share).await?;
        ensure!(has_encoder(&after).await?, "by the policy");
        ensure!(!has_encoder(&before).await?, "of a running container");
        Ok(())
    })
}
