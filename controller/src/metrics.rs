//! The controller's metrics, in Prometheus' text format. `docs/reference/metrics.md` lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
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
    Create,
    Update,
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

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct PendingLabels {
    namespace: String,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct NamespaceLabels {
    namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LaneLabels {
    lane: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WatchLabels {
    kind: &'static str,
}

/// The series of families that are recorded as a whole.
#[derive(Clone, Debug)]
struct Series<L>(Arc<Mutex<BTreeSet<L>>>);

impl<L> Default for Series<L> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<L: Clone + Ord> Series<L> {
    /// Stores the present series and returns those that are gone.
    fn replace(&self, now: BTreeSet<L>) -> Vec<L> {
        let mut before = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = before.difference(&now).cloned().collect();
        *before = now;
        gone
    }
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
    missing: Family<NodeLabels, Gauge>,
    pending: Family<PendingLabels, Gauge>,
    pending_since: Family<PendingLabels, Gauge>,
    idle: Family<NamespaceLabels, Gauge>,
    idle_memory: Family<NamespaceLabels, Gauge<u64, AtomicU64>>,
    /// The series that `pending` and `idle` have.
    pending_series: Series<PendingLabels>,
    idle_series: Series<NamespaceLabels>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut all = Registry::with_prefix("tranche");
        let pending = Family::default();
        all.register(
            "pods_pending",
            "Pods that wait for claims of our classes, by reason",
            pending.clone(),
        );
        let pending_since = Family::default();
        all.register_with_unit(
            "pods_pending_oldest_timestamp",
            "When the oldest of these pods was created, Unix time",
            Unit::Seconds,
            pending_since.clone(),
        );
        let idle = Family::default();
        all.register(
            "idle_claims",
            "Claims whose programs hold GPU memory and have run no kernel for as long as the SharingPolicy's `spec.idle` says",
            idle.clone(),
        );
        let idle_memory = Family::default();
        all.register_with_unit(
            "idle_claims_memory",
            "GPU memory that these claims hold: their end would free it",
            Unit::Bytes,
            idle_memory.clone(),
        );
        let registry = all.sub_registry_with_prefix("controller");
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
            "GPUs of a node that are not offered in all tiers that the policy asks for",
            withheld.clone(),
        );
        let missing = Family::default();
        registry.register(
            "slices_missing",
            "ResourceSlices that were published for a node's plugin and are gone, or 1 if none was published for it yet",
            missing.clone(),
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
            registry: Arc::new(all),
            writes,
            reconciles,
            slices,
            problems,
            withheld,
            lists,
            watch_errors,
            queued,
            leader,
            missing,
            pending,
            pending_since,
            idle,
            idle_memory,
            pending_series: Series::default(),
            idle_series: Series::default(),
        }
    }
}

impl Metrics {
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

    /// Records how many of a node's slices are missing; a node whose slices all exist has no series.
    pub fn slices_missing(&self, node: &str, missing: usize) {
        let labels = NodeLabels {
            node: node.to_owned(),
        };
        if missing == 0 {
            self.missing.remove(&labels);
            return;
        }
        let missing = i64::try_from(missing).unwrap_or(i64::MAX);
        self.missing.get_or_create(&labels).set(missing);
    }

    /// Records the pods that wait: namespace, reason, how many, and when the oldest was created, Unix time. Reasons without
    /// a pod lose their series.
    pub fn pending<'a>(
        &self,
        counts: impl IntoIterator<Item = (&'a str, &'static str, usize, i64)>,
    ) {
        let mut now = BTreeSet::new();
        for (namespace, reason, pods, since) in counts {
            let labels = PendingLabels {
                namespace: namespace.to_owned(),
                reason,
            };
            let pods = i64::try_from(pods).unwrap_or(i64::MAX);
            self.pending.get_or_create(&labels).set(pods);
            self.pending_since.get_or_create(&labels).set(since);
            now.insert(labels);
        }
        for gone in self.pending_series.replace(now) {
            self.pending.remove(&gone);
            self.pending_since.remove(&gone);
        }
    }

    /// Records the idle claims and the bytes that they hold, by namespace.
    pub fn idle(&self, counts: &BTreeMap<&str, (usize, u64)>) {
        let mut now = BTreeSet::new();
        for (namespace, (claims, memory)) in counts {
            let labels = NamespaceLabels {
                namespace: (*namespace).to_owned(),
            };
            let claims = i64::try_from(*claims).unwrap_or(i64::MAX);
            self.idle.get_or_create(&labels).set(claims);
            self.idle_memory.get_or_create(&labels).set(*memory);
            now.insert(labels);
        }
        for gone in self.idle_series.replace(now) {
            self.idle.remove(&gone);
            self.idle_memory.remove(&gone);
        }
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

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    const REFERENCE: &str = include_str!("../../docs/reference/controller-metrics.md");

    /// One of everything: a family without series has no text.
    fn all() -> Metrics {
        let metrics = Metrics::default();
        metrics.written(Verb::Create, "resourceslices", Outcome::Done);
        metrics.node("n", 1, None);
        metrics.slices_missing("n", 1);
        metrics.listed("nodes");
        metrics.watch_failed("nodes");
        metrics.queued("prompt", 1);
        metrics.pending([("team", "unallocated", 1, 0)]);
        metrics.idle(&BTreeMap::from([("team", (1, 1))]));
        metrics
    }

    #[test]
    fn the_reference_lists_all_metrics() {
        let metrics = all();
        let (mut table, mut meaning) = (String::new(), "");
        let text = metrics.text().expect("text");
        for line in text.lines() {
            match line.splitn(4, ' ').collect::<Vec<_>>()[..] {
                ["#", "HELP", _, help] => meaning = help.trim_end_matches('.'),
                ["#", "TYPE", name, kind] => {
                    let total = if kind == "counter" { "_total" } else { "" };
                    let _ = writeln!(table, "| `{name}{total}` | {kind} | {meaning} |");
                }
                _ => {}
            }
        }
        assert_eq!(
            table.lines().count(),
            14,
            "add what is new to `all`: {table}"
        );
        assert!(
            REFERENCE.contains(&table),
            "docs/reference/controller-metrics.md must have this table:\n{table}"
        );
    }
}
