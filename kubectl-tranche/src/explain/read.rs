//! Reads the objects that an explanation needs.

use std::collections::BTreeSet;

use futures::future::{join, join3, join4};
use k8s_openapi::api::core::v1::{Node, Pod, ResourceQuota};
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaimTemplate, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use tranche_api::names::DRIVER;
use tranche_driver::extended_resources;
use tranche_scheduler_rules::add_taint_rules;

use super::facts::{self, Facts, NotFound, Source, Subject};
use crate::cluster::{Cluster, list};
use crate::pods;
use crate::snapshot::{Gap, Resource, Scope, Snapshot};

/// Why nothing can be explained.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An object could not be read that every explanation needs.
    #[error("{}", .0.message)]
    Gap(Gap),
    /// There is no object of the name.
    #[error(transparent)]
    NotFound(#[from] NotFound),
}

/// Reads the objects. `kind` is `pod` or `claim`; without it, `name` is of either, and a pod has precedence.
pub async fn read(
    cluster: &Cluster,
    kind: Option<&'static str>,
    name: &str,
) -> Result<(Facts, Snapshot), Error> {
    let namespace = cluster.namespace.clone();
    let asked = [
        Resource::GpuNodes,
        Resource::ResourceClaims,
        Resource::DeviceClasses,
        Resource::Nodes,
    ];
    let (client, all) = (|| cluster.client(), ListParams::default());
    let (mut snapshot, lists, pods) = join3(
        Box::pin(cluster.read(&asked, Scope::All)),
        Box::pin(join4(
            list::<ResourceSlice>(Resource::ResourceSlices, &Api::all(client()), &all),
            list::<DeviceTaintRule>(Resource::DeviceTaintRules, &Api::all(client()), &all),
            list::<ResourceClaimTemplate>(
                Resource::ResourceClaimTemplates,
                &Api::namespaced(client(), &namespace),
                &all,
            ),
            list::<ResourceQuota>(
                Resource::ResourceQuotas,
                &Api::namespaced(client(), &namespace),
                &all,
            ),
        )),
        join(
            list::<Pod>(Resource::Pods, &Api::namespaced(client(), &namespace), &all),
            cluster.plugins(),
        ),
    )
    .await;
    let (pods, plugins) = pods;
    // Without templates and quotas a line says less, but the verdict is the same.
    let (slices, rules, templates, quotas) = lists;
    snapshot.gaps.extend(slices.gap);
    if let Some(gap) = snapshot.obstacle() {
        return Err(Error::Gap(gap.clone()));
    }
    let missing: Vec<String> = [pods.gap, rules.gap]
        .into_iter()
        .flatten()
        .map(|gap| gap.message)
        .collect();
    let (mut slices, pods) = (slices.objects, pods.objects);
    let templates = templates.gap.is_none().then(|| {
        let names = templates.objects.into_iter();
        names
            .filter_map(|it| it.metadata.name)
            .collect::<BTreeSet<_>>()
    });
    let ours = slices.iter().filter(|slice| slice.spec.driver == DRIVER);
    snapshot.slices = ours.cloned().collect();
    add_taint_rules(&rules.objects, &mut slices);
    let nodes = match snapshot.gap(Resource::Nodes) {
        Some(_) => named_nodes(&slices),
        None => snapshot.nodes.clone(),
    };
    let subject = subject(kind, name, &namespace, &pods, &snapshot)?;
    let pod = match &subject {
        Subject::Pod(name) => {
            let mut pods = pods.into_iter();
            pods.find(|pod| pod.metadata.name.as_ref() == Some(name))
        }
        Subject::Claim(name) => self::waiting_pod(pods, name),
    };
    let now = Timestamp::now();
    let warning = match pod.as_ref().filter(|pod| is_to_be_asked_about(pod)) {
        Some(pod) => cluster.newest_warning(pod).await,
        None => None,
    };
    let gaps = snapshot.gaps.iter().map(|gap| gap.message.clone());
    let extended = pod
        .as_ref()
        .and_then(|pod| extended_resources::claim(pod, &snapshot.classes));
    let facts = Facts {
        subject,
        namespace,
        pod,
        claims: snapshot.claims.clone(),
        extended,
        templates,
        slices,
        classes: snapshot.classes.clone(),
        nodes,
        quotas: quotas.objects,
        rules: rules.objects,
        gpu_nodes: snapshot.gpu_nodes.clone(),
        plugins,
        warning,
        now,
        unread: snapshot.gaps.iter().map(|gap| gap.resource).collect(),
        gaps: gaps.chain(missing).collect(),
    };
    Ok((facts, snapshot))
}

/// Whether a pod has a node, and does not run there or is to end: then its events say why.
fn is_to_be_asked_about(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    let is_starting = phase == Some("Pending") || !pods::stopped(pod).is_empty();
    pods::is_placed(pod) && (is_starting || pod.metadata.deletion_timestamp.is_some())
}

/// The nodes that slices name.
fn named_nodes(slices: &[ResourceSlice]) -> Vec<Node> {
    let names: BTreeSet<&String> = slices
        .iter()
        .filter_map(|it| it.spec.node_name.as_ref())
        .collect();
    let node = |name: &String| {
        let mut node = Node::default();
        node.metadata.name = Some(name.clone());
        node
    };
    names.into_iter().map(node).collect()
}

/// The pod or claim with this name. A waiting claim is explained together with the pod that waits for it.
fn subject(
    kind: Option<&'static str>,
    name: &str,
    namespace: &str,
    pods: &[Pod],
    snapshot: &Snapshot,
) -> Result<Subject, NotFound> {
    let pod_names = || pods.iter().filter_map(|pod| pod.metadata.name.as_deref());
    let claim_names = || {
        let claims = snapshot.claims.iter();
        let here = claims.filter(|it| it.metadata.namespace.as_deref() == Some(namespace));
        here.filter_map(|claim| claim.metadata.name.as_deref())
    };
    if kind != Some("claim") && pod_names().any(|it| it == name) {
        return Ok(Subject::Pod(name.to_owned()));
    }
    if kind != Some("pod") && claim_names().any(|it| it == name) {
        return Ok(Subject::Claim(name.to_owned()));
    }
    let nearest = match kind {
        Some("pod") => facts::there_is(name, pod_names()),
        Some(_) => facts::there_is(name, claim_names()),
        None => facts::there_is(name, pod_names().chain(claim_names())),
    };
    Err(NotFound {
        kind: kind.unwrap_or("pod or claim"),
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        nearest,
    })
}

/// The first pod without a node that uses a claim.
fn waiting_pod(pods: Vec<Pod>, claim: &str) -> Option<Pod> {
    let uses = |pod: &Pod| {
        facts::sources(pod)
            .into_iter()
            .any(|(_, source)| match source {
                Source::Named(name) | Source::Template(_, Some(name)) => name == claim,
                Source::Template(_, None) | Source::Nothing => false,
            })
    };
    let mut pods = pods.into_iter();
    pods.find(|pod| !pods::is_placed(pod) && uses(pod))
}
