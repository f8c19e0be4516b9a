//! The loop: observations in, steps out.
//!
//! One task owns the index and the queue, so neither needs a lock. Steps run beside it, one per node at a
//! time and a few nodes at once. After a step the node rests until the watches have delivered what
//! the step wrote; only then is it looked at again. So nothing is ever decided on a copy older than our own
//! writes, and there is no cache of writes that could lie.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use tranche_api::gpu_node::Published;

use crate::apply::{ApplyError, Executor, Written};
use crate::feed::Feed;
use crate::http::Health;
use crate::index::{Index, Mark, NodeView};
use crate::leader::Leadership;
use crate::metrics::Metrics;
use crate::mirror::{Version, version};
use crate::offered;
use crate::pool::{Memory, Write};
use crate::queue::Queue;
use crate::reconcile::{Evidence, Step, reconcile};
use crate::withdrawn::Held;

/// Nodes that are worked on at once. Three slices take about 15 ms: this many publish a thousand nodes in 2 s.
const AT_ONCE: usize = 8;
/// How long a write may take to come back through the watch before the watches are begun anew.
const ECHO: Duration = Duration::from_secs(10);
/// How often the loop says that it lives when nothing happens.
const BEAT: Duration = Duration::from_secs(5);

/// A write that the watches have not delivered yet.
#[derive(Clone, Debug)]
enum Echo {
    Slice(Version),
    Gone { name: String, uid: String },
    GpuNode(Version),
}

/// A node that rests.
#[derive(Debug)]
struct Resting {
    echoes: Vec<Echo>,
    mark: Mark,
    until: Instant,
}

/// What a step found out.
#[derive(Debug)]
enum Learned {
    Held(Held),
    PluginReady(bool),
}

/// What a step came to.
#[derive(Debug)]
struct Report {
    node: String,
    memory: Memory,
    echoes: Vec<Echo>,
    learned: Option<Learned>,
    error: Option<ApplyError>,
    began: Instant,
}

/// Publishes the slices of every node while it leads, and follows the cluster while it does not.
#[derive(Debug)]
pub struct Controller {
    executor: Executor,
    feed: Feed,
    leadership: Leadership,
    metrics: Metrics,
    health: Health,
    index: Index,
    queue: Queue,
    memories: BTreeMap<String, Memory>,
    /// What steps asked for, for nodes that are not at rest yet. What claims held stays true of devices that
    /// were tainted long before: nobody can allocate them since.
    evidence: BTreeMap<String, Evidence>,
    working: BTreeMap<String, Mark>,
    resting: BTreeMap<String, Resting>,
    steps: JoinSet<Report>,
    led: bool,
}

impl Controller {
    /// A controller that writes by `executor` while `leadership` holds.
    #[must_use]
    pub fn new(
        executor: Executor,
        feed: Feed,
        leadership: Leadership,
        metrics: Metrics,
        health: Health,
    ) -> Self {
        Self {
            executor,
            feed,
            leadership,
            metrics,
            health,
            index: Index::default(),
            queue: Queue::default(),
            memories: BTreeMap::new(),
            evidence: BTreeMap::new(),
            working: BTreeMap::new(),
            resting: BTreeMap::new(),
            steps: JoinSet::new(),
            led: false,
        }
    }

    /// Runs until told to stop; the steps under way are finished.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            self.health.beat(self.index.synced());
            self.lead();
            self.wake();
            self.work();
            let next = self.next_look();
            tokio::select! {
                () = stop.cancelled() => break,
                observation = self.feed.next() => {
                    let now = Instant::now();
                    for node in self.index.observe(observation) {
                        self.queue.mark(&node, now);
                    }
                }
                Some(Ok(report)) = self.steps.join_next() => self.finish(report),
                () = self.leadership.changed() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
        while let Some(Ok(report)) = self.steps.join_next().await {
            self.finish(report);
        }
    }

    /// A replica that begins to lead looks at every node.
    fn lead(&mut self) {
        let leads = self.leadership.holds();
        self.metrics.leading(leads);
        if leads && !self.led {
            let now = Instant::now();
            for node in self.index.node_names() {
                self.queue.mark(&node, now);
            }
        }
        self.led = leads;
    }

    /// Nodes whose writes came back are looked at again.
    fn wake(&mut self) {
        let now = Instant::now();
        let index = &self.index;
        let mut lost = false;
        let mut awake = Vec::new();
        self.resting.retain(|node, resting| {
            resting.echoes.retain(|echo| match echo {
                Echo::Slice(version) => !index.has_slice_write(*version, resting.mark),
                Echo::Gone { name, uid } => index.has_slice(name, uid),
                Echo::GpuNode(version) => !index.has_gpu_node_write(*version, resting.mark),
            });
            let due = resting.echoes.is_empty();
            if !due && now >= resting.until {
                tracing::warn!(node, "a write did not come back through the watches");
                resting.until = now + ECHO;
                lost = true;
            }
            if due {
                awake.push(node.clone());
            }
            !due
        });
        for node in awake {
            self.queue.mark(&node, now);
        }
        if lost {
            self.feed.relist();
        }
    }

    fn next_look(&self) -> Instant {
        let beat = Instant::now() + BEAT;
        if !self.can_work() {
            return beat;
        }
        let queued = self.queue.next().unwrap_or(beat);
        let rested = self.resting.values().map(|r| r.until).min();
        queued.min(rested.unwrap_or(beat)).min(beat)
    }

    fn can_work(&self) -> bool {
        self.index.synced() && self.leadership.holds() && self.working.len() < AT_ONCE
    }

    /// Begins the steps that are due.
    fn work(&mut self) {
        let now = Instant::now();
        while self.can_work() {
            let Some(node) = self.queue.pop(now) else {
                return;
            };
            // Looked at again when its step ends or its writes come back.
            if self.working.contains_key(&node) || self.resting.contains_key(&node) {
                continue;
            }
            self.begin(node);
        }
    }

    fn begin(&mut self, node: String) {
        let began = Instant::now();
        let view = self.index.view(&node);
        let mut memory = self.memories.remove(&node).unwrap_or_default();
        let evidence = self.evidence.entry(node.clone()).or_default();
        let now = self.executor.clock().now();
        let decision = reconcile(&view, &mut memory, evidence, now);
        if let Some(again) = decision.again {
            self.queue.at(&node, began + again);
        }
        self.note(&view);
        if decision.step == Step::Nothing {
            self.queue.succeeded(&node);
            self.evidence.remove(&node);
            if view.gpu_node.is_some() || !view.slices.is_empty() {
                self.memories.insert(node, memory);
            }
            self.metrics.reconciled(began.elapsed());
            return;
        }
        self.working.insert(node.clone(), self.index.mark());
        let span = tracing::info_span!("step", node);
        let step = execute(self.executor.clone(), view, decision.step, memory, began);
        self.steps.spawn(step.instrument(span));
    }

    fn note(&self, view: &NodeView) {
        self.metrics
            .node(&view.name, view.slices.len(), published(view));
    }

    fn finish(&mut self, report: Report) {
        let Report {
            node,
            memory,
            echoes,
            learned,
            error,
            began,
        } = report;
        self.metrics.reconciled(began.elapsed());
        self.memories.insert(node.clone(), memory);
        let now = Instant::now();
        if let Some(learned) = learned {
            let evidence = self.evidence.entry(node.clone()).or_default();
            match learned {
                Learned::Held(held) => evidence.held = Some(held),
                Learned::PluginReady(ready) => evidence.plugin_ready = Some(ready),
            }
            self.queue.mark(&node, now);
        }
        match error {
            None => self.queue.succeeded(&node),
            Some(ApplyError::NotLeading) => {}
            Some(error) => {
                let failures = self.queue.failed(&node, now);
                // Once or twice is a race, and the watch brings what changed. More often is an object that the
                // watch does not show.
                if failures < 3 && matches!(error, ApplyError::Changed { .. }) {
                    tracing::debug!(node, %error, "step not finished");
                } else {
                    tracing::warn!(node, %error, failures, "step failed");
                }
            }
        }
        if let Some(mark) = self.working.remove(&node)
            && !echoes.is_empty()
        {
            self.resting.insert(
                node,
                Resting {
                    echoes,
                    mark,
                    until: now + ECHO,
                },
            );
        }
    }
}

/// What is recorded of a node.
fn published(view: &NodeView) -> Option<&Published> {
    let status = view.gpu_node.as_ref()?.status.as_ref()?;
    status.published.as_ref()
}

/// Executes a step up to the first failure.
async fn execute(
    executor: Executor,
    view: NodeView,
    step: Step,
    mut memory: Memory,
    began: Instant,
) -> Report {
    let mut echoes = Vec::new();
    let mut learned = None;
    let result = match step {
        Step::Nothing => Ok(()),
        Step::Slices(writes) => write_all(&executor, writes, &mut memory, &mut echoes).await,
        Step::Record(record) => match executor.record(&view, &record).await {
            Err(error) => Err(error),
            Ok(stored) => {
                echoes.push(Echo::GpuNode(version(&stored)));
                let status = stored.status.unwrap_or_default();
                memory.recorded(&record, &status.published.unwrap_or_default());
                tracing::info!(
                    epoch = record.epoch,
                    generation = record.pool_generation,
                    slices = record.slices.len(),
                    withheld = record.withheld_count,
                    problem = record.problem,
                    "recorded"
                );
                let before = published(&view).cloned().unwrap_or_default();
                for news in offered::news(&before, &record) {
                    if news.warning {
                        tracing::warn!("{}", news.note);
                    }
                    executor.tell(&view, &news).await;
                }
                Ok(())
            }
        },
        Step::ListClaims => executor.held(&view.name).await.map(|held| {
            learned = Some(Learned::Held(held));
        }),
        Step::FindPlugin => executor.plugin_is_ready(&view.name).await.map(|ready| {
            if !ready {
                tracing::info!("an old registration, and no node plugin is ready: not published");
            }
            learned = Some(Learned::PluginReady(ready));
        }),
    };
    Report {
        node: view.name,
        memory,
        echoes,
        learned,
        error: result.err(),
        began,
    }
}

async fn write_all(
    executor: &Executor,
    writes: Vec<Write>,
    memory: &mut Memory,
    echoes: &mut Vec<Echo>,
) -> Result<(), ApplyError> {
    let mut names = BTreeSet::new();
    for write in writes {
        match executor.write(write).await? {
            Written::Stored { sent, stored } => {
                echoes.push(Echo::Slice(version(stored.as_ref())));
                if memory.answered(&sent, &stored) {
                    tracing::warn!(
                        slice = stored.metadata.name,
                        problem = memory.problem(),
                        "the API server did not store what was written"
                    );
                }
                names.extend(stored.metadata.name);
            }
            Written::Deleted { name, uid } => {
                names.insert(name.clone());
                echoes.push(Echo::Gone { name, uid });
            }
        }
    }
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    tracing::info!(slices = names.join(" "), "wrote");
    Ok(())
}
