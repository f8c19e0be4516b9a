//! The time until a node's slices appear: after the plugin's start, a deletion, and a restart of the kubelet.
//!
//! The time of a change in the API is the time at which a watch of this process receives it.

mod pool_watch;

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};

use crate::cluster::Cluster;
use crate::process::{self, Process};
use crate::row::Row;
use crate::stats::Spread;
use pool_watch::PoolWatch;

/// The number of measurements of each kind.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Starts of the plugin
    #[arg(long, default_value_t = 7)]
    starts: usize,
    /// Deletions of a slice
    #[arg(long, default_value_t = 10)]
    deletions: usize,
    /// Restarts of the kubelet
    #[arg(long, default_value_t = 3)]
    restarts: usize,
    /// The chart's namespace
    #[arg(long, default_value = "tranche-system")]
    namespace: String,
}

const PROGRAM: &str = "tranche-kubelet-plugin";
const LONGEST_WAIT: Duration = Duration::from_secs(90);
/// The effects of a kubelet's restart are complete when nothing has changed for this time.
const SETTLED: Duration = Duration::from_secs(6);

/// Measures all three. Afterwards the slices are as before.
pub async fn run(args: &Args, cluster: &Cluster) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    ensure!(
        PoolWatch::start(cluster).await?.is_complete(),
        "pool {} is not published to begin with",
        cluster.pool()
    );

    let mut times = Vec::new();
    for n in 1..=args.starts {
        eprintln!("Starting the plugin, {n} of {}", args.starts);
        times.push(plugin_start(args, cluster).await?);
    }
    rows.extend(row("plugin-start", &times));

    let mut times = Vec::new();
    for n in 1..=args.deletions {
        eprintln!("Deleting a slice, {n} of {}", args.deletions);
        times.push(heal(cluster).await?);
    }
    rows.extend(row("slice-healed", &times));

    let (mut after_registration, mut after_command) = (Vec::new(), Vec::new());
    for n in 1..=args.restarts {
        eprintln!("Restarting the kubelet, {n} of {}", args.restarts);
        let restart = kubelet_restart(cluster).await?;
        after_registration.push(restart.after_registration.as_secs_f64());
        after_command.push(restart.after_command.as_secs_f64());
    }
    if let (Some(spread), Some(whole)) = (Spread::of(after_registration), Spread::of(after_command))
    {
        rows.push(
            Row::new("kubelet-restart", spread.p50)
                .from(spread)
                .beside("since systemctl restart kubelet", whole.p50),
        );
    }
    Ok(rows)
}

fn row(id: &str, times: &[Duration]) -> Option<Row> {
    let spread = Spread::of_times(times)?;
    Some(Row::new(id, spread.p50).from(spread))
}

/// The time from the new process's start until its slices are complete.
///
/// The pod is replaced, and between the two plugins the kubelet deletes the slices, after 30 s. Nobody may create them again before a
/// plugin has registered.
async fn plugin_start(args: &Args, cluster: &Cluster) -> anyhow::Result<Duration> {
    let mut watch = PoolWatch::start(cluster).await?;
    let old = plugin()?;
    delete_plugin_pod(args, cluster).await?;
    until("the old plugin has ended", async || {
        Ok((!old.is_alive()).then_some(()))
    })
    .await?;
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    for slice in cluster.slices().await? {
        slices
            .delete(&slice.name_any(), &DeleteParams::default())
            .await?;
    }
    watch.until(LONGEST_WAIT, |pool| pool.slices() == 0).await?;
    let new = until("the new plugin runs", async || {
        Ok(process::running(PROGRAM)?.pop())
    })
    .await?;
    watch.until(LONGEST_WAIT, PoolWatch::is_complete).await?;
    let complete = process::since_boot();
    until("the new plugin's pod is ready", async || {
        Ok(plugin_pods(args, cluster)
            .await?
            .iter()
            .any(is_ready)
            .then_some(()))
    })
    .await?;
    Ok(complete.saturating_sub(new.started))
}

fn plugin() -> anyhow::Result<Process> {
    let mut running = process::running(PROGRAM)?;
    match (running.pop(), running.is_empty()) {
        (Some(process), true) => Ok(process),
        (None, _) => {
            bail!("no {PROGRAM} runs on this node: is this process in the node's PID namespace?")
        }
        (Some(_), false) => bail!("more than one {PROGRAM} runs on this node"),
    }
}

async fn plugin_pods(args: &Args, cluster: &Cluster) -> anyhow::Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &args.namespace);
    let here = ListParams::default()
        .fields(&format!("spec.nodeName={}", cluster.node))
        .labels("app.kubernetes.io/component=node-plugin");
    Ok(pods.list(&here).await?.items)
}

async fn delete_plugin_pod(args: &Args, cluster: &Cluster) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &args.namespace);
    let found = plugin_pods(args, cluster).await?;
    ensure!(
        !found.is_empty(),
        "namespace {} has no plugin pod on {}",
        args.namespace,
        cluster.node
    );
    for pod in found {
        pods.delete(&pod.name_any(), &DeleteParams::default())
            .await?;
    }
    Ok(())
}

fn is_ready(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && pod
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten())
            .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The time from the deletion of one slice until the pool is complete again.
async fn heal(cluster: &Cluster) -> anyhow::Result<Duration> {
    let mut watch = PoolWatch::start(cluster).await?;
    let slices: Api<ResourceSlice> = Api::all(cluster.client.clone());
    let published = cluster.slices().await?;
    let first = published.first().context("no slice to delete")?;
    let start = Instant::now();
    slices
        .delete(&first.name_any(), &DeleteParams::default())
        .await?;
    watch
        .until(LONGEST_WAIT, |pool| !pool.is_complete())
        .await?;
    watch.until(LONGEST_WAIT, PoolWatch::is_complete).await?;
    Ok(start.elapsed())
}

struct Restart {
    after_registration: Duration,
    after_command: Duration,
}

/// The time from the new kubelet's first registration of the plugin until the slices stay complete.
async fn kubelet_restart(cluster: &Cluster) -> anyhow::Result<Restart> {
    let mut watch = PoolWatch::start(cluster).await?;
    let epoch = watch.epoch();
    let start = Instant::now();
    let done = tokio::task::spawn_blocking(|| {
        Command::new("systemctl")
            .args(["restart", "kubelet"])
            .status()
    })
    .await?
    .context("systemctl")?;
    ensure!(done.success(), "systemctl restart kubelet: {done}");
    watch
        .until(LONGEST_WAIT, |pool| pool.epoch() > epoch)
        .await?;
    let registered = Instant::now();
    watch.until(LONGEST_WAIT, PoolWatch::is_complete).await?;
    let mut complete = Instant::now();
    // The kubelet deletes the slices some time after it has registered the plugin, so the pool may become incomplete again, even several
    // times.
    while watch
        .until(SETTLED, |pool| !pool.is_complete())
        .await
        .is_ok()
    {
        watch.until(LONGEST_WAIT, PoolWatch::is_complete).await?;
        complete = Instant::now();
    }
    Ok(Restart {
        after_registration: complete.saturating_duration_since(registered),
        after_command: complete.saturating_duration_since(start),
    })
}

async fn until<T>(
    what: &str,
    look: impl AsyncFn() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let looked = async {
        loop {
            if let Some(found) = look().await? {
                return anyhow::Ok(found);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONGEST_WAIT, looked)
        .await
        .with_context(|| format!("waited {} s until {what}", LONGEST_WAIT.as_secs()))?
}
