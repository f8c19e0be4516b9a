//! Runs one test, alone on the cluster or alone on one of its nodes, and restores everything afterwards.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, anyhow, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{
    Namespace as CoreNamespace, Node as CoreNode, Pod, ServiceAccount,
};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, Config, ResourceExt};
use tranche_api::gpu_node::{Gpu, GpuNode};
use tranche_api::names::{DRIVER, attribute, pool};

use crate::fingerprint::{Fingerprint, Objects};
use crate::namespace::Namespace;
use crate::node::Node;
use crate::pulse::Stopwatch;
use crate::system::{NodePlugin, text};
use crate::turn::Turn;
use crate::{diagnosis, record, wait};

/// The part of the cluster that a test uses alone.
pub struct Case {
    /// A client with the administrator's rights.
    pub client: Client,
    /// The node of the test's pods: the first one with GPUs, or the one that `TRANCHE_E2E_NODE` names; for a test on one node, the
    /// free one.
    pub node: Node,
    /// Its GPUs, by PCI address.
    pub gpus: Vec<Gpu>,
    extent: Extent,
    /// The other nodes with GPUs, if the test has the whole cluster.
    others: Vec<GpuNode>,
    /// The test's node and the other ones that have a machine.
    nodes: Vec<Node>,
    suffix: String,
    found: Fingerprint,
    changes: Mutex<Vec<&'static str>>,
    namespaces: Mutex<Vec<(String, Until)>>,
    undos: Mutex<Vec<(String, Undo)>>,
    _turn: Option<Turn>,
}

/// The part of the cluster that a test has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    Cluster,
    Node,
    /// A node that is made for it, without a machine. It shares everything else with other tests.
    HollowNode,
}

/// How much of a namespace must be removed before the test ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    /// Its pods and claims: its name is used only once.
    Emptied,
    /// All of it: its name is used again.
    Gone,
}

type Undo = BoxFuture<'static, anyhow::Result<()>>;

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("suffix", &self.suffix)
            .finish_non_exhaustive()
    }
}

/// Runs a test alone on the cluster. Whether it passes or fails, its objects are removed. After that, the nodes must have no
/// file of a claim.
pub fn run(test: impl AsyncFnOnce(&Case) -> anyhow::Result<()>) -> anyhow::Result<()> {
    within(Extent::Cluster, test)
}

/// Runs a test like [`run`], but alone on one node, beside tests on the other nodes. Its pods run on this node, and its policies
/// apply to the node's GPUs. It must not change or count objects that belong to no node, and must not measure times.
pub fn run_on_a_node(test: impl AsyncFnOnce(&Case) -> anyhow::Result<()>) -> anyhow::Result<()> {
    within(Extent::Node, test)
}

/// Runs a test on a new node of its own without a machine (`e2e/api`), beside any other tests. The status of its pods says that
/// they run, but no program runs.
pub fn run_on_a_hollow_node(
    test: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    within(Extent::HollowNode, test)
}

fn within(
    extent: Extent,
    test: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let case = Case::begin(extent).await?;
        let took = Stopwatch::start();
        let outcome = AssertUnwindSafe(test(&case))
            .catch_unwind()
            .await
            .unwrap_or_else(|_| Err(anyhow!("a check panicked: its message is above")));
        if outcome.is_err() {
            let names: Vec<_> = case
                .namespaces()
                .into_iter()
                .map(|(name, _)| name)
                .collect();
            diagnosis::print(&case.client, case.nodes.first(), &names).await;
        }
        let cleaned = case.finish().await.context("cleaning up");
        record::test(&format!("{extent:?}"), &took);
        match (outcome, cleaned) {
            (Err(error), Err(also)) => Err(error.context(format!("and {also:#}"))),
            (Err(error), Ok(())) | (Ok(()), Err(error)) => Err(error),
            (Ok(()), Ok(())) => Ok(()),
        }
    })
}

impl Case {
    async fn begin(extent: Extent) -> anyhow::Result<Self> {
        ensure!(
            std::env::var_os("KUBECONFIG").is_some_and(|path| !path.is_empty()),
            "KUBECONFIG is not set: the suite needs a cluster; run `make e2e`, or `make cluster-up` and `source target/cluster/env`"
        );
        let config = Config::infer().await.context("reading KUBECONFIG")?;
        let client = Client::try_from(config)?;
        let (turn, name) = match extent {
            Extent::HollowNode => return Self::on_a_hollow_node(client).await,
            Extent::Cluster => (Turn::on_the_cluster().await?, None),
            Extent::Node => {
                let names = names_for_one(&client).await?;
                let (turn, index) = Turn::on_one_of(&names).await?;
                (turn, Some(names[index].clone()))
            }
        };
        unused(&client, name.as_deref()).await?;
        // Read now, because the test before this one may have changed its node.
        let mut in_order = gpu_nodes(&client).await?;
        if let Some(name) = name {
            in_order.retain(|node| node.name_any() == name);
        }
        let mut remaining = in_order.into_iter();
        let first = remaining
            .next()
            .context("the cluster has no node with GPUs")?;
        let others: Vec<_> = remaining.collect();
        // Another test left it cordoned.
        schedulable(&client, &first.name_any(), true).await?;
        for other in &others {
            schedulable(&client, &other.name_any(), false).await?;
        }
        let names = std::iter::once(&first).chain(&others);
        let nodes: Vec<_> = names.map(|node| Node::new(node.name_any())).collect();
        let mut case = Self {
            client,
            node: nodes[0].clone(),
            gpus: gpus(&first)?,
            extent,
            others,
            nodes,
            suffix: suffix(),
            found: Fingerprint::default(),
            changes: Mutex::default(),
            namespaces: Mutex::default(),
            undos: Mutex::default(),
            _turn: Some(turn),
        };
        // A user of the cluster before the suite may have ended only just now.
        for node in &case.nodes {
            node.no_claim_files(wait::USUAL).await?;
            node.no_gpu_records().await?;
        }
        // A probe may have failed while the machine stood still.
        for node in &case.nodes {
            let plugin = NodePlugin::new(case.client.clone(), node.name().to_owned());
            plugin.ready(None).await?;
        }
        case.found = case.fingerprint().await?;
        Ok(case)
    }

    async fn fingerprint(&self) -> anyhow::Result<Fingerprint> {
        let objects = match self.extent {
            Extent::Cluster => Objects::All,
            Extent::Node | Extent::HollowNode => Objects::Named(&self.suffix),
        };
        Fingerprint::of(&self.client, &self.nodes, objects).await
    }

    /// Allows the test to leave changes: lines of the fingerprint that begin with `what` may differ.
    pub fn changes(&self, what: &'static str) {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        changes.push(what);
    }

    async fn on_a_hollow_node(client: Client) -> anyhow::Result<Self> {
        let suffix = suffix();
        let mut case = Self {
            client,
            node: Node::new(format!("e2e-hollow-{suffix}")),
            gpus: Vec::new(),
            extent: Extent::HollowNode,
            others: Vec::new(),
            nodes: Vec::new(),
            suffix,
            found: Fingerprint::default(),
            changes: Mutex::default(),
            namespaces: Mutex::default(),
            undos: Mutex::default(),
            _turn: None,
        };
        case.gpus = case.hollow_node(case.node.name()).await?;
        Ok(case)
    }

    /// Makes a node without a machine, until the test ends; waits until its GPUs are offered, and returns them.
    pub async fn hollow_node(&self, name: &str) -> anyhow::Result<Vec<Gpu>> {
        let labels =
            serde_json::json!({"kubernetes.io/hostname": name, "nvidia.com/gpu.present": "true"});
        let node = serde_json::json!({"metadata": {"name": name, "labels": labels}});
        let nodes: Api<CoreNode> = Api::all(self.client.clone());
        nodes
            .create(&PostParams::default(), &serde_json::from_value(node)?)
            .await
            .with_context(|| format!("creating the node {name}"))?;
        let removed = name.to_owned();
        self.afterwards("the hollow node", async move {
            nodes.delete(&removed, &DeleteParams::default()).await?;
            Ok(())
        });
        let plugin = NodePlugin::new(self.client.clone(), name.to_owned());
        plugin.settled().await?;
        gpus(&plugin.gpu_node().await?)
    }

    /// The plugin of the test's node.
    #[must_use]
    pub fn plugin(&self) -> NodePlugin {
        NodePlugin::new(self.client.clone(), self.node.name().to_owned())
    }

    /// The plugins of all nodes with GPUs.
    #[must_use]
    pub fn plugins(&self) -> Vec<NodePlugin> {
        let others = self.others.iter().map(ResourceExt::name_any);
        std::iter::once(self.node.name().to_owned())
            .chain(others)
            .map(|node| NodePlugin::new(self.client.clone(), node))
            .collect()
    }

    /// Allows pods on a second node with GPUs until the test ends.
    pub async fn second_node(&self) -> anyhow::Result<(Node, Vec<Gpu>)> {
        ensure!(
            self.extent == Extent::Cluster,
            "a test on one node has no second one: call `run` instead of `run_on_a_node`"
        );
        let second = self.others.first().context(
            "the test needs two nodes with GPUs: bring the cluster up with WORKERS=2, as `make e2e` does",
        )?;
        let name = second.name_any();
        let (client, closed) = (self.client.clone(), name.clone());
        self.afterwards("the second node", async move {
            schedulable(&client, &closed, false).await
        });
        schedulable(&self.client, &name, true).await?;
        Ok((self.nodes[1].clone(), gpus(second)?))
    }

    /// The GPUs to which the test's policies apply: all, or those of its only node.
    #[must_use]
    pub(crate) fn policy_gpus(&self) -> Option<Vec<&str>> {
        let uuids = || self.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        (self.extent != Extent::Cluster).then(uuids)
    }

    /// Makes a namespace that is removed after the test.
    pub async fn namespace(&self, name: &str) -> anyhow::Result<Namespace> {
        let name = format!("e2e-{name}-{}", self.suffix);
        let namespace: CoreNamespace =
            serde_json::from_value(serde_json::json!({"metadata": {"name": name}}))?;
        Api::all(self.client.clone())
            .create(&PostParams::default(), &namespace)
            .await
            .with_context(|| format!("creating the namespace {name}"))?;
        self.remember(&name, Until::Emptied);
        // No pod is admitted without it.
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &name);
        let found = |account: Option<&ServiceAccount>| account.map(drop);
        wait::for_one(
            accounts,
            "default",
            "the namespace's account",
            wait::USUAL,
            found,
        )
        .await?;
        let namespace = Namespace::new(self.client.clone(), name);
        Ok(match self.extent {
            Extent::Cluster => namespace,
            Extent::Node | Extent::HollowNode => namespace.on_node(self.node.name()),
        })
    }

    /// Removes the namespace `name` after the test; somebody else makes it.
    pub fn adopt(&self, name: &str) -> Namespace {
        self.remember(name, Until::Gone);
        Namespace::new(self.client.clone(), name.to_owned())
    }

    fn remember(&self, name: &str, until: Until) {
        self.namespaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((name.to_owned(), until));
    }

    /// The name of the device under which `gpu` is offered in the tier `isolation`.
    pub async fn device(&self, gpu: &Gpu, isolation: &str) -> anyhow::Result<String> {
        let fields = format!("spec.driver={DRIVER}");
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let slices = api.list(&ListParams::default().fields(&fields)).await?;
        let mut devices = slices
            .items
            .iter()
            .flat_map(|s| s.spec.devices.iter().flatten());
        let device = devices
            .find(|device| {
                text(device, attribute::UUID) == Some(&gpu.uuid)
                    && text(device, attribute::ISOLATION) == Some(isolation)
            })
            .with_context(|| format!("{} is not offered as {isolation}", gpu.uuid))?;
        Ok(device.name.clone())
    }

    #[must_use]
    pub fn unique(&self, name: &str) -> String {
        format!("e2e-{name}-{}", self.suffix)
    }

    /// Runs a step after the test, the last one first.
    pub fn afterwards(
        &self,
        what: &str,
        undo: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        self.undos
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((what.to_owned(), undo.boxed()));
    }

    fn namespaces(&self) -> Vec<(String, Until)> {
        self.namespaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Runs the steps after the test; returns what failed.
    async fn undo(&self) -> Vec<String> {
        let mut problems = Vec::new();
        loop {
            let undo = self
                .undos
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop();
            let Some((what, undo)) = undo else {
                return problems;
            };
            if let Err(error) = undo.await {
                problems.push(format!("{what}: {error:#}"));
            }
        }
    }

    /// Deletes the test's objects and then its nodes, without waiting: no other test uses these names or nodes.
    async fn finish_hollow(self) -> anyhow::Result<()> {
        let namespaces: Api<CoreNamespace> = Api::all(self.client.clone());
        for (name, _) in self.namespaces() {
            namespaces.delete(&name, &DeleteParams::default()).await?;
        }
        let problems = self.undo().await;
        ensure!(problems.is_empty(), "{}", problems.join("; "));
        Ok(())
    }

    async fn finish(self) -> anyhow::Result<()> {
        if self.extent == Extent::HollowNode {
            return self.finish_hollow().await;
        }
        let mut problems = self.undo().await;
        for (name, until) in self.namespaces() {
            if let Err(error) = remove(&self.client, &name, until).await {
                problems.push(format!("namespace {name}: {error:#}"));
            }
        }
        // The kubelet releases claims before a pod is gone, unless it was deleted by force.
        let changes = self
            .changes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let what = "node and cluster as the test found them";
        let as_before = wait::for_answer(what, wait::USUAL, async || {
            let differences = self.found.differences(&self.fingerprint().await?, &changes);
            ensure!(differences.is_empty(), "{}", differences.join("\n"));
            Ok(Some(()))
        });
        if let Err(error) = as_before.await {
            problems.push(format!("{error:#}"));
        }
        ensure!(problems.is_empty(), "{}", problems.join("; "));
        Ok(())
    }
}

/// The suffix that makes a test's names unique.
fn suffix() -> String {
    let unique = uuid::Uuid::new_v4().simple().to_string();
    unique[..6].to_owned()
}

/// Removes the namespace, and waits for its pods and claims, because the next test needs their GPUs. A Deployment makes no new pods
/// in a namespace that is being deleted.
async fn remove(client: &Client, name: &str, until: Until) -> anyhow::Result<()> {
    let namespaces: Api<CoreNamespace> = Api::all(client.clone());
    let pods: Api<Pod> = Api::namespaced(client.clone(), name);
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), name);
    let (now, all) = (DeleteParams::default(), ListParams::default());
    let any = watcher::Config::default;
    match namespaces.delete(name, &now).await {
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        other => other.map(drop)?,
    }
    pods.delete_collection(&now, &all).await?;
    // Deleted before the pods are gone: if those take too long, the next test waits for claims that are being deleted.
    claims.delete_collection(&now, &all).await?;
    wait::for_none(pods, any(), "no more pods", wait::TRIED_AGAIN).await?;
    wait::for_none(claims, any(), "no more claims", wait::USUAL).await?;
    match until {
        Until::Emptied => Ok(()),
        Until::Gone => {
            wait::for_one(
                namespaces,
                name,
                "the namespace gone",
                wait::USUAL,
                |namespace| namespace.is_none().then_some(()),
            )
            .await
        }
    }
}

/// Checks that no other claim has GPUs, or GPUs of `node`, because many tests depend on the last free one. Waits for claims that are
/// being deleted.
async fn unused(client: &Client, node: Option<&str>) -> anyhow::Result<()> {
    let claims: Api<ResourceClaim> = Api::all(client.clone());
    claims
        .list(&ListParams::default().limit(1))
        .await
        .context("the cluster of KUBECONFIG does not answer")?;
    let any = watcher::Config::default();
    wait::for_all(claims, any, "no claimed GPU", wait::TRIED_AGAIN, |claims| {
        let held = || claims.values().filter(|claim| holds(claim, node));
        let staying: Vec<_> = held()
            .filter(|claim| claim.metadata.deletion_timestamp.is_none())
            .map(|claim| format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any()))
            .collect();
        if !staying.is_empty() {
            return Some(Err(anyhow!(
                "the suite needs the GPUs for itself, but they are claimed by {}: delete these, or, if it was \
                 the demo, `kubectl delete --recursive --filename examples`",
                staying.join(", ")
            )));
        }
        held().next().is_none().then_some(Ok(()))
    })
    .await?
}

/// Whether the claim has devices of ours, on `node` if one is named.
fn holds(claim: &ResourceClaim, node: Option<&str>) -> bool {
    claim
        .status
        .iter()
        .flat_map(|status| &status.allocation)
        .flat_map(|allocation| &allocation.devices)
        .flat_map(|devices| &devices.results)
        .flatten()
        .any(|result| result.driver == DRIVER && node.is_none_or(|node| result.pool == pool(node)))
}

/// The nodes for a test on one node: the one that `TRANCHE_E2E_NODE` names, or all.
async fn names_for_one(client: &Client) -> anyhow::Result<Vec<String>> {
    if let Ok(wanted) = std::env::var("TRANCHE_E2E_NODE") {
        return Ok(vec![wanted]);
    }
    let nodes = gpu_nodes(client).await?;
    ensure!(!nodes.is_empty(), "the cluster has no node with GPUs");
    Ok(nodes.iter().map(ResourceExt::name_any).collect())
}

/// The nodes with GPUs, by name, the one that `TRANCHE_E2E_NODE` names first.
async fn gpu_nodes(client: &Client) -> anyhow::Result<Vec<GpuNode>> {
    let api: Api<GpuNode> = Api::all(client.clone());
    let mut nodes = api
        .list(&ListParams::default())
        .await
        .context("listing GpuNodes: is the chart installed?")?
        .items;
    let wanted = std::env::var("TRANCHE_E2E_NODE").ok();
    nodes.sort_by_key(|node| (wanted != Some(node.name_any()), node.name_any()));
    let first = nodes.first().map(ResourceExt::name_any);
    ensure!(
        wanted.is_none() || first == wanted,
        "TRANCHE_E2E_NODE names {wanted:?}, which is no node with GPUs"
    );
    Ok(nodes)
}

fn gpus(node: &GpuNode) -> anyhow::Result<Vec<Gpu>> {
    let gpus: Vec<_> = node
        .status
        .iter()
        .flat_map(|status| &status.inventory)
        .flat_map(|inventory| &inventory.gpus)
        .cloned()
        .collect();
    ensure!(
        gpus.len() == 2,
        "the suite expects two GPUs, {} has {}",
        node.name_any(),
        gpus.len()
    );
    Ok(gpus)
}

/// Sets whether the scheduler may use the node. Most tests depend on the last GPU of one node, so the others are cordoned.
async fn schedulable(client: &Client, node: &str, may: bool) -> anyhow::Result<()> {
    let nodes: Api<CoreNode> = Api::all(client.clone());
    let patch = Patch::Merge(serde_json::json!({"spec": {"unschedulable": !may}}));
    nodes
        .patch(node, &PatchParams::default(), &patch)
        .await
        .with_context(|| format!("cordoning or uncordoning {node}"))?;
    Ok(())
}
