//! The compute share: a pod's part of a GPU's time, alone and with others.

use anyhow::ensure;
use futures::future::try_join_all;
use serde::Deserialize;
use serde_json::json;
use tranche_e2e::namespace::{IDLE, Source};
use tranche_e2e::request::with_parameters;
use tranche_e2e::{Case, PodHandle, Request, run};

/// How far, in percent of the GPU's time, a share may be from its cores.
const POINTS: f64 = 5.0;

/// The result of `tranche-workload spin`, in percent of the GPU's time.
#[derive(Debug, Deserialize)]
struct Spun {
    /// The median over all seconds, which a second without progress of the machine does not change.
    median: f64,
}

/// The share of the GPU's time that a pod's program gets while it keeps the GPU busy.
pub async fn spin(pod: &PodHandle, time: &str) -> anyhow::Result<f64> {
    spin_with(pod, "1ms", time).await
}

/// The same with kernels of this length. The longer they are, the less of the GPU's time is lost when other programs keep the
/// machine's processors busy.
pub async fn spin_with(pod: &PodHandle, kernel: &str, time: &str) -> anyhow::Result<f64> {
    let command = [
        "tranche-workload",
        "--json",
        "spin",
        "--kernel",
        kernel,
        "--time",
        time,
    ];
    let spun: Spun = serde_json::from_str(&pod.stdout(&command).await?)?;
    Ok(spun.median)
}

fn about(share: f64, cores: f64, of: &str) -> anyhow::Result<()> {
    ensure!(
        (share - cores).abs() <= POINTS,
        "{of}: {share:.1} % of {cores}"
    );
    Ok(())
}

#[test]
fn neighbours_get_what_each_has_claimed() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("neighbours").await?;
        let cores = ["30", "70"];
        let mut pods = Vec::new();
        for cores in cores {
            let share = Request::capped("2Gi", cores).on(&case.gpus[0].uuid);
            let pod = namespace.started(&format!("pod-{cores}"), &share).await?;
            pods.push(pod);
        }
        let shares = try_join_all(pods.iter().map(|pod| spin(pod, "10s"))).await?;
        for (share, cores) in shares.iter().zip(cores) {
            about(*share, cores.parse()?, &format!("{shares:?}"))?;
        }
        Ok(())
    })
}

#[test]
fn all_of_the_cores_and_what_others_leave_are_not_slowed() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("unslowed").await?;
        let whole = namespace
            .started("whole", &Request::capped("2Gi", "100"))
            .await?;
        let share = spin(&whole, "5s").await?;
        ensure!(share > 100.0 - POINTS, "cores: 100 gives {share:.1} %");
        whole.delete().await?;

        let conserving = with_parameters(
            Request::capped("2Gi", "20").spec(),
            &json!({
                "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "ShareConfig",
                "compute": {"mode": "workConserving"},
            }),
        );
        namespace.template("conserving", &conserving).await?;
        let alone = namespace
            .pod("alone", &[Source::Template("conserving")], &IDLE)
            .await?;
        alone.started().await?;
        let share = spin(&alone, "5s").await?;
        ensure!(
            share > 100.0 - 2.0 * POINTS,
            "alone on the GPU it gets {share:.1} %"
        );
        Ok(())
    })
}
