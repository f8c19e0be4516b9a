//! Pods with and without a claim, from their creation to Running.
//!
//! The kinds of pod take turns within each round, so that other work of the machine affects all kinds alike. The time that a claim
//! adds is the difference of their medians. It includes the scheduler, the kubelet and the container runtime. For one pod at a time,
//! [`steps`] divides it.

mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures::future::try_join_all;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    ResourceClaim, ResourceClaimTemplate, ResourceClaimTemplateSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tranche_api::names::capacity;

use crate::claims;
use crate::cluster::{Cluster, NAMESPACE, unless_interrupted, wait_until};
use crate::row::Row;
use crate::stats::{Spread, ms};
use steps::{Counted, STEPS, Step};

/// How much to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Rounds with one pod of each kind
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Rounds with 8 pods of each kind at once
    #[arg(long, default_value_t = 8)]
    rounds_of_8: usize,
    /// The pods' image: it must be on the node and have a shell
    #[arg(long, default_value = "tranche/workload:dev")]
    image: String,
}

const TOGETHER: usize = 8;
/// Eight whole GPUs are more than a node has.
const TOGETHER_KINDS: [Kind; 3] = [Kind::Plain, Kind::Claim, Kind::Template];
const TEMPLATE: &str = "share";
const LONGEST_WAIT: Duration = Duration::from_secs(90);

/// How a pod gets a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// It has no GPU.
    Plain,
    /// A claim for a capped share, made before the pod.
    Claim,
    /// A claim for a whole GPU, made before the pod.
    Exclusive,
    /// A claim that the control plane makes for the pod from a template.
    Template,
}

const KINDS: [Kind; 4] = [Kind::Plain, Kind::Claim, Kind::Exclusive, Kind::Template];

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Claim => "claim",
            Self::Exclusive => "exclusive",
            Self::Template => "template",
        }
    }
}

/// Measures, and then removes all objects, even if it fails or is interrupted.
pub async fn run(args: &Args, cluster: &Cluster) -> anyhow::Result<Vec<Row>> {
    cluster.make_namespace().await?;
    let bench = Bench::new(cluster, &args.image);
    let measured = unless_interrupted(bench.measure(args)).await;
    cluster.remove_namespace().await?;
    measured
}

/// Runs one pod with a claim: a container runtime watches the CDI folder from its first container with a device on.
pub async fn warm_up(cluster: &Cluster, image: &str) -> anyhow::Result<()> {
    cluster.service_account().await?;
    let bench = Bench::new(cluster, image);
    let ran = bench.pods_to_running(Kind::Claim, "warm", 1).await;
    ran.map(drop)
}

#[derive(Debug)]
struct Bench<'a> {
    cluster: &'a Cluster,
    /// Of the pods.
    image: &'a str,
    pods: Api<Pod>,
    claims: Api<ResourceClaim>,
}

impl<'a> Bench<'a> {
    fn new(cluster: &'a Cluster, image: &'a str) -> Self {
        Self {
            cluster,
            image,
            pods: Api::namespaced(cluster.client.clone(), NAMESPACE),
            claims: Api::namespaced(cluster.client.clone(), NAMESPACE),
        }
    }

    async fn measure(&self, args: &Args) -> anyhow::Result<Vec<Row>> {
        self.make_template().await?;
        self.cluster.service_account().await?;
        // Warms up images and caches.
        for kind in KINDS {
            self.pods_to_running(kind, "warm", 1).await?;
        }
        let mut rows = self.one_by_one(args.rounds).await?;
        rows.extend(self.together(args.rounds_of_8).await?);
        Ok(rows)
    }

    /// One pod of each kind after the other: the time that a claim adds, and the steps to which it adds.
    async fn one_by_one(&self, rounds: usize) -> anyhow::Result<Vec<Row>> {
        let mut times: BTreeMap<Kind, Vec<Duration>> = BTreeMap::new();
        let mut steps: BTreeMap<(Kind, Step), Vec<f64>> = BTreeMap::new();
        for round in 0..rounds {
            eprintln!("a pod with and without a claim, {} of {rounds}", round + 1);
            for kind in KINDS {
                let (time, its_steps) = self.one_pod(kind, &format!("r{round}")).await?;
                times.entry(kind).or_default().push(time);
                for (step, taken) in its_steps {
                    steps.entry((kind, step)).or_default().push(taken);
                }
            }
        }
        let mut rows = vec![
            added(&times, Kind::Claim, "pod-claim-added")?,
            added(&times, Kind::Exclusive, "pod-exclusive-added")?,
            added(&times, Kind::Template, "pod-template-added")?,
        ];
        let median = |kind, step| {
            let taken = steps.get(&(kind, step)).cloned().unwrap_or_default();
            Spread::of(taken)
                .map(|spread| spread.p50)
                .context("no round was asked for")
        };
        let mut ours = 0.0;
        for step in STEPS {
            let plain = median(Kind::Plain, step)?;
            let claim = median(Kind::Claim, step)? - plain;
            if matches!(step, Step::Prepare | Step::Create | Step::Start) {
                ours += claim;
            }
            rows.push(
                Row::new(&format!("pod-step-{}", step.as_str()), claim)
                    .beside("a whole GPU", median(Kind::Exclusive, step)? - plain)
                    .beside("median without a claim", plain),
            );
        }
        rows.push(Row::new("pod-step-ours", ours));
        Ok(rows)
    }

    /// Several pods of each kind at once: the time that a claim adds to the last of them.
    async fn together(&self, rounds: usize) -> anyhow::Result<Vec<Row>> {
        let mut times: BTreeMap<Kind, Vec<Duration>> = BTreeMap::new();
        for round in 0..rounds {
            eprintln!(
                "{TOGETHER} pods at once, with and without a claim, {} of {rounds}",
                round + 1
            );
            for kind in TOGETHER_KINDS {
                let time = self
                    .pods_to_running(kind, &format!("r{round}"), TOGETHER)
                    .await?;
                times.entry(kind).or_default().push(time);
            }
        }
        Ok(vec![
            added(&times, Kind::Claim, "pod-claim-added-8")?,
            added(&times, Kind::Template, "pod-template-added-8")?,
        ])
    }

    /// One pod: the time from its creation until it runs, and its steps.
    async fn one_pod(
        &self,
        kind: Kind,
        round: &str,
    ) -> anyhow::Result<(Duration, [(Step, f64); STEPS.len()])> {
        let names = names(kind, round, 1);
        let mut events = self.prepare(kind, &names).await?;
        let (client, node) = (&self.cluster.client, &self.cluster.node);
        let before = Counted::read(client, node).await?;
        let start = Instant::now();
        self.create(kind, &names).await?;
        follow(&mut events, &names, "have a node", is_scheduled).await?;
        let scheduled = start.elapsed();
        follow(&mut events, &names, "run", runs).await?;
        let running = start.elapsed();
        let after = Counted::read(client, node).await?;
        self.remove(&mut events, &names).await?;
        Ok((running, after.steps(&before, ms(scheduled), ms(running))))
    }

    /// The time from the first pod's creation until the last of `together` pods runs.
    async fn pods_to_running(
        &self,
        kind: Kind,
        round: &str,
        together: usize,
    ) -> anyhow::Result<Duration> {
        let names = names(kind, round, together);
        let mut events = self.prepare(kind, &names).await?;
        let start = Instant::now();
        self.create(kind, &names).await?;
        follow(&mut events, &names, "run", runs).await?;
        let elapsed = start.elapsed();
        self.remove(&mut events, &names).await?;
        Ok(elapsed)
    }

    /// Makes the claims that the pods name, and watches the pods.
    async fn prepare(&self, kind: Kind, names: &[String]) -> anyhow::Result<Events<'_>> {
        let (tier, size) = match kind {
            Kind::Claim => ("capped", size()),
            Kind::Exclusive => ("exclusive", BTreeMap::new()),
            Kind::Plain | Kind::Template => ("", BTreeMap::new()),
        };
        if !tier.is_empty() {
            let params = PostParams::default();
            let claims: Vec<_> = names
                .iter()
                .map(|name| claims::claim(name, tier, size.clone()))
                .collect();
            try_join_all(
                claims
                    .iter()
                    .map(|claim| self.claims.create(&params, claim)),
            )
            .await?;
        }
        let pods = self.pods.list(&ListParams::default().limit(1)).await?;
        let version = pods.metadata.resource_version.unwrap_or_default();
        let events = self.pods.watch(&WatchParams::default(), &version).await?;
        Ok(events.boxed())
    }

    async fn create(&self, kind: Kind, names: &[String]) -> anyhow::Result<()> {
        let pods: Vec<_> = names
            .iter()
            .map(|name| self.pod(name, kind))
            .collect::<Result<_, _>>()?;
        let params = PostParams::default();
        try_join_all(pods.iter().map(|pod| self.pods.create(&params, pod))).await?;
        Ok(())
    }

    async fn remove(&self, events: &mut Events<'_>, names: &[String]) -> anyhow::Result<()> {
        let delete = DeleteParams::default();
        try_join_all(names.iter().map(|name| self.pods.delete(name, &delete))).await?;
        follow(events, names, "are gone", is_gone).await?;
        self.remove_claims().await
    }

    fn pod(&self, name: &str, kind: Kind) -> anyhow::Result<Pod> {
        let (claims, resources) = match kind {
            Kind::Plain => (Value::Null, Value::Null),
            Kind::Claim | Kind::Exclusive => {
                (json!([{"name": "gpu", "resourceClaimName": name}]), used())
            }
            Kind::Template => (
                json!([{"name": "gpu", "resourceClaimTemplateName": TEMPLATE}]),
                used(),
            ),
        };
        Ok(serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 5,
                "nodeSelector": {"kubernetes.io/hostname": self.cluster.node},
                "containers": [{
                    "name": "main",
                    "image": self.image,
                    "imagePullPolicy": "IfNotPresent",
                    // Ends at once on SIGTERM.
                    "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 3600 & wait"],
                    "resources": resources
                }],
                "resourceClaims": claims
            }
        }))?)
    }

    async fn make_template(&self) -> anyhow::Result<()> {
        let templates: Api<ResourceClaimTemplate> =
            Api::namespaced(self.cluster.client.clone(), NAMESPACE);
        let template = ResourceClaimTemplate {
            metadata: ObjectMeta {
                name: Some(TEMPLATE.to_owned()),
                ..ObjectMeta::default()
            },
            spec: Some(ResourceClaimTemplateSpec {
                metadata: None,
                spec: Some(claims::spec("capped", size())),
            }),
        };
        templates.create(&PostParams::default(), &template).await?;
        Ok(())
    }

    async fn remove_claims(&self) -> anyhow::Result<()> {
        for claim in self.claims.list(&ListParams::default()).await? {
            // Claims from a template are deleted with their pod.
            match self
                .claims
                .delete(&claim.name_any(), &DeleteParams::default())
                .await
            {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                other => drop(other?),
            }
        }
        wait_until("the claims are gone", async || {
            Ok(self
                .claims
                .list(&ListParams::default())
                .await?
                .items
                .is_empty())
        })
        .await
    }
}

type Events<'a> = BoxStream<'a, kube::Result<WatchEvent<Pod>>>;

fn names(kind: Kind, round: &str, together: usize) -> Vec<String> {
    (0..together)
        .map(|n| format!("{}-{round}-{together}-{n}", kind.as_str()))
        .collect()
}

/// How much later the pods of a kind ran than pods without a claim: the difference of the medians.
fn added(times: &BTreeMap<Kind, Vec<Duration>>, kind: Kind, id: &str) -> anyhow::Result<Row> {
    let spread = |kind| {
        times
            .get(&kind)
            .and_then(|times| Spread::of_times(times))
            .context("no round was asked for")
    };
    let (plain, with) = (spread(Kind::Plain)?, spread(kind)?);
    Ok(Row::new(id, with.p50 - plain.p50)
        .from(with)
        .beside("median without a claim", plain.p50)
        .beside("its 99th percentile", plain.p99)
        .beside("ratio", with.p50 / plain.p50))
}

/// Waits until there was an event of each pod for which `is_so` is true.
async fn follow(
    events: &mut Events<'_>,
    names: &[String],
    what: &str,
    is_so: fn(&WatchEvent<Pod>) -> Option<String>,
) -> anyhow::Result<()> {
    let mut waiting: BTreeSet<_> = names.iter().cloned().collect();
    let followed = async {
        while !waiting.is_empty() {
            let event = events
                .try_next()
                .await?
                .context("the API server ended the watch")?;
            if let WatchEvent::Error(error) = &event {
                bail!("watch: {}", error.message);
            }
            if let Some(name) = is_so(&event) {
                waiting.remove(&name);
            }
        }
        anyhow::Ok(())
    };
    match tokio::time::timeout(LONGEST_WAIT, followed).await {
        Ok(result) => result,
        Err(_) => bail!(
            "waited {} s until {waiting:?} {what}",
            LONGEST_WAIT.as_secs()
        ),
    }
}

/// A size for which eight shares fit into one GPU.
fn size() -> BTreeMap<String, Quantity> {
    [(capacity::MEMORY, "1Gi"), (capacity::CORES, "10")]
        .into_iter()
        .map(|(name, size)| (name.to_owned(), Quantity(size.to_owned())))
        .collect()
}

fn used() -> Value {
    json!({"claims": [{"name": "gpu"}]})
}

fn is_scheduled(event: &WatchEvent<Pod>) -> Option<String> {
    match event {
        WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
            let spec = pod.spec.as_ref()?;
            spec.node_name.as_ref().map(|_| pod.name_any())
        }
        _ => None,
    }
}

fn runs(event: &WatchEvent<Pod>) -> Option<String> {
    match event {
        WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
            let phase = pod.status.as_ref()?.phase.as_deref()?;
            (phase == "Running").then(|| pod.name_any())
        }
        _ => None,
    }
}

fn is_gone(event: &WatchEvent<Pod>) -> Option<String> {
    match event {
        WatchEvent::Deleted(pod) => Some(pod.name_any()),
        _ => None,
    }
}
