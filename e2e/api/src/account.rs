//! A pod's token.

use anyhow::Context;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::control_plane::ControlPlane;

/// A token of the pod's ServiceAccount that is bound to the pod, as the kubelet mounts it.
pub(crate) async fn token(control_plane: &ControlPlane, pod: &Pod) -> anyhow::Result<String> {
    let account = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.clone())
        .context("the pod's ServiceAccount")?;
    let bound =
        json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid()});
    let request: TokenRequest = serde_json::from_value(
        json!({"spec": {"audiences": [], "expirationSeconds": 86400, "boundObjectRef": bound}}),
    )?;
    let accounts: Api<ServiceAccount> = Api::namespaced(
        control_plane.client().await?,
        &pod.namespace().unwrap_or_default(),
    );
    let answer = accounts
        .create_token_request(&account, &PostParams::default(), &request)
        .await?;
    answer
        .status
        .and_then(|status| status.token)
        .context("a token")
}
