//! Decides when the API server is asked for which held claim. A state machine without I/O; [`super`]
//! makes the requests.
//!
//! ```text
//!                  ┌────────── the kubelet lists it ◄──────────┐
//!                  ▼                                           │
//!  loaded ─► asked for once ─► listed: never asked for ─► not listed: asked for at growing
//! intervals
//!                                    │                         │
//!                                    └─► blocks a new claim ───┴─► asked for at once
//!
//!  gone ─► GRACE ─► gone again, and the kubelet does not list it ─► released
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use tokio::time::Instant;

/// How often the kubelet is asked, and how long a claim that it does not list waits for its first GET.
pub const INTERVAL: Duration = Duration::from_mins(1);

/// The time over which the first GETs after a start are spread, because nodes may start at the same time.
pub const SPREAD: Duration = Duration::from_mins(5);

/// The longest pause between two GETs of a claim that exists and that the kubelet does not list: for
/// example one that only init containers use, or if the kubelet does not answer.
pub const LONGEST: Duration = Duration::from_hours(6);

/// A claim must be gone at two GETs that are at least this far apart: the claim of a pod that was deleted
/// by force is gone before its containers have ended. It is short enough for a claim that waits for the
/// orphan's GPU.
pub const GRACE: Duration = Duration::from_secs(15);

/// The shortest pause between two GETs of the node.
pub const PAUSE: Duration = Duration::from_secs(1);

/// The result of a GET of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    There,
    /// The API server said that it does not exist, or has another claim of its name.
    Gone,
    /// The API server gave no valid answer.
    Unknown,
}

/// The state of one claim.
#[derive(Clone, Copy, Debug)]
struct Claim {
    /// When it is asked for next, if at all.
    due: Option<Instant>,
    /// Asked for before the others, because another claim waits.
    urgent: bool,
    /// Whether this process has read it, or need not.
    read: bool,
    /// Whether the kubelet lists it; `None` if the kubelet did not answer.
    listed: Option<bool>,
    /// Since when it is gone.
    gone: Option<Instant>,
    /// The pause after the next GET that finds it.
    pause: Duration,
    last: Option<Instant>,
}

/// The held claims and their next requests.
#[derive(Debug, Default)]
pub struct Schedule {
    claims: BTreeMap<String, Claim>,
    /// The pods for which each claim was asked for already.
    joined: BTreeMap<String, BTreeSet<String>>,
    started: bool,
}

impl Schedule {
    /// Updates the held claims, and whether the kubelet lists each: `None` if it did not answer. The claims
    /// of the first call were loaded from the journal.
    pub fn update(&mut self, now: Instant, held: &BTreeMap<String, Option<bool>>) {
        self.claims.retain(|uid, _| held.contains_key(uid));
        self.joined.retain(|uid, _| held.contains_key(uid));
        for (uid, listed) in held {
            let loaded = !self.started;
            let claim = self.claims.entry(uid.clone()).or_insert_with(|| Claim {
                due: loaded.then(|| now + part(uid, SPREAD)),
                urgent: false,
                read: !loaded,
                listed: None,
                gone: None,
                pause: INTERVAL,
                last: None,
            });
            claim.listed = *listed;
            if !claim.read || claim.gone.is_some() || claim.urgent {
                continue;
            }
            claim.due = match listed {
                Some(true) => {
                    claim.pause = INTERVAL;
                    None
                }
                Some(false) => claim.due.or(Some(now + varied(uid, claim.pause))),
                None => claim.due.or(Some(now + varied(uid, LONGEST))),
            };
        }
        self.started = true;
    }

    /// Notes pods that use a claim, although the claim did not name them when it was last read: it is
    /// asked for once for each of them.
    pub fn joined(&mut self, now: Instant, uid: &str, pods: BTreeSet<String>) {
        if !self.claims.get(uid).is_some_and(|claim| claim.read) {
            return;
        }
        let asked = self.joined.entry(uid.to_owned()).or_default();
        if !pods.is_subset(asked) {
            asked.extend(pods);
            self.suspect(now, uid);
        }
    }

    /// Removes a claim that is no longer held.
    pub fn forget(&mut self, uid: &str) {
        self.claims.remove(uid);
    }

    /// A claim blocks a new claim, or another request waits for it: it is asked for at once, unless it just was.
    pub fn suspect(&mut self, now: Instant, uid: &str) {
        let Some(claim) = self.claims.get_mut(uid) else {
            return;
        };
        let soonest = claim.last.map_or(now, |last| now.max(last + GRACE));
        claim.due = Some(claim.due.map_or(soonest, |due| due.min(soonest)));
        claim.urgent = true;
    }

    /// The claim to ask for now, if any.
    #[must_use]
    pub fn next(&self, now: Instant) -> Option<&str> {
        let due = |claim: &Claim| claim.due.filter(|due| *due <= now);
        let claims = self.claims.iter();
        claims
            .filter_map(|(uid, claim)| Some(((!claim.urgent, due(claim)?), uid)))
            .min()
            .map(|(_, uid)| uid.as_str())
    }

    /// When the next claim is due.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.claims.values().filter_map(|claim| claim.due).min()
    }

    /// Records an answer. Returns whether the claim has been gone for long enough to be released; it is
    /// asked for again later in case the release fails.
    #[must_use]
    pub fn found(&mut self, now: Instant, uid: &str, found: Presence) -> bool {
        let Some(claim) = self.claims.get_mut(uid) else {
            return false;
        };
        claim.last = Some(now);
        claim.urgent = false;
        claim.read = true;
        match found {
            Presence::There | Presence::Unknown => {
                claim.gone = None;
                claim.due = match claim.listed {
                    Some(true) if found == Presence::There => None,
                    Some(_) => Some(now + varied(uid, claim.pause)),
                    None => Some(now + varied(uid, LONGEST)),
                };
                claim.pause = (claim.pause * 2).min(LONGEST);
                false
            }
            Presence::Gone => {
                let since = *claim.gone.get_or_insert(now);
                let long = now.duration_since(since) >= GRACE;
                claim.due = Some(now + if long { INTERVAL } else { GRACE });
                long && claim.listed != Some(true)
            }
        }
    }
}

/// Three to five quarters of a duration, by a claim's UID.
fn varied(uid: &str, duration: Duration) -> Duration {
    duration * 3 / 4 + part(uid, duration / 2)
}

/// A part of a duration, by a claim's UID.
fn part(uid: &str, duration: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    uid.hash(&mut hasher);
    // 1024 steps are enough.
    let step = u32::try_from(hasher.finish() % 1024).unwrap_or_default();
    duration * step / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(listed: Option<bool>) -> BTreeMap<String, Option<bool>> {
        BTreeMap::from([("a".to_owned(), listed)])
    }

    /// The number of GETs in a time, while the claim exists and the kubelet says `listed`.
    fn gets(schedule: &mut Schedule, from: Instant, time: Duration, listed: Option<bool>) -> usize {
        let mut gets = 0;
        let mut now = from;
        while now < from + time {
            schedule.update(now, &held(listed));
            while schedule.next(now).is_some() {
                assert!(!schedule.found(now, "a", Presence::There));
                gets += 1;
            }
            now += PAUSE;
        }
        gets
    }

    #[test]
    fn a_loaded_claim_that_the_kubelet_lists_is_asked_for_once() {
        let mut schedule = Schedule::default();
        let start = Instant::now();
        assert_eq!(gets(&mut schedule, start, SPREAD, Some(true)), 1);
        let day = Duration::from_hours(24);
        assert_eq!(gets(&mut schedule, start + SPREAD, day, Some(true)), 0);
    }

    #[test]
    fn a_claim_that_is_not_listed_is_asked_for_more_and_more_rarely() {
        for listed in [Some(false), None] {
            let mut schedule = Schedule::default();
            let start = Instant::now();
            let day = Duration::from_hours(24);
            let first = gets(&mut schedule, start, day, listed);
            assert!((4..=16).contains(&first), "{listed:?}: {first}");
            let second = gets(&mut schedule, start + day, day, listed);
            assert!((3..=5).contains(&second), "{listed:?}: {second}");
        }
    }

    #[test]
    fn a_claim_is_released_at_the_second_answer_after_the_grace() {
        let mut schedule = Schedule::default();
        let now = Instant::now();
        schedule.update(now, &held(Some(false)));
        schedule.suspect(now, "a");
        assert_eq!(schedule.next(now), Some("a"));
        assert!(!schedule.found(now, "a", Presence::Gone));
        assert_eq!(schedule.next(now), None);
        // A waiting claim does not shorten the grace period.
        schedule.suspect(now, "a");
        assert_eq!(schedule.next(now + GRACE - PAUSE), None);
        assert!(!schedule.found(now + PAUSE, "a", Presence::Gone));
        assert!(schedule.found(now + GRACE, "a", Presence::Gone));
    }

    #[test]
    fn one_answer_that_it_is_there_or_none_at_all_begins_anew() {
        for other in [Presence::There, Presence::Unknown] {
            let mut schedule = Schedule::default();
            let now = Instant::now();
            schedule.update(now, &held(Some(false)));
            assert!(!schedule.found(now, "a", Presence::Gone));
            assert!(!schedule.found(now + GRACE, "a", other));
            assert!(
                !schedule.found(now + 2 * GRACE, "a", Presence::Gone),
                "{other:?}"
            );
            assert!(schedule.found(now + 3 * GRACE, "a", Presence::Gone));
        }
    }

    #[test]
    fn what_the_kubelet_lists_is_never_released() {
        let mut schedule = Schedule::default();
        let mut now = Instant::now();
        for _ in 0..5 {
            schedule.update(now, &held(Some(true)));
            assert!(!schedule.found(now, "a", Presence::Gone));
            now += INTERVAL;
        }
        schedule.update(now, &held(Some(false)));
        assert!(schedule.found(now, "a", Presence::Gone));
    }

    #[test]
    fn a_claim_in_the_way_goes_first_and_is_not_asked_for_twice() {
        let mut schedule = Schedule::default();
        let start = Instant::now();
        let both = BTreeMap::from([("a".to_owned(), None), ("b".to_owned(), None)]);
        schedule.update(start, &both);
        let now = start + SPREAD;
        schedule.suspect(now, "b");
        assert_eq!(schedule.next(now), Some("b"));
        assert!(!schedule.found(now, "b", Presence::There));
        schedule.suspect(now, "b");
        assert_eq!(schedule.next(now), Some("a"));
        assert!(!schedule.found(now, "a", Presence::There));
        assert_eq!(schedule.next(now), None);
        assert_eq!(schedule.next(now + GRACE), Some("b"));
        schedule.suspect(now, "not-held");
    }
}
