//! Follows the ConfigMap that says who the API server is: authorities are renewed.

use std::sync::Arc;
use std::sync::PoisonError;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};

use crate::front_proxy::{NAME, NAMESPACE, Trust};
use crate::server::CurrentTrust;

/// Follows the ConfigMap in a task. A ConfigMap that cannot be used changes nothing.
#[must_use]
pub fn follow(client: Client) -> CurrentTrust {
    let current = CurrentTrust::default();
    let this = Arc::clone(&current);
    let api: Api<ConfigMap> = Api::namespaced(client, NAMESPACE);
    tokio::spawn(async move {
        let mut seen = watch_object(api, NAME).default_backoff().boxed();
        while let Some(seen) = seen.next().await {
            match seen {
                Ok(Some(object)) => match Trust::new(&object.data.unwrap_or_default()) {
                    Ok(trust) => {
                        tracing::debug!(?trust, "read who the API server is");
                        *this.lock().unwrap_or_else(PoisonError::into_inner) =
                            Some(Arc::new(trust));
                    }
                    Err(error) => tracing::error!(%error, "usage.gpu.tranche.dev cannot be served"),
                },
                Ok(None) => tracing::error!(
                    "usage.gpu.tranche.dev cannot be served: there is no ConfigMap {NAMESPACE}/{NAME}: the API server has no aggregator"
                ),
                Err(error) => tracing::warn!(
                    %error,
                    "the watch of ConfigMap {NAMESPACE}/{NAME} failed and is retried: check the RoleBinding to extension-apiserver-authentication-reader"
                ),
            }
        }
    });
    current
}
