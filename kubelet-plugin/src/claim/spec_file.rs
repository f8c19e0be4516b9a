//! The CDI spec of the claims' devices on the disk.
//!
//! A container runtime reads all CDI specs again at each event in their folder. So there is one file, and claims that are prepared or
//! released at the same time share a write and its event:
//!
//! ```text
//!  announce ─► … ─► put, remove ─► devices ─► one of them waits for those who are announced, and writes for all ─► file
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::warn;
use tranche_driver::cdi::{ClaimDevices, Spec};

use crate::host::fs::{self, Durability, Fs, FsError};

/// How long a write waits for claims that were announced, and how long one is waited for. Alone, a claim waits for nobody.
const PATIENCE: Duration = Duration::from_millis(15);

/// The file of the claims' devices.
#[derive(Debug)]
pub struct ClaimSpecFile {
    fs: Arc<dyn Fs>,
    path: PathBuf,
    wanted: Mutex<Wanted>,
    arrived: Condvar,
    patience: Duration,
    /// The most threads that come here at a time.
    most: usize,
    /// How many changes the file has. Who holds the lock writes.
    written: Mutex<u64>,
}

/// What the file should have.
#[derive(Debug, Default)]
struct Wanted {
    devices: ClaimDevices,
    /// Counts the changes.
    changes: u64,
    /// The UIDs of claims that are on their way to a change, and since when.
    announced: BTreeMap<String, Instant>,
    /// How many threads wait for a write, including the one that writes.
    waiting: usize,
}

/// A claim that is on its way to a change of the file.
#[derive(Debug)]
#[must_use]
pub struct Announcement {
    file: Arc<ClaimSpecFile>,
    uid: String,
}

impl ClaimSpecFile {
    /// Reads the file, which at most `most` threads change at a time. One that cannot be understood has no devices: it is written
    /// anew with the next change.
    pub fn open(fs: Arc<dyn Fs>, path: PathBuf, most: usize) -> Result<Self, FsError> {
        let content = fs.read(&path)?;
        let devices = content.and_then(|content| ClaimDevices::decode(&content));
        Ok(Self {
            fs,
            path,
            wanted: Mutex::new(Wanted {
                devices: devices.unwrap_or_default(),
                ..Wanted::default()
            }),
            arrived: Condvar::new(),
            patience: PATIENCE,
            most,
            written: Mutex::default(),
        })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a claim has its devices in the file, or will have them when it is restored.
    #[must_use]
    pub fn has(&self, uid: &str) -> bool {
        lock(&self.wanted).devices.has(uid)
    }

    /// Says that a claim's change comes in milliseconds, so that it can share a write.
    pub fn announce(self: &Arc<Self>, uid: &str) -> Announcement {
        let uid = uid.to_owned();
        lock(&self.wanted)
            .announced
            .insert(uid.clone(), Instant::now());
        Announcement {
            file: Arc::clone(self),
            uid,
        }
    }

    /// Puts the devices of a claim into the file, in place of those that it had.
    pub fn put(&self, uid: &str, spec: Spec) -> Result<(), FsError> {
        match self.arrive(uid, |devices| devices.put(uid, spec)) {
            Some(change) => self.written(change),
            // It may be deleted.
            None => self.restore(),
        }
    }

    /// Takes the devices of a claim out of the file. Where that cannot be written, no claim stays held for it: the file is written
    /// again within seconds, and without its pages or its VFIO group a device is of no use.
    pub fn remove(&self, uid: &str) {
        let change = self.arrive(uid, |devices| devices.remove(uid));
        self.removed(change);
    }

    /// Removes the devices of all other claims than these, as [`Self::remove`] does.
    pub fn keep<'a>(&self, uids: impl IntoIterator<Item = &'a str>) {
        let change = lock(&self.wanted).change(|devices| devices.keep(uids));
        self.removed(change);
    }

    fn removed(&self, change: Option<u64>) {
        if let Some(change) = change
            && let Err(error) = self.written(change)
        {
            warn!(%error, "the CDI spec still has devices of released claims; it is written again within seconds");
        }
    }

    /// Writes the file if it is missing or different.
    pub fn restore(&self) -> Result<(), FsError> {
        let mut written = lock(&self.written);
        let (changes, content) = {
            let wanted = lock(&self.wanted);
            (wanted.changes, wanted.devices.encode())
        };
        let is_intact = match &content {
            Some(content) => fs::is_intact(&*self.fs, &self.path, content, MODE)?,
            None => self.fs.mode(&self.path)?.is_none(),
        };
        if !is_intact {
            self.replace(content.as_deref())?;
        }
        *written = changes;
        Ok(())
    }

    /// Waits until the file has this change.
    fn written(&self, change: u64) -> Result<(), FsError> {
        lock(&self.wanted).waiting += 1;
        self.arrived.notify_all();
        let written = self.write(change);
        lock(&self.wanted).waiting -= 1;
        written
    }

    /// Writes the file, unless somebody has written this change.
    fn write(&self, change: u64) -> Result<(), FsError> {
        let mut written = lock(&self.written);
        if *written >= change {
            return Ok(());
        }
        let (changes, content) = {
            let is_announced = |wanted: &mut Wanted| {
                let mut since = wanted.announced.values();
                wanted.waiting < self.most && since.any(|since| since.elapsed() < self.patience)
            };
            let wanted =
                (self.arrived).wait_timeout_while(lock(&self.wanted), self.patience, is_announced);
            let (wanted, _) = wanted.unwrap_or_else(PoisonError::into_inner);
            (wanted.changes, wanted.devices.encode())
        };
        self.replace(content.as_deref())?;
        *written = changes;
        Ok(())
    }

    /// Changes what the file should have; the claim is on its way no more. Returns the number of the change, if it is one.
    fn arrive(&self, uid: &str, change: impl FnOnce(&mut ClaimDevices) -> bool) -> Option<u64> {
        let mut wanted = lock(&self.wanted);
        wanted.announced.remove(uid);
        self.arrived.notify_all();
        wanted.change(change)
    }

    fn replace(&self, content: Option<&[u8]>) -> Result<(), FsError> {
        match content {
            Some(content) => fs::replace(&*self.fs, &self.path, content, MODE, Durability::Rebuilt),
            None => fs::remove(&*self.fs, &self.path, Durability::Rebuilt),
        }
    }
}

impl Wanted {
    /// Changes the devices. Returns the number of the change, if it is one.
    fn change(&mut self, change: impl FnOnce(&mut ClaimDevices) -> bool) -> Option<u64> {
        let is_changed = change(&mut self.devices);
        self.changes += u64::from(is_changed);
        is_changed.then_some(self.changes)
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.file.arrive(&self.uid, |_| false);
    }
}

const MODE: u32 = 0o644;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete when its lock is released.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
