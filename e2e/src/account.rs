//! ServiceAccounts with rights, and their tokens: users other than the suite's administrator.

use anyhow::Context;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::Case;

/// The token of a new ServiceAccount.
pub async fn create(client: &Client, namespace: &str, name: &str) -> anyhow::Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let account = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    accounts.create(&PostParams::default(), &account).await?;
    token(client, namespace, name, None).await
}

/// A token of a ServiceAccount for the API server, bound to `pod` or to no pod.
pub async fn token(
    client: &Client,
    namespace: &str,
    name: &str,
    pod: Option<&Pod>,
) -> anyhow::Result<String> {
    let mut object = json!({"spec": {"audiences": [], "expirationSeconds": 600}});
    if let Some(pod) = pod {
        object["spec"]["boundObjectRef"] =
            json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid()});
    }
    let request: TokenRequest = serde_json::from_value(object)?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let answer = accounts
        .create_token_request(name, &PostParams::default(), &request)
        .await?;
    let status = answer.status.context("a status")?;
    status.token.context("a token")
}

/// Binds a ServiceAccount to a ClusterRole in the whole cluster, until the test ends.
pub async fn bind(case: &Case, namespace: &str, account: &str, role: &str) -> anyhow::Result<()> {
    let bindings: Api<ClusterRoleBinding> = Api::all(case.client.clone());
    let name = case.unique(role);
    let binding = binding(&name, ("ClusterRole", role), namespace, account);
    let binding = serde_json::from_value(binding)?;
    bindings.create(&PostParams::default(), &binding).await?;
    case.afterwards("the binding", async move {
        bindings.delete(&name, &DeleteParams::default()).await?;
        Ok(())
    });
    Ok(())
}

/// Binds a ServiceAccount to a role, given by kind and name, in its own namespace.
pub async fn bind_here(
    case: &Case,
    namespace: &str,
    account: &str,
    role: (&str, &str),
) -> anyhow::Result<()> {
    let bindings: Api<RoleBinding> = Api::namespaced(case.client.clone(), namespace);
    let binding = serde_json::from_value(binding(account, role, namespace, account))?;
    bindings.create(&PostParams::default(), &binding).await?;
    Ok(())
}

fn binding(name: &str, (kind, role): (&str, &str), namespace: &str, account: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    })
}
