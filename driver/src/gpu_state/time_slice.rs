//! The length of a GPU's time slices: while it has timeshared shares, the length that their policy asks for; after the
//! last of them, the length from before.
//!
//! A GPU has one length, so claims that were planned under different policies cannot each have their own. The length
//! that is set stays while any claim was planned with it: a change of the policy does not disturb a running claim.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tranche_api::sharing_policy::Interval;

/// A length that Tranche has set, or is about to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChangedTimeSlice {
    /// The length before.
    pub before: Interval,
    /// The length that is set.
    pub set: Interval,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextTimeSlice {
    /// Write this into the GPU's record, durably.
    Write(Option<ChangedTimeSlice>),
    /// Set the length.
    Set(Interval),
    /// The length is as wanted.
    Done,
}

/// The next step that reconciles the length of time slices. `wanted` has the lengths with which the held timeshared
/// shares were planned; [`Interval::Default`] asks for nothing. `actual` is what the driver reports.
#[must_use]
pub fn next_time_slice(
    wanted: &BTreeSet<Interval>,
    changed: Option<ChangedTimeSlice>,
    actual: Interval,
) -> NextTimeSlice {
    let wishes = || wanted.iter().filter(|it| **it != Interval::Default);
    let kept = changed.filter(|changed| wishes().any(|wish| *wish == changed.set));
    if let Some(kept) = kept {
        return if actual == kept.set {
            NextTimeSlice::Done
        } else {
            NextTimeSlice::Set(kept.set)
        };
    }
    match (changed, wishes().next_back()) {
        // Any other length was set by somebody else, or by a reboot.
        (Some(changed), _) if actual == changed.set && changed.before != changed.set => {
            NextTimeSlice::Set(changed.before)
        }
        (None, None) => NextTimeSlice::Done,
        (_, longest) => NextTimeSlice::Write(longest.map(|set| ChangedTimeSlice {
            before: actual,
            set: *set,
        })),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A GPU and its record.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct State {
        changed: Option<ChangedTimeSlice>,
        actual: Interval,
    }

    impl State {
        fn of(actual: Interval) -> Self {
            Self {
                changed: None,
                actual,
            }
        }

        /// Every state on the way, up to the one in which nothing is left to do.
        fn brought_to(self, wanted: &[Interval]) -> Vec<Self> {
            let wanted = wanted.iter().copied().collect();
            let mut states = vec![self];
            loop {
                let mut state = states[states.len() - 1];
                match next_time_slice(&wanted, state.changed, state.actual) {
                    NextTimeSlice::Write(changed) => state.changed = changed,
                    NextTimeSlice::Set(interval) => state.actual = interval,
                    NextTimeSlice::Done => return states,
                }
                assert!(states.len() < 10, "{states:?}");
                states.push(state);
            }
        }

        fn at_end_of(self, wanted: &[Interval]) -> Self {
            *self.brought_to(wanted).last().unwrap()
        }
    }

    #[test]
    fn what_is_set_stays_while_a_claim_was_planned_with_it() {
        let state = State::of(Interval::Default).at_end_of(&[Interval::Short]);
        let both = state.at_end_of(&[Interval::Short, Interval::Long]);
        assert_eq!(both.actual, Interval::Short);
        let long = both.at_end_of(&[Interval::Long]);
        assert_eq!(long.actual, Interval::Long);
        assert_eq!(
            long.at_end_of(&[Interval::Default]),
            State::of(Interval::Default)
        );
    }

    #[test]
    fn of_several_new_wishes_the_longest_holds() {
        let wishes = [
            Interval::Default,
            Interval::Medium,
            Interval::Long,
            Interval::Short,
        ];
        let state = State::of(Interval::Default).at_end_of(&wishes);
        assert_eq!(state.actual, Interval::Long);
    }

    #[test]
    fn without_a_wish_nothing_is_touched() {
        for wanted in [&[][..], &[Interval::Default]] {
            let foreign = State::of(Interval::Long);
            assert_eq!(foreign.brought_to(wanted), [foreign]);
        }
    }

    fn interval() -> impl Strategy<Value = Interval> {
        prop::sample::select(vec![
            Interval::Default,
            Interval::Short,
            Interval::Medium,
            Interval::Long,
        ])
    }

    proptest! {
        /// A crash between any two steps, and any later wishes: in the end the length is as it was before.
        #[test]
        fn the_former_length_comes_back_after_a_crash_at_any_step(
            before in interval(),
            rounds in prop::collection::vec((prop::collection::vec(interval(), 0..4), any::<prop::sample::Index>()), 0..5),
        ) {
            let mut state = State::of(before);
            for (wanted, crash) in rounds {
                let states = state.brought_to(&wanted);
                let end = states[states.len() - 1];
                let mut wishes = wanted.iter().filter(|it| **it != Interval::Default).peekable();
                if wishes.peek().is_some() {
                    prop_assert!(wishes.any(|wish| *wish == end.actual));
                }
                state = states[crash.index(states.len())];
            }
            prop_assert_eq!(state.at_end_of(&[]), State::of(before));
        }

        /// A length that somebody else sets meanwhile stays.
        #[test]
        fn somebody_elses_length_stays(before in interval(), ours in interval(), theirs in interval()) {
            let mut state = State::of(before).at_end_of(&[ours]);
            prop_assume!(theirs != state.actual);
            state.actual = theirs;
            prop_assert_eq!(state.at_end_of(&[]), State::of(theirs));
        }
    }
}
