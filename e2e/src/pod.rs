//! A pod of a test.

use std::fmt;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, LogParams, Patch, PatchParams};
use kube::runtime::watcher;
use serde_json::Value;
use tranche_api::names::DRIVER;

use crate::exec::{self, Exit};
use crate::node::Node;
use crate::wait;
use crate::workload::{self, Beat, Filled, VisibleDevice};

/// A pod, by name.
#[derive(Clone)]
pub struct PodHandle {
    client: Client,
    namespace: String,
    name: String,
    container: Option<String>,
}

impl fmt::Debug for PodHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PodHandle({}/{})", self.namespace, self.name)
    }
}

impl PodHandle {
    /// The pod `name`, which somebody else may have made.
    #[must_use]
    pub fn new(client: Client, namespace: String, name: String) -> Self {
        Self {
            client,
            namespace,
            name,
            container: None,
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits until its container runs.
    pub async fn started(&self) -> anyhow::Result<Pod> {
        self.started_within(wait::USUAL).await
    }

    /// Waits up to a time limit until its container runs.
    pub async fn started_within(&self, limit: wait::Limit) -> anyhow::Result<Pod> {
        let what = format!("pod {} running", self.name);
        let pod = wait::for_one(self.pods(), &self.name, &what, limit, |pod| {
            let pod = pod?;
            let phase = pod.status.as_ref()?.phase.as_deref()?;
            matches!(phase, "Running" | "Failed" | "Succeeded").then(|| pod.clone())
        })
        .await?;
        match pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref())
        {
            Some("Running") => Ok(pod),
            phase => bail!("pod {} is {phase:?} instead of running", self.name),
        }
    }

    /// Waits until the scheduler has bound it to a node.
    pub async fn scheduled(&self) -> anyhow::Result<()> {
        let what = format!("a node for pod {}", self.name);
        let has_node = |pod: Option<&Pod>| pod?.spec.as_ref()?.node_name.as_ref().map(drop);
        wait::for_one(self.pods(), &self.name, &what, wait::USUAL, has_node).await
    }

    /// Waits until the scheduler reports that it cannot place the pod, and returns its reason.
    pub async fn unschedulable(&self) -> anyhow::Result<String> {
        let what = format!("pod {} unschedulable", self.name);
        wait::for_one(self.pods(), &self.name, &what, wait::USUAL, |pod| {
            unschedulable(pod?)
        })
        .await
    }

    /// Waits until the scheduler reports that it cannot allocate the pod's claims.
    pub async fn has_no_room(&self) -> anyhow::Result<()> {
        let reason = self.unschedulable().await?;
        ensure!(
            reason.contains("cannot allocate all claims"),
            "{}: {reason}",
            self.name
        );
        Ok(())
    }

    /// Waits for an event of this reason about the pod, and returns its message.
    pub async fn event(&self, reason: &str) -> anyhow::Result<String> {
        let about = watcher::Config::default().fields(&self.about(reason));
        let what = format!("an event {reason} of the pod {}", self.name);
        wait::for_all(self.all_events(), about, &what, wait::USUAL, |events| {
            events.values().find_map(|event| event.message.clone())
        })
        .await
    }

    /// The messages of the events of this reason about the pod until now.
    pub async fn events(&self, reason: &str) -> anyhow::Result<Vec<String>> {
        let about = ListParams::default().fields(&self.about(reason));
        let events = self.all_events().list(&about).await?.items;
        Ok(events.into_iter().filter_map(|it| it.message).collect())
    }

    fn all_events(&self) -> Api<Event> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn about(&self, reason: &str) -> String {
        format!("involvedObject.name={},reason={reason}", self.name)
    }

    /// The claim that was made for it from a template.
    pub async fn claim(&self) -> anyhow::Result<ResourceClaim> {
        let what = format!("the claim of the pod {}", self.name);
        let name = wait::for_one(self.pods(), &self.name, &what, wait::USUAL, |pod| {
            pod?.status
                .as_ref()?
                .resource_claim_statuses
                .as_ref()?
                .first()?
                .resource_claim_name
                .clone()
        })
        .await?;
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        Ok(claims.get(&name).await?)
    }

    /// The driver's data on the only device of ours in its claim's status, once the status has it.
    pub async fn device_data(&self) -> anyhow::Result<Value> {
        let what = format!("status.devices of the claim of {}", self.name);
        wait::for_answer(&what, wait::USUAL, async || {
            let devices = self.claim().await?.status.and_then(|status| status.devices);
            let ours = devices
                .into_iter()
                .flatten()
                .find(|device| device.driver == DRIVER);
            Ok(ours.and_then(|device| device.data).map(|data| data.0))
        })
        .await
    }

    /// Runs a command in it.
    pub async fn exec(&self, command: &[&str]) -> anyhow::Result<Exit> {
        exec::run(&self.pods(), &self.name, self.container.as_deref(), command).await
    }

    /// The pod with `container` as the container of commands.
    #[must_use]
    pub fn container(&self, container: &str) -> Self {
        Self {
            container: Some(container.to_owned()),
            ..self.clone()
        }
    }

    /// Runs a command that must succeed, and returns its standard output.
    pub async fn stdout(&self, command: &[&str]) -> anyhow::Result<String> {
        self.exec(command)
            .await?
            .ok()
            .with_context(|| format!("{command:?} in {}", self.name))
    }

    /// The GPUs that CUDA shows in it.
    pub async fn seen(&self) -> anyhow::Result<Vec<VisibleDevice>> {
        workload::lines(&self.stdout(&["tranche-workload", "--json", "info"]).await?)
    }

    /// Fills each of its devices, with further `options`.
    pub async fn fill(&self, options: &[&str]) -> anyhow::Result<Vec<Filled>> {
        let command = [&["tranche-workload", "--json", "fill"], options].concat();
        workload::lines(&self.stdout(&command).await?)
    }

    /// The memory of each GPU that the real nvidia-smi shows: UUID and MiB, in its order.
    pub async fn nvidia_smi(&self) -> anyhow::Result<Vec<(String, u64)>> {
        let output = self
            .stdout(&[
                "nvidia-smi",
                "--query-gpu=uuid,memory.total",
                "--format=csv,noheader,nounits",
            ])
            .await?;
        output
            .lines()
            .map(|line| {
                let (uuid, total) = line.split_once(", ").with_context(|| line.to_owned())?;
                Ok((
                    uuid.to_owned(),
                    total.trim().parse().with_context(|| line.to_owned())?,
                ))
            })
            .collect()
    }

    pub async fn logs(&self) -> anyhow::Result<String> {
        Ok(self.pods().logs(&self.name, &LogParams::default()).await?)
    }

    /// Waits for heartbeats of `tranche-workload --json hold`, and returns all so far.
    pub async fn beats(&self) -> anyhow::Result<Vec<Beat>> {
        let what = format!("heartbeats of {}", self.name);
        wait::for_answer(&what, wait::USUAL, async || {
            let beats: Vec<Beat> = workload::lines(&self.logs().await?)?;
            Ok((!beats.is_empty()).then_some(beats))
        })
        .await
    }

    /// Waits for a new heartbeat and returns it: the holder still works.
    pub async fn next_beat(&self) -> anyhow::Result<Beat> {
        let now = self.beats().await?.len();
        let what = format!("the next heartbeats of {}", self.name);
        wait::for_answer(&what, wait::USUAL, async || {
            let beats: Vec<Beat> = workload::lines(&self.logs().await?)?;
            // One heartbeat may have begun before this call.
            Ok(beats.get(now + 1).cloned())
        })
        .await
    }

    /// How often its container was started again.
    pub async fn restarts(&self) -> anyhow::Result<i32> {
        let pod = self.started().await?;
        Ok(first_container(&pod).map_or(0, |container| container.restart_count))
    }

    /// Kills its container on `node`, and waits until the kubelet has started it again.
    pub async fn restart_container(&self, node: &Node) -> anyhow::Result<()> {
        let pod = self.started().await?;
        let container = first_container(&pod).context("no container")?;
        let count = container.restart_count;
        node.kill_container(container.container_id.as_deref().unwrap_or_default())
            .await?;
        let what = format!("the container of {} started again", self.name);
        wait::for_one(self.pods(), &self.name, &what, wait::USUAL, |pod| {
            let container = first_container(pod?)?;
            (container.restart_count > count && container.ready).then_some(())
        })
        .await
    }

    /// Makes the kubelet sync the pod: after a failed Prepare it does so only when the pod changes, or after more than a
    /// minute.
    pub async fn sync(&self) -> anyhow::Result<()> {
        let other = uuid::Uuid::new_v4().to_string();
        let changed = serde_json::json!({"metadata": {"annotations": {"sync": other}}});
        self.pods()
            .patch(&self.name, &PatchParams::default(), &Patch::Merge(&changed))
            .await?;
        Ok(())
    }

    /// Deletes it and waits until it is gone.
    pub async fn delete(&self) -> anyhow::Result<()> {
        self.delete_with(&DeleteParams::default()).await
    }

    /// Deletes it with `params` and waits until it is gone.
    pub async fn delete_with(&self, params: &DeleteParams) -> anyhow::Result<()> {
        let pods = self.pods();
        pods.delete(&self.name, params).await?;
        let what = format!("pod {} gone", self.name);
        wait::for_one(pods, &self.name, &what, wait::USUAL, |pod| {
            pod.is_none().then_some(())
        })
        .await
    }
}

fn first_container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

/// Why the scheduler cannot place a pod.
fn unschedulable(pod: &Pod) -> Option<String> {
    pod.status
        .as_ref()?
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.reason.as_deref() == Some("Unschedulable"))?
        .message
        .clone()
}
