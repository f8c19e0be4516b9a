//! Reads what `doctor` examines.

use std::collections::BTreeMap;

use futures::future::{join, join_all, join3, join4};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::DeviceTaintRule;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::Api;
use kube::api::{ListParams, PostParams};

use super::read::{each_as, list};
use super::{Cluster, gap, problem};
use crate::doctor::pods;
use crate::facts::{Access, Component, Facts, Served, Workload};
use crate::snapshot::{Resource, Scope};

/// The APIService of the usage API.
const USAGE_API: &str = "v1alpha1.usage.gpu.tranche.dev";
/// Pods whose events are read.
const MOST_STUCK: usize = 20;

/// The label by which the chart's pods are found.
pub const PODS_OF_CHART: &str = "app.kubernetes.io/name=tranche";

/// The rights that commands need: verb, group, resource, and whether only in the namespace of Tranche.
const RIGHTS: [(&str, &str, &str, bool); 12] = [
    ("list", "gpu.tranche.dev", "gpunodes", false),
    ("list", "gpu.tranche.dev", "sharingpolicies", false),
    ("list", "resource.k8s.io", "resourceslices", false),
    ("list", "resource.k8s.io", "resourceclaims", false),
    ("list", "resource.k8s.io", "deviceclasses", false),
    ("list", "resource.k8s.io", "devicetaintrules", false),
    ("list", "", "pods", false),
    ("list", "", "nodes", false),
    ("list", "apps", "deployments", true),
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
            Resource::Nodes,
        ];
        let (snapshot, usage, (version, dra_versions, gates, (access, pods)), others) = join4(
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
            Box::pin(join3(
                self.workloads(),
                self.usage_api_fault(),
                self.rules(),
            )),
        )
        .await;
        let (workloads, usage_api_fault, rules) = others;
        let mut facts = Facts {
            version,
            dra_versions,
            gates,
            access: access.into_iter().flatten().collect(),
            components: pods
                .as_ref()
                .map(|pods| pods.iter().map(component).collect())
                .map_err(Clone::clone),
            workloads,
            usage_api_fault,
            system: self.system.clone(),
            now: jiff::Timestamp::now(),
            warnings: BTreeMap::new(),
            rules,
            snapshot,
            usage,
        };
        Box::pin(self.add_users(&mut facts)).await;
        (facts, pods)
    }

    /// Adds the pods that have devices of ours, and the warnings about those that cannot start or end.
    async fn add_users(&self, facts: &mut Facts) {
        let mut found: Vec<Pod> = Vec::new();
        let users = pods::users(facts);
        let all = Api::<Pod>::all(self.client());
        // Where no claim is in use, no pod is.
        let read = if users.is_empty() {
            Ok(())
        } else {
            let page = ListParams::default().limit(500);
            let take = |pod: Pod| {
                let uid = pod.metadata.uid.as_deref();
                if uid.is_some_and(|uid| users.contains(uid)) {
                    found.push(pod);
                }
            };
            each_as(Resource::Pods, &all, page, take).await
        };
        let snapshot = &mut facts.snapshot;
        snapshot.asked.insert(Resource::Pods);
        snapshot.gaps.extend(read.err());
        snapshot.pods = found;
        let facts_read = &*facts;
        let pods = facts_read.snapshot.pods.iter();
        let stuck = pods.filter(|pod| pods::is_stuck(pod, facts_read));
        let warnings = stuck.take(MOST_STUCK).map(|pod| async {
            let uid = pod.metadata.uid.clone()?;
            let warning = self.newest_warning(pod).await?;
            Some((uid, warning))
        });
        let warnings = join_all(warnings).await;
        facts.warnings = warnings.into_iter().flatten().collect();
    }

    /// The newest warning about a pod.
    pub(crate) async fn newest_warning(&self, pod: &Pod) -> Option<String> {
        let namespace = pod.metadata.namespace.as_deref()?;
        let uid = pod.metadata.uid.as_deref()?;
        let events = Api::<Event>::namespaced(self.client(), namespace);
        let fields = format!("involvedObject.uid={uid},type=Warning");
        let listed = events.list(&ListParams::default().fields(&fields)).await;
        let seen = |event: &Event| {
            let series = event
                .series
                .as_ref()
                .and_then(|it| it.last_observed_time.as_ref());
            let once = event.event_time.as_ref();
            let micro = series.or(once).map(|it| it.0);
            micro.or(event.last_timestamp.as_ref().map(|it| it.0))
        };
        let newest = listed.ok()?.items.into_iter().max_by_key(seen)?;
        let message = newest.message?;
        Some(message.split_whitespace().collect::<Vec<_>>().join(" "))
    }

    async fn workloads(&self) -> Served<Vec<Workload>> {
        let params = ListParams::default().labels(PODS_OF_CHART);
        let deployments = Api::<Deployment>::namespaced(self.client(), &self.system);
        let daemon_sets = Api::<DaemonSet>::namespaced(self.client(), &self.system);
        let (deployments, daemon_sets) =
            join(deployments.list(&params), daemon_sets.list(&params)).await;
        let unread = |error: &kube::Error| problem::root(error);
        let deployments = deployments.map_err(|error| unread(&error))?.items;
        let daemon_sets = daemon_sets.map_err(|error| unread(&error))?.items;
        let deployments = deployments.into_iter().map(|it| {
            let replicas = it.spec.replicas.unwrap_or(1);
            workload("Deployment", it.metadata, replicas)
        });
        let daemon_sets = daemon_sets.into_iter().map(|it| {
            let nodes = it.status.map_or(0, |it| it.desired_number_scheduled);
            workload("DaemonSet", it.metadata, nodes)
        });
        Ok(deployments.chain(daemon_sets).collect())
    }

    async fn usage_api_fault(&self) -> Option<String> {
        let services = Api::<APIService>::all(self.client());
        let service = services.get_opt(USAGE_API).await.ok()??;
        let conditions = service.status?.conditions?;
        let available = conditions.into_iter().find(|it| it.type_ == "Available")?;
        (available.status != "True").then(|| available.message.unwrap_or_default())
    }

    async fn rules(&self) -> Vec<DeviceTaintRule> {
        let all = Api::<DeviceTaintRule>::all(self.client());
        list(Resource::DeviceTaintRules, &all, &ListParams::default())
            .await
            .objects
    }

    /// The API server's version.
    pub(crate) async fn version(&self) -> Served<String> {
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

    /// The nodes with a pod of the node plugin, and whether it is ready; `None` where the caller may not list these pods.
    pub(crate) async fn plugins(&self) -> Option<BTreeMap<String, bool>> {
        let pods = self.chart_pods().await.ok()?;
        let pods = pods.iter().map(component);
        let plugins = pods.filter(|it| it.component == "node-plugin");
        Some(plugins.map(|it| (it.node, it.is_ready)).collect())
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

fn component_of(metadata: &ObjectMeta) -> String {
    let labels = metadata.labels.as_ref();
    let label = labels.and_then(|labels| labels.get("app.kubernetes.io/component"));
    label.cloned().unwrap_or_default()
}

fn workload(kind: &'static str, metadata: ObjectMeta, wanted: i32) -> Workload {
    Workload {
        kind,
        component: component_of(&metadata),
        name: metadata.name.unwrap_or_default(),
        wanted: usize::try_from(wanted).unwrap_or_default(),
    }
}

fn component(pod: &Pod) -> Component {
    let status = pod.status.as_ref();
    let mut conditions = status
        .into_iter()
        .flat_map(|it| it.conditions.iter().flatten());
    let spec = pod.spec.as_ref();
    let containers = spec.into_iter().flat_map(|spec| &spec.containers);
    Component {
        component: component_of(&pod.metadata),
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
