//! Evicts the pods that have a GPU, through the Eviction API, which respects PodDisruptionBudgets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, EvictParams, Preconditions};
use serde::Serialize;
use tokio::time::Instant;

use super::{Error, Target};
use crate::cluster::{Cluster, root};
use crate::model::{Claim, Model};
use crate::output::{self, Block, Table, Tone, View};
use crate::snapshot::{Resource, Scope, Snapshot};
use crate::usage::Usage;

/// The pause between two looks at who is left.
const PAUSE: Duration = Duration::from_secs(2);

/// How to drain.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// How long to wait for pods and budgets.
    pub timeout: Duration,
    /// Whether pods are evicted that nobody makes again.
    pub force: bool,
    /// Whether it only shows who would be evicted.
    pub dry_run: bool,
}

/// The result of `drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Drained {
    pub node: String,
    #[serde(rename = "gpuUUID", skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    /// Whether it is cordoned now: not after a dry run.
    pub is_cordoned: bool,
    /// The pods that were evicted, `namespace/name`.
    pub evicted: Vec<String>,
    /// Who still has it.
    pub left: Vec<Left>,
}

/// A pod that still has a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    pub namespace: String,
    /// The pod; empty for what is not a pod.
    pub pod: String,
    pub claims: BTreeSet<String>,
    pub why: String,
}

/// A pod that holds a target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Whether it only observes.
    pub is_admin: bool,
}

/// The pods that hold a target, with their claims.
#[must_use]
pub fn holders(
    target: &Target,
    snapshot: &Snapshot,
    model: &Model,
) -> BTreeMap<Holder, BTreeSet<String>> {
    // A pod that observes by one claim and has a share by another is no observer.
    let mut pods: BTreeMap<(&str, String, String), (bool, BTreeSet<String>)> = BTreeMap::new();
    for claim in &model.claims {
        let here = claim.devices.iter().filter(|it| {
            let is_gpu = target.gpu.is_none() || it.gpu_uuid == target.gpu;
            it.node == target.node && is_gpu
        });
        let admins: Vec<bool> = here.map(|it| it.is_admin).collect();
        if admins.is_empty() {
            continue;
        }
        for (name, uid) in consumers(snapshot, claim) {
            let key = (claim.namespace.as_str(), name, uid);
            let (is_admin, claims) = pods.entry(key).or_insert((true, BTreeSet::new()));
            *is_admin &= admins.iter().all(|it| *it);
            claims.insert(claim.name.clone());
        }
    }
    let holders = pods
        .into_iter()
        .map(|((namespace, name, uid), (is_admin, claims))| {
            let holder = Holder {
                namespace: namespace.to_owned(),
                name,
                uid,
                is_admin,
            };
            (holder, claims)
        });
    holders.collect()
}

fn consumers(snapshot: &Snapshot, claim: &Claim) -> Vec<(String, String)> {
    let mut objects = snapshot.claims.iter();
    let object = objects.find(|it| it.metadata.uid.as_ref() == Some(&claim.uid));
    let status = object.and_then(|it| it.status.as_ref());
    let reserved = status
        .into_iter()
        .flat_map(|it| it.reserved_for.iter().flatten());
    reserved
        .map(|it| match it.resource.as_str() {
            "pods" => (it.name.clone(), it.uid.clone()),
            other => (format!("{other}/{}", it.name), String::new()),
        })
        .collect()
}

/// Evicts the holders, and waits until none is left or nothing more can be done.
pub async fn drain(cluster: &Cluster, target: &Target, how: Drain) -> Result<Drained, Error> {
    let mut evicted: BTreeMap<String, String> = BTreeMap::new();
    let end = Instant::now() + how.timeout;
    loop {
        let asked = [Resource::ResourceSlices, Resource::ResourceClaims];
        let snapshot = Box::pin(cluster.read(&asked, Scope::All)).await;
        if let Some(gap) = snapshot.obstacle() {
            return Err(Error::Gap(gap.clone()));
        }
        if snapshot.scope != Scope::All {
            return Err(Error::Unknown(target.text()));
        }
        let model = Model::new(&snapshot, &Ok(Usage::default()));
        let mut left = Vec::new();
        let mut may_change = false;
        for (holder, claims) in holders(target, &snapshot, &model) {
            let outcome = if evicted.contains_key(&holder.uid) {
                Outcome::Later("it is ending".to_owned())
            } else {
                self::evict(cluster, &holder, how).await
            };
            let why = match outcome {
                Outcome::Gone => continue,
                Outcome::Evicted => {
                    let name = format!("{}/{}", holder.namespace, holder.name);
                    output::note(Tone::Faint, &format!("evicted {name}"));
                    evicted.insert(holder.uid.clone(), name);
                    may_change = true;
                    "it is ending".to_owned()
                }
                Outcome::Later(why) => {
                    may_change = true;
                    why
                }
                Outcome::Never(why) => why,
            };
            left.push(Left {
                namespace: holder.namespace,
                pod: holder.name,
                claims,
                why,
            });
        }
        if !may_change || how.dry_run || Instant::now() + PAUSE > end {
            return Ok(Drained {
                node: target.node.clone(),
                gpu_uuid: target.gpu.clone(),
                is_cordoned: !how.dry_run,
                evicted: evicted.into_values().collect(),
                left,
            });
        }
        tokio::time::sleep(PAUSE).await;
    }
}

enum Outcome {
    Gone,
    Evicted,
    /// Not now.
    Later(String),
    /// Not without a person.
    Never(String),
}

async fn evict(cluster: &Cluster, holder: &Holder, how: Drain) -> Outcome {
    if holder.uid.is_empty() {
        return Outcome::Never("it is no pod: whoever made it must delete it".to_owned());
    }
    if holder.is_admin {
        return Outcome::Never("it only observes (admin access)".to_owned());
    }
    let pods = Api::<Pod>::namespaced(cluster.client(), &holder.namespace);
    let pod = match pods.get_opt(&holder.name).await {
        Ok(Some(pod)) => pod,
        Ok(None) => return Outcome::Gone,
        Err(error) => return Outcome::Never(root(&error)),
    };
    if pod.metadata.uid.as_ref() != Some(&holder.uid) {
        return Outcome::Gone;
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return Outcome::Later("it is ending".to_owned());
    }
    let mut owners = pod.metadata.owner_references.iter().flatten();
    if !how.force && !owners.any(|it| it.controller == Some(true)) {
        return Outcome::Never(
            "no controller makes it again: delete it, or use --force".to_owned(),
        );
    }
    if how.dry_run {
        return Outcome::Later("it would be evicted".to_owned());
    }
    let params = EvictParams {
        delete_options: Some(DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(holder.uid.clone()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        }),
        ..EvictParams::default()
    };
    match pods.evict(&holder.name, &params).await {
        Ok(_) => Outcome::Evicted,
        Err(kube::Error::Api(status)) => match status.code {
            404 | 409 => Outcome::Later("it changes".to_owned()),
            // A budget has no disruption left.
            429 => Outcome::Later(status.message.clone()),
            code => Outcome::Never(format!("{code} {}", status.message)),
        },
        Err(error) => Outcome::Never(root(&error)),
    }
}

impl View for Drained {
    fn blocks(&self, _: bool) -> Vec<Block> {
        let what = match &self.gpu_uuid {
            Some(uuid) => format!("{uuid} of node {}", self.node),
            None => format!("node {}", self.node),
        };
        let state = if self.is_cordoned { "cordoned; " } else { "" };
        let mut blocks: Vec<Block> = Vec::new();
        if self.left.is_empty() {
            let line = format!("{what}: {state}nobody has any of it");
            blocks.push(Block::Line(Tone::Good, line));
            return blocks;
        }
        let line = format!("{what}: {state}these still have some of it");
        blocks.push(Block::Line(Tone::Warning, line));
        let mut table = Table::new(&["NAMESPACE", "POD", "CLAIMS", "WHY"]);
        for left in &self.left {
            let claims: Vec<_> = left.claims.iter().map(String::as_str).collect();
            table.row(
                Tone::Plain,
                vec![
                    left.namespace.clone(),
                    left.pod.clone(),
                    claims.join(","),
                    left.why.split_whitespace().collect::<Vec<_>>().join(" "),
                ],
            );
        }
        blocks.push(Block::Table(table));
        blocks
    }
}
