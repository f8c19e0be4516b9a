//! The journal on disk: one file per claim, named after its UID.
//!
//! A file that cannot be read is kept, and the claim is refused with an error that names the file: only a
//! person can decide whether its GPUs are still in use. Until then the GPUs that it names count as taken,
//! or all GPUs of the node if that is not known ([`MayHold`]). It is read again whenever the kubelet asks
//! for a claim.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use tranche_driver::journal::{ClaimRecord, JournalError};

use crate::host::fs::{self, Durability, Fs, FsError};

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("journal: {0}")]
    Fs(#[from] FsError),
    #[error(
        "journal {path}: {source}; where no driver reads it, delete the claim's pods and then the file"
    )]
    Unreadable {
        path: PathBuf,
        source: JournalError,
        /// What the claim may hold.
        may_hold: MayHold,
    },
    /// The content belongs to another claim.
    #[error("journal {path} records claim {uid}: the file was renamed or copied; delete it")]
    Misnamed {
        path: PathBuf,
        uid: String,
        /// What the claim of the file's name may hold.
        may_hold: MayHold,
    },
}

impl StoreError {
    /// What the claim of this journal may hold.
    #[must_use]
    pub fn may_hold(&self) -> MayHold {
        match self {
            Self::Fs(_) => MayHold::Any,
            Self::Unreadable { may_hold, .. } | Self::Misnamed { may_hold, .. } => may_hold.clone(),
        }
    }
}

/// The GPUs that a claim with an unreadable journal may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MayHold {
    /// Only these, by UUID.
    Gpus(BTreeSet<String>),
    /// Any GPU of the node.
    Any,
}

impl MayHold {
    /// The UUIDs in a file, if it is complete. A file that is not valid JSON may have lost some.
    fn of(content: &[u8]) -> Self {
        if serde_json::from_slice::<serde_json::Value>(content).is_err() {
            return Self::Any;
        }
        let gpus: BTreeSet<_> = content
            .windows(UUID_LENGTH)
            .filter_map(|window| str::from_utf8(window).ok())
            .filter(|text| is_gpu_uuid(text))
            .map(str::to_owned)
            .collect();
        if gpus.is_empty() {
            return Self::Any;
        }
        Self::Gpus(gpus)
    }

    /// Whether a GPU may be among them.
    #[must_use]
    pub fn includes(&self, gpu_uuid: &str) -> bool {
        match self {
            Self::Gpus(gpus) => gpus.contains(gpu_uuid),
            Self::Any => true,
        }
    }
}

/// The length of `GPU-` and a UUID.
const UUID_LENGTH: usize = 40;

/// Whether this is a GPU's UUID as NVML spells it.
fn is_gpu_uuid(text: &str) -> bool {
    text.strip_prefix("GPU-").is_some_and(|uuid| {
        let dashes = [8, 13, 18, 23];
        let fits = |(at, byte): (usize, u8)| match byte {
            b'-' => dashes.contains(&at),
            byte => byte.is_ascii_hexdigit() && !dashes.contains(&at),
        };
        uuid.bytes().enumerate().all(fits)
    })
}

/// The folder of journals.
#[derive(Clone, Debug)]
pub struct Journal {
    fs: Arc<dyn Fs>,
    folder: PathBuf,
}

/// The content of the folder at the start.
#[derive(Debug, Default)]
pub struct Loaded {
    pub records: Vec<ClaimRecord>,
    /// The others: the claim UID from the file name, and the error.
    pub refused: Vec<(String, StoreError)>,
}

impl Journal {
    /// Makes the folder if it is missing.
    pub fn open(fs: Arc<dyn Fs>, folder: PathBuf) -> Result<Self, FsError> {
        fs.create_dir(&folder)?;
        Ok(Self { fs, folder })
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{uid}.json"))
    }

    /// Reads all files, and removes temporary files of interrupted writes.
    pub fn load_all(&self) -> Result<Loaded, FsError> {
        let mut loaded = Loaded::default();
        fs::remove_temporaries(&*self.fs, &self.folder, "")?;
        for name in self.fs.list(&self.folder)? {
            if let Some(uid) = name.strip_suffix(".json") {
                match self.load(uid) {
                    Ok(Some(record)) => loaded.records.push(record),
                    Ok(None) => {}
                    Err(e) => loaded.refused.push((uid.to_owned(), e)),
                }
            }
        }
        Ok(loaded)
    }

    /// Reads one claim's record, if there is one.
    pub fn load(&self, uid: &str) -> Result<Option<ClaimRecord>, StoreError> {
        let path = self.path(uid);
        let Some(bytes) = self.fs.read(&path)? else {
            return Ok(None);
        };
        match ClaimRecord::decode(&bytes) {
            Ok(record) if record.plan.allocation.uid == uid => Ok(Some(record)),
            Ok(record) => Err(StoreError::Misnamed {
                path,
                uid: record.plan.allocation.uid,
                may_hold: MayHold::of(&bytes),
            }),
            Err(source) => Err(StoreError::Unreadable {
                path,
                source,
                may_hold: MayHold::of(&bytes),
            }),
        }
    }

    /// Writes one claim's record. After a power failure the old one or none may be there, but no part of one. That is enough:
    /// no container and no page outlives a power failure, and the claim is prepared anew (docs/adr/0006).
    pub fn write(&self, record: &ClaimRecord) -> Result<(), FsError> {
        let path = self.path(&record.plan.allocation.uid);
        fs::replace(&*self.fs, &path, &record.encode(), 0o600, Durability::Disk)
    }

    /// Removes one claim's record; it may be gone. It must not come back, because then the claim would hold its GPU again.
    pub fn remove(&self, uid: &str) -> Result<(), FsError> {
        fs::remove(&*self.fs, &self.path(uid), Durability::Disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "GPU-5f2c1a9e-0b3d-4c7e-9a51-d2e8f0746b13";
    const B: &str = "GPU-00000000-0000-4000-8000-000000000001";

    #[test]
    fn the_uuids_of_a_whole_file_are_saved() {
        let newer =
            format!(r#"{{"version": 9, "parts": [["{A}", "gpu.tranche.dev/x={B}-7"], null]}}"#);
        let both = BTreeSet::from([A.to_owned(), B.to_owned()]);
        assert_eq!(MayHold::of(newer.as_bytes()), MayHold::Gpus(both));
    }

    #[test]
    fn a_file_that_may_have_lost_some_may_hold_any() {
        let whole = format!(r#"{{"version": 9, "gpus": ["{A}", "{B}"]}}"#);
        for end in 0..whole.len() {
            assert_eq!(MayHold::of(&whole.as_bytes()[..end]), MayHold::Any, "{end}");
        }
        for other in [
            r#"{"version": 9}"#,
            "",
            "\0\0\0\0",
            r#"["GPU-5f2c1a9e-0b3d-4c7e-9a51-d2e8f0746b1"]"#,
        ] {
            assert_eq!(MayHold::of(other.as_bytes()), MayHold::Any, "{other}");
        }
        assert!(MayHold::Any.includes(A));
        assert!(!MayHold::Gpus(BTreeSet::from([B.to_owned()])).includes(A));
    }
}
