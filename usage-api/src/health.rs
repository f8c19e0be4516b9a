//! `/healthz` and `/readyz`, on a port of their own: a client that takes all connections of the API's port cannot have the pod
//! restarted.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::nodes::Nodes;
use crate::server::CurrentTrust;

/// What a replica needs before it can answer.
#[derive(Clone, Debug)]
pub struct Health {
    /// Who the API server is.
    pub trust: CurrentTrust,
    /// Where the node plugins are.
    pub nodes: Arc<Nodes>,
}

/// Serves health until `stop`.
pub async fn serve(
    endpoint: SocketAddr,
    health: Health,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = TcpListener::bind(endpoint).await?;
    axum::serve(listener, router(health))
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(readyz))
        .with_state(health)
}

async fn readyz(State(health): State<Health>) -> (StatusCode, &'static str) {
    let trust = health.trust.lock().unwrap_or_else(PoisonError::into_inner);
    if trust.is_none() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "the API server's certificate authority is not known yet; see the usage API's log",
        );
    }
    if health.nodes.names().is_none() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "the node plugins are not listed yet",
        );
    }
    (StatusCode::OK, "ok")
}
