//! The watchdog's last findings: memory in no account, by share, and other memory on the GPUs.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::shares::{ShareLabels, seconds};
use crate::ledger::Ledger;
use crate::share::last_findings::{LastFindings, Watched};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct GpuLabels {
    pub(super) gpu_uuid: String,
}

pub(super) type GpuGauges = Family<GpuLabels, Gauge<u64, AtomicU64>>;

/// The metrics of the last samples. A share whose GPU could not be watched has no series, nor has a
/// GPU without claims.
pub fn registry(ledger: &Ledger, last_findings: &LastFindings) -> Registry {
    let (now, gpus) = last_findings.get();
    let bytes = Family::<ShareLabels, Gauge<u64, AtomicU64>>::default();
    let age = Family::<ShareLabels, Gauge<f64, AtomicU64>>::default();
    for record in ledger.held() {
        let pods = ledger.pods(&record.plan.allocation.uid).join(",");
        for device in record.plan.devices.iter().filter(|d| d.cap.is_share()) {
            let Some(Watched::Yes(findings)) = gpus.get(&device.gpu_uuid) else {
                continue;
            };
            let labels = ShareLabels::new(&record, device, &pods);
            let of_share = || findings.bypasses.iter().filter(|b| b.share == device.key);
            // A process may be reported by itself and with its share: its memory is counted once.
            let mut largest: BTreeMap<_, u64> = BTreeMap::new();
            for bypass in of_share() {
                let known = largest.entry(bypass.process).or_default();
                *known = bypass.bytes.max(*known);
            }
            let since = of_share().map(|bypass| bypass.since).min();
            bytes
                .get_or_create(&labels)
                .inc_by(largest.into_values().fold(0, u64::saturating_add));
            age.get_or_create(&labels)
                .inc_by(since.map_or(0.0, |since| seconds(now.saturating_sub(since))));
        }
    }
    let (watched, withheld) = (GpuGauges::default(), GpuGauges::default());
    let (processes, foreign, unowned) = (
        GpuGauges::default(),
        GpuGauges::default(),
        GpuGauges::default(),
    );
    for (uuid, found) in gpus {
        let labels = GpuLabels { gpu_uuid: uuid };
        let set = |family: &GpuGauges, value: u64| {
            family.get_or_create(&labels).set(value);
        };
        set(&watched, u64::from(matches!(found, Watched::Yes(_))));
        set(&withheld, u64::from(found.is_withheld()));
        if let Watched::Yes(findings) = &found {
            set(&processes, u64::from(findings.foreign.0));
            set(&foreign, findings.foreign.1);
            if let Some(bytes) = findings.unowned {
                set(&unowned, bytes);
            }
        }
    }
    let mut registry = Registry::with_prefix("tranche");
    let r = &mut registry;
    r.register_with_unit(
        "share_bypass",
        "Memory that processes of the share hold and that is not in its account",
        Unit::Bytes,
        bytes,
    );
    r.register_with_unit(
        "share_bypass_age",
        "Time since such memory was first seen, 0 if there is none",
        Unit::Seconds,
        age,
    );
    r.register(
        "gpu_watched",
        "1, or 0 if the GPU's processes cannot be watched, so that memory that bypasses a cap is not detected",
        watched,
    );
    r.register(
        "gpu_foreign_processes",
        "Processes on the GPU that belong to no claim on it",
        processes,
    );
    r.register_with_unit(
        "gpu_foreign_memory",
        "Memory of the GPU that these processes hold",
        Unit::Bytes,
        foreign,
    );
    r.register_with_unit(
        "gpu_unowned_memory",
        "Memory of the GPU that is in use by no process and in no account",
        Unit::Bytes,
        unowned,
    );
    r.register(
        "gpu_withheld",
        "1 while no new claim gets the GPU because memory of it has no owner",
        withheld,
    );
    registry
}
