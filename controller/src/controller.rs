//! The loop: observations in, steps out.
//!
//! A change of one node is handled at once. A change that concerns many nodes, usually of a policy, is paced: a few
//! nodes at a time, in the order of their names. It takes minutes for all nodes and leaves the API server free for
//! others. The claims are listed once for all nodes that ask for them.
//!
//! One task owns the index and the queue, so neither needs a lock. Steps run beside it, one per node at a
//! time and a few nodes at once. After a step the node rests until the watches have delivered what
//! the step wrote; only then is it reconciled again. So no decision uses a copy that is older than our own
//! writes, and no cache of writes is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kube::ResourceExt as _;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use tranche_api::gpu_node::Published;

use crate::apply::{ApplyError, Executor, Written};
use crate::feed::Feed;
use crate::http::Health;
use crate::idle::Asked;
use crate::index::{Found, Index, Mark, NodeView};
use crate::leader::Leadership;
use crate::metrics::Metrics;
use crate::mirror::{Version, version};
use crate::offered;
use crate::pool::{Memory, Write};
use crate::queue::{Lane, Pace, Queue};
use crate::reconcile::{Evidence, Step, missing_slices, reconcile};
use crate::withdrawn::{HeldDevices, ReadDevices};

/// Nodes that are worked on at once.
const AT_ONCE: usize = 8;
/// Nodes that are in the middle of a paced change at once.
const PACED_AT_ONCE: usize = 4;
/// Nodes that are reconciled before the loop handles events again. One takes about a millisecond.
const IN_A_ROW: usize = 16;
/// Requests a second for paced changes, where nothing else is configured.
pub const REQUESTS_PER_SECOND: u32 = 100;
/// How long paced changes stop when the API server is overloaded.
const RELIEF: Duration = Duration::from_secs(1);
/// How long nodes that ask for the claims are gathered before the claims are listed.
const GATHER: Duration = Duration::from_secs(2);
/// A list of the claims is followed by a pause of this many times its own duration.
const LIST_REST: u32 = 20;
/// The pause after a list of the claims that failed.
const LIST_RETRY: Duration = Duration::from_secs(2);
/// How long a write may take to return through the watch before its object is read by itself.
const ECHO: Duration = Duration::from_secs(10);
/// How often the idle loop reports that it is alive.
const BEAT: Duration = Duration::from_secs(5);

/// A write that the watches have not delivered yet.
#[derive(Clone, Debug, PartialEq)]
enum Echo {
    Slice { name: String, version: Version },
    Gone { name: String, uid: String },
    GpuNode { name: String, version: Version },
}

impl Echo {
    fn name(&self) -> &str {
        match self {
            Self::Slice { name, .. } | Self::Gone { name, .. } | Self::GpuNode { name, .. } => name,
        }
    }
}

/// The result of a read of an object whose write the watch did not deliver in time.
#[derive(Debug)]
struct ReadBack {
    node: String,
    echo: Echo,
    found: Result<Found, ApplyError>,
}

/// A node that waits for its writes.
#[derive(Debug)]
struct Resting {
    echoes: Vec<Echo>,
    mark: Mark,
    until: Instant,
}

/// What a step learned.
#[derive(Debug)]
enum Learned {
    Read(ReadDevices),
    PluginReady(bool),
}

/// The result of a list of the claims.
#[derive(Debug)]
struct Listed {
    asked: BTreeSet<String>,
    held: Result<BTreeMap<String, HeldDevices>, ApplyError>,
    took: Duration,
}

/// The nodes that ask which of their devices claims hold, and when the claims are listed next.
#[derive(Debug, Default)]
struct Claims {
    asking: BTreeSet<String>,
    /// When the next list may begin; `None` until a node asks.
    at: Option<Instant>,
    /// The earliest time for the next list.
    rest_until: Option<Instant>,
    list: JoinSet<Listed>,
}

/// The result of a step.
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
    asked: Asked,
    index: Index,
    queue: Queue,
    memories: BTreeMap<String, Memory>,
    /// What steps read for nodes that are not settled yet. It is used only while it is fresh.
    evidence: BTreeMap<String, Evidence>,
    pace: Pace,
    /// Nodes in the middle of a paced change.
    paced: BTreeSet<String>,
    claims: Claims,
    working: BTreeMap<String, Mark>,
    resting: BTreeMap<String, Resting>,
    steps: JoinSet<Report>,
    reads: JoinSet<ReadBack>,
    led: bool,
}

impl Controller {
    /// A controller that writes with `executor` while `leadership` holds. `requests_per_second` limits the requests for
    /// changes that concern many nodes. `asked` gets what policies ask of idle claims.
    #[must_use]
    pub fn new(
        executor: Executor,
        feed: Feed,
        leadership: Leadership,
        metrics: Metrics,
        health: Health,
        requests_per_second: u32,
        asked: Asked,
    ) -> Self {
        Self {
            executor,
            feed,
            leadership,
            metrics,
            health,
            asked,
            index: Index::default(),
            queue: Queue::default(),
            memories: BTreeMap::new(),
            evidence: BTreeMap::new(),
            pace: Pace::new(requests_per_second),
            paced: BTreeSet::new(),
            claims: Claims::default(),
            working: BTreeMap::new(),
            resting: BTreeMap::new(),
            steps: JoinSet::new(),
            reads: JoinSet::new(),
            led: false,
        }
    }

    /// Runs until `stop`; steps in progress are finished.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            self.health.beat(self.index.synced());
            self.lead();
            self.wake();
            self.work();
            self.list_claims();
            for lane in [Lane::Prompt, Lane::Paced] {
                self.metrics.queued(lane.as_str(), self.queue.len(lane));
            }
            let next = self.next_wake();
            tokio::select! {
                () = stop.cancelled() => break,
                observation = self.feed.next() => {
                    let concerns_many = observation.concerns_many();
                    let nodes = self.index.observe(observation);
                    self.mark(nodes, concerns_many);
                }
                Some(Ok(report)) = self.steps.join_next() => self.finish(report),
                Some(Ok(listed)) = self.claims.list.join_next() => self.claims_are_listed(listed),
                Some(Ok(read)) = self.reads.join_next() => self.has_read(read),
                () = self.leadership.changed() => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
        while let Some(Ok(report)) = self.steps.join_next().await {
            self.finish(report);
        }
    }

    /// A replica that begins to lead reconciles every node.
    fn lead(&mut self) {
        let leads = self.leadership.holds();
        self.metrics.leading(leads);
        if leads && !self.led {
            // What a standby queued while it watched would all be in the prompt lane.
            self.queue = Queue::default();
            self.mark(self.index.node_names(), true);
        }
        self.led = leads;
    }

    /// Queues nodes. Where there may be many of them, those whose plugins registered go first.
    fn mark(&mut self, nodes: BTreeSet<String>, may_be_many: bool) {
        let now = Instant::now();
        for node in nodes {
            let lane = if may_be_many && !self.index.asks(&node) {
                Lane::Paced
            } else {
                Lane::Prompt
            };
            self.queue.mark(&node, lane, now);
        }
    }

    /// Queues the nodes whose writes the watches delivered, and reads what they did not deliver in time.
    fn wake(&mut self) {
        let now = Instant::now();
        let index = &self.index;
        let mut overdue = Vec::new();
        let mut awake = Vec::new();
        self.resting.retain(|node, resting| {
            resting.echoes.retain(|echo| match echo {
                Echo::Slice { version, .. } => !index.has_slice_write(*version, resting.mark),
                Echo::Gone { name, uid } => index.has_slice(name, uid),
                Echo::GpuNode { version, .. } => !index.has_gpu_node_write(*version, resting.mark),
            });
            let due = resting.echoes.is_empty();
            if !due && now >= resting.until {
                resting.until = now + ECHO;
                // The list may be older than what would be read; it is read if the list does not have it either.
                if !index.is_listing() {
                    let echoes = resting.echoes.iter().cloned();
                    overdue.extend(echoes.map(|echo| (node.clone(), echo)));
                }
            }
            if due {
                awake.push(node.clone());
            }
            !due
        });
        for node in awake {
            self.queue.mark(&node, Lane::Prompt, now);
        }
        for (node, echo) in overdue {
            tracing::warn!(
                node,
                object = echo.name(),
                "a write did not return through the watch: reading the object"
            );
            let executor = self.executor.clone();
            self.reads.spawn(async move {
                let found = match &echo {
                    Echo::Slice { name, .. } | Echo::Gone { name, .. } => {
                        executor.read_slice(name).await.map(Found::Slice)
                    }
                    Echo::GpuNode { name, .. } => {
                        let found = executor.read_gpu_node(name).await;
                        found.map(|node| Found::GpuNode(node.map(Box::new)))
                    }
                };
                ReadBack { node, echo, found }
            });
        }
    }

    /// What was read is as new as the write, whatever the watch has delivered.
    fn has_read(&mut self, read: ReadBack) {
        let ReadBack { node, echo, found } = read;
        match found {
            // Tried again with the next overdue echo.
            Err(error) => {
                tracing::warn!(node, object = echo.name(), %error, "cannot read an object that was written");
            }
            Ok(_) if self.index.is_listing() => {}
            Ok(found) => {
                let nodes = self.index.read(echo.name(), found);
                self.mark(nodes, false);
                if let Some(resting) = self.resting.get_mut(&node) {
                    resting.echoes.retain(|waiting| *waiting != echo);
                }
            }
        }
    }

    fn next_wake(&self) -> Instant {
        let beat = Instant::now() + BEAT;
        if !self.can_work() {
            return beat;
        }
        let prompt = self.queue.next(Lane::Prompt);
        let paced = self
            .queue
            .next(Lane::Paced)
            .filter(|_| self.paced.len() < PACED_AT_ONCE)
            .map(|due| self.pace.opens().map_or(due, |open| due.max(open)));
        let rested = self.resting.values().map(|r| r.until).min();
        let list = self.claims.at.filter(|_| self.claims.list.is_empty());
        let next = [prompt, paced, rested, list].into_iter().flatten().min();
        next.unwrap_or(beat).min(beat)
    }

    fn can_work(&self) -> bool {
        self.index.synced() && self.leadership.holds() && self.working.len() < AT_ONCE
    }

    /// Starts the steps that are due.
    fn work(&mut self) {
        let now = Instant::now();
        for _ in 0..IN_A_ROW {
            if !self.can_work() {
                return;
            }
            let paced_is_open = self.pace.is_open(now) && self.paced.len() < PACED_AT_ONCE;
            let Some((node, lane)) = self.queue.pop(now, paced_is_open) else {
                return;
            };
            // Queued again when its step ends or its writes come back.
            if self.working.contains_key(&node) || self.resting.contains_key(&node) {
                continue;
            }
            if lane == Lane::Paced {
                self.paced.insert(node.clone());
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
            self.queue.at(&node, Lane::Prompt, began + again);
        }
        self.note(&view);
        if decision.step == Step::ListClaims {
            self.paced.remove(&node);
            self.memories.insert(node.clone(), memory);
            self.claims.asking.insert(node);
            let at = began + GATHER;
            let rested = self.claims.rest_until.map_or(at, |rest| rest.max(at));
            self.claims.at.get_or_insert(rested);
            self.metrics.reconciled(began.elapsed());
            return;
        }
        if decision.step == Step::Nothing {
            self.queue.succeeded(&node);
            self.evidence.remove(&node);
            self.paced.remove(&node);
            if view.gpu_node.is_some() || !view.slices.is_empty() {
                self.memories.insert(node, memory);
            }
            self.metrics.reconciled(began.elapsed());
            return;
        }
        if self.paced.contains(&node) {
            self.pace.charge(decision.step.requests(), began);
        }
        self.working.insert(node.clone(), self.index.mark());
        let span = tracing::info_span!("step", node);
        let step = execute(self.executor.clone(), view, decision.step, memory, began);
        self.steps.spawn(step.instrument(span));
    }

    fn note(&self, view: &NodeView) {
        self.metrics
            .node(&view.name, view.slices.len(), published(view));
        self.asked.note(view);
        self.metrics
            .slices_missing(&view.name, missing_slices(view));
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
                // What was read before is kept, so that the next step reads only what is missing.
                Learned::Read(read) => evidence.read.extend(read),
                Learned::PluginReady(ready) => {
                    evidence.plugin_ready = Some((ready, self.executor.clock().now()));
                }
            }
            self.queue.mark(&node, Lane::Prompt, now);
        }
        match error {
            None => self.queue.succeeded(&node),
            Some(ApplyError::NotLeading) => {
                self.paced.remove(&node);
            }
            Some(error) => {
                if error.is_overload() {
                    self.pace.close(now + RELIEF);
                }
                let lane = if self.paced.remove(&node) {
                    Lane::Paced
                } else {
                    Lane::Prompt
                };
                let failures = self.queue.failed(&node, lane, now);
                // One or two such failures are a race, and the watch delivers the change. More of them mean that the
                // watch does not show an object.
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

    /// Lists the claims for all nodes that ask, one list at a time.
    fn list_claims(&mut self) {
        let now = Instant::now();
        let is_due = self.claims.at.is_some_and(|at| at <= now);
        if !is_due || !self.claims.list.is_empty() || !self.leadership.holds() {
            return;
        }
        self.claims.at = None;
        let asked = std::mem::take(&mut self.claims.asking);
        let executor = self.executor.clone();
        self.claims.list.spawn(async move {
            let held = executor.held(&asked).await;
            let took = now.elapsed();
            Listed { asked, held, took }
        });
    }

    fn claims_are_listed(&mut self, listed: Listed) {
        let now = Instant::now();
        match listed.held {
            Ok(held) => {
                tracing::debug!(nodes = held.len(), took = ?listed.took, "listed the claims");
                for (node, held) in held {
                    self.evidence.entry(node.clone()).or_default().held = Some(held);
                    // These nodes go before those that have not begun: a list can be used for a minute, and a withdrawn device
                    // takes memory until it is removed.
                    self.queue.first(&node, Lane::Paced, now);
                }
                self.claims.rest_until = Some(now + listed.took * LIST_REST);
            }
            Err(error) => {
                tracing::warn!(%error, nodes = listed.asked.len(), "cannot list the claims");
                self.claims.asking.extend(listed.asked);
                self.claims.rest_until = Some(now + LIST_RETRY);
            }
        }
        self.claims.at = if self.claims.asking.is_empty() {
            None
        } else {
            self.claims.rest_until.max(Some(now + GATHER))
        };
    }
}

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
        // `list_claims` makes one list for all nodes.
        Step::Nothing | Step::ListClaims => Ok(()),
        Step::Slices(writes) => write_all(&executor, writes, &mut memory, &mut echoes).await,
        Step::Record(record) => match executor.record(&view, &record).await {
            Err(error) => Err(error),
            Ok(stored) => {
                echoes.push(Echo::GpuNode {
                    name: view.name.clone(),
                    version: version(&stored),
                });
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
                    executor.write_events(&view, &news).await;
                }
                Ok(())
            }
        },
        Step::ReadSlices(slices) => executor.read(slices).await.map(|read| {
            learned = Some(Learned::Read(read));
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
                echoes.push(Echo::Slice {
                    name: stored.name_any(),
                    version: version(stored.as_ref()),
                });
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
