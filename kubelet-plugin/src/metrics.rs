//! What the parts of the plugin count while they work. [`http`](crate::http) adds what is read at each scrape.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tranche_api::Tier;
use tranche_node::nvml::{EVENTS, Hang};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    Prepare,
    Unprepare,
}

impl Method {
    /// The name in gRPC.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prepare => "NodePrepareResources",
            Self::Unprepare => "NodeUnprepareResources",
        }
    }
}

impl EncodeLabelValue for Method {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.as_str().encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: Method,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabels {
    method: Method,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    tier: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    /// A UUID, or empty.
    gpu: String,
}

/// Seconds: from a tenth of the target to the kubelet's deadline.
const BUCKETS: [f64; 14] = [
    0.0002, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.1, 0.5, 1.0, 5.0, 15.0, 45.0,
];

/// The plugin's metrics. All names begin with `tranche_`, except those of DCGM.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter<u64, AtomicU64>>,
    durations: Family<MethodLabels, Histogram, fn() -> Histogram>,
    devices: Family<TierLabels, Gauge<i64, AtomicI64>>,
    claims: Gauge,
    unreadable_journals: Gauge,
    /// The last written registration epoch.
    pub epoch: Gauge,
    /// Registrations with the kubelet in the life of this process.
    pub registrations: Counter,
    /// Claims released because they were gone.
    pub orphans: Counter,
    /// Processes that died with memory of their share.
    pub dead_processes: Counter,
    /// Processes that were ended because they bypassed their share's cap.
    pub bypasses_ended: Counter,
    /// Failed attempts to write the audit trail.
    pub audit_write_failures: Counter,
    /// Entries of the audit trail that were dropped.
    pub audit_entries_lost: Counter,
    /// 1 while there is a usable driver.
    pub driver_ready: Gauge,
    /// GPUs with shares for which NVML does not report utilization by process.
    pub gpus_without_process_utilization: Gauge,
    hanging_calls: Family<GpuLabels, Gauge<i64, AtomicI64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(BUCKETS);
        let mut metrics = Self {
            registry: Registry::with_prefix("tranche"),
            requests: Family::default(),
            durations: Family::new_with_constructor(histogram),
            devices: Family::default(),
            claims: Gauge::default(),
            unreadable_journals: Gauge::default(),
            epoch: Gauge::default(),
            registrations: Counter::default(),
            orphans: Counter::default(),
            dead_processes: Counter::default(),
            bypasses_ended: Counter::default(),
            audit_write_failures: Counter::default(),
            audit_entries_lost: Counter::default(),
            driver_ready: Gauge::default(),
            gpus_without_process_utilization: Gauge::default(),
            hanging_calls: Family::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let r = &mut self.registry;
        r.register(
            "dra_claims",
            "Claims that the kubelet asked to prepare or unprepare, by outcome",
            self.requests.clone(),
        );
        r.register_with_unit(
            "dra_claim_duration",
            "Time from a claim's request to its answer, including waits",
            Unit::Seconds,
            self.durations.clone(),
        );
        r.register(
            "prepared_devices",
            "Prepared devices, by tier",
            self.devices.clone(),
        );
        r.register("prepared_claims", "Prepared claims", self.claims.clone());
        r.register(
            "unreadable_journals",
            "Claims whose journal cannot be read; the log names the files",
            self.unreadable_journals.clone(),
        );
        r.register(
            "registration_epoch",
            "Epoch of the newest registration in the GpuNode",
            self.epoch.clone(),
        );
        r.register(
            "registrations",
            "Registrations with the kubelet since the plugin started",
            self.registrations.clone(),
        );
        r.register(
            "orphaned_claims_released",
            "Claims that were gone from the API server and not released by the kubelet",
            self.orphans.clone(),
        );
        r.register(
            "dead_processes_swept",
            "Dead processes whose slots in their shares the node reclaimed",
            self.dead_processes.clone(),
        );
        r.register(
            "bypassing_processes_ended",
            "Processes that the node ended because they held memory that was not in their share's account",
            self.bypasses_ended.clone(),
        );
        r.register(
            "audit_write_failures",
            "Failed attempts to write the audit trail; its lines wait",
            self.audit_write_failures.clone(),
        );
        r.register(
            "audit_entries_lost",
            "Beginnings and ends of claims that the audit trail lacks, because too many waited",
            self.audit_entries_lost.clone(),
        );
        r.register(
            "driver_ready",
            "1 if there is a usable NVIDIA driver, else 0",
            self.driver_ready.clone(),
        );
        r.register(
            "gpus_without_process_utilization",
            "GPUs with compute shares for which NVML does not report utilization by process (MIG, vGPU): their shares get a common correction",
            self.gpus_without_process_utilization.clone(),
        );
        r.register(
            "driver_call_hanging",
            "1 for each GPU for which a call of the driver does not return; without a GPU it is the start of NVML",
            self.hanging_calls.clone(),
        );
    }

    /// Sets which GPUs have a call that does not return.
    pub fn set_hangs(&self, hangs: &[Hang]) {
        self.hanging_calls.clear();
        for hang in hangs.iter().filter(|hang| hang.object != EVENTS) {
            let labels = GpuLabels {
                gpu: hang.object.clone(),
            };
            self.hanging_calls.get_or_create(&labels).set(1);
        }
    }

    /// Counts one claim of one call.
    pub fn observe(&self, method: Method, outcome: &'static str, took: Duration) {
        self.requests
            .get_or_create(&RequestLabels { method, outcome })
            .inc();
        self.durations
            .get_or_create(&MethodLabels { method })
            .observe(took.as_secs_f64());
    }
    /// Sets what is held now: devices by tier, claims, and claims whose journals cannot be read.
    pub fn set_held(&self, devices: &BTreeMap<Tier, i64>, claims: usize, unreadable: usize) {
        for tier in Tier::ALL {
            let labels = TierLabels {
                tier: tier.as_str(),
            };
            let held = devices.get(&tier).copied().unwrap_or(0);
            self.devices.get_or_create(&labels).set(held);
        }
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.claims.set(count(claims));
        self.unreadable_journals.set(count(unreadable));
    }

    /// All of them, for the text format.
    #[must_use]
    pub const fn registry(&self) -> &Registry {
        &self.registry
    }
}
