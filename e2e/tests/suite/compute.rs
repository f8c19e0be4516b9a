//! The compute share: a pod's part of a GPU's time, alone and with others.

use anyhow::ensure;
use futures::future::try_join_all;
use serde::Deserialize;
use serde_json::json;
use tranche_e2e::namespace::{IDLE, Source};
use tranche_e2e::request::with_parameters;
use tranche_e2e::{Case, PodHandle, Request, run};

/// Points of the GPU's time by which a share may miss its cores.
const POINTS: f64 = 5.0;

/// The result of `tranche-workload spin`, in percent of the GPU's time.
#[derive(Debug, Deserialize)]
pub struct Spun {
    share: f64,
    /// Of the shares of each second.
    pub median: f64,
}

/// The share of the GPU's time that a pod's program gets.
async fn spin(pod: &PodHandle, kernel: &str, launch: &str, time: &str) -> anyhow::Result<f64> {
    Ok(spun(pod, kernel, launch, time).await?.share)
}

/// What a pod's program counts while it keeps the GPU busy.
pub async fn spun(pod: &PodHandle, kernel: &str, launch: &str, time: &str) -> anyhow::Result<Spun> {
    let command = [
        "tranche-workload",
        "--json",
        "spin",
        "--kernel",
        kernel,
        "--launch",
        launch,
        "--time",
        time,
    ];
    Ok(serde_json::from_str(&pod.stdout(&command).await?)?)
}

fn about(share: f64, cores: f64, of: &str) -> anyhow::Result<()> {
    ensure!(
        (share - cores).abs() <= POINTS,
        "{of}: {share:.1} % of {cores}"
    );
    Ok(())
}

#[test]
fn a_share_gets_its_cores_however_it_launches() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("cores").await?;
        let pod = namespace
            .started("pod", &Request::capped("2Gi", "25"))
            .await?;
        // Each after another with other kernels: the last two over ten seconds.
        for (kernel, launch, time) in [
            ("1ms", "plain", "6s"),
            ("1ms", "cooperative", "6s"),
            ("1ms", "ex", "6s"),
            ("1ms", "graph", "6s"),
            ("10us", "plain", "10s"),
            ("50ms", "plain", "10s"),
        ] {
            let share = spin(&pod, kernel, launch, time).await?;
            about(share, 25.0, &format!("{kernel}, {launch}"))?;
        }
        Ok(())
    })
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
        let shares = try_join_all(pods.iter().map(|pod| spin(pod, "1ms", "plain", "10s"))).await?;
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
        let share = spin(&whole, "1ms", "plain", "5s").await?;
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
        let share = spin(&alone, "1ms", "plain", "5s").await?;
        ensure!(
            share > 100.0 - 2.0 * POINTS,
            "alone on the GPU it gets {share:.1} %"
        );
        Ok(())
    })
}
