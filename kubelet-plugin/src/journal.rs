//! The journal on disk: one file per claim, named after its UID.
//!
//! A file that cannot be read is left where it is, and the claim is refused by its path: only a
//! human can tell whether what it recorded is still in use. Until then the GPUs that it names count as
//! taken, or all of the node where that is not known ([`MayHold`]). It is read again whenever the kubelet
//! asks for a claim.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use tranche_driver::journal::{JournalError, Record};

use crate::fs::{self, Durability, Fs, FsError};

/// A journal that is not to be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system.
    #[error("journal: {0}")]
    Fs(#[from] FsError),
    /// The content.
    #[error(
        "journal {path}: {source}; where no driver reads it, delete the claim's pods and then the file"
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: JournalError,
        /// What the claim may hold.
        may_hold: MayHold,
    },
    /// The content is another claim's.
    #[error("journal {path} records claim {uid}: the file was renamed or copied; delete it")]
    Misnamed {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        uid: String,
        /// What the claim may hold that the file is named after.
        may_hold: MayHold,
    },
}

impl StoreError {
    /// What the claim may hold whose journal this is.
    #[must_use]
    pub fn may_hold(&self) -> MayHold {
        match self {
            Self::Fs(_) => MayHold::Any,
            Self::Unreadable { may_hold, .. } | Self::Misnamed { may_hold, .. } => may_hold.clone(),
        }
    }
}

/// The GPUs that a claim may hold whose journal cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MayHold {
    /// These, by UUID, and no other.
    Gpus(BTreeSet<String>),
    /// Any of the node.
    Any,
}

impl MayHold {
    /// What can be saved of a file: the UUIDs in it, if it is whole. One that is not JSON from end to end
    /// may have lost some.
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

/// What the folder held at start.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The readable ones.
    pub records: Vec<Record>,
    /// The others: claim UID (as the file name says) and why.
    pub refused: Vec<(String, StoreError)>,
}

impl Journal {
    /// The folder is made when it is missing.
    pub fn open(fs: Arc<dyn Fs>, folder: PathBuf) -> Result<Self, FsError> {
        fs.create_dir(&folder)?;
        Ok(Self { fs, folder })
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{uid}.json"))
    }

    /// Reads everything, and removes what an interrupted write left.
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

    /// Reads one claim's record, `None` where there is none.
    pub fn load(&self, uid: &str) -> Result<Option<Record>, StoreError> {
        let path = self.path(uid);
        let Some(bytes) = self.fs.read(&path)? else {
            return Ok(None);
        };
        match Record::decode(&bytes) {
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

    /// Writes one claim's record.
    pub fn write(&self, record: &Record) -> Result<(), FsError> {
        let path = self.path(&record.plan.allocation.uid);
        fs::replace(&*self.fs, &path, &record.encode(), 0o600, Durability::Disk)
    }

    /// Removes one claim's record; it may be gone.
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
    fn of_a_file_that_is_whole_the_uuids_are_saved() {
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
