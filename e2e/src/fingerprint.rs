//! The state that a test must not change: that of its nodes, and the objects of the cluster that it may touch.

use std::collections::BTreeSet;

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node as CoreNode, Pod};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, ListParams};
use kube::{Client, Resource, ResourceExt};
use tranche_api::SharingPolicy;

use crate::SYSTEM;
use crate::node::Node;
use crate::system::{NODE_PLUGIN, NODE_PLUGIN_NAME, is_ready, restarts};
use crate::wait::Watched;

/// A line for each thing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fingerprint(BTreeSet<String>);

/// The objects without a node that a test must leave unchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Objects<'a> {
    /// All objects: the test has the cluster alone.
    All,
    /// Its own objects, whose names contain this text: other tests run beside it.
    Named(&'a str),
}

impl Fingerprint {
    pub(crate) async fn of(
        client: &Client,
        nodes: &[Node],
        objects: Objects<'_>,
    ) -> anyhow::Result<Self> {
        let mut lines = BTreeSet::new();
        for node in nodes {
            let found = node.state().await?;
            lines.extend(found.lines().map(|line| format!("{}: {line}", node.name())));
        }
        let is_on_them = |name: Option<&str>| nodes.iter().any(|node| Some(node.name()) == name);
        let all = ListParams::default();
        let machines: Api<CoreNode> = Api::all(client.clone());
        for node in machines.list(&all).await? {
            let spec = node.spec.clone().unwrap_or_default();
            let labels: Vec<_> = node
                .labels()
                .keys()
                .filter(|key| key.contains("tranche.dev"))
                .cloned()
                .collect();
            if is_on_them(Some(&node.name_any())) {
                let is_cordoned = spec.unschedulable == Some(true);
                lines.insert(format!(
                    "node {}: cordoned {is_cordoned}, labels {labels:?}",
                    node.name_any()
                ));
            }
        }
        let plugins: Api<Pod> = Api::namespaced(client.clone(), SYSTEM);
        for pod in plugins.list(&all.clone().labels(NODE_PLUGIN)).await? {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            if is_on_them(node) {
                let (uid, restarts, ready) = (pod.uid(), restarts(&pod), is_ready(&pod));
                lines.insert(format!(
                    "plugin of {node:?}: {uid:?}, restarts {restarts}, ready {ready}"
                ));
            }
        }
        if matches!(objects, Objects::All) {
            let sets: Api<DaemonSet> = Api::namespaced(client.clone(), SYSTEM);
            let set = sets.get(NODE_PLUGIN_NAME).await?;
            lines.insert(format!("plugin's DaemonSet: {:?}", set.metadata.generation));
        }
        add::<SharingPolicy>(&mut lines, client, objects).await?;
        add::<DeviceClass>(&mut lines, client, objects).await?;
        add::<ValidatingAdmissionPolicyBinding>(&mut lines, client, objects).await?;
        add::<ClusterRoleBinding>(&mut lines, client, objects).await?;
        Ok(Self(lines))
    }

    /// The lines that are only here or only in `now`, except lines that begin with a text of `changed`.
    pub(crate) fn differences(&self, now: &Self, changed: &[&str]) -> Vec<String> {
        let differ = |one: &Self, other: &Self, sign| {
            let lines = one.0.difference(&other.0);
            let of_others = lines.filter(|line| !changed.iter().any(|it| line.starts_with(it)));
            of_others
                .map(|line| format!("{sign} {line}"))
                .collect::<Vec<_>>()
        };
        [differ(self, now, '-'), differ(now, self, '+')].concat()
    }
}

/// Adds a line for each object of a kind, with its specified content.
async fn add<K>(
    lines: &mut BTreeSet<String>,
    client: &Client,
    objects: Objects<'_>,
) -> anyhow::Result<()>
where
    K: Watched + Resource<DynamicType = ()>,
{
    let api: Api<K> = Api::all(client.clone());
    for object in api.list(&ListParams::default()).await? {
        let name = object.name_any();
        let is_its_own = match objects {
            Objects::All => true,
            Objects::Named(part) => name.contains(part),
        };
        if is_its_own {
            let spec = serde_json::to_value(&object)?["spec"].take();
            lines.insert(format!("{} {name}: {spec}", K::kind(&())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Fingerprint {
        Fingerprint(lines.iter().map(|&line| line.to_owned()).collect())
    }

    #[test]
    fn what_a_test_leaves_and_takes_is_told_unless_it_says_so() {
        let (before, after) = (of(&["a: 1", "b: 1", "c: 1"]), of(&["a: 1", "b: 2", "d: 1"]));
        let all = ["- b: 1", "- c: 1", "+ b: 2", "+ d: 1"];
        assert_eq!(before.differences(&after, &[]), all);
        assert_eq!(before.differences(&after, &["b"]), ["- c: 1", "+ d: 1"]);
    }
}
