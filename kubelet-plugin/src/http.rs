//! `/healthz`, `/readyz` and `/metrics`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::sync::watch;

use crate::driver_state::DriverState;
use crate::layout::Layout;
use crate::metrics::Metrics;
use crate::preparer::Preparer;
use crate::proto::dra::NodePrepareResourcesRequest;
use crate::proto::dra::dra_plugin_client::DraPluginClient;
use crate::proto::pluginregistration::InfoRequest;
use crate::proto::pluginregistration::registration_client::RegistrationClient;
use crate::registration::Registered;
use crate::sockets::connect;
use crate::watchdog::Board;

/// How long the plugin may take to answer itself; the kubelet allows GetInfo as much.
const DEADLINE: Duration = Duration::from_secs(1);

/// What is looked at.
#[derive(Clone, Debug)]
pub struct Health {
    /// The registration socket.
    pub registration_socket: PathBuf,
    /// The DRA socket.
    pub dra_socket: PathBuf,
    /// Whether the kubelet took the plugin.
    pub registered: watch::Receiver<Registered>,
    /// Whether there is a driver.
    pub driver: watch::Receiver<DriverState>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What is held.
    pub preparer: Arc<Preparer>,
    /// Where its pages lie.
    pub layout: Layout,
    /// What the watchdog found.
    pub board: Arc<Board>,
}

/// The three paths.
pub fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(health)
}

/// Alive: both services answer on their sockets, as the kubelet would ask them.
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

/// Ready: registered with the kubelet, and a driver to work with.
async fn readyz(State(health): State<Health>) -> (StatusCode, String) {
    let registered = health.registered.borrow().now;
    let driver = match &*health.driver.borrow() {
        DriverState::Ready(_) => None,
        DriverState::Unknown => Some("the driver was not looked at yet".to_owned()),
        DriverState::Absent(why) => Some(why.to_string()),
    };
    match (registered, driver) {
        (true, None) => (StatusCode::OK, "ok\n".into()),
        (false, None) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "the kubelet has not registered the plugin; see the kubelet's log\n".into(),
        ),
        (_, Some(why)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

async fn metrics(State(health): State<Health>) -> impl IntoResponse {
    let ready = matches!(&*health.driver.borrow(), DriverState::Ready(_));
    health.metrics.driver_ready.set(i64::from(ready));
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let (metrics, ledger) = (health.metrics, Arc::clone(health.preparer.ledger()));
    let text =
        tokio::task::spawn_blocking(move || metrics.encode(&ledger, &health.layout, &health.board))
            .await;
    // It fails only at shutdown.
    let text = text.unwrap_or_default();
    ([(header::CONTENT_TYPE, content_type)], text)
}
