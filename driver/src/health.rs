//! Whether a GPU works, and what follows from that.
//!
//! ```text
//!  NVML's answer, Xids ─┐
//!  policy: HealthTerms ─┼─► observe ─► Record (durable; none while the GPU is healthy) ─► Verdict ─► condition, taint
//!  result of a check ───┘
//! ```
//!
//! A GPU with a fault stays unhealthy until three things hold: NVML reports no fault, the driver asks for no recovery
//! action, and a check on the GPU has passed ([`Record::wants_check`]). A driver older than 565 reports no recovery
//! action. Under it, an Xid is not over before the GPU was lost and is back, the machine has booted again, or an
//! administrator has worked on the node ([`Record::note_maintenance`]).

mod fault;
#[cfg(test)]
mod tests;
pub mod xid;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tranche_api::gpu_node::{PublishedHealth, TaintEffect};
use tranche_api::sharing_policy::{FaultEffect, HealthPolicy};

pub use fault::{Fault, FaultError, Severity};

/// What the driver asks for (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryAction {
    /// `NVML_GPU_RECOVERY_ACTION_NONE`.
    None,
    /// `NVML_GPU_RECOVERY_ACTION_GPU_RESET`.
    Reset,
    /// `NVML_GPU_RECOVERY_ACTION_NODE_REBOOT`.
    Reboot,
    /// `NVML_GPU_RECOVERY_ACTION_DRAIN_P2P` and `NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET`.
    Drain,
}

impl RecoveryAction {
    /// From NVML's number. An action that this release does not know is taken for a reset.
    #[must_use]
    pub const fn of(number: u64) -> Self {
        match number {
            0 => Self::None,
            2 => Self::Reboot,
            3 | 4 => Self::Drain,
            _ => Self::Reset,
        }
    }
}

/// What NVML reports about the health of a GPU. What the model or the driver does not report is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
    pub recovery_action: Option<RecoveryAction>,
    /// `NVML_FI_DEV_REMAPPED_PENDING`.
    pub remap_pending: bool,
    /// `NVML_FI_DEV_REMAPPED_FAILURE`.
    pub remap_failed: bool,
}

/// A look at a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// NVML's answer.
    Report(Report),
    /// `NVML_ERROR_GPU_IS_LOST`.
    Lost,
    /// NVML could not be asked, and why.
    Unwatched(String),
}

/// A look at a GPU, with what happened since the last one.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// What was seen.
    pub seen: &'a Seen,
    /// The Xids since the last look.
    pub xids: &'a [u64],
    /// The machine's boot ID.
    pub boot: &'a str,
    /// Unix seconds.
    pub now: i64,
}

/// What a policy says about faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthTerms {
    /// The effect of a fault of [`Severity::Broken`].
    broken: TaintEffect,
    /// Seconds before [`TaintEffect::NoExecute`].
    grace: i64,
    /// Effects of single faults.
    faults: BTreeMap<Fault, FaultEffect>,
}

impl Default for HealthTerms {
    fn default() -> Self {
        Self::of(&PublishedHealth::default())
    }
}

impl HealthTerms {
    /// What the controller published for a GPU. A fault that this release does not know is left out.
    #[must_use]
    pub fn of(published: &PublishedHealth) -> Self {
        let rules = published.faults.iter();
        Self {
            broken: published.effect,
            grace: published
                .grace_seconds
                .unwrap_or(HealthPolicy::GRACE_SECONDS)
                .into(),
            faults: rules
                .filter_map(|rule| Some((rule.fault.parse().ok()?, rule.effect)))
                .collect(),
        }
    }

    /// The effect of a fault, or `None` if it has none.
    fn effect(&self, fault: Fault) -> Option<TaintEffect> {
        match (self.faults.get(&fault), fault.severity()) {
            (Some(FaultEffect::Ignore), _) | (None, Severity::None) => None,
            (Some(FaultEffect::NoSchedule), _) | (None, Severity::Degraded) => {
                Some(TaintEffect::NoSchedule)
            }
            (Some(FaultEffect::NoExecute), _) => Some(TaintEffect::NoExecute),
            (None, Severity::Broken) => Some(self.broken),
        }
    }
}

/// What is remembered of a GPU that has a fault, across restarts of the plugin and reboots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The faults, with the Unix seconds at which each was first seen.
    faults: BTreeMap<Fault, i64>,
    /// The boot in which the newest fault was seen.
    boot: String,
    /// Whether the GPU is lost.
    #[serde(default)]
    is_lost: bool,
    /// Whether a reset is due that the driver does not report.
    #[serde(default)]
    reset_due: bool,
    /// Why the last check did not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    check: Option<String>,
}

/// The status of the condition `Healthy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// No fault is known.
    Healthy,
    /// The GPU has a fault.
    Unhealthy,
    /// No fault is known, and the GPU is not watched.
    Unknown,
}

impl Status {
    /// As in a condition.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "True",
            Self::Unhealthy => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// The taint of a GPU's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taint {
    /// The worst fault.
    pub value: String,
    /// The effect now.
    pub effect: TaintEffect,
    /// Unix seconds: since when it has this effect.
    pub since: i64,
}

/// What follows for a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The condition's status.
    pub status: Status,
    /// The condition's reason: one word, the worst fault's name.
    pub reason: String,
    /// The condition's message: the faults, and the way out.
    pub message: String,
    /// The taint of its devices.
    pub taint: Option<Taint>,
}

/// What follows for each GPU, by UUID.
pub type Verdicts = BTreeMap<String, Verdict>;

/// The record after a look at the GPU.
#[must_use]
pub fn observe(record: Option<Record>, look: Look<'_>, terms: &HealthTerms) -> Option<Record> {
    let counts = |fault: &Fault| terms.effect(*fault).is_some();
    let xids = look.xids.iter().filter_map(|xid| u32::try_from(*xid).ok());
    let xids: Vec<Fault> = xids.map(Fault::Xid).filter(counts).collect();
    let states: Vec<Fault> = states(look.seen).into_iter().filter(counts).collect();
    let mut record = record.unwrap_or_else(|| Record {
        faults: BTreeMap::new(),
        boot: look.boot.to_owned(),
        is_lost: false,
        reset_due: false,
        check: None,
    });
    record.faults.retain(|fault, _| counts(fault));
    if record.boot != look.boot {
        look.boot.clone_into(&mut record.boot);
        record.reset_due = false;
    }
    let is_silent = match look.seen {
        Seen::Report(report) => report.recovery_action.is_none(),
        Seen::Lost | Seen::Unwatched(_) => true,
    };
    match look.seen {
        Seen::Lost => record.is_lost = true,
        // It was reset, or it would not answer.
        Seen::Report(_) if record.is_lost => {
            record.is_lost = false;
            record.reset_due = false;
        }
        Seen::Report(_) | Seen::Unwatched(_) => {}
    }
    record.reset_due |= !xids.is_empty() && is_silent;
    for fault in xids.into_iter().chain(states) {
        record.faults.entry(fault).or_insert(look.now);
    }
    (!record.faults.is_empty()).then_some(record)
}

/// The faults that NVML reports now.
fn states(seen: &Seen) -> Vec<Fault> {
    let report = match seen {
        Seen::Lost => return vec![Fault::GpuLost],
        Seen::Unwatched(_) => return Vec::new(),
        Seen::Report(report) => report,
    };
    let action = match report.recovery_action {
        None | Some(RecoveryAction::None) => None,
        Some(RecoveryAction::Reset) => Some(Fault::ResetRequired),
        Some(RecoveryAction::Reboot) => Some(Fault::RebootRequired),
        Some(RecoveryAction::Drain) => Some(Fault::DrainRequired),
    };
    let remap_failed = report.remap_failed.then_some(Fault::RowRemapFailure);
    let remap_pending = report.remap_pending.then_some(Fault::RowRemapPending);
    action
        .into_iter()
        .chain(remap_failed)
        .chain(remap_pending)
        .collect()
}

impl Record {
    /// Whether only a check is missing for the GPU to be healthy.
    #[must_use]
    pub fn wants_check(&self, seen: &Seen, terms: &HealthTerms) -> bool {
        let Seen::Report(report) = seen else {
            return false;
        };
        let is_over = |fault: Fault| terms.effect(fault).is_none();
        let is_reset = report.recovery_action.is_some() || !self.reset_due;
        is_reset && states(seen).into_iter().all(is_over)
    }

    /// Notes that an administrator has worked on the node: it was cordoned, no claim held a GPU, and NVML was closed, so
    /// that GPUs could be reset.
    pub fn note_maintenance(&mut self) {
        self.reset_due = false;
    }

    /// Whether the newest fault was seen in this boot.
    #[must_use]
    pub fn is_of_boot(&self, boot: &str) -> bool {
        self.boot == boot
    }

    /// Whether both have the same faults.
    #[must_use]
    pub fn has_faults_of(&self, other: &Self) -> bool {
        self.faults == other.faults
    }

    /// Notes why a check did not pass.
    pub fn note_check(&mut self, problem: String) {
        self.check = Some(problem);
    }

    fn taint(&self, terms: &HealthTerms, now: i64) -> Option<Taint> {
        let worst = self.worst(terms)?;
        let effects = self.faults.iter().filter_map(|(fault, since)| {
            let effect = terms.effect(*fault)?;
            let from = match effect {
                TaintEffect::NoExecute => since.saturating_add(terms.grace),
                TaintEffect::NoSchedule => *since,
            };
            Some((effect, from))
        });
        let executes = effects
            .filter(|(effect, from)| *effect == TaintEffect::NoExecute && *from <= now)
            .map(|(_, from)| from)
            .min();
        let first = self.faults.values().min();
        Some(Taint {
            value: worst.to_string(),
            effect: executes.map_or(TaintEffect::NoSchedule, |_| TaintEffect::NoExecute),
            since: executes.or(first.copied())?,
        })
    }

    /// The most severe fault, of equal ones the first.
    fn worst(&self, terms: &HealthTerms) -> Option<Fault> {
        let rank = |(fault, since): &(&Fault, &i64)| {
            // NoExecute comes first.
            (terms.effect(**fault), fault.severity(), **since, **fault)
        };
        self.faults.iter().min_by_key(rank).map(|(fault, _)| *fault)
    }

    /// The faults, and what happens next or what an administrator does.
    fn message(&self, seen: &Seen, is_held: bool, terms: &HealthTerms) -> String {
        let faults: Vec<_> = self.faults.keys().map(|fault| fault.describe()).collect();
        let faults = faults.join("; ");
        let next = match (&self.check, self.wants_check(seen, terms)) {
            (_, true) if is_held => {
                "it is checked when no claim holds it any more".to_owned()
            }
            (Some(problem), true) => format!("the check of the GPU does not pass: {problem}"),
            (None, true) => "it is being checked".to_owned(),
            (_, false) => match seen {
                Seen::Unwatched(why) => format!("it cannot be watched: {why}"),
                Seen::Lost => "reset the GPU or reboot the node".to_owned(),
                Seen::Report(_) => states(seen)
                    .first()
                    .map_or("cordon the node, reset the GPU when no claim is left on the node, and uncordon it", |state| state.way_out())
                    .to_owned(),
            },
        };
        format!("{faults}; {next}")
    }
}

/// What follows from the record of a GPU, and from the last look at it. `is_held` says whether a claim holds it.
#[must_use]
pub fn verdict(
    record: Option<&Record>,
    seen: &Seen,
    is_held: bool,
    terms: &HealthTerms,
    now: i64,
) -> Verdict {
    let found = record.and_then(|record| Some((record, record.worst(terms)?)));
    match (found, seen) {
        (Some((record, worst)), _) => Verdict {
            status: Status::Unhealthy,
            reason: worst.to_string(),
            message: record.message(seen, is_held, terms),
            taint: record.taint(terms, now),
        },
        (None, Seen::Unwatched(why)) => Verdict {
            status: Status::Unknown,
            reason: "NotWatched".to_owned(),
            message: why.clone(),
            taint: None,
        },
        (None, Seen::Report(_) | Seen::Lost) => Verdict {
            status: Status::Healthy,
            reason: "NoFault".to_owned(),
            message: "NVML reports no fault".to_owned(),
            taint: None,
        },
    }
}
