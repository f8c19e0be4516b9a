//! Reads what decides about a claim in addition to what its programs do: its namespace, its annotations, its pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use tranche_api::conditions::IDLE;
use tranche_api::names::{DRIVER, IDLE_ANNOTATION, KEEP, node_of};
use tranche_api::usage::ClaimReference;
use tranche_driver::pod::claims_of;

use super::decision::{Facts, Noticed, PodFacts};
use super::holder::{Device, Holder};
use super::state::{Activity, Watch};
use super::writer::told;
use crate::apply::{ApplyError, read};

/// Claims in one page of a list.
const PAGE: u32 = 500;

/// Reads from the API server.
#[derive(Clone)]
pub struct Reader {
    client: Client,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reader")
    }
}

impl Reader {
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// The facts of a claim; `None` if it is gone, or if its name belongs to another one now.
    pub async fn facts(&self, claim: &ClaimReference) -> Result<Option<Facts>, ApplyError> {
        let (namespace, name) = (&claim.namespace, &claim.name);
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let what = || format!("read ResourceClaim {namespace}/{name}");
        let named = read(what, claims.get_opt(name)).await?;
        let Some(object) = named.filter(|it| it.metadata.uid.as_ref() == Some(&claim.uid)) else {
            return Ok(None);
        };
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let what = || format!("read Namespace {namespace}");
        let Some(of_namespace) = read(what, namespaces.get_metadata_opt(namespace)).await? else {
            return Ok(None);
        };
        let mut facts = Facts {
            labels: of_namespace.labels().clone(),
            is_kept: is_kept(object.annotations()),
            pods: Vec::new(),
        };
        let status = object.status.as_ref();
        let reserved = status.and_then(|it| it.reserved_for.as_deref());
        // `reservedFor` may also name a PodGroup.
        let pods = reserved.unwrap_or_default().iter();
        for reserved in pods.filter(|it| it.resource == "pods") {
            let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
            let what = || format!("read Pod {namespace}/{}", reserved.name);
            let pod = read(what, api.get_opt(&reserved.name)).await?;
            let Some(pod) = pod.filter(|it| it.metadata.uid.as_ref() == Some(&reserved.uid)) else {
                continue;
            };
            facts.is_kept |= is_kept(pod.annotations());
            facts.pods.push(pod_facts(&pod));
        }
        Ok(Some(facts))
    }

    /// The claims that an earlier leader called idle, by UID.
    pub async fn noticed(&self) -> Result<BTreeMap<String, Noticed>, ApplyError> {
        let claims: Api<ResourceClaim> = Api::all(self.client.clone());
        let mut params = ListParams::default().limit(PAGE);
        let mut noticed = BTreeMap::new();
        loop {
            let what = || "list ResourceClaims".to_owned();
            let page = read(what, claims.list(&params)).await?;
            noticed.extend(page.items.iter().filter_map(noticed_before));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => return Ok(noticed),
            }
        }
    }
}

fn is_kept(annotations: &BTreeMap<String, String>) -> bool {
    annotations
        .get(IDLE_ANNOTATION)
        .is_some_and(|it| it == KEEP)
}

fn pod_facts(pod: &Pod) -> PodFacts {
    PodFacts {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        claims: claims_of(pod).into_iter().map(str::to_owned).collect(),
        is_ending: pod.metadata.deletion_timestamp.is_some(),
    }
}

/// The UID of a claim that has the condition `Idle`, and what is known of it.
fn noticed_before(claim: &ResourceClaim) -> Option<(String, Noticed)> {
    let devices = claim
        .status
        .as_ref()?
        .devices
        .as_deref()
        .unwrap_or_default();
    let mut watch = Watch::Busy;
    let mut of_claim = BTreeSet::new();
    for device in devices.iter().filter(|it| it.driver == DRIVER) {
        let conditions = device.conditions.as_deref().unwrap_or_default();
        let idle = conditions
            .iter()
            .find(|it| it.type_ == IDLE && it.status == "True");
        if let Some(idle) = idle {
            let since = idle.last_transition_time.0.as_second();
            watch = Watch::Noticed {
                at: Duration::from_secs(u64::try_from(since).unwrap_or_default()),
                told: told(&idle.reason),
            };
        }
        of_claim.insert(Device {
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share_id.clone(),
        });
    }
    if watch == Watch::Busy {
        return None;
    }
    let node = node_of(&of_claim.first()?.pool).to_owned();
    let uid = claim.uid()?;
    let holder = Holder {
        claim: ClaimReference {
            namespace: claim.namespace().unwrap_or_default(),
            name: claim.name_any(),
            uid: uid.clone(),
        },
        devices: of_claim,
        gpus: BTreeSet::new(),
        seen: Activity::NOTHING,
    };
    Some((
        uid,
        Noticed {
            node,
            holder,
            watch,
        },
    ))
}
