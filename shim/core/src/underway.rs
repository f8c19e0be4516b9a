//! Calls of one kind that are in progress, in one word. It tells whether a call was alone from its beginning to its end,
//! and which call is the last.
//!
//! The driver is called without a lock, so the order in which it executes two concurrent calls is unknown. A caller that
//! was alone knows the driver's state after its call; any other caller assumes the worst case.

use crate::sync::{AtomicU64, Ordering};

/// The calls. All zeros means no calls.
#[repr(transparent)]
#[derive(Debug)]
pub struct Underway(AtomicU64);

/// A call that began.
#[derive(Debug)]
#[must_use = "end it"]
pub struct BegunCall {
    at: u64,
    was_alone: bool,
}

/// The calls that were observed at an instant.
#[derive(Clone, Copy, Debug)]
pub struct Observation(u64);

/// Calls are counted in the lower half of the word; beginnings and ends in the upper.
const EVENT: u64 = 1 << 32;
const COUNT: u64 = EVENT - 1;

impl Underway {
    #[cfg(any(test, loom))]
    fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Begins a call.
    pub fn begin(&self) -> BegunCall {
        let before = self.0.fetch_add(EVENT + 1, Ordering::AcqRel);
        BegunCall {
            at: before.wrapping_add(EVENT + 1),
            was_alone: before & COUNT == 0,
        }
    }

    /// Ends a call; returns whether no other one was in progress at any time since it began.
    pub fn end(&self, begun: &BegunCall) -> bool {
        let before = self.0.fetch_add(EVENT - 1, Ordering::AcqRel);
        begun.was_alone && before == begun.at
    }

    /// Ends a call, whether or not it was alone.
    pub fn leave(&self) {
        self.0.fetch_add(EVENT - 1, Ordering::AcqRel);
    }

    /// Whether a call is in progress.
    pub fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) & COUNT != 0
    }

    /// Notes the calls, before the driver is asked for its state.
    pub fn observe(&self) -> Observation {
        Observation(self.0.load(Ordering::Acquire))
    }

    /// Ends a call if no other one began or ended since then.
    pub fn end_if_unchanged(&self, seen: Observation) -> bool {
        self.0
            .compare_exchange(
                seen.0,
                seen.0.wrapping_add(EVENT - 1),
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
    }
}

impl Observation {
    /// Whether there was one call.
    #[must_use]
    pub const fn is_last(self) -> bool {
        self.0 & COUNT == 1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Underway;

    #[test]
    fn a_call_that_was_alone_knows_it() {
        let calls = Underway::none();
        let one = calls.begin();
        assert!(calls.any());
        assert!(calls.end(&one));
        // One within the other, as a callback makes it; and one after the other began.
        let outer = calls.begin();
        let inner = calls.begin();
        assert!(!calls.end(&inner));
        assert!(!calls.end(&outer));
        let (first, second) = (calls.begin(), calls.begin());
        assert!(!calls.end(&first));
        assert!(!calls.end(&second));
        assert!(!calls.any());
    }

    #[test]
    fn an_outdated_observation_ends_nothing() {
        let calls = Underway::none();
        let (_first, second) = (calls.begin(), calls.begin());
        let seen = calls.observe();
        assert!(!seen.is_last());
        calls.end(&second);
        assert!(!calls.end_if_unchanged(seen));
        let seen = calls.observe();
        assert!(seen.is_last());
        assert!(calls.end_if_unchanged(seen));
        assert!(!calls.any());
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::atomic::{AtomicU64, Ordering};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::Underway;

    struct State {
        calls: Underway,
        driver: AtomicU64,
        noted: Mutex<u64>,
    }

    fn set(value: u64, state: &State) {
        let begun = state.calls.begin();
        state.driver.store(value, Ordering::SeqCst);
        let mut noted = state.noted.lock().unwrap();
        let alone = state.calls.end(&begun);
        *noted = if alone { value } else { value.max(*noted) };
    }

    /// Two threads set a limit in the driver and note it: what is noted is never less than what is set.
    #[test]
    fn what_is_noted_is_no_less_than_what_is_set() {
        loom::model(|| {
            let state = Arc::new(State {
                calls: Underway::none(),
                driver: AtomicU64::new(0),
                noted: Mutex::new(0),
            });
            let other = {
                let state = Arc::clone(&state);
                thread::spawn(move || set(5, &state))
            };
            set(9, &state);
            other.join().unwrap();
            let noted = *state.noted.lock().unwrap();
            assert!(noted >= state.driver.load(Ordering::SeqCst));
        });
    }

    /// A primary context is released by one thread and retained by another. The last of the calls asks the driver,
    /// and gives the charge back if the context is gone; a retain without a charge makes one first.
    #[test]
    fn a_context_that_exists_is_charged() {
        loom::model(|| {
            struct Primary {
                calls: Underway,
                /// References in the driver.
                references: AtomicU64,
                charged: Mutex<bool>,
            }
            let leave = |primary: &Primary| loop {
                let seen = primary.calls.observe();
                let exists = primary.references.load(Ordering::SeqCst) > 0;
                let mut charged = primary.charged.lock().unwrap();
                if primary.calls.end_if_unchanged(seen) {
                    *charged &= exists || !seen.is_last();
                    return;
                }
            };
            let primary = Arc::new(Primary {
                calls: Underway::none(),
                references: AtomicU64::new(1),
                charged: Mutex::new(true),
            });
            let other = {
                let primary = Arc::clone(&primary);
                thread::spawn(move || {
                    {
                        let mut charged = primary.charged.lock().unwrap();
                        let _ = primary.calls.begin();
                        *charged = true;
                    }
                    primary.references.fetch_add(1, Ordering::SeqCst);
                    leave(&primary);
                })
            };
            {
                let _charged = primary.charged.lock().unwrap();
                let _ = primary.calls.begin();
            }
            primary.references.fetch_sub(1, Ordering::SeqCst);
            leave(&primary);
            other.join().unwrap();
            assert!(*primary.charged.lock().unwrap());
        });
    }
}
