//! When a holder that does nothing gives its part of a GPU back (ADR 0043).
//!
//! ```text
//!           no kernel for `after`               `grace` later, if the policy evicts
//!   busy ─────────────────────────► noticed ─────────────────────────────────────► evicted
//!     ▲                                │  ▲                                           │
//!     └── a kernel, an exemption, ─────┘  └──────── the eviction was refused ◄────────┘
//!         another policy, not known
//! ```
//!
//! [`Watch::step`] decides for one device of a claim; whoever calls it says the time and what was seen. Whatever is not known
//! counts as work: nobody is evicted because a driver does not answer.

#[cfg(test)]
mod tests;

use std::time::Duration;

use tranche_api::usage::ShareUsage;

/// What a policy says of idle holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Without a kernel for so long, a holder is idle.
    pub after: Duration,
    /// What then happens.
    pub action: Action,
}

/// What happens to an idle holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It is named, with what it would free.
    Report,
    /// It is named, and evicted after a time in which it, or its owner, can do something about it.
    Evict {
        /// That time.
        grace: Duration,
    },
}

/// What was seen of a device of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// For how long it has run no kernel; `None` if that is not known.
    pub idle: Option<Duration>,
    /// Bytes of the GPU's memory that its processes hold.
    pub memory: u64,
}

impl Seen {
    /// What NVML said of a device, and for how long its own account has known no launch, where it has an account. Its programs
    /// write the account: they can make it look busy with it, and no other claim.
    #[must_use]
    pub fn of(usage: &ShareUsage, without_launch: Option<Duration>) -> Self {
        let by_nvml = usage.idle_seconds.map(Duration::from_secs);
        let idle = by_nvml.map(|idle| without_launch.map_or(idle, |launch| launch.min(idle)));
        Self {
            idle,
            memory: usage.memory.used,
        }
    }
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
    /// Say that it is not idle any more, or that it is not asked.
    Withdraw,
    /// Evict its pods.
    Evict,
}

/// What is known of one device of a claim, from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Watch {
    /// Nothing was said.
    #[default]
    Busy,
    /// It was called idle, at this time.
    Noticed(Duration),
}

impl Watch {
    /// The next state, and what must be done. `now` is a time that does not go back; `terms` are those of its namespace, `None`
    /// if nothing is asked of it there, or if it is exempt.
    #[must_use]
    pub fn step(self, now: Duration, terms: Option<Terms>, seen: Seen) -> (Self, Step) {
        let idle_for = |terms: Terms| {
            let idle = seen.idle.filter(|idle| *idle >= terms.after)?;
            (seen.memory > 0).then_some((terms.action, idle))
        };
        let Some((action, idle)) = terms.and_then(idle_for) else {
            return match self {
                Self::Busy => (Self::Busy, Step::Nothing),
                Self::Noticed(_) => (Self::Busy, Step::Withdraw),
            };
        };
        match self {
            // It has worked since, and is idle again.
            Self::Noticed(at) if idle < now.saturating_sub(at) => {
                (Self::Noticed(now), Step::Notice { idle })
            }
            Self::Noticed(at) => match action {
                Action::Evict { grace } if now.saturating_sub(at) >= grace => (self, Step::Evict),
                Action::Evict { .. } | Action::Report => (self, Step::Nothing),
            },
            Self::Busy => (Self::Noticed(now), Step::Notice { idle }),
        }
    }
}
