//! The claims of a pod.

use k8s_openapi::api::core::v1::Pod;

/// The names of a pod's claims, in its namespace: those that it names, those that were created for it, and the one for
/// its extended resources.
#[must_use]
pub fn claims_of(pod: &Pod) -> Vec<&str> {
    let spec = pod.spec.as_ref();
    let named = spec
        .and_then(|it| it.resource_claims.as_deref())
        .unwrap_or_default()
        .iter()
        .filter_map(|it| it.resource_claim_name.as_deref());
    let status = pod.status.as_ref();
    let made = status
        .and_then(|it| it.resource_claim_statuses.as_deref())
        .unwrap_or_default()
        .iter()
        .filter_map(|it| it.resource_claim_name.as_deref());
    let extended = status
        .and_then(|it| it.extended_resource_claim_status.as_ref())
        .map(|it| it.resource_claim_name.as_str());
    named.chain(made).chain(extended).collect()
}
