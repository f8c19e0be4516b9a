//! The durable record of one claim, as bytes.
//!
//! The kubelet-plugin keeps one such record per claim in a file; this module defines only its
//! content. A record is JSON. `version` is the format of the release that wrote it, `minReader` the
//! oldest format whose readers understand it (ADR 0019):
//!
//! - A reader refuses a record whose `minReader` is above its own version, names both versions, and
//!   never overwrites it. In other records it ignores unknown fields. So a release that adds a
//!   field can be rolled back; one that adds what must not be ignored (a step that must be undone)
//!   raises `minReader` in the records that have it.
//! - A reader knows its own version and the one before, so that a node can be upgraded with claims
//!   held.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::preparation::PreparationPlan;

/// The version written.
pub const VERSION: u64 = 2;
/// The oldest version read.
pub const OLDEST_VERSION: u64 = 1;
/// The oldest version whose readers understand what this one writes. Version 1 refused every field
/// and device name that it did not know.
const MIN_READER: u64 = 2;

/// One claim's plan. Any part of it may have been carried out: executing it again, or undoing it,
/// covers all steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    version: u64,
    /// Version 1 had none.
    #[serde(default)]
    min_reader: u64,
    /// What to do.
    pub plan: PreparationPlan,
    /// Results that are known only after a step has run, by the step's index in the plan.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub results: BTreeMap<usize, StepResult>,
}

/// The result of a step, for its inverse and for later steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum StepResult {
    /// A MIG instance was created.
    #[serde(rename_all = "camelCase")]
    MigInstance {
        /// The GPU instance's id (`nvmlGpuInstanceInfo_t.id`).
        gpu_instance: u32,
        /// The id of the compute instance in it (`nvmlComputeInstanceInfo_t.id`).
        compute_instance: u32,
        /// `MIG-…`.
        uuid: String,
    },
    /// A daemon was started.
    #[serde(rename_all = "camelCase")]
    Daemon {
        /// Its PID in the host's PID namespace.
        pid: u32,
        /// When that process started, in clock ticks since boot (field 22 of `/proc/<pid>/stat`):
        /// distinguishes it from a later process with the same PID.
        started: u64,
    },
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Not a record, or cut short.
    #[error("corrupt journal: {0}")]
    Corrupt(#[source] serde_json::Error),
    /// A later version of this driver wrote it, with something that must not be ignored.
    #[error(
        "the journal has version {version} and needs a driver that reads version {min_reader}, this one reads versions {OLDEST_VERSION} to {VERSION}: run the driver that wrote it, or a newer one"
    )]
    Newer {
        /// The version of the record.
        version: u64,
        /// The version that a reader must know at least.
        min_reader: u64,
    },
    /// Written by a version of this driver that is too old.
    #[error(
        "the journal has version {version}, this driver reads versions {OLDEST_VERSION} to {VERSION}: upgrade one version at a time"
    )]
    Older {
        /// The version of the record.
        version: u64,
    },
}

/// The fields that every version has.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    version: u64,
    min_reader: Option<u64>,
}

impl Record {
    /// A record of this version, for a plan of which no step has run.
    #[must_use]
    pub const fn new(plan: PreparationPlan) -> Self {
        Self {
            version: VERSION,
            min_reader: MIN_READER,
            plan,
            results: BTreeMap::new(),
        }
    }

    /// A record of this version with `plan` in place of the recorded one: the same steps with
    /// current facts.
    #[must_use]
    pub fn with_plan(&self, plan: PreparationPlan) -> Self {
        Self {
            results: self.results.clone(),
            ..Self::new(plan)
        }
    }

    /// The record's bytes, with a final newline.
    ///
    /// # Panics
    ///
    /// Never: serializing to memory fails only for maps whose keys are not strings or numbers, and there
    /// are none.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a record has only strings for keys");
        bytes.push(b'\n');
        bytes
    }

    /// Reads a record of this version, of the version before, or of a later version whose `minReader`
    /// allows it.
    pub fn decode(bytes: &[u8]) -> Result<Self, JournalError> {
        let Envelope {
            version,
            min_reader,
        } = serde_json::from_slice(bytes).map_err(JournalError::Corrupt)?;
        let min_reader = min_reader.unwrap_or(version);
        if min_reader > VERSION {
            return Err(JournalError::Newer {
                version,
                min_reader,
            });
        }
        if version < OLDEST_VERSION {
            return Err(JournalError::Older { version });
        }
        serde_json::from_slice(bytes).map_err(JournalError::Corrupt)
    }
}

#[cfg(test)]
mod tests;
