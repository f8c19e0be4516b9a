//! A service of high priority beside a batch job on one GPU.

use anyhow::ensure;
use futures::try_join;
use serde_json::json;
use tranche_e2e::namespace::{IDLE, Namespace, Source};
use tranche_e2e::request::with_parameters;
use tranche_e2e::{Case, PodHandle, Request, run};

use crate::compute::spin;

/// Short requests with pauses.
async fn serve(pod: &PodHandle) -> anyhow::Result<()> {
    let command = ["tranche-workload", "serve", "--requests", "200"];
    pod.stdout(&command).await?;
    Ok(())
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

/// By GPU time: how long requests take depends on the machine's other work (`shim/tests/suite/priority.rs` and `bench` measure it).
#[test]
fn a_low_batch_job_gets_what_a_service_leaves() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("priority").await?;
        let gpu = &case.gpus[0].uuid;
        let service = half(&namespace, "service", gpu, "high").await?;
        ensure!(service.device_data().await?["priority"] == "high");
        let normal = half(&namespace, "normal", gpu, "normal").await?;
        let (busy, beside_normal) = try_join!(spin(&service, "10s"), spin(&normal, "10s"))?;
        ensure!(
            beside_normal > 35.0,
            "normal: {beside_normal:.1} % of 50 %, beside {busy:.1} %"
        );
        normal.delete().await?;
        let low = half(&namespace, "low", gpu, "low").await?;
        let (busy, beside_work) = try_join!(spin(&service, "10s"), spin(&low, "10s"))?;
        // The requests use the GPU for a tenth of the time.
        let ((), beside_requests) = try_join!(serve(&service), spin(&low, "10s"))?;
        println!(
            "normal {beside_normal:.1} %; low beside work of {busy:.1} %: {beside_work:.1} %, beside requests: {beside_requests:.1} %"
        );
        ensure!(
            beside_work < 25.0,
            "beside work: {beside_work:.1} % of 50 %"
        );
        ensure!(
            beside_requests > 35.0,
            "beside requests: {beside_requests:.1} % of 50 %"
        );
        let write = ["sh", "-c", "echo > /usr/lib/tranche/shares/*/load"];
        let exit = low.exec(&write).await?;
        ensure!(exit.code != 0, "a low share can write the load page");
        Ok(())
    })
}
