//! The measured cluster: its API, and the devices of this process's node.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use tranche_api::names::{DRIVER, pool};

/// The namespace of all measurements, which is removed afterwards.
pub const NAMESPACE: &str = "tranche-bench";
const LONGEST_WAIT: Duration = Duration::from_mins(2);

/// An API server and one GPU node of its cluster.
#[derive(Clone)]
pub struct Cluster {
    /// A client with the kubeconfig of the environment.
    pub client: Client,
    /// The node that this process runs on.
    pub node: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cluster({})", self.node)
    }
}

impl Cluster {
    /// Connects with `KUBECONFIG`, for measurements on the node of that name.
    pub async fn connect(node: &str) -> anyhow::Result<Self> {
        let kubeconfig = Kubeconfig::from_env()
            .context("KUBECONFIG")?
            .context("KUBECONFIG is not set: it must name a kubeconfig that works on this node")?;
        let mut config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        // The measurement would count a retry inside the client as one slow answer.
        config.default_retry = false;
        Ok(Self {
            client: Client::try_from(config)?,
            node: node.to_owned(),
        })
    }

    #[must_use]
    pub fn pool(&self) -> String {
        pool(&self.node)
    }

    pub async fn slices(&self) -> anyhow::Result<Vec<ResourceSlice>> {
        let all: Api<ResourceSlice> = Api::all(self.client.clone());
        let fields = format!("spec.driver={DRIVER}");
        let slices = all.list(&ListParams::default().fields(&fields)).await?;
        let pool = self.pool();
        Ok(slices
            .items
            .into_iter()
            .filter(|slice| slice.spec.pool.name == pool)
            .collect())
    }

    /// The GPUs that are offered as capped and as timeshared, by the names of their exclusive devices.
    pub async fn shareable_gpus(&self) -> anyhow::Result<Vec<Arc<str>>> {
        let slices = self.slices().await?;
        let devices: BTreeSet<_> = slices
            .iter()
            .filter_map(|slice| slice.spec.devices.as_ref())
            .flatten()
            .map(|device| device.name.as_str())
            .collect();
        let gpus: Vec<Arc<str>> = devices
            .iter()
            .filter_map(|name| name.strip_suffix("-capped"))
            .filter(|gpu| devices.contains(format!("{gpu}-timeshared").as_str()))
            .map(Arc::from)
            .collect();
        if gpus.len() < 2 {
            bail!(
                "pool {}: {} GPUs are offered as capped and timeshared, and two are needed: one for the claims that are timed and one for those that are held",
                self.pool(),
                gpus.len()
            );
        }
        Ok(gpus)
    }

    /// Two of the smallest partitions that fit together on the GPU whose exclusive device has this name.
    pub async fn two_partitions(&self, gpu: &str) -> anyhow::Result<[Arc<str>; 2]> {
        let slices = self.slices().await?;
        let devices = slices
            .iter()
            .filter_map(|slice| slice.spec.devices.as_ref());
        let names: BTreeSet<_> = devices.flatten().map(|device| &*device.name).collect();
        let prefix = format!("{gpu}-mig-1g");
        // Profiles with media engines have their own names, and only one such partition fits at a time.
        let is_small = |name: &&&str| name.starts_with(&prefix) && !name.contains("me-");
        let profile = |name: &str| name.rsplit_once('-').map(|(profile, _)| profile.to_owned());
        let mut small = names.iter().filter(is_small).peekable();
        while let Some(one) = small.next() {
            if let Some(other) = small.peek()
                && profile(one) == profile(other)
            {
                return Ok([Arc::from(*one), Arc::from(**other)]);
            }
        }
        bail!(
            "pool {}: the GPU {gpu} is offered in no two partitions of one slice: measure a GPU that has MIG",
            self.pool()
        );
    }

    /// Makes the namespace, and first removes one that an interrupted run left.
    pub async fn make_namespace(&self) -> anyhow::Result<()> {
        self.remove_namespace().await?;
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        self.namespaces()
            .create(&PostParams::default(), &namespace)
            .await
            .with_context(|| format!("namespace {NAMESPACE}"))?;
        Ok(())
    }

    /// Waits for the namespace's service account, without which pods are refused.
    pub async fn service_account(&self) -> anyhow::Result<()> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), NAMESPACE);
        wait_until("the namespace has a service account", async || {
            Ok(accounts.get_opt("default").await?.is_some())
        })
        .await
    }

    /// Removes the namespace with its objects, and waits until it is gone.
    pub async fn remove_namespace(&self) -> anyhow::Result<()> {
        let api = self.namespaces();
        let Some(namespace) = api.get_opt(NAMESPACE).await? else {
            return Ok(());
        };
        if namespace.metadata.deletion_timestamp.is_none() {
            api.delete(NAMESPACE, &DeleteParams::default()).await?;
        }
        wait_until("the namespace tranche-bench is gone", async || {
            Ok(api.get_opt(NAMESPACE).await?.is_none())
        })
        .await
    }

    fn namespaces(&self) -> Api<Namespace> {
        Api::all(self.client.clone())
    }
}

/// The result of a measurement, or an error as soon as the user interrupts it, so that its objects are removed.
pub async fn unless_interrupted<T>(
    measurement: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::select! {
        measured = measurement => measured,
        signal = tokio::signal::ctrl_c() => {
            signal?;
            Err(anyhow::anyhow!("interrupted"))
        }
    }
}

/// Polls until the condition is true.
pub async fn wait_until(
    what: &str,
    is_so: impl AsyncFn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let asked = async {
        while !is_so().await? {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LONGEST_WAIT, asked)
        .await
        .with_context(|| format!("waited {} s until {what}", LONGEST_WAIT.as_secs()))?
}
