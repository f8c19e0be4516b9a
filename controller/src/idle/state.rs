//! When a claim whose programs do nothing gives its part of a GPU back (ADR 0043).
//!
//! ```text
//!           no kernel for `after`               `grace` later, if the policy evicts
//!   busy ─────────────────────────► noticed ─────────────────────────────────────► evicted
//!     ▲                                │  ▲                                           │
//!     └── a kernel, an exemption, ─────┘  └──────── the eviction was refused ◄────────┘
//!         another policy, not known
//! ```
//!
//! [`Watch::step`] decides for one claim; its caller gives the time. Unknown activity counts as work: no pod is evicted because a
//! driver does not answer.

#[cfg(test)]
mod tests;

use std::time::Duration;

use tranche_driver::policy::{Action, IdleRule};

/// What was seen of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// For how long it has run no kernel; `None` if that is not known.
    pub idle: Option<Duration>,
    /// Bytes of GPU memory that its processes hold.
    pub memory: u64,
}

impl Activity {
    /// Nothing is known of it.
    pub const NOTHING: Self = Self {
        idle: None,
        memory: 0,
    };
}

/// What must be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: the condition on the claim is as it should be.
    Nothing,
    /// Say that it is idle.
    Notice {
        /// For how long it has run no kernel.
        idle: Duration,
    },
    /// Say that it is not idle any more, or why that is not known.
    Withdraw(Why),
    /// Evict its pods.
    Evict,
}

/// Why a claim is no longer called idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It ran a kernel.
    Works,
    /// Its processes hold no memory.
    HoldsNothing,
    /// The node or its driver does not tell.
    NotKnown,
    /// No policy asks, or it is exempt.
    NotAsked,
}

/// What is known of a claim, from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Watch {
    /// The claim has no condition `Idle`, or a false one.
    #[default]
    Busy,
    /// The claim has the condition `Idle`.
    Noticed {
        /// When.
        at: Duration,
        /// What the notice announced. No pod is evicted without notice, or earlier than announced.
        told: Action,
    },
}

impl Watch {
    /// The next state, and what must be done. `now` is a time that does not go back; `terms` are those of its namespace, `None`
    /// if nothing is asked of it there, or if it is exempt.
    #[must_use]
    pub fn step(self, now: Duration, terms: Option<IdleRule>, seen: Activity) -> (Self, Step) {
        let (action, idle) = match judge(terms, seen) {
            Ok(idle) => idle,
            Err(why) => {
                return match self {
                    Self::Busy => (Self::Busy, Step::Nothing),
                    Self::Noticed { .. } => (Self::Busy, Step::Withdraw(why)),
                };
            }
        };
        let told_now = Self::Noticed {
            at: now,
            told: action,
        };
        let notice = (told_now, Step::Notice { idle });
        let Self::Noticed { at, told } = self else {
            return notice;
        };
        let for_so_long = now.saturating_sub(at);
        // It has worked since, and is idle again.
        if idle < for_so_long {
            return notice;
        }
        match (action, told) {
            (Action::Report, Action::Report) => (self, Step::Nothing),
            (Action::Evict { grace }, Action::Evict { grace: told }) => {
                let is_over = for_so_long >= grace.max(told);
                (self, if is_over { Step::Evict } else { Step::Nothing })
            }
            (Action::Report, Action::Evict { .. }) | (Action::Evict { .. }, Action::Report) => {
                notice
            }
        }
    }
}

/// Whether a claim is idle by these terms.
#[must_use]
pub fn is_idle(terms: IdleRule, seen: Activity) -> bool {
    judge(Some(terms), seen).is_ok()
}

/// The action for an idle claim, and for how long it has been idle; or why it is not idle.
fn judge(terms: Option<IdleRule>, seen: Activity) -> Result<(Action, Duration), Why> {
    let terms = terms.ok_or(Why::NotAsked)?;
    let idle = seen.idle.ok_or(Why::NotKnown)?;
    if idle < terms.after {
        return Err(Why::Works);
    }
    if seen.memory == 0 {
        return Err(Why::HoldsNothing);
    }
    Ok((terms.action, idle))
}
