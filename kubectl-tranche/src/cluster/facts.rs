//! Reads what `doctor` examines.

use std::collections::BTreeMap;

use futures::future::{join, join_all, join3, join4};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, PostParams};

use super::{Cluster, gap, problem};
use crate::facts::{Access, Component, Facts, Served};
use crate::snapshot::{Resource, Scope};

/// The label by which the chart's pods are found.
pub const PODS_OF_CHART: &str = "app.kubernetes.io/name=tranche";

/// The rights that commands need: verb, group, resource, and whether only in the namespace of Tranche.
const RIGHTS: [(&str, &str, &str, bool); 10] = [
    ("list", "gpu.tranche.dev", "gpunodes", false),
    ("list", "gpu.tranche.dev", "sharingpolicies", false),
    ("list", "resource.k8s.io", "resourceslices", false),
    ("list", "resource.k8s.io", "resourceclaims", false),
    ("list", "resource.k8s.io", "deviceclasses", false),
    ("list", "", "pods", false),
    ("list", "", "nodes", false),
    ("get", "", "configmaps", true),
    ("get", "", "pods/log", true),
    ("list", "events.k8s.io", "events", false),
];

impl Cluster {
    /// Reads all that the checks need. A failure does not stop the other reads.
    pub async fn facts(&self) -> Facts {
        self.facts_and_pods().await.0
    }

    /// The same, with the chart's whole pods, which the facts summarize.
    pub(super) async fn facts_and_pods(&self) -> (Facts, Served<Vec<Pod>>) {
        let asked = [
            Resource::GpuNodes,
            Resource::SharingPolicies,
            Resource::ResourceSlices,
            Resource::ResourceClaims,
            Resource::DeviceClasses,
        ];
        let (snapshot, usage, (version, dra_versions, gates, (access, pods))) = join3(
            Box::pin(self.read(&asked, Scope::All)),
            Box::pin(self.usage(&Scope::All)),
            join4(
                self.version(),
                self.dra_versions(),
                self.gates(),
                join(
                    join_all(RIGHTS.map(|right| self.access(right))),
                    self.chart_pods(),
                ),
            ),
        )
        .await;
        let facts = Facts {
            version,
            dra_versions,
            gates,
            access: access.into_iter().flatten().collect(),
            components: pods
                .as_ref()
                .map(|pods| pods.iter().map(component).collect())
                .map_err(Clone::clone),
            system: self.system.clone(),
            snapshot,
            usage,
        };
        (facts, pods)
    }

    async fn version(&self) -> Served<String> {
        let version = self.client().apiserver_version().await;
        version
            .map(|version| version.git_version)
            .map_err(|error| problem::root(&error))
    }

    async fn dra_versions(&self) -> Served<Vec<String>> {
        let groups = self
            .client()
            .list_api_groups()
            .await
            .map_err(|error| problem::root(&error))?;
        let dra = groups
            .groups
            .into_iter()
            .find(|group| group.name == "resource.k8s.io");
        let versions = dra.into_iter().flat_map(|group| group.versions);
        Ok(versions.map(|version| version.version).collect())
    }

    /// The gates in the API server's metrics.
    async fn gates(&self) -> Served<BTreeMap<String, bool>> {
        let request = http::Request::get("/metrics")
            .body(Vec::new())
            .map_err(|error| error.to_string())?;
        let text = self.client().request_text(request).await.map_err(|error| {
            format!(
                "you may not get /metrics of the API server, which tells them ({})",
                problem::root(&error)
            )
        })?;
        Ok(text.lines().filter_map(gate).collect())
    }

    async fn access(
        &self,
        right: (&'static str, &'static str, &'static str, bool),
    ) -> Option<Access> {
        let (verb, group, resource, is_system) = right;
        let (name, subresource) = match resource.split_once('/') {
            Some((name, subresource)) => (name, Some(subresource.to_owned())),
            None => (resource, None),
        };
        let namespace = if is_system {
            self.system.clone()
        } else {
            String::new()
        };
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(verb.to_owned()),
                    group: Some(group.to_owned()),
                    resource: Some(name.to_owned()),
                    subresource,
                    namespace: Some(namespace.clone()),
                    ..ResourceAttributes::default()
                }),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let reviews = Api::<SelfSubjectAccessReview>::all(self.client());
        let answer = reviews.create(&PostParams::default(), &review).await.ok()?;
        Some(Access {
            verb,
            resource,
            namespace,
            is_allowed: answer.status?.allowed,
        })
    }

    async fn chart_pods(&self) -> Served<Vec<Pod>> {
        let pods = Api::<Pod>::namespaced(self.client(), &self.system);
        let listed = pods
            .list(&ListParams::default().labels(PODS_OF_CHART))
            .await;
        listed.map(|list| list.items).map_err(|error| {
            format!(
                "{} (namespace {})",
                gap(Resource::Pods, &error).message,
                self.system
            )
        })
    }
}

/// `kubernetes_feature_enabled{name="DRADeviceTaints",stage="BETA"} 1`.
fn gate(line: &str) -> Option<(String, bool)> {
    let rest = line.strip_prefix("kubernetes_feature_enabled{")?;
    let (_, rest) = rest.split_once("name=\"")?;
    let (name, rest) = rest.split_once('"')?;
    let value = rest.rsplit(' ').next()?;
    Some((name.to_owned(), value == "1"))
}

fn component(pod: &Pod) -> Component {
    let labels = pod.metadata.labels.as_ref();
    let label = labels.and_then(|labels| labels.get("app.kubernetes.io/component"));
    let status = pod.status.as_ref();
    let mut conditions = status
        .into_iter()
        .flat_map(|it| it.conditions.iter().flatten());
    let spec = pod.spec.as_ref();
    let containers = spec.into_iter().flat_map(|spec| &spec.containers);
    Component {
        component: label.cloned().unwrap_or_default(),
        pod: pod.metadata.name.clone().unwrap_or_default(),
        node: spec.and_then(|it| it.node_name.clone()).unwrap_or_default(),
        is_ready: conditions.any(|it| it.type_ == "Ready" && it.status == "True"),
        images: containers.filter_map(|it| it.image.clone()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_are_read_from_the_metrics() {
        let line = r#"kubernetes_feature_enabled{name="DRADeviceTaints",stage="BETA"} 0"#;
        assert_eq!(gate(line), Some(("DRADeviceTaints".to_owned(), false)));
        let line = r#"kubernetes_feature_enabled{name="DRADeviceTaints",stage=""} 1"#;
        assert_eq!(gate(line), Some(("DRADeviceTaints".to_owned(), true)));
        assert_eq!(gate("# HELP kubernetes_feature_enabled x"), None);
    }
}
