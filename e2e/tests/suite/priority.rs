//! A service of high priority beside a batch job on one GPU.

use anyhow::ensure;
use futures::try_join;
use serde::Deserialize;
use serde_json::json;
use tranche_e2e::namespace::{IDLE, Namespace, Source};
use tranche_e2e::request::with_parameters;
use tranche_e2e::{Case, PodHandle, Request, run};

use crate::compute::spin;

/// The result of `tranche-workload serve`, in milliseconds.
#[derive(Debug, Deserialize)]
struct Served {
    p50: f64,
}

async fn serve(pod: &PodHandle) -> anyhow::Result<Served> {
    let command = ["tranche-workload", "--json", "serve", "--requests", "200"];
    Ok(serde_json::from_str(&pod.stdout(&command).await?)?)
}

/// A pod with half of a GPU's time.
async fn half(
    namespace: &Namespace,
    name: &str,
    gpu: &str,
    priority: &str,
) -> anyhow::Result<PodHandle> {
    let parameters = json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "ShareConfig",
        "compute": {"priority": priority},
    });
    let spec = with_parameters(Request::capped("2Gi", "50").on(gpu).spec(), &parameters);
    namespace.template(name, &spec).await?;
    let pod = namespace
        .pod(name, &[Source::Template(name)], &IDLE)
        .await?;
    pod.started().await?;
    Ok(pod)
}

#[test]
fn a_service_is_nearly_as_fast_beside_a_low_batch_job_as_alone() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("priority").await?;
        let gpu = &case.gpus[0].uuid;
        let service = half(&namespace, "service", gpu, "high").await?;
        ensure!(service.device_data().await?["priority"] == "high");
        let alone = serve(&service).await?;
        let mut beside = Vec::new();
        for priority in ["normal", "low"] {
            let batch = half(&namespace, priority, gpu, priority).await?;
            // The batch job runs longer than the requests.
            let (served, share) = try_join!(serve(&service), spin(&batch, "10s"))?;
            // The service uses the GPU for a tenth of the time.
            ensure!(share > 35.0, "{priority}: {share:.1} % of 50 %");
            if priority == "low" {
                let write = ["sh", "-c", "echo > /usr/lib/tranche/shares/*/load"];
                let exit = batch.exec(&write).await?;
                ensure!(exit.code != 0, "a low share can write the load page");
            }
            batch.delete().await?;
            beside.push(served);
        }
        println!("alone {alone:?}, beside normal, beside low: {beside:?}");
        let [normal, low] = &beside[..] else {
            anyhow::bail!("{beside:?}");
        };
        // The machine has other work: `shim/tests/suite/priority.rs` measures it more exactly.
        ensure!(
            low.p50 < 2.0 * alone.p50 && low.p50 < 0.9 * normal.p50,
            "alone {alone:?}, beside normal {normal:?}, beside low {low:?}"
        );
        Ok(())
    })
}
