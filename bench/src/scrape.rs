//! The cost of a scrape of the node plugin while pods use all shares of 8 GPUs.
//!
//! ```text
//!  a pod for each GPU, 16 containers in it, each with a capped share and memory in it
//!      └─► GET /metrics of the node's plugin, as Prometheus makes it ─► time, bytes, CPU time, memory
//! ```
//!
//! The plugin reads NVML at most once a second, so scrapes are further apart. In turn with each scrape, a request for a path that the
//! server does not have measures only TLS and the check of the token.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tranche_api::names::capacity;
use tranche_serving::testing::get;

use crate::claims;
use crate::cluster::{Cluster, NAMESPACE, unless_interrupted, wait_until};
use crate::process::{self, Process, mib};
use crate::row::Row;
use crate::stats::{Spread, count, ms};

/// How much to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Shares in use on each GPU
    #[arg(long, default_value_t = 16)]
    shares: usize,
    /// Scrapes
    #[arg(long, default_value_t = 40)]
    samples: usize,
    /// The pods' image: tranche/workload
    #[arg(long, default_value = "tranche/workload:dev")]
    image: String,
    /// The port of /metrics
    #[arg(long, default_value_t = 8443)]
    port: u16,
}

/// Longer than the plugin keeps a reading.
const APART: Duration = Duration::from_millis(1200);
/// Labels of the node plugin's pods.
const PLUGIN: &str = "app.kubernetes.io/component=node-plugin";
/// The ServiceAccount that scrapes, and its binding.
const READER: &str = "tranche-bench-reader";
const MB: f64 = 1e6;

/// Measures, and then removes all objects, even if it fails or is interrupted.
pub async fn run(args: &Args, cluster: &Cluster) -> anyhow::Result<Vec<Row>> {
    cluster.make_namespace().await?;
    let bench = Bench { args, cluster };
    let measured = unless_interrupted(bench.measure()).await;
    bench.remove_binding().await?;
    cluster.remove_namespace().await?;
    measured
}

struct Bench<'a> {
    args: &'a Args,
    cluster: &'a Cluster,
}

/// The times of scrapes and of the requests beside them.
#[derive(Debug, Default)]
struct Times {
    scrapes: Vec<f64>,
    empty: Vec<f64>,
    bytes: usize,
}

impl Bench<'_> {
    async fn measure(&self) -> anyhow::Result<Vec<Row>> {
        let gpus = self.cluster.shareable_gpus().await?.len();
        self.fill(gpus).await?;
        let token = self.token().await?;
        let address = self.address().await?;
        let plugin = process::running("tranche-kubelet-plugin")?;
        let [plugin] = plugin[..] else {
            anyhow::bail!("{} plugins run on this node, not one", plugin.len());
        };
        eprintln!("{} scrapes", self.args.samples);
        let idle = self.idle_cpu(plugin).await?;
        let before = plugin.cpu_time()?;
        let times = self.scrapes(&address, &token).await?;
        let busy = plugin
            .cpu_time()?
            .saturating_sub(before)
            .saturating_sub(idle);
        let (scrapes, empty) = (spread(times.scrapes)?, spread(times.empty)?);
        let memory = plugin.memory()?;
        Ok(vec![
            Row::new("scrape-time", scrapes.p50)
                .from(scrapes)
                .beside("an empty answer", empty.p50)
                .beside(
                    "CPU time of the plugin",
                    ms(busy) / count(self.args.samples),
                )
                .beside("GPUs", count(gpus))
                .beside("shares", count(gpus * self.args.shares)),
            Row::new("scrape-size", count(times.bytes) / MB),
            Row::new("scrape-memory", mib(memory.resident))
                .beside("at most since its start", mib(memory.peak)),
        ])
    }

    /// Starts the pods, and waits until each container has its memory.
    async fn fill(&self, gpus: usize) -> anyhow::Result<()> {
        let client = &self.cluster.client;
        self.cluster.service_account().await?;
        eprintln!("{gpus} pods with {} shares each", self.args.shares);
        let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), NAMESPACE);
        let params = PostParams::default();
        for nth in 0..gpus {
            let names = self.names(nth);
            let size = size(self.args.shares);
            let made: Vec<ResourceClaim> = names
                .iter()
                .map(|name| claims::claim(name, "capped", size.clone()))
                .collect();
            try_join_all(made.iter().map(|claim| claims.create(&params, claim))).await?;
            pods.create(&params, &self.pod(nth, &names)?).await?;
            // One after another, because each pod fills a GPU.
            wait_until(
                "a pod with a share in each container is ready",
                async || Ok(pods.get(&pod_name(nth)).await.as_ref().is_ok_and(is_ready)),
            )
            .await?;
        }
        Ok(())
    }

    fn names(&self, nth: usize) -> Vec<String> {
        let names = 0..self.args.shares;
        names.map(|share| format!("share-{nth}-{share}")).collect()
    }

    fn pod(&self, nth: usize, claims: &[String]) -> anyhow::Result<Pod> {
        let containers: Vec<Value> = claims
            .iter()
            .map(|claim| {
                json!({
                    "name": claim,
                    "image": self.args.image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["tranche-workload", "hold", "--bytes=64Mi", "--beat=5000"],
                    "resources": {"claims": [{"name": claim}]},
                })
            })
            .collect();
        let claims: Vec<Value> = claims
            .iter()
            .map(|claim| json!({"name": claim, "resourceClaimName": claim}))
            .collect();
        Ok(serde_json::from_value(json!({
            "metadata": {"name": pod_name(nth)},
            "spec": {
                "terminationGracePeriodSeconds": 5,
                "nodeSelector": {"kubernetes.io/hostname": self.cluster.node},
                "containers": containers,
                "resourceClaims": claims,
            }
        }))?)
    }

    /// The token of an account that may read metrics.
    async fn token(&self) -> anyhow::Result<String> {
        let client = &self.cluster.client;
        let params = PostParams::default();
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
        let account = serde_json::from_value(json!({"metadata": {"name": READER}}))?;
        accounts.create(&params, &account).await?;
        self.remove_binding().await?;
        let binding = serde_json::from_value(json!({
            "metadata": {"name": READER},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                "name": "tranche-metrics-reader",
            },
            "subjects": [{"kind": "ServiceAccount", "name": READER, "namespace": NAMESPACE}],
        }))?;
        self.bindings().create(&params, &binding).await?;
        let request: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
        let answer = accounts.create_token_request(READER, &params, &request);
        let status = answer.await?.status.context("a token request's status")?;
        status.token.context("a token")
    }

    fn bindings(&self) -> Api<ClusterRoleBinding> {
        Api::all(self.cluster.client.clone())
    }

    async fn remove_binding(&self) -> anyhow::Result<()> {
        match self
            .bindings()
            .delete(READER, &DeleteParams::default())
            .await
        {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            other => other.map(drop).map_err(Into::into),
        }
    }

    /// Where the node's plugin serves its metrics.
    async fn address(&self) -> anyhow::Result<String> {
        let api: Api<Pod> = Api::all(self.cluster.client.clone());
        let node = format!("spec.nodeName={}", self.cluster.node);
        let of_node = ListParams::default().labels(PLUGIN).fields(&node);
        let pods = api.list(&of_node).await?;
        let mut addresses = pods
            .items
            .iter()
            .filter_map(|pod| pod.status.as_ref()?.pod_ip.clone());
        let address = addresses
            .next()
            .with_context(|| format!("no pod of the plugin on {node}"))?;
        Ok(format!("{address}:{}", self.args.port))
    }

    /// The plugin's CPU time while nobody scrapes, for as long as the scrapes take.
    async fn idle_cpu(&self, plugin: Process) -> anyhow::Result<Duration> {
        let before = plugin.cpu_time()?;
        let turns = u32::try_from(self.args.samples)?;
        tokio::time::sleep(APART * turns).await;
        Ok(plugin.cpu_time()?.saturating_sub(before))
    }

    async fn scrapes(&self, address: &str, token: &str) -> anyhow::Result<Times> {
        let mut times = Times::default();
        let ask = async |path: &str, expected: u16| {
            let start = Instant::now();
            let stream = TcpStream::connect(address).await?;
            let (status, text) = get(stream, path, Some(token)).await?;
            let time = ms(start.elapsed());
            ensure!(status == expected, "{path}: {status}: {text}");
            anyhow::Ok((time, text))
        };
        // At the first request the plugin asks the API server about the token's rights.
        ask("/metrics", 200).await?;
        for _ in 0..self.args.samples {
            tokio::time::sleep(APART).await;
            let (time, text) = ask("/metrics", 200).await?;
            let held = text.lines().filter(|it| is_share(it)).count();
            ensure!(held > 0, "the plugin knows of no pod: {text}");
            times.scrapes.push(time);
            times.bytes = times.bytes.max(text.len());
            times.empty.push(ask("/nothing", 404).await?.0);
        }
        Ok(times)
    }
}

/// Whether a line is the memory metric of a container.
fn is_share(line: &str) -> bool {
    line.starts_with("DCGM_FI_DEV_FB_USED{") && line.contains("container=\"share-")
}

fn pod_name(nth: usize) -> String {
    format!("holder-{nth}")
}

fn is_ready(pod: &Pod) -> bool {
    let mut conditions = pod
        .status
        .as_ref()
        .and_then(|it| it.conditions.as_deref())
        .into_iter()
        .flatten();
    conditions.any(|it| it.type_ == "Ready" && it.status == "True")
}

/// The size for which `shares` shares fit into a GPU.
fn size(shares: usize) -> BTreeMap<String, Quantity> {
    let cores = (100 / shares).to_string();
    [
        (capacity::MEMORY, "1Gi".to_owned()),
        (capacity::CORES, cores),
    ]
    .into_iter()
    .map(|(name, size)| (name.to_owned(), Quantity(size)))
    .collect()
}

fn spread(times: Vec<f64>) -> anyhow::Result<Spread> {
    Spread::of(times).context("no scrape was asked for")
}
