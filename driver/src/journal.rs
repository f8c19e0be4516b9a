//! The durable records of a claim and of a GPU, as bytes.
//!
//! The kubelet-plugin keeps a file per claim, and one per GPU that Tranche has changed; this module defines only their
//! content. A record is JSON. `version` is the format of the release that wrote it, `minReader` the
//! oldest format whose readers understand it (ADR 0019):
//!
//! - A reader refuses a record whose `minReader` is above its own version, names both versions, and
//!   never overwrites it. In other records it ignores unknown fields. So a release that adds a
//!   field can be rolled back; one that adds what must not be ignored (a step that must be undone)
//!   raises `minReader` in the records that have it.
//! - A reader knows its own version and the one before, so that a node can be upgraded with claims
//!   held.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::gpu_state;
use crate::moment::Moment;
use crate::preparation::PreparationPlan;

/// The version written.
pub const VERSION: u64 = 1;
/// The oldest version read.
pub const OLDEST_VERSION: u64 = 1;
/// The oldest version whose readers understand what this release writes.
const MIN_READER: u64 = 1;

/// One claim's plan. Any part of it may have been carried out: executing it again, or undoing it,
/// covers all steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRecord {
    version: u64,
    min_reader: u64,
    /// When the claim got its devices; `None` if that is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Moment>,
    /// What to do.
    pub plan: PreparationPlan,
}

/// What Tranche has changed on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRecord {
    version: u64,
    min_reader: u64,
    /// `GPU-…`.
    pub gpu_uuid: String,
    /// The kernel's boot in which it was written, if that is recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
    /// The changes.
    changes: gpu_state::GpuChanges,
}

impl GpuRecord {
    /// A record of this version, written in this boot.
    #[must_use]
    pub const fn new(gpu_uuid: String, boot: String, changes: gpu_state::GpuChanges) -> Self {
        Self {
            boot: Some(boot),
            version: VERSION,
            min_reader: MIN_READER,
            gpu_uuid,
            changes,
        }
    }

    /// The changes that are left in this boot.
    #[must_use]
    pub fn changes_in(self, boot: &str) -> gpu_state::GpuChanges {
        match self.boot {
            Some(before) if before != boot => self.changes.after_a_boot(),
            _ => self.changes,
        }
    }

    /// The record's bytes, with a final newline.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads a record of this version, or of a later one whose `minReader` allows it.
    pub fn decode(bytes: &[u8]) -> Result<Self, JournalError> {
        decode(bytes)
    }
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Not a record, or truncated.
    #[error("corrupt journal: {0}")]
    Corrupt(#[source] serde_json::Error),
    /// A later version of this driver wrote it, with something that must not be ignored.
    #[error(
        "the journal has version {version} and needs a driver that reads version {min_reader}, this one reads versions up to {VERSION}: run the driver that wrote it, or a newer one"
    )]
    Newer {
        /// The version of the record.
        version: u64,
        /// The version that a reader must know at least.
        min_reader: u64,
    },
    /// Written by a version of this driver that is too old.
    #[error(
        "the journal has version {version}, this driver reads versions from {OLDEST_VERSION} on: upgrade one version at a time"
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
    min_reader: u64,
}

impl ClaimRecord {
    /// A record of this version, of a claim that has had its devices since `since`.
    #[must_use]
    pub fn new(plan: PreparationPlan, since: Option<Moment>) -> Self {
        Self {
            version: VERSION,
            min_reader: MIN_READER,
            since,
            plan,
        }
    }

    /// The record of the same claim with another plan.
    #[must_use]
    pub fn with_plan(&self, plan: PreparationPlan) -> Self {
        Self::new(plan, self.since)
    }

    /// The record's bytes, with a final newline.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads a record of this version, of an earlier one, or of a later one whose `minReader` allows it.
    pub fn decode(bytes: &[u8]) -> Result<Self, JournalError> {
        decode(bytes)
    }
}

/// # Panics
///
/// Never: serializing to memory fails only for maps whose keys are not strings or numbers, and there
/// are none.
fn encode(record: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(record).expect("a record has only strings for keys");
    bytes.push(b'\n');
    bytes
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JournalError> {
    let Envelope {
        version,
        min_reader,
    } = serde_json::from_slice(bytes).map_err(JournalError::Corrupt)?;
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

#[cfg(test)]
mod tests;
