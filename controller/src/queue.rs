//! Which node to reconcile next, and when.
//!
//! A node is in each lane at most once, at the earliest time anybody asked for. Events are gathered for a
//! moment, because a pool's slices arrive one by one; failures wait longer and longer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// How long events of one node are gathered.
pub const DEBOUNCE: Duration = Duration::from_millis(10);
/// The wait after a first failure; doubled with each.
const FIRST_RETRY: Duration = Duration::from_millis(250);
/// The longest wait between attempts.
const LAST_RETRY: Duration = Duration::from_mins(1);

/// How soon a node is reconciled when it is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// At once: something about this node changed.
    Prompt,
    /// At the pace of [`Pace`], after what is prompt: something changed that concerns many nodes.
    Paced,
}

impl Lane {
    /// Its name in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Paced => "paced",
        }
    }
}

/// The nodes of one lane in order of time.
#[derive(Debug, Default)]
struct Order {
    due: BTreeMap<String, Instant>,
    nodes: BTreeSet<(Instant, String)>,
}

impl Order {
    fn at(&mut self, node: &str, when: Instant) {
        if self.due.get(node).is_some_and(|&due| due <= when) {
            return;
        }
        self.remove(node);
        self.due.insert(node.to_owned(), when);
        self.nodes.insert((when, node.to_owned()));
    }

    fn remove(&mut self, node: &str) {
        if let Some(due) = self.due.remove(node) {
            self.nodes.remove(&(due, node.to_owned()));
        }
    }

    fn pop(&mut self, now: Instant) -> Option<String> {
        if self.next()? > now {
            return None;
        }
        let (_, node) = self.nodes.pop_first()?;
        self.due.remove(&node);
        Some(node)
    }

    fn next(&self) -> Option<Instant> {
        self.nodes.first().map(|(when, _)| *when)
    }
}

/// The nodes to reconcile.
#[derive(Debug, Default)]
pub struct Queue {
    prompt: Order,
    paced: Order,
    failures: BTreeMap<String, u32>,
}

impl Queue {
    /// Something about the node changed: it is due in a moment, or earlier if it is due earlier already.
    pub fn mark(&mut self, node: &str, lane: Lane, now: Instant) {
        self.at(node, lane, now + DEBOUNCE);
    }

    /// Makes the node due at that time, or earlier if it is due earlier already.
    pub fn at(&mut self, node: &str, lane: Lane, when: Instant) {
        match lane {
            Lane::Prompt => self.prompt.at(node, when),
            Lane::Paced => self.paced.at(node, when),
        }
    }

    /// The node is due before all others of the lane: it is in the middle of a change.
    pub fn first(&mut self, node: &str, lane: Lane, now: Instant) {
        let before = |next: Instant| next.checked_sub(Duration::from_nanos(1)).unwrap_or(next);
        let when = self.next(lane).map_or(now, |next| now.min(before(next)));
        self.at(node, lane, when);
    }

    /// The attempt failed: the node is due again after a wait that doubles with each failure in a row. Returns how
    /// many there were.
    pub fn failed(&mut self, node: &str, lane: Lane, now: Instant) -> u32 {
        let count = self.failures.entry(node.to_owned()).or_default();
        let wait = FIRST_RETRY
            .saturating_mul(1 << (*count).min(16))
            .min(LAST_RETRY);
        *count = count.saturating_add(1);
        let failures = *count;
        self.at(node, lane, now + wait);
        failures
    }

    /// The attempt succeeded: the next failure waits for the shortest time again.
    pub fn succeeded(&mut self, node: &str) {
        self.failures.remove(node);
    }

    /// Takes the first node whose time has come, from the lane `Paced` only where that is open and nothing is
    /// prompt. The node leaves both lanes: reconciling it covers whatever it was queued for.
    pub fn pop(&mut self, now: Instant, paced_is_open: bool) -> Option<(String, Lane)> {
        if let Some(node) = self.prompt.pop(now) {
            self.paced.remove(&node);
            return Some((node, Lane::Prompt));
        }
        let node = paced_is_open.then(|| self.paced.pop(now)).flatten()?;
        self.prompt.remove(&node);
        Some((node, Lane::Paced))
    }

    /// When the next node of a lane is due.
    #[must_use]
    pub fn next(&self, lane: Lane) -> Option<Instant> {
        match lane {
            Lane::Prompt => self.prompt.next(),
            Lane::Paced => self.paced.next(),
        }
    }

    /// How many nodes are in a lane.
    #[must_use]
    pub fn len(&self, lane: Lane) -> usize {
        match lane {
            Lane::Prompt => self.prompt.due.len(),
            Lane::Paced => self.paced.due.len(),
        }
    }
}

/// How fast changes that concern many nodes are carried out: so many requests a second, on average. A change of many
/// requests makes the next one wait longer.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    per_second: u32,
    open: Option<Instant>,
}

impl Pace {
    /// A pace of so many requests a second; at least one.
    #[must_use]
    pub fn new(per_second: u32) -> Self {
        Self {
            per_second: per_second.max(1),
            open: None,
        }
    }

    /// When the next change may begin; `None` for at once.
    #[must_use]
    pub fn opens(&self) -> Option<Instant> {
        self.open
    }

    /// Whether the next change may begin.
    #[must_use]
    pub fn is_open(&self, now: Instant) -> bool {
        self.open.is_none_or(|open| open <= now)
    }

    /// No change begins before `until`.
    pub fn close(&mut self, until: Instant) {
        self.open = self.open.max(Some(until));
    }

    /// Counts requests that are made now.
    pub fn charge(&mut self, requests: usize, now: Instant) {
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        let time = Duration::from_secs(1).saturating_mul(requests) / self.per_second;
        self.open = Some(self.open.map_or(now, |open| open.max(now)) + time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pop(queue: &mut Queue, now: Instant) -> Option<String> {
        queue.pop(now, true).map(|(node, _)| node)
    }

    #[test]
    fn events_of_a_node_are_gathered_into_one_visit() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.mark("a", Lane::Prompt, now);
        queue.mark("a", Lane::Prompt, now + DEBOUNCE / 2);
        queue.mark("a", Lane::Paced, now);
        assert_eq!(pop(&mut queue, now), None);
        assert_eq!(pop(&mut queue, now + DEBOUNCE).as_deref(), Some("a"));
        assert_eq!(queue.next(Lane::Prompt), None);
        assert_eq!(queue.next(Lane::Paced), None);
    }

    #[test]
    fn an_event_is_not_held_back_by_a_later_appointment() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.at("a", Lane::Prompt, now + Duration::from_mins(1));
        queue.mark("a", Lane::Prompt, now);
        assert_eq!(queue.next(Lane::Prompt), Some(now + DEBOUNCE));
        assert_eq!(pop(&mut queue, now + DEBOUNCE).as_deref(), Some("a"));
        assert_eq!(queue.next(Lane::Prompt), None, "the later one is gone");
    }

    #[test]
    fn a_closed_lane_keeps_its_nodes_and_what_is_prompt_goes_first() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.at("a", Lane::Paced, now);
        queue.at("b", Lane::Paced, now);
        queue.at("c", Lane::Prompt, now);
        let paced = |node: &str| Some((node.to_owned(), Lane::Paced));
        assert_eq!(queue.pop(now, true), Some(("c".to_owned(), Lane::Prompt)));
        assert_eq!(queue.pop(now, false), None);
        assert_eq!(queue.len(Lane::Paced), 2);
        assert_eq!(queue.pop(now, true), paced("a"));
        assert_eq!(queue.pop(now, true), paced("b"));
    }

    #[test]
    fn a_node_amid_a_change_goes_before_those_that_wait_to_begin() {
        let now = Instant::now();
        let mut queue = Queue::default();
        for node in ["b", "c"] {
            queue.at(node, Lane::Paced, now);
        }
        let later = now + Duration::from_secs(9);
        queue.first("d", Lane::Paced, later);
        queue.first("a", Lane::Paced, later);
        let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, later)).collect();
        assert_eq!(order, ["a", "d", "b", "c"]);
        queue.first("e", Lane::Paced, later);
        assert_eq!(
            queue.next(Lane::Paced),
            Some(later),
            "at once, in an empty lane"
        );
    }

    #[test]
    fn failures_wait_longer_and_longer_up_to_a_minute() {
        let now = Instant::now();
        let mut queue = Queue::default();
        let mut waits = Vec::new();
        for _ in 0..12 {
            queue.failed("a", Lane::Prompt, now);
            waits.push(queue.next(Lane::Prompt).expect("queued") - now);
            pop(&mut queue, now + LAST_RETRY);
        }
        assert_eq!(waits[0], FIRST_RETRY);
        assert!(waits.windows(2).all(|w| w[0] <= w[1]));
        assert_eq!(waits[11], LAST_RETRY);

        queue.succeeded("a");
        queue.failed("a", Lane::Prompt, now);
        assert_eq!(queue.next(Lane::Prompt), Some(now + FIRST_RETRY));
    }

    #[test]
    fn a_pace_is_kept_on_average_and_saves_nothing_up() {
        let begun = Instant::now();
        let mut pace = Pace::new(100);
        let (mut now, mut requests) = (begun, 0_u32);
        while now < begun + Duration::from_secs(10) {
            if pace.is_open(now) {
                pace.charge(9, now);
                requests += 9;
            }
            now += Duration::from_millis(1);
        }
        assert!((1000 - 9..=1000 + 9).contains(&requests), "{requests}");
        // An hour later no more than one change begins at once.
        let later = now + Duration::from_hours(1);
        pace.charge(9, later);
        assert!(!pace.is_open(later));
    }
}
