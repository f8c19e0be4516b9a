//! The claims of a namespace, page by page, with what they use.
//!
//! The API server says which claims there are and from which nodes each has devices. Only these nodes are asked. If a node does not
//! answer, its claims' rows say so. What a node tells about a claim that has no device there is not shown.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, Client};
use tranche_api::usage_api::DeviceUsage;
use tranche_node_usage::reader::AT_ONCE;

use crate::nodes::Nodes;
use crate::request::{Refusal, Wanted};
use crate::resources::{Claim, Object, devices_of};

/// Claims in one page. A page is held whole.
const PAGE: u32 = 500;
/// How long the API server may take for a page.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub struct Claims {
    client: Client,
    nodes: Arc<Nodes>,
}

impl std::fmt::Debug for Claims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Claims")
    }
}

/// A page of a list.
#[derive(Debug)]
pub struct Page {
    pub objects: Vec<Object>,
    /// The token for the next one; empty after the last.
    pub next: String,
}

impl Claims {
    /// Reads claims with `client`, and what they use from `nodes`.
    #[must_use]
    pub fn new(client: Client, nodes: Arc<Nodes>) -> Self {
        Self { client, nodes }
    }

    /// The page of the wanted list that begins at `token`.
    pub async fn page(&self, wanted: &Wanted, token: &str) -> Result<Page, Refusal> {
        let api: Api<ResourceClaim> = match &wanted.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let fields = match &wanted.name {
            Some(name) => format!("metadata.name={name}"),
            None => wanted.fields.clone(),
        };
        let limit = if wanted.limit == 0 {
            PAGE
        } else {
            wanted.limit.min(PAGE)
        };
        let mut params = ListParams::default()
            .limit(limit)
            .fields(&fields)
            .labels(&wanted.labels);
        params.continue_token = (!token.is_empty()).then(|| token.to_owned());
        let listed = tokio::time::timeout(DEADLINE, api.list(&params))
            .await
            .map_err(|_| {
                let limit = DEADLINE.as_secs();
                let message = format!("the ResourceClaims: no answer within {limit} s");
                Refusal::new(504, "Timeout", message)
            })?
            .map_err(|error| refusal(&error))?;
        let claims = listed.items.into_iter().filter_map(Claim::new).collect();
        Ok(Page {
            objects: self.objects(claims).await,
            next: listed.metadata.continue_.unwrap_or_default(),
        })
    }

    async fn objects(&self, claims: Vec<Claim>) -> Vec<Object> {
        let mut uids = BTreeMap::<String, BTreeSet<String>>::new();
        for claim in &claims {
            for node in &claim.nodes {
                uids.entry(node.clone())
                    .or_default()
                    .insert(claim.uid.clone());
            }
        }
        let nodes = &self.nodes;
        let mut answers = futures::stream::iter(uids)
            .map(|(node, uids)| async move { (nodes.usage(&node).await, uids) })
            .buffer_unordered(AT_ONCE);
        let mut devices = BTreeMap::<String, Vec<DeviceUsage>>::new();
        let mut problems = BTreeMap::<String, BTreeSet<String>>::new();
        while let Some((usage, uids)) = answers.next().await {
            let of_claims = match usage {
                Ok(usage) => devices_of(usage, &uids),
                Err(problem) => {
                    let of_all = uids.into_iter().map(|uid| (uid, Err(problem.clone())));
                    of_all.collect()
                }
            };
            for (uid, device) in of_claims {
                match device {
                    Ok(device) => devices.entry(uid).or_default().push(device),
                    Err(problem) => {
                        problems.entry(uid).or_default().insert(problem);
                    }
                }
            }
        }
        claims
            .into_iter()
            .map(|claim| {
                let devices = devices.remove(&claim.uid).unwrap_or_default();
                let problems = problems.remove(&claim.uid).unwrap_or_default();
                claim.object(devices, problems)
            })
            .collect()
    }
}

/// Passes on why the API server refuses a list: an unknown selector, a `continue` that has expired.
fn refusal(error: &kube::Error) -> Refusal {
    match error {
        kube::Error::Api(status) => {
            let (code, reason) = match status.code {
                400 => (400, "BadRequest"),
                410 => (410, "Expired"),
                429 => (429, "TooManyRequests"),
                _ => (503, "ServiceUnavailable"),
            };
            Refusal::new(
                code,
                reason,
                format!("the ResourceClaims: {}", status.message),
            )
        }
        error => Refusal::new(
            503,
            "ServiceUnavailable",
            format!("the ResourceClaims: {error}"),
        ),
    }
}
