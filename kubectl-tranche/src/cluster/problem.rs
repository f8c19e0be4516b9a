//! The error of an API server, in one line.

use std::error::Error;

use tranche_api::usage_api::API_VERSION;

use crate::snapshot::{Cause, Gap, Resource};

/// The gap for an error of the client.
#[must_use]
pub fn gap(resource: Resource, error: &kube::Error) -> Gap {
    gap_in(resource, None, error)
}

/// The same, for a list of one namespace.
#[must_use]
pub fn gap_in(resource: Resource, namespace: Option<&str>, error: &kube::Error) -> Gap {
    let cause = cause(error);
    Gap {
        resource,
        cause,
        is_partial: false,
        message: message(resource, namespace, cause, error),
    }
}

fn cause(error: &kube::Error) -> Cause {
    match error {
        kube::Error::Api(status) => match status.code {
            401 => Cause::Unauthenticated,
            403 => Cause::Forbidden,
            404 => Cause::NotServed,
            _ => Cause::Refused,
        },
        kube::Error::SerdeError(_) => Cause::Unreadable,
        kube::Error::Auth(_) => Cause::Unauthenticated,
        kube::Error::Service(_) | kube::Error::HyperError(_) => Cause::Unreachable,
        _ => Cause::Refused,
    }
}

fn message(
    resource: Resource,
    namespace: Option<&str>,
    cause: Cause,
    error: &kube::Error,
) -> String {
    let verb = resource.verb();
    match cause {
        Cause::Forbidden => match namespace {
            Some(namespace) => format!(
                "you may not {verb} {resource} in namespace {namespace}: ask an administrator for the right"
            ),
            // Only these commands' lists can be of one namespace.
            None if matches!(resource, Resource::ResourceClaims | Resource::Pods) => format!(
                "you may not {verb} {resource}: ask an administrator for the right, or show what you may see with --namespace"
            ),
            None => {
                format!("you may not {verb} {resource}: ask an administrator for the right")
            }
        },
        Cause::Unauthenticated => format!(
            "the API server does not accept your credentials ({}): log in again, or choose another --context",
            root(error)
        ),
        Cause::NotServed => not_served(resource),
        Cause::Unreachable => format!(
            "cannot reach the API server ({}): check the cluster's address with `kubectl config view --minify`",
            root(error)
        ),
        Cause::Unreadable => format!(
            "cannot read {resource} ({}): use the kubectl-tranche of the release that the cluster runs; this one is {}",
            root(error),
            env!("CARGO_PKG_VERSION")
        ),
        Cause::Refused => format!(
            "cannot {verb} {resource}: the API server answered {}; try again, and if it stays, ask an administrator",
            root(error)
        ),
    }
}

fn not_served(resource: Resource) -> String {
    match resource {
        Resource::GpuNodes | Resource::SharingPolicies => format!(
            "Tranche is not installed in this cluster: the API server does not serve {resource}; choose another --context, or install the chart"
        ),
        Resource::ResourceSlices
        | Resource::ResourceClaims
        | Resource::DeviceClasses
        | Resource::DeviceTaintRules
        | Resource::ResourceClaimTemplates => format!(
            "the API server does not serve resource.k8s.io/v1, so there are no {}: Tranche needs Kubernetes 1.36 or later",
            resource.as_str().split('.').next().unwrap_or_default()
        ),
        Resource::NodeUsages | Resource::ClaimUsages => format!(
            "the cluster does not serve {API_VERSION}; ask an administrator for a release of Tranche that has it, and for the chart's usageApi.enabled"
        ),
        Resource::Pods | Resource::Nodes | Resource::Prices | Resource::ResourceQuotas => {
            format!(
                "the API server does not serve {resource}: check that --context is a Kubernetes cluster"
            )
        }
    }
}

/// The innermost cause of an error, on one line: the outer ones repeat it.
pub(crate) fn root(error: &(dyn Error + 'static)) -> String {
    let text = if let Some(kube::Error::Api(status)) = error.downcast_ref() {
        format!("{} {}", status.code, status.message)
    } else {
        let mut innermost = error;
        while let Some(source) = innermost.source() {
            innermost = source;
        }
        innermost.to_string()
    };
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
