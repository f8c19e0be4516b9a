//! `/healthz` and `/readyz`, which are open, and the content of `/metrics`, which is not.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::sync::watch;

use crate::driver_state::DriverState;
use crate::layout::Layout;
use crate::metrics::Metrics;
use crate::metrics::format::Format;
use crate::preparer::Preparer;
use crate::proto::dra::NodePrepareResourcesRequest;
use crate::proto::dra::dra_plugin_client::DraPluginClient;
use crate::proto::pluginregistration::InfoRequest;
use crate::proto::pluginregistration::registration_client::RegistrationClient;
use crate::registration::Registered;
use crate::sockets::connect;
use crate::usage::Usage;
use crate::watchdog::Board;

/// The time limit for the plugin's answer to itself; the kubelet allows GetInfo as much.
const DEADLINE: Duration = Duration::from_secs(1);

/// What the health checks need.
#[derive(Clone, Debug)]
pub struct Health {
    /// The registration socket.
    pub registration_socket: PathBuf,
    /// The DRA socket.
    pub dra_socket: PathBuf,
    /// Whether the kubelet has registered the plugin.
    pub registered: watch::Receiver<Registered>,
}

/// The two paths.
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

/// What a scrape needs.
#[derive(Clone, Debug)]
pub struct Scrape {
    /// Whether there is a driver.
    pub driver: watch::Receiver<DriverState>,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// The held claims.
    pub preparer: Arc<Preparer>,
    /// The paths of its pages.
    pub layout: Layout,
    /// The watchdog's findings.
    pub board: Arc<Board>,
    /// Who uses the GPUs.
    pub usage: Arc<Usage>,
}

/// The paths `/metrics` and `/usage`. They name tenants' pods and claims, so they need authorization.
pub fn metrics_router(scrape: Scrape) -> Router {
    Router::new()
        .route(tranche_metrics::PATH, get(metrics))
        .route(tranche_api::usage::PATH, get(usage))
        .with_state(scrape)
}

async fn metrics(State(scrape): State<Scrape>, headers: HeaderMap) -> impl IntoResponse {
    let ready = match &*scrape.driver.borrow() {
        DriverState::Ready(ready) => Some(Arc::clone(ready)),
        DriverState::Unknown | DriverState::Absent(_) => None,
    };
    scrape.metrics.driver_ready.set(i64::from(ready.is_some()));
    let accept = headers.get(header::ACCEPT).and_then(|it| it.to_str().ok());
    let format = Format::negotiate(accept);
    let text = tokio::task::spawn_blocking(move || {
        let inventory = ready.as_ref().map(|ready| &ready.inventory);
        let usage = scrape.usage.get();
        let ledger = scrape.preparer.ledger();
        let (layout, board) = (&scrape.layout, &scrape.board);
        let text = scrape
            .metrics
            .encode(ledger, layout, board, &usage, inventory);
        format.convert(text)
    });
    // Fails only at shutdown.
    let text = text.await.unwrap_or_default();
    ([(header::CONTENT_TYPE, format.content_type())], text)
}

async fn usage(State(scrape): State<Scrape>) -> impl IntoResponse {
    let json = tokio::task::spawn_blocking(move || serde_json::to_vec(&*scrape.usage.get()));
    // Fails only at shutdown: a usage is text and numbers.
    let json = json.await.ok().and_then(Result::ok).unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], json)
}
