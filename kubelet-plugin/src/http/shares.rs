//! The usage of held shares, read from their accounts at each scrape.
//!
//! There is a series for each held share; it is removed with the share. The numbers come from the
//! account, which the share's tenant can write: they prove nothing.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{Cap, PreparedDevice};
use tranche_node::page::AccountFile;
use tranche_shim_core::AccountSnapshot;

use crate::host::layout::Layout;
use crate::ledger::Ledger;
use crate::share::usage::unix;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ShareLabels {
    pub(super) namespace: String,
    /// The pods that the claim is reserved for, as far as the plugin has read them; joined by
    /// commas.
    pub(super) pod: String,
    pub(super) claim: String,
    pub(super) request: String,
    pub(super) device: String,
    pub(super) gpu_uuid: String,
}

impl ShareLabels {
    /// The labels of a record's device; `pods` are the claim's pods, joined.
    pub(super) fn new(record: &ClaimRecord, device: &PreparedDevice, pods: &str) -> Self {
        let allocation = &record.plan.allocation;
        Self {
            namespace: allocation.namespace.clone(),
            pod: pods.to_owned(),
            claim: allocation.name.clone(),
            request: device.request.clone(),
            device: device.device.clone(),
            gpu_uuid: device.gpu_uuid.clone(),
        }
    }
}

type Bytes = Family<ShareLabels, Gauge<u64, AtomicU64>>;
type Count = Family<ShareLabels, Counter<u64, AtomicU64>>;
type Seconds = Family<ShareLabels, Counter<f64, AtomicU64>>;

/// The metrics of one scrape.
#[derive(Debug, Default)]
struct Shares {
    readable: Bytes,
    memory_limit: Bytes,
    memory_used: Bytes,
    memory_peak: Bytes,
    refused: Count,
    processes: Bytes,
    compute_limit: Family<ShareLabels, Gauge<f64, AtomicU64>>,
    gpu_time: Seconds,
    launches: Count,
    throttled: Seconds,
    last_launch: Family<ShareLabels, Gauge<f64, AtomicU64>>,
}

/// The metrics of all shares that are held now.
pub fn registry(ledger: &Ledger, layout: &Layout) -> Registry {
    let shares = Shares::default();
    for record in ledger.held() {
        let pods = ledger.pods(&record.plan.allocation.uid).join(",");
        for device in &record.plan.devices {
            shares.add(&record, device, &pods, layout);
        }
    }
    shares.registry()
}

impl Shares {
    fn add(&self, record: &ClaimRecord, device: &PreparedDevice, pods: &str, layout: &Layout) {
        let Cap::Share {
            memory,
            cores,
            context_memory,
            ..
        } = device.cap
        else {
            return;
        };
        let allocation = &record.plan.allocation;
        let labels = ShareLabels::new(record, device, pods);
        self.memory_limit.get_or_create(&labels).inc_by(memory);
        let part = f64::from(cores) / 100.0;
        self.compute_limit.get_or_create(&labels).inc_by(part);
        let account = layout.share(&allocation.uid, &device.key).account;
        let copy = AccountFile::open(&account).and_then(|account| account.copy());
        let readable = self.readable.get_or_create(&labels);
        readable.set(u64::from(copy.is_ok()));
        drop(readable);
        if let Ok(copy) = copy {
            self.count(&labels, copy.snapshot(), context_memory);
        }
    }

    fn count(&self, labels: &ShareLabels, account: AccountSnapshot<'_>, context_memory: u64) {
        // The share has room for one context beside its memory, which its programs do not see.
        let counted = |bytes: u64| bytes.saturating_sub(context_memory);
        // Two shares of one GPU for one request have one series, because they also add up for the
        // container.
        let sum = |family: &Bytes, value| {
            family.get_or_create(labels).inc_by(value);
        };
        let add = |family: &Count, value| {
            family.get_or_create(labels).inc_by(value);
        };
        let add_nanos = |family: &Seconds, nanos| {
            family.get_or_create(labels).inc_by(seconds(nanos));
        };
        sum(&self.memory_used, counted(account.used()));
        sum(&self.memory_peak, counted(account.peak()));
        sum(&self.processes, account.processes().count() as u64);
        add(&self.refused, account.refused());
        add(&self.launches, account.launches());
        add_nanos(&self.gpu_time, account.spent_nanos());
        add_nanos(&self.throttled, account.throttled_nanos());
        if let Some(moment) = account.last_launch() {
            let ago = tranche_node::sampler::now().saturating_sub(moment);
            let when = unix().as_secs_f64() - seconds(ago);
            self.last_launch.get_or_create(labels).set(when);
        }
    }

    fn registry(self) -> Registry {
        let mut registry = Registry::with_prefix("tranche_share");
        let r = &mut registry;
        r.register(
            "account_readable",
            "1, or 0 if the share's account page is broken and its usage metrics are missing",
            self.readable,
        );
        r.register_with_unit(
            "memory_limit",
            "Memory limit of all programs of the share together",
            Unit::Bytes,
            self.memory_limit,
        );
        r.register_with_unit(
            "memory_used",
            "Memory that the share's programs hold, as they see it",
            Unit::Bytes,
            self.memory_used,
        );
        r.register_with_unit(
            "memory_peak",
            "The most memory that was reserved for the share's programs at a time, up to 16 MiB per process more than they held",
            Unit::Bytes,
            self.memory_peak,
        );
        r.register(
            "refused_allocations",
            "Allocations that the memory limit refused",
            self.refused,
        );
        r.register("processes", "Processes that use the share", self.processes);
        r.register_with_unit(
            "compute_limit",
            "Part of the GPU's time that the share may use, 1 for the whole",
            Unit::Other("ratio".to_owned()),
            self.compute_limit,
        );
        r.register_with_unit(
            "gpu_time",
            "Estimated GPU time of the share's launches",
            Unit::Seconds,
            self.gpu_time,
        );
        r.register("launches", "Launches of kernels and graphs", self.launches);
        r.register_with_unit(
            "throttled",
            "Time for which launches were delayed, summed over threads",
            Unit::Seconds,
            self.throttled,
        );
        r.register_with_unit(
            "last_launch_timestamp",
            "Unix time of the last launch; missing before the first",
            Unit::Seconds,
            self.last_launch,
        );
        registry
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a microsecond in a century does not matter"
)]
pub(super) fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
