//! The durable record of one claim's plan, as bytes.
//!
//! The kubelet-plugin keeps one such record per claim in a file; here is only what is in it. A
//! record is JSON with a `version` at its top. A reader knows its own version and the one before,
//! so that a node can be upgraded with claims held; it refuses a newer one by name instead of
//! guessing, and never overwrites it.

use serde::{Deserialize, Serialize};

use crate::preparation::PreparationPlan;

/// The version written.
pub const VERSION: u64 = 1;
/// The oldest version read.
pub const OLDEST_VERSION: u64 = 1;

/// One claim's plan, of which any part may have been carried out: doing it again and undoing it both
/// cover the whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    version: u64,
    /// What to do.
    pub plan: PreparationPlan,
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Not a record, or cut short.
    #[error("corrupt journal: {0}")]
    Corrupt(#[source] serde_json::Error),
    /// Written by a later version of this driver.
    #[error(
        "the journal has version {found}, this driver reads versions {OLDEST_VERSION} to {VERSION}: run the driver that wrote it, or a newer one"
    )]
    Newer {
        /// The version of the record.
        found: u64,
    },
    /// Written by a version of this driver that is too old.
    #[error(
        "the journal has version {found}, this driver reads versions {OLDEST_VERSION} to {VERSION}: upgrade one version at a time"
    )]
    Older {
        /// The version of the record.
        found: u64,
    },
}

/// The one field that every version has.
#[derive(Deserialize)]
struct Envelope {
    version: u64,
}

impl Record {
    /// A record of this version.
    #[must_use]
    pub fn new(plan: PreparationPlan) -> Self {
        Self {
            version: VERSION,
            plan,
        }
    }

    /// The record's bytes, with a final newline.
    ///
    /// # Panics
    ///
    /// Never: JSON in memory fails only for maps whose keys are no strings, and there are none.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a record has only strings for keys");
        bytes.push(b'\n');
        bytes
    }

    /// Reads a record of this version or the one before.
    pub fn decode(bytes: &[u8]) -> Result<Self, JournalError> {
        let Envelope { version } = serde_json::from_slice(bytes).map_err(JournalError::Corrupt)?;
        if version > VERSION {
            return Err(JournalError::Newer { found: version });
        }
        if version < OLDEST_VERSION {
            return Err(JournalError::Older { found: version });
        }
        serde_json::from_slice(bytes).map_err(JournalError::Corrupt)
    }
}

#[cfg(test)]
mod tests;
