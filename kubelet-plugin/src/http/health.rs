//! `/healthz` and `/readyz`, which are open.

use std::path::PathBuf;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::sync::watch;

use crate::kubelet::proto::dra::NodePrepareResourcesRequest;
use crate::kubelet::proto::dra::dra_plugin_client::DraPluginClient;
use crate::kubelet::proto::pluginregistration::InfoRequest;
use crate::kubelet::proto::pluginregistration::registration_client::RegistrationClient;
use crate::kubelet::registration::Registered;
use crate::kubelet::sockets::connect;

/// The time limit for the plugin's answer to itself; the kubelet allows GetInfo as much.
const DEADLINE: Duration = Duration::from_secs(1);

/// What the health checks need.
#[derive(Clone, Debug)]
pub struct Health {
    pub registration_socket: PathBuf,
    pub dra_socket: PathBuf,
    /// Whether the kubelet has registered the plugin.
    pub registered: watch::Receiver<Registered>,
}

pub fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(health)
}

/// Alive: both services answer on their sockets, as to the kubelet.
async fn healthz(State(health): State<Health>) -> (StatusCode, String) {
    let probe = async {
        let registration = connect(&health.registration_socket, "localhost").await;
        let channel = registration.map_err(|e| format!("registration socket: {e}"))?;
        let info = RegistrationClient::new(channel)
            .get_info(InfoRequest {})
            .await;
        info.map_err(|e| format!("GetInfo: {e}"))?;
        let dra = connect(&health.dra_socket, "localhost").await;
        let channel = dra.map_err(|e| format!("DRA socket: {e}"))?;
        let nothing = NodePrepareResourcesRequest { claims: Vec::new() };
        let prepared = DraPluginClient::new(channel)
            .node_prepare_resources(nothing)
            .await;
        prepared.map_err(|e| format!("NodePrepareResources: {e}"))?;
        Ok::<_, String>(())
    };
    match tokio::time::timeout(DEADLINE, probe).await {
        Ok(Ok(())) => (StatusCode::OK, "ok\n".into()),
        Ok(Err(e)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{e}\n")),
        Err(_) => {
            let text = format!(
                "no answer on its own sockets within {} s\n",
                DEADLINE.as_secs()
            );
            (StatusCode::SERVICE_UNAVAILABLE, text)
        }
    }
}

/// Ready: the kubelet has registered the plugin. A node without a driver is ready too: its plugin releases
/// claims and reports on the GpuNode what is missing. Otherwise one such node would use up the DaemonSet's
/// `maxUnavailable` and block every rollout.
async fn readyz(State(health): State<Health>) -> (StatusCode, &'static str) {
    if health.registered.borrow().now {
        (StatusCode::OK, "ok\n")
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the kubelet has not registered the plugin; see the kubelet's log\n",
        )
    }
}
