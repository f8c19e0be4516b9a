//! A namespace of a test: claims, templates and pods in it.

use std::fmt;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use crate::pod::PodHandle;
use crate::request::Request;

/// Idle until SIGTERM.
pub const IDLE: [&str; 3] = ["sh", "-c", "trap exit TERM; sleep infinity & wait"];

/// A namespace that is removed after its test.
#[derive(Clone)]
pub struct Namespace {
    client: Client,
    name: String,
    node: Option<String>,
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Namespace").field(&self.name).finish()
    }
}

/// The source of a pod's claim.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A claim that exists.
    Claim(&'a str),
    /// A template from which the pod gets its own claim.
    Template(&'a str),
}

impl Namespace {
    pub(crate) fn new(client: Client, name: String) -> Self {
        Self {
            client,
            name,
            node: None,
        }
    }

    /// Sets the node of its pods.
    pub(crate) fn on_node(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pods in it.
    #[must_use]
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// The claims in it.
    #[must_use]
    pub fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// Makes a claim.
    pub async fn claim(&self, name: &str, spec: &Value) -> anyhow::Result<ResourceClaim> {
        let claim = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
        self.claims()
            .create(&PostParams::default(), &claim)
            .await
            .with_context(|| format!("creating the claim {name}"))
    }

    /// Makes a template.
    pub async fn template(&self, name: &str, spec: &Value) -> anyhow::Result<()> {
        let template: ResourceClaimTemplate =
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"spec": spec}}))?;
        Api::namespaced(self.client.clone(), &self.name)
            .create(&PostParams::default(), &template)
            .await
            .with_context(|| format!("creating the claim template {name}"))?;
        Ok(())
    }

    /// Makes a pod that runs `command` in one container with the devices of all `sources`.
    pub async fn pod(
        &self,
        name: &str,
        sources: &[Source<'_>],
        command: &[&str],
    ) -> anyhow::Result<PodHandle> {
        self.pod_from(manifest(name, sources, command)).await
    }

    /// Makes a pod from a manifest.
    pub async fn pod_from(&self, mut manifest: Value) -> anyhow::Result<PodHandle> {
        if let Some(node) = &self.node {
            manifest["spec"]["nodeSelector"]["kubernetes.io/hostname"] = json!(node);
        }
        let pod: Pod = serde_json::from_value(manifest)?;
        let name = pod.metadata.name.clone().unwrap_or_default();
        self.pods()
            .create(&PostParams::default(), &pod)
            .await
            .with_context(|| format!("creating the pod {name}"))?;
        Ok(self.handle(&name))
    }

    /// The pod of this name, which may have been made elsewhere.
    #[must_use]
    pub fn handle(&self, name: &str) -> PodHandle {
        PodHandle::new(self.client.clone(), self.name.clone(), name.to_owned())
    }

    /// An idle pod with a template of its own for one request.
    pub async fn idle(&self, name: &str, request: &Request) -> anyhow::Result<PodHandle> {
        self.running(name, request, &IDLE).await
    }

    /// The same, once its container runs.
    pub async fn started(&self, name: &str, request: &Request) -> anyhow::Result<PodHandle> {
        let pod = self.idle(name, request).await?;
        pod.started().await?;
        Ok(pod)
    }

    /// A pod that runs `command`, with a template of its own for one request.
    pub async fn running(
        &self,
        name: &str,
        request: &Request,
        command: &[&str],
    ) -> anyhow::Result<PodHandle> {
        self.template(name, &request.spec()).await?;
        self.pod(name, &[Source::Template(name)], command).await
    }
}

/// The manifest of [`Namespace::pod`].
#[must_use]
pub fn manifest(name: &str, sources: &[Source<'_>], command: &[&str]) -> Value {
    let named: Vec<_> = sources
        .iter()
        .enumerate()
        .map(|(index, source)| match source {
            Source::Claim(claim) => {
                json!({"name": format!("gpu-{index}"), "resourceClaimName": claim})
            }
            Source::Template(template) => {
                json!({"name": format!("gpu-{index}"), "resourceClaimTemplateName": template})
            }
        })
        .collect();
    let used: Vec<_> = named
        .iter()
        .map(|claim| json!({"name": claim["name"]}))
        .collect();
    json!({
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "resourceClaims": named,
            "containers": [{
                "name": "cuda",
                "image": "tranche/workload:dev",
                "imagePullPolicy": "IfNotPresent",
                "command": command,
                "resources": {"claims": used},
            }],
        },
    })
}
