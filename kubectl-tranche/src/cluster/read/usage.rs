//! The use of GPUs, from the aggregated API `usage.gpu.tranche.dev`: that of all nodes, or that of the claims that the caller may see.
//!
//! A cluster need not have the API, and what stands behind it may be away. So nothing of it stands in the way of the rest.

use std::time::Duration;

use kube::Api;
use kube::api::ListParams;
use tranche_api::usage_api::{API_VERSION, ClaimUsage, NodeUsageObject};

use super::{Cluster, List, list};
use crate::snapshot::{Cause, Gap, Resource, Scope};

/// How long it may take. The rest of a result does not wait longer for it: a node that is dead takes 2 s, and 64 are asked at a time.
const DEADLINE: Duration = Duration::from_secs(15);
/// What grants the right to see all nodes.
const READER: &str = "tranche-usage-reader";

/// What was read.
#[derive(Default)]
pub(super) struct Usages {
    pub(super) nodes: Vec<NodeUsageObject>,
    pub(super) claims: Vec<ClaimUsage>,
    pub(super) gap: Option<Gap>,
}

impl Cluster {
    /// Of all GPUs for all namespaces; of its claims for one.
    pub(super) async fn usages(&self, is_asked: bool, scope: &Scope) -> Usages {
        if !is_asked {
            return Usages::default();
        }
        let read = tokio::time::timeout(DEADLINE, self.usages_of(scope));
        read.await.unwrap_or_else(|_| Usages {
            gap: Some(gap(
                Cause::Unreachable,
                format!(
                    "usage is not shown: {API_VERSION} did not answer within {} s; see the log of Tranche's controller",
                    DEADLINE.as_secs()
                ),
            )),
            ..Usages::default()
        })
    }

    async fn usages_of(&self, scope: &Scope) -> Usages {
        if let Scope::Namespace(namespace) = scope {
            let claims = self.claim_usages(Some(namespace)).await;
            let gap = claims.gap.as_ref().map(unknown);
            return Usages {
                claims: claims.objects,
                gap,
                ..Usages::default()
            };
        }
        let api = Api::<NodeUsageObject>::all(self.client());
        let nodes = list(Resource::NodeUsages, &api, &ListParams::default()).await;
        match nodes.gap {
            None => Usages {
                nodes: nodes.objects,
                ..Usages::default()
            },
            Some(gap) if gap.cause == Cause::Forbidden => self.usages_of_claims(&gap).await,
            Some(gap) => Usages {
                gap: Some(unknown(&gap)),
                ..Usages::default()
            },
        }
    }

    /// For a caller who may not see nodes.
    async fn usages_of_claims(&self, forbidden: &Gap) -> Usages {
        let mut claims = self.claim_usages(None).await;
        let mut whose = "all claims".to_owned();
        if claims.gap.is_some() {
            claims = self.claim_usages(Some(&self.namespace)).await;
            whose = format!("claims in {}", self.namespace);
        }
        let gap = match claims.gap {
            Some(_) => unknown(forbidden),
            None => Gap {
                is_partial: true,
                ..gap(
                    Cause::Forbidden,
                    format!(
                        "usage is shown of {whose} only, and not of GPUs: you may not list {}; ask an administrator for the ClusterRole {READER}",
                        Resource::NodeUsages
                    ),
                )
            },
        };
        Usages {
            claims: claims.objects,
            gap: Some(gap),
            ..Usages::default()
        }
    }

    async fn claim_usages(&self, namespace: Option<&str>) -> List<ClaimUsage> {
        let api = match namespace {
            Some(namespace) => Api::namespaced(self.client(), namespace),
            None => Api::all(self.client()),
        };
        list(Resource::ClaimUsages, &api, &ListParams::default()).await
    }
}

fn gap(cause: Cause, message: String) -> Gap {
    Gap {
        resource: Resource::NodeUsages,
        cause,
        is_partial: false,
        message,
    }
}

/// The gap of all use, from that of a list.
fn unknown(of_list: &Gap) -> Gap {
    let why = match of_list.cause {
        Cause::Forbidden => format!(
            "you may not list {}; ask an administrator for the ClusterRole {READER}, or for view in your namespace",
            of_list.resource
        ),
        // Wrong credentials are refused for the other lists, too.
        Cause::Unauthenticated => format!(
            "{API_VERSION} does not believe the API server; see the log of Tranche's controller"
        ),
        Cause::Refused => format!(
            "{}; see `kubectl get apiservice v1alpha1.usage.gpu.tranche.dev`",
            of_list.message
        ),
        Cause::NotServed | Cause::Unreachable | Cause::Unreadable => of_list.message.clone(),
    };
    gap(of_list.cause, format!("usage is not shown: {why}"))
}
