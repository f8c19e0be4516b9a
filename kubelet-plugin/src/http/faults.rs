//! The GPUs' health.

use std::sync::atomic::AtomicI64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tranche_driver::health::{Status, Verdicts};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    gpu_uuid: String,
    reason: String,
}

/// A GPU that is not watched has no series.
pub fn registry(verdicts: Option<&Verdicts>) -> Registry {
    let healthy = Family::<Labels, Gauge<i64, AtomicI64>>::default();
    for (uuid, verdict) in verdicts.into_iter().flatten() {
        let value = match verdict.status {
            Status::Healthy => 1,
            Status::Unhealthy => 0,
            Status::Unknown => continue,
        };
        let labels = Labels {
            gpu_uuid: uuid.clone(),
            reason: verdict.reason.clone(),
        };
        healthy.get_or_create(&labels).set(value);
    }
    let mut registry = Registry::with_prefix("tranche");
    registry.register(
        "gpu_healthy",
        "1, or 0 while the GPU has a fault; the reason is the worst fault",
        healthy,
    );
    registry
}
