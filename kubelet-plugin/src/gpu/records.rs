//! What Tranche has changed on each GPU, on disk: one file per GPU, named after its UUID.
//!
//! A file that cannot be read is kept, and its GPU is given to no claim: it may be divided, and only a person can decide whose
//! its instances are.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tranche_driver::gpu_state::GpuChanges;
use tranche_driver::journal::{GpuRecord, JournalError};

use crate::host::fs::{self, Durability, Fs, FsError};

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("record of a GPU: {0}")]
    Fs(#[from] FsError),
    #[error(
        "record {path} of a GPU: {source}; where no driver reads it, release the GPU's claims, remove its GPU instances \
         (`nvidia-smi mig -dci`, `nvidia-smi mig -dgi`) and then the file"
    )]
    Unreadable { path: PathBuf, source: JournalError },
    /// The content belongs to another GPU.
    #[error("record {path} is of GPU {gpu}: the file was renamed or copied; delete it")]
    Misnamed { path: PathBuf, gpu: String },
}

/// The folder of records.
#[derive(Clone, Debug)]
pub struct GpuRecords {
    fs: Arc<dyn Fs>,
    folder: PathBuf,
    /// The kernel's boot.
    boot: Arc<str>,
}

impl GpuRecords {
    /// Makes the folder if it is missing, and removes temporary files of interrupted writes. `boot` identifies the kernel's boot.
    pub fn open(fs: Arc<dyn Fs>, folder: PathBuf, boot: &str) -> Result<Self, FsError> {
        fs.create_dir(&folder)?;
        fs::remove_temporaries(&*fs, &folder, "")?;
        Ok(Self {
            fs,
            folder,
            boot: boot.into(),
        })
    }

    fn path(&self, gpu_uuid: &str) -> PathBuf {
        self.folder.join(format!("{gpu_uuid}.json"))
    }

    /// The GPUs that have a record, by UUID.
    pub fn all(&self) -> Result<Vec<String>, FsError> {
        let names = self.fs.list(&self.folder)?.into_iter();
        Ok(names
            .filter_map(|name| Some(name.strip_suffix(".json")?.to_owned()))
            .collect())
    }

    /// The readable records, by GPU.
    pub fn readable(&self) -> Result<BTreeMap<String, GpuChanges>, FsError> {
        let gpus = self.all()?.into_iter();
        Ok(gpus
            .filter_map(|gpu| {
                let record = self.load(&gpu).ok()?;
                Some((gpu, record))
            })
            .collect())
    }

    /// What is changed on a GPU; nothing where there is no file.
    pub fn load(&self, gpu_uuid: &str) -> Result<GpuChanges, RecordError> {
        let record = self.read(gpu_uuid)?;
        Ok(record.map_or_else(GpuChanges::default, |it| it.changes_in(&self.boot)))
    }

    /// The same for a GPU whose lock the caller holds: what a boot has undone is removed from the file.
    pub fn renew(&self, gpu_uuid: &str) -> Result<GpuChanges, RecordError> {
        let Some(record) = self.read(gpu_uuid)? else {
            return Ok(GpuChanges::default());
        };
        let changes = record.clone().changes_in(&self.boot);
        if record != self.record(gpu_uuid, &changes) {
            self.write(gpu_uuid, &changes)?;
        }
        Ok(changes)
    }

    fn record(&self, gpu_uuid: &str, changes: &GpuChanges) -> GpuRecord {
        GpuRecord::new(gpu_uuid.to_owned(), self.boot.to_string(), changes.clone())
    }

    fn read(&self, gpu_uuid: &str) -> Result<Option<GpuRecord>, RecordError> {
        let path = self.path(gpu_uuid);
        let Some(bytes) = self.fs.read(&path)? else {
            return Ok(None);
        };
        match GpuRecord::decode(&bytes) {
            Ok(record) if record.gpu_uuid == gpu_uuid => Ok(Some(record)),
            Ok(record) => Err(RecordError::Misnamed {
                path,
                gpu: record.gpu_uuid,
            }),
            Err(source) => Err(RecordError::Unreadable { path, source }),
        }
    }

    /// Writes what was changed on a GPU; removes the file where that is nothing.
    pub fn write(&self, gpu_uuid: &str, changes: &GpuChanges) -> Result<(), RecordError> {
        let path = self.path(gpu_uuid);
        if changes.is_empty() {
            fs::remove(&*self.fs, &path, Durability::Disk)?;
        } else {
            let record = self.record(gpu_uuid, changes);
            fs::replace(&*self.fs, &path, &record.encode(), 0o600, Durability::Disk)?;
        }
        Ok(())
    }
}
