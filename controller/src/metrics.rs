//! The controller's metrics, in Prometheus' text format.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tranche_api::gpu_node::Published;

/// The kind of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// POST.
    Create,
    /// PUT.
    Update,
    /// DELETE.
    Delete,
    /// PATCH, server-side apply.
    Apply,
}

impl Verb {
    /// Its name in logs and labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Delete => "delete",
            Self::Apply => "apply",
        }
    }
}

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Stored.
    Done,
    /// Not sent: another replica leads.
    NotLeading,
    /// The object changed after the write was decided.
    Changed,
    /// The API server refused it.
    Refused,
    /// No answer in time.
    Deadline,
    /// Anything else.
    Failed,
}

impl EncodeLabelValue for Verb {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.as_str().encode(encoder)
    }
}

impl EncodeLabelValue for Outcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let word = match self {
            Self::Done => "done",
            Self::NotLeading => "not_leading",
            Self::Changed => "changed",
            Self::Refused => "refused",
            Self::Deadline => "deadline",
            Self::Failed => "failed",
        };
        word.encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    verb: Verb,
    resource: &'static str,
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NodeLabels {
    node: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LaneLabels {
    lane: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WatchLabels {
    kind: &'static str,
}

/// All metrics; clones share the same counters.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    writes: Family<WriteLabels, Counter>,
    reconciles: Histogram,
    slices: Family<NodeLabels, Gauge>,
    problems: Family<NodeLabels, Gauge>,
    withheld: Family<NodeLabels, Gauge>,
    lists: Family<WatchLabels, Counter>,
    watch_errors: Family<WatchLabels, Counter>,
    queued: Family<LaneLabels, Gauge>,
    leader: Gauge<i64, AtomicI64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("tranche_controller");
        let writes = Family::default();
        registry.register(
            "writes",
            "Writes to the API server, events included",
            writes.clone(),
        );
        // 0.1 ms to 1.6 s.
        let reconciles = Histogram::new(exponential_buckets(0.0001, 2.0, 15));
        registry.register_with_unit(
            "reconcile",
            "Time to decide and execute one step for one node",
            Unit::Seconds,
            reconciles.clone(),
        );
        let slices = Family::default();
        registry.register("slices", "ResourceSlices of a node", slices.clone());
        let problems = Family::default();
        registry.register(
            "problem",
            "1 for a node whose pool is not published as wanted",
            problems.clone(),
        );
        let withheld = Family::default();
        registry.register(
            "withheld_gpus",
            "GPUs of a node of which not everything is offered that the policy asks for",
            withheld.clone(),
        );
        let lists = Family::default();
        registry.register("lists", "Complete lists taken in", lists.clone());
        let watch_errors = Family::default();
        registry.register("watch_errors", "Watches that failed", watch_errors.clone());
        let queued = Family::default();
        registry.register(
            "queued_nodes",
            "Nodes to reconcile: prompt, since something about them changed, or paced, since something changed that concerns many",
            queued.clone(),
        );
        let leader = Gauge::default();
        registry.register("leader", "1 on the replica that writes", leader.clone());
        Self {
            registry: Arc::new(registry),
            writes,
            reconciles,
            slices,
            problems,
            withheld,
            lists,
            watch_errors,
            queued,
            leader,
        }
    }
}

impl Metrics {
    /// Counts a write.
    pub fn written(&self, verb: Verb, resource: &'static str, outcome: Outcome) {
        self.writes
            .get_or_create(&WriteLabels {
                verb,
                resource,
                outcome,
            })
            .inc();
    }

    /// Counts a step for one node.
    pub fn reconciled(&self, took: Duration) {
        self.reconciles.observe(took.as_secs_f64());
    }

    /// Records the state of a node; a node that is gone has no series.
    pub fn node(&self, node: &str, slices: usize, published: Option<&Published>) {
        let labels = NodeLabels {
            node: node.to_owned(),
        };
        let problem = published.is_some_and(|published| !published.problem.is_empty());
        let withheld = published.map_or(0, |published| published.withheld_count);
        if slices == 0 && !problem && withheld == 0 {
            self.slices.remove(&labels);
            self.problems.remove(&labels);
            self.withheld.remove(&labels);
            return;
        }
        self.slices
            .get_or_create(&labels)
            .set(i64::try_from(slices).unwrap_or(i64::MAX));
        self.problems.get_or_create(&labels).set(i64::from(problem));
        self.withheld.get_or_create(&labels).set(withheld.into());
    }

    /// Counts a complete list of a watch.
    pub fn listed(&self, kind: &'static str) {
        self.lists.get_or_create(&WatchLabels { kind }).inc();
    }

    /// Counts a watch that failed.
    pub fn watch_failed(&self, kind: &'static str) {
        self.watch_errors.get_or_create(&WatchLabels { kind }).inc();
    }

    /// Notes how many nodes wait in a lane.
    pub fn queued(&self, lane: &'static str, nodes: usize) {
        let nodes = i64::try_from(nodes).unwrap_or(i64::MAX);
        self.queued.get_or_create(&LaneLabels { lane }).set(nodes);
    }

    /// Records whether this replica leads.
    pub fn leading(&self, leading: bool) {
        self.leader.set(i64::from(leading));
    }

    /// The text for Prometheus.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
