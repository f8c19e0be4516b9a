//! The journal on disk: one file per claim, named after its UID.
//!
//! A file that cannot be read is left where it is, and the claim is refused by its path: only a
//! human can tell whether what it recorded is still in use. It is read again whenever the kubelet asks
//! for the claim.

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
    },
    /// The content is another claim's.
    #[error("journal {path} records claim {uid}: the file was renamed or copied; delete it")]
    Misnamed {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        uid: String,
    },
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
            }),
            Err(source) => Err(StoreError::Unreadable { path, source }),
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
