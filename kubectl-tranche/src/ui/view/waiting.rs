//! Pods that do not run because of a GPU, and why.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::DeviceClass;
use serde::Serialize;
use tranche_api::names::DRIVER;
use tranche_driver::extended_resources;
use tranche_driver::pod::claims_of;

use crate::model::{Claim, Model, Want, wants_of_ours};
use crate::output::bytes;
use crate::pods;
use crate::snapshot::Snapshot;

/// A pod that does not run yet.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodView {
    pub namespace: String,
    pub name: String,
    /// The requests of its claims for our devices.
    pub wants: Vec<String>,
    /// Since when: RFC 3339.
    pub since: Option<String>,
    /// The node, where the scheduler chose one.
    pub node: Option<String>,
    /// Why it does not run, in the API server's words.
    pub reason: String,
}

/// The pods of the snapshot that have a claim of ours, or request our devices as an extended resource.
#[must_use]
pub fn pods(snapshot: &Snapshot, model: &Model) -> Vec<PodView> {
    let claims: BTreeMap<(&str, &str), &Claim> = model
        .claims
        .iter()
        .map(|claim| ((claim.namespace.as_str(), claim.name.as_str()), claim))
        .collect();
    let pods = snapshot.pods.iter();
    pods.filter_map(|pod| of_pod(pod, &claims, &snapshot.classes))
        .collect()
}

fn of_pod(
    pod: &Pod,
    claims: &BTreeMap<(&str, &str), &Claim>,
    classes: &[DeviceClass],
) -> Option<PodView> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let ours = claims_of(pod)
        .into_iter()
        .filter_map(|name| claims.get(&(namespace, name)));
    let mut wanted: Vec<Want> = ours.flat_map(|claim| claim.wants.clone()).collect();
    let not_made = extended_resources::claim(pod, classes);
    wanted.extend(not_made.iter().flat_map(|it| wants_of_ours(it, classes)));
    if wanted.is_empty() {
        return None;
    }
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let created = pod.metadata.creation_timestamp.as_ref();
    Some(PodView {
        namespace: namespace.to_owned(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        wants: wanted.iter().map(wants).collect(),
        since: created.map(|time| time.0.to_string()),
        reason: reason(pod, node.as_deref()),
        node,
    })
}

fn wants(want: &Want) -> String {
    let class = want
        .class
        .strip_suffix(DRIVER)
        .and_then(|it| it.strip_suffix('.'));
    let count = match want.count {
        Some(1) => None,
        Some(count) => Some(format!("{count} ×")),
        None => Some("all".to_owned()),
    };
    let words: Vec<String> = [
        count,
        Some(class.unwrap_or(&want.class).to_owned()),
        want.memory.map(bytes),
        want.cores.map(|cores| format!("{cores} %")),
    ]
    .into_iter()
    .flatten()
    .collect();
    words.join(" ")
}

/// The scheduler's message; for a pod with a node, the reason for which its containers wait.
fn reason(pod: &Pod, node: Option<&str>) -> String {
    if let Some(message) = pods::unscheduled(pod) {
        return message.to_owned();
    }
    let Some(node) = node else {
        return "the scheduler has not looked at it yet".to_owned();
    };
    let status = pod.status.as_ref();
    let mut containers = [
        status.and_then(|it| it.init_container_statuses.as_deref()),
        status.and_then(|it| it.container_statuses.as_deref()),
    ]
    .into_iter()
    .flatten()
    .flatten();
    // `ContainerCreating` and `PodInitializing` have no message.
    let told = containers.find_map(|container| {
        let waiting = container.state.as_ref()?.waiting.as_ref()?;
        let message = waiting.message.as_deref()?;
        Some(format!("{}: {message}", container.name))
    });
    told.unwrap_or_else(|| format!("{node} prepares it"))
}
