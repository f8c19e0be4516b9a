//! `/healthz` and `/readyz`, which are open, and `/metrics`, which needs authorization.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tranche_serving::access::Access;
use tranche_serving::server::ServeError;

use crate::metrics::Metrics;

/// How long the controller's loop may be silent. It reports that it is alive every few seconds.
const SILENCE: Duration = Duration::from_mins(1);

/// The controller's health, as its loop last reported.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<Pulse>>);

#[derive(Clone, Copy, Debug, Default)]
struct Pulse {
    at: Option<Instant>,
    synced: bool,
}

impl Health {
    /// Reports that the loop is alive; `synced` says whether its index is complete.
    pub fn beat(&self, synced: bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Pulse {
            at: Some(Instant::now()),
            synced,
        };
    }

    fn pulse(&self) -> Pulse {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves health until `stop`.
pub async fn serve(
    endpoint: SocketAddr,
    health: Health,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = tranche_serving::listen(endpoint).await?;
    let router = Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(health);
    axum::serve(listener, router)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

/// Serves metrics to those whom `access` admits, until `stop`.
pub async fn serve_metrics(
    endpoint: SocketAddr,
    access: Access,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let listener = tranche_serving::listen(endpoint).await?;
    let router = Router::new()
        .route(tranche_serving::access::PATH, get(text))
        .with_state(metrics);
    tranche_serving::server::serve(listener, access, router, stop).await
}

async fn healthz(State(health): State<Health>) -> impl IntoResponse {
    match health.pulse().at {
        // A loop that has not reported yet is starting; the probes' settings limit that time.
        None => (StatusCode::OK, "starting".to_owned()),
        Some(at) if at.elapsed() < SILENCE => (StatusCode::OK, "ok".to_owned()),
        Some(at) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("the loop has been silent for {} s", at.elapsed().as_secs()),
        ),
    }
}

async fn readyz(State(health): State<Health>) -> impl IntoResponse {
    if health.pulse().synced {
        (StatusCode::OK, "ok")
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the first lists are not complete",
        )
    }
}

async fn text(State(metrics): State<Metrics>) -> impl IntoResponse {
    match metrics.text() {
        Ok(text) => (
            StatusCode::OK,
            [(
                CONTENT_TYPE,
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
            )],
            text,
        ),
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(CONTENT_TYPE, "text/plain")],
            error.to_string(),
        ),
    }
}
