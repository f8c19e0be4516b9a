//! How a claim is named, and the pods for which it is reserved.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tranche_driver::audit::Pod;
use tranche_driver::journal::ClaimRecord;

/// A claim as the kubelet names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimRef {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The names of a record's claim.
#[must_use]
pub fn claim_of(record: &ClaimRecord) -> ClaimRef {
    let allocation = &record.plan.allocation;
    ClaimRef {
        uid: allocation.uid.clone(),
        namespace: allocation.namespace.clone(),
        name: allocation.name.clone(),
    }
}

/// The pods for which a claim is reserved.
#[must_use]
pub fn pods_of(claim: &ResourceClaim) -> BTreeSet<Pod> {
    let reserved = claim.status.as_ref().and_then(|s| s.reserved_for.as_ref());
    let pods = reserved
        .into_iter()
        .flatten()
        .filter(|it| it.resource == "pods");
    pods.map(|pod| Pod {
        name: pod.name.clone(),
        uid: pod.uid.clone(),
    })
    .collect()
}
