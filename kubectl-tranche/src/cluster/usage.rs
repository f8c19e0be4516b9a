//! Reads the use of GPUs from the aggregated API `usage.gpu.tranche.dev`: for all nodes, or for the claims that the caller may see.
//!
//! A cluster need not have the API, and the server behind it may be down. So no error here stops the rest.

use std::time::Duration;

use kube::Api;
use kube::api::ListParams;
use tranche_api::usage_api::{API_VERSION, ClaimUsage, NodeUsageObject};

use super::Cluster;
use super::read::each_as;
use crate::snapshot::{Cause, Gap, Resource, Scope};
use crate::usage::reading::{ClaimReading, NodeReading};
use crate::usage::{Usage, UsageResult};

/// The longest that a result waits for the use: the server waits 2 s for a dead node, and asks 64 nodes at a time.
const DEADLINE: Duration = Duration::from_secs(15);
/// Objects in a page. One page is in memory at a time; a full node takes 70 KB.
const PAGE: u32 = 250;
/// The ClusterRole that grants the right to see all nodes.
const READER: &str = "tranche-usage-reader";

impl Cluster {
    /// The use of all GPUs for all namespaces, or of its claims for one namespace.
    pub async fn usage(&self, scope: &Scope) -> UsageResult {
        let read = tokio::time::timeout(DEADLINE, self.read_usage(scope)).await;
        read.unwrap_or_else(|_| {
            Err(format!(
                "usage is not shown: {API_VERSION} did not answer within {} s; see the log of Tranche's usage API",
                DEADLINE.as_secs()
            ))
        })
    }

    async fn read_usage(&self, scope: &Scope) -> UsageResult {
        if let Scope::Namespace(namespace) = scope {
            let of_claims = self.usage_of_claims(Some(namespace)).await;
            return of_claims.map_err(|gap| unknown(&gap));
        }
        let mut usage = Usage::default();
        let api = Api::<NodeUsageObject>::all(self.client());
        let add = |node: NodeReading| usage.add_node(&node);
        let read = each_as(Resource::NodeUsages, &api, pages(), add).await;
        match read {
            Ok(()) => Ok(usage),
            Err(gap) if gap.cause == Cause::Forbidden => self.what_may_be_seen(&gap).await,
            Err(gap) => Err(unknown(&gap)),
        }
    }

    /// The use for a caller who may not see nodes.
    async fn what_may_be_seen(&self, forbidden: &Gap) -> UsageResult {
        let (whose, of_claims) = match self.usage_of_claims(None).await {
            Ok(all) => ("all claims".to_owned(), Ok(all)),
            Err(_) => (
                format!("claims in {}", self.namespace),
                self.usage_of_claims(Some(&self.namespace)).await,
            ),
        };
        let mut usage = of_claims.map_err(|_| unknown(forbidden))?;
        usage.partial = Some(format!(
            "usage is shown of {whose} only, and not of GPUs: you may not list {}; ask an administrator for the ClusterRole {READER}",
            forbidden.resource
        ));
        Ok(usage)
    }

    async fn usage_of_claims(&self, namespace: Option<&str>) -> Result<Usage, Gap> {
        let api = match namespace {
            Some(namespace) => Api::<ClaimUsage>::namespaced(self.client(), namespace),
            None => Api::all(self.client()),
        };
        let mut usage = Usage::default();
        let add = |claim: ClaimReading| usage.add_claim(&claim);
        each_as(Resource::ClaimUsages, &api, pages(), add).await?;
        Ok(usage)
    }
}

fn pages() -> ListParams {
    ListParams::default().limit(PAGE)
}

/// Why no use is known, from the gap of a list.
fn unknown(of_list: &Gap) -> String {
    let why = match of_list.cause {
        Cause::Forbidden => format!(
            "you may not list {}; ask an administrator for the ClusterRole {READER}, or for view in your namespace",
            of_list.resource
        ),
        // The other lists refuse wrong credentials, too.
        Cause::Unauthenticated => format!(
            "{API_VERSION} does not believe the API server; see the log of Tranche's usage API"
        ),
        Cause::Refused => format!(
            "{}; see `kubectl get apiservice v1alpha1.usage.gpu.tranche.dev`",
            of_list.message
        ),
        Cause::NotServed | Cause::Unreachable | Cause::Unreadable => of_list.message.clone(),
    };
    format!("usage is not shown: {why}")
}
