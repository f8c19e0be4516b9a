//! Which node to look at next, and when.
//!
//! A node is in the queue at most once, at the earliest time anybody asked for. Events are gathered for a
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

/// The nodes to look at, in order of time.
#[derive(Debug, Default)]
pub struct Queue {
    due: BTreeMap<String, Instant>,
    order: BTreeSet<(Instant, String)>,
    failures: BTreeMap<String, u32>,
}

impl Queue {
    /// Something about the node changed. Forgets no earlier appointment.
    pub fn mark(&mut self, node: &str, now: Instant) {
        self.at(node, now + DEBOUNCE);
    }

    /// Looks at the node at that time, or earlier if that is arranged already.
    pub fn at(&mut self, node: &str, when: Instant) {
        if self.due.get(node).is_some_and(|&due| due <= when) {
            return;
        }
        if let Some(later) = self.due.insert(node.to_owned(), when) {
            self.order.remove(&(later, node.to_owned()));
        }
        self.order.insert((when, node.to_owned()));
    }

    /// The attempt failed: looks again after a wait that doubles with each failure in a row. Says how many.
    pub fn failed(&mut self, node: &str, now: Instant) -> u32 {
        let failures = self.failures.entry(node.to_owned()).or_default();
        let wait = FIRST_RETRY
            .saturating_mul(1 << (*failures).min(16))
            .min(LAST_RETRY);
        *failures = failures.saturating_add(1);
        let failures = *failures;
        self.at(node, now + wait);
        failures
    }

    /// The attempt succeeded: the next failure waits for the shortest time again.
    pub fn succeeded(&mut self, node: &str) {
        self.failures.remove(node);
    }

    /// Takes the first node whose time has come.
    pub fn pop(&mut self, now: Instant) -> Option<String> {
        if self.order.first()?.0 > now {
            return None;
        }
        let (_, node) = self.order.pop_first()?;
        self.due.remove(&node);
        Some(node)
    }

    /// When the next node is due.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.order.first().map(|(when, _)| *when)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_a_node_are_gathered_into_one_visit() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.mark("a", now);
        queue.mark("a", now + DEBOUNCE / 2);
        assert_eq!(queue.pop(now), None);
        assert_eq!(queue.pop(now + DEBOUNCE).as_deref(), Some("a"));
        assert_eq!(queue.next(), None);
    }

    #[test]
    fn an_event_is_not_held_back_by_a_later_appointment() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.at("a", now + Duration::from_mins(1));
        queue.mark("a", now);
        assert_eq!(queue.next(), Some(now + DEBOUNCE));
        assert_eq!(queue.pop(now + DEBOUNCE).as_deref(), Some("a"));
        assert_eq!(queue.next(), None, "the later appointment is gone");
    }

    #[test]
    fn failures_wait_longer_and_longer_up_to_a_minute() {
        let now = Instant::now();
        let mut queue = Queue::default();
        let mut waits = Vec::new();
        for _ in 0..12 {
            queue.failed("a", now);
            waits.push(queue.next().expect("queued") - now);
            queue.pop(now + LAST_RETRY);
        }
        assert_eq!(waits[0], FIRST_RETRY);
        assert!(waits.windows(2).all(|w| w[0] <= w[1]));
        assert_eq!(waits[11], LAST_RETRY);

        queue.succeeded("a");
        queue.failed("a", now);
        assert_eq!(queue.next(), Some(now + FIRST_RETRY));
    }
}
