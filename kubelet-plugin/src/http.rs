//! The content of `/metrics` and `/usage`, which need authorization; [`health`] answers without.
//!
//! `docs/reference/metrics.md` lists the metrics; a test compares that list.

mod claims;
mod dcgm;
mod faults;
pub mod format;
pub mod health;
mod shares;
#[cfg(test)]
mod tests;
mod watchdog;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use tokio::sync::watch;
use tranche_api::gpu_node::Inventory;
use tranche_api::usage::NodeUsage;
use tranche_driver::health::Verdicts;
use tranche_node::nvml::Hangs;

use self::format::Format;
use crate::gpu::driver_state::DriverState;
use crate::health::Board;
use crate::host::layout::Layout;
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::share::last_findings::LastFindings;
use crate::share::usage::Usage;

/// What a scrape needs.
#[derive(Clone, Debug)]
pub struct Scrape {
    /// Whether there is a driver.
    pub driver: watch::Receiver<DriverState>,
    /// Which calls of the driver do not return.
    pub hangs: Hangs,
    pub metrics: Arc<Metrics>,
    pub ledger: Arc<Ledger>,
    /// The paths of its pages.
    pub layout: Layout,
    pub last_findings: Arc<LastFindings>,
    /// The verdicts on the GPUs' health.
    pub health: Arc<Board>,
    /// Who uses the GPUs.
    pub usage: Arc<Usage>,
    /// Whether the GPUs' sensors have series, under the names of dcgm-exporter.
    pub gpu_sensors: bool,
}

/// The paths `/metrics` and `/usage`. They name tenants' pods and claims, so they need authorization.
pub fn router(scrape: Scrape) -> Router {
    Router::new()
        .route(tranche_serving::access::PATH, get(metrics))
        .route(tranche_api::usage::PATH, get(usage))
        .with_state(scrape)
}

async fn metrics(State(scrape): State<Scrape>, headers: HeaderMap) -> impl IntoResponse {
    let ready = match &*scrape.driver.borrow() {
        DriverState::Ready(ready) => Some(Arc::clone(ready)),
        DriverState::Unknown | DriverState::Absent(_) => None,
    };
    let is_ready = ready.as_ref().is_some_and(|ready| ready.hang.is_none());
    scrape.metrics.driver_ready.set(i64::from(is_ready));
    scrape.metrics.set_hangs(&scrape.hangs.now());
    let accept = headers.get(header::ACCEPT).and_then(|it| it.to_str().ok());
    let format = Format::negotiate(accept);
    let work = tokio::task::spawn_blocking(move || {
        let inventory = ready.as_ref().map(|ready| &ready.inventory);
        let usage = scrape.usage.get();
        format.convert(exposition(
            &scrape.metrics,
            &scrape.ledger,
            &scrape.layout,
            &scrape.last_findings,
            &usage,
            &Known {
                inventory,
                verdicts: scrape.health.now().as_deref(),
                sensors: scrape.gpu_sensors,
            },
        ))
    });
    // Fails only at shutdown.
    let text = work.await.unwrap_or_default();
    ([(header::CONTENT_TYPE, format.content_type())], text)
}

async fn usage(State(scrape): State<Scrape>) -> impl IntoResponse {
    let work = tokio::task::spawn_blocking(move || serde_json::to_vec(&*scrape.usage.get()));
    // Fails only at shutdown: a usage is text and numbers.
    let json = work.await.ok().and_then(Result::ok).unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], json)
}

/// What is known of the GPUs, apart from their usage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known<'a> {
    pub inventory: Option<&'a Inventory>,
    /// The verdicts on their health.
    pub verdicts: Option<&'a Verdicts>,
    /// Whether the sensors of whole GPUs are among the metrics.
    pub sensors: bool,
}

/// All metrics in the text format of OpenMetrics. Held claims and their usage are counted now,
/// from the account of every held share; `usage` is what NVML said.
#[must_use]
pub fn exposition(
    metrics: &Metrics,
    ledger: &Ledger,
    layout: &Layout,
    last_findings: &LastFindings,
    usage: &NodeUsage,
    gpus: &Known<'_>,
) -> String {
    let (claims, unreadable) = (ledger.held().len(), ledger.refused().len());
    metrics.set_held(&ledger.devices(), claims, unreadable);
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode_registry(&mut text, metrics.registry());
    let _ = encode_registry(&mut text, &shares::registry(ledger, layout));
    let _ = encode_registry(&mut text, &watchdog::registry(ledger, last_findings));
    let _ = encode_registry(&mut text, &faults::registry(gpus.verdicts));
    let _ = encode_registry(&mut text, &claims::registry(usage, gpus.inventory, ledger));
    let _ = encode_registry(&mut text, &dcgm::registry(usage, gpus.sensors));
    let _ = encode_eof(&mut text);
    text
}
