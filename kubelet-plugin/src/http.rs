//! `/healthz` and `/readyz`, for everybody, and what is behind `/metrics`, which is for a few.

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
}

/// The two paths.
pub fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
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

/// Ready: registered with the kubelet, which is all that a release can be blamed for. A node without a
/// driver is ready too: its plugin releases claims and says on the GpuNode what is missing. Were it not, one
/// such node would use up the DaemonSet's `maxUnavailable` for ever and keep all others from an update.
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

/// What Prometheus reads.
#[derive(Clone, Debug)]
pub struct Scrape {
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

/// The path `/metrics`. It names tenants' pods and claims, so not everybody may be let to it.
pub fn metrics_router(scrape: Scrape) -> Router {
    Router::new()
        .route(tranche_metrics::PATH, get(metrics))
        .with_state(scrape)
}

async fn metrics(State(scrape): State<Scrape>) -> impl IntoResponse {
    let ready = matches!(&*scrape.driver.borrow(), DriverState::Ready(_));
    scrape.metrics.driver_ready.set(i64::from(ready));
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let (metrics, ledger) = (scrape.metrics, Arc::clone(scrape.preparer.ledger()));
    let text =
        tokio::task::spawn_blocking(move || metrics.encode(&ledger, &scrape.layout, &scrape.board))
            .await;
    // It fails only at shutdown.
    let text = text.unwrap_or_default();
    ([(header::CONTENT_TYPE, content_type)], text)
}
