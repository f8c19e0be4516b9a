//! The rounds: reads the usage of each node that is due, decides about its claims, and carries the steps out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use kube::Client;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tranche_api::conditions::{IDLE, State};
use tranche_node_usage::Reader;

use super::asked::{self, Asked, NodeTerms};
use super::decision::{self, Act, Facts, Noticed, decide, may_be_idle};
use super::facts;
use super::holder::{Holder, holders};
use super::state::{Step, Watch, Why};
use super::writer::{EVICTION_REFUSED, Writer, condition_of};
use crate::apply::{ApplyError, Executor};
use crate::leader::Leadership;
use crate::metrics::Metrics;

/// How often the nodes that are due are looked at.
const TICK: Duration = Duration::from_secs(1);
/// How many nodes are read, and how many steps are carried out, at the same time.
const AT_ONCE: usize = 8;
/// How long after its election a leader has reconciled every node.
const SETTLED: Duration = Duration::from_mins(10);
/// How long an eviction that was refused waits for the next; it doubles up to the last.
const FIRST_RETRY: Duration = Duration::from_secs(10);
const LAST_RETRY: Duration = Duration::from_mins(5);

/// Looks for idle claims.
#[derive(Debug)]
pub struct Idle {
    asked: Asked,
    nodes: Reader,
    reader: facts::Reader,
    writer: Writer,
    executor: Executor,
    leadership: Leadership,
    metrics: Metrics,
    due: BTreeMap<String, Instant>,
    watches: BTreeMap<String, Noticed>,
    refused: BTreeMap<String, Refusal>,
}

/// An eviction that was refused.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    again: Instant,
    pause: Duration,
}

/// What was seen of a node.
struct Look {
    node: String,
    terms: Arc<NodeTerms>,
    /// The claims that hold devices, by UID; or why the node's plugin does not answer.
    holders: Result<BTreeMap<String, Holder>, String>,
    facts: BTreeMap<String, Facts>,
}

impl Idle {
    /// Asks `nodes` for what is `asked`, and writes while `leadership` holds.
    #[must_use]
    pub fn new(
        client: Client,
        executor: Executor,
        asked: Asked,
        nodes: Reader,
        leadership: Leadership,
        metrics: Metrics,
    ) -> Self {
        Self {
            asked,
            nodes,
            reader: facts::Reader::new(client.clone()),
            writer: Writer::new(client, executor.clone()),
            executor,
            leadership,
            metrics,
            due: BTreeMap::new(),
            watches: BTreeMap::new(),
            refused: BTreeMap::new(),
        }
    }

    /// Looks until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut led_since = None;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            if !self.leadership.holds() {
                led_since = None;
                // What the policies asked before another replica led is out of date.
                self.asked.clear();
                self.due.clear();
                self.watches.clear();
                self.refused.clear();
                self.metrics.idle(&BTreeMap::new());
                continue;
            }
            let Some(since) = led_since else {
                match self.reader.noticed().await {
                    Ok(noticed) => {
                        self.watches = noticed;
                        led_since = Some(Instant::now());
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot read which claims are idle already; trying again");
                    }
                }
                continue;
            };
            let asked = self.asked.all();
            let is_settled = since.elapsed() > SETTLED;
            self.round(&asked, is_settled).await;
        }
    }

    async fn round(&mut self, asked: &BTreeMap<String, Arc<NodeTerms>>, is_settled: bool) {
        let mut acts = self.look(asked).await;
        // Until a node is reconciled, it is not known what the policies ask of it.
        let is_unasked =
            |node: &String| asked.get(node).map_or(is_settled, |terms| terms.is_empty());
        let named: BTreeSet<_> = self.watches.values().map(|it| it.node.clone()).collect();
        for node in named.into_iter().filter(is_unasked) {
            let withdrawn = decision::withdraw(&node, Why::NotAsked, &mut self.watches);
            acts.extend(withdrawn.into_iter().map(|act| (act, Facts::default())));
        }
        let now = Instant::now();
        let mut due = Vec::new();
        for (act, facts) in acts {
            let refused = self.refused.get(&act.holder.claim.uid);
            if act.step != Step::Evict || refused.is_none_or(|it| it.again <= now) {
                due.push((act, facts));
            }
        }
        let this = &*self;
        let done: Vec<(String, bool)> = futures::stream::iter(due)
            .map(|(act, facts)| async move {
                let is_refused = this.carry_out(&act, &facts).await;
                (act.holder.claim.uid, is_refused)
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        for (uid, is_refused) in done {
            let before = self.refused.remove(&uid);
            if is_refused {
                let pause = before.map_or(FIRST_RETRY, |it| (it.pause * 2).min(LAST_RETRY));
                let again = Instant::now() + pause;
                self.refused.insert(uid, Refusal { again, pause });
            }
        }
        self.refused.retain(|uid, _| self.watches.contains_key(uid));
        self.count();
    }

    /// Looks at the nodes that are due, and decides.
    async fn look(&mut self, asked: &BTreeMap<String, Arc<NodeTerms>>) -> Vec<(Act, Facts)> {
        let now = Instant::now();
        self.due.retain(|node, _| asked.contains_key(node));
        let mut due = Vec::new();
        for (node, terms) in asked.iter().filter(|(_, terms)| !terms.is_empty()) {
            if self.due.get(node).is_none_or(|due| *due <= now) {
                self.due.insert(node.clone(), now + asked::pause(terms));
                due.push((node.clone(), Arc::clone(terms)));
            }
        }
        let this = &*self;
        let looks: Vec<Look> = futures::stream::iter(due)
            .map(|(node, terms)| this.look_at(node, terms))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let clock = self.now();
        let mut acts = Vec::new();
        for mut look in looks {
            let watches = &mut self.watches;
            let of_node = match &look.holders {
                Ok(holders) => decide(
                    clock,
                    &look.node,
                    holders,
                    &look.terms,
                    &look.facts,
                    watches,
                ),
                Err(why) => {
                    tracing::debug!(
                        node = look.node,
                        why,
                        "a node does not tell which claims are idle"
                    );
                    decision::withdraw(&look.node, Why::NotKnown, watches)
                }
            };
            acts.extend(of_node.into_iter().map(|act| {
                let facts = look.facts.remove(&act.holder.claim.uid).unwrap_or_default();
                (act, facts)
            }));
        }
        acts
    }

    async fn look_at(&self, node: String, terms: Arc<NodeTerms>) -> Look {
        let holders = self.nodes.usage(&node).await.map(|it| holders(&it));
        let mut facts = BTreeMap::new();
        for (uid, holder) in holders.iter().flatten() {
            if !may_be_idle(holder, &terms) {
                continue;
            }
            match self.reader.facts(&holder.claim).await {
                Ok(found) => facts.extend(found.map(|it| (uid.clone(), it))),
                Err(error) => {
                    tracing::warn!(%error, "cannot tell whether a claim may be called idle");
                }
            }
        }
        Look {
            node,
            terms,
            holders,
            facts,
        }
    }

    /// Executes a step; returns whether an eviction was refused.
    async fn carry_out(&self, act: &Act, facts: &Facts) -> bool {
        let claim = &act.holder.claim;
        if let Some(condition) = condition_of(act) {
            self.say(&act.holder, &condition).await;
            if condition.holds {
                for pod in &facts.pods {
                    let event =
                        self.writer
                            .event(&claim.namespace, pod, "Idle", &condition.message);
                    event.await;
                }
            }
            return false;
        }
        let mut is_refused = false;
        for pod in facts.pods.iter().filter(|pod| !pod.is_ending) {
            match self.writer.evict(&claim.namespace, pod).await {
                Ok(()) => {
                    let note = format!(
                        "evicted: its claim {} ran no kernel and held GPU memory, as its event Idle said before",
                        claim.name
                    );
                    tracing::info!(
                        namespace = claim.namespace,
                        pod = pod.name,
                        claim = claim.name,
                        "evicted the pod of an idle claim"
                    );
                    self.writer
                        .event(&claim.namespace, pod, "IdleEvicted", &note)
                        .await;
                }
                // The pod is gone, or its name belongs to another pod.
                Err(ApplyError::Changed { .. } | ApplyError::NotLeading) => {}
                Err(error) => {
                    is_refused = true;
                    self.say_refused(act, &pod.name, &error).await;
                }
            }
        }
        is_refused
    }

    async fn say_refused(&self, act: &Act, pod: &str, error: &ApplyError) {
        let claim = &act.holder.claim;
        // Only the first refusal in a row is reported.
        if self.refused.contains_key(&claim.uid) {
            return;
        }
        tracing::warn!(namespace = claim.namespace, claim = claim.name, pod, %error, "the pod of an idle claim cannot be evicted now");
        let condition = State {
            kind: IDLE,
            holds: true,
            reason: EVICTION_REFUSED,
            message: format!("the pod {pod} cannot be evicted now, and it is tried again: {error}"),
        };
        self.say(&act.holder, &condition).await;
    }

    async fn say(&self, holder: &Holder, condition: &State) {
        let since = match self.watches.get(&holder.claim.uid).map(|it| it.watch) {
            Some(Watch::Noticed { at, .. }) => {
                let seconds = i64::try_from(at.as_secs()).unwrap_or(i64::MAX);
                Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
            }
            Some(Watch::Busy) | None => self.executor.clock().now(),
        };
        match self.writer.condition(holder, condition, since).await {
            // Gone, or no longer allocated: the API server has dropped its devices.
            Ok(()) | Err(ApplyError::Changed { .. } | ApplyError::NotLeading) => {}
            Err(error) => {
                let claim = &holder.claim;
                tracing::warn!(namespace = claim.namespace, claim = claim.name, %error, "cannot write the condition Idle of a claim");
            }
        }
    }

    /// Unix time in whole seconds, as a condition's time.
    fn now(&self) -> Duration {
        let now = self.executor.clock().now().as_second();
        Duration::from_secs(u64::try_from(now).unwrap_or_default())
    }

    fn count(&self) {
        let mut counts: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
        for noticed in self.watches.values() {
            let (claims, memory) = counts.entry(&noticed.holder.claim.namespace).or_default();
            *claims += 1;
            *memory = memory.saturating_add(noticed.holder.seen.memory);
        }
        self.metrics.idle(&counts);
    }
}
