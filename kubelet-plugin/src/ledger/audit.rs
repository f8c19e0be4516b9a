//! The audit trail on disk: `audit/audit.jsonl`, and the files before it as `audit.jsonl.1`, `.2` and so on.
//!
//! ```text
//!  journal ─► steps ─► beginning ─► … ─► steps undone ─► end, synced ─► journal removed
//! ```
//!
//! A beginning is not waited for: after a kill it is in the file, after a power failure it is made anew from the journal. An
//! end is on the disk before the journal is removed. Every file begins with the grants that were open then, so that the
//! current file alone, with the journals, says what is due ([`Trail`]).
//!
//! A claim does not get its devices, or keeps its journal, if its line cannot be written. Room for the current file is
//! reserved on the disk, so that claims can be released also on a full one.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::{debug, warn};
use tranche_driver::audit::{Ended, HeldAtEnd, Line, Pod, Trail};
use tranche_driver::journal::Record;
use tranche_driver::moment::Moment;
use tranche_serving::Clock;

use crate::host::fs::{self, Fs, FsError};
use crate::ledger::journal::Loaded;

/// The name of the current file.
const NAME: &str = "audit.jsonl";

/// Log collectors that do not run as root can be given the group.
const MODE: u32 = 0o640;

/// How much the trail may take of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of files, at least 2.
    pub files: u32,
    /// The length of a file, bytes. A single write may exceed it.
    pub file_bytes: u64,
}

impl Limits {
    /// So many files of 8 MiB, about 7,000 claims each.
    #[must_use]
    pub const fn of(files: u32) -> Self {
        Self {
            files,
            file_bytes: 8 << 20,
        }
    }
}

/// Where and as what a trail is written.
#[derive(Clone, Debug)]
pub struct Place {
    /// The folder of its files.
    pub folder: PathBuf,
    /// The node's name.
    pub node: String,
    /// How much it may take of the disk.
    pub limits: Limits,
    /// The time.
    pub clock: Clock,
}

/// The trail of this node.
#[derive(Debug)]
pub struct Audit {
    fs: Arc<dyn Fs>,
    place: Place,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    trail: Trail,
    /// The length of the whole lines of the current file; `None` if there is no current file.
    length: Option<u64>,
    /// What was in use when the release of a claim began, by its UID: to undo its steps removes its account.
    at_end: BTreeMap<String, BTreeMap<String, HeldAtEnd>>,
}

impl Audit {
    /// Reads the current file, and makes one if there is none.
    pub fn open(fs: Arc<dyn Fs>, place: Place) -> Result<Self, FsError> {
        fs.create_dir(&place.folder)?;
        fs::remove_temporaries(&*fs, &place.folder, NAME)?;
        let mut trail = Trail::new(place.node.clone());
        let current = fs.read(&place.folder.join(NAME))?;
        let is_there = current.is_some();
        // A kill in the middle of a rotation leaves only the file before.
        let content = match current {
            Some(content) => Some(content),
            None => fs.read(&place.folder.join(earlier(1)))?,
        };
        let length = replay(&mut trail, &content.unwrap_or_default());
        let this = Self {
            fs,
            place,
            state: Mutex::new(State {
                trail,
                length: is_there.then_some(length),
                at_end: BTreeMap::new(),
            }),
        };
        if !is_there {
            this.renew(&mut this.state())?;
        }
        Ok(this)
    }

    /// Writes what is missing of the claims of the journal, and the ends of those that are not in it any more.
    pub fn settle(&self, loaded: &Loaded) -> Result<(), FsError> {
        let unreadable: BTreeSet<_> = loaded.refused.iter().map(|(uid, _)| &**uid).collect();
        let mut state = self.state();
        let due = state.trail.settle(&loaded.records, &unreadable, self.now());
        self.write(&mut state, due).map(drop)
    }

    /// The time, as lines have it.
    #[must_use]
    pub fn now(&self) -> Moment {
        self.place.clock.now().into()
    }

    /// A claim has its devices: writes what is not written yet. The caller holds the claim's lock.
    pub fn held(&self, record: &Record, pods: &BTreeSet<Pod>) -> Result<(), FsError> {
        let mut state = self.state();
        let due = state.trail.held(record, pods, self.now());
        self.write(&mut state, due).map(drop)
    }

    /// More pods use a claim. One that was released meanwhile is left alone.
    pub fn joined(&self, record: &Record, pods: &BTreeSet<Pod>) -> Result<(), FsError> {
        let mut state = self.state();
        let due = state.trail.joined(record, pods, self.now());
        self.write(&mut state, due).map(drop)
    }

    /// The release of a claim begins: keeps what of its memory is in use, as it was when it was begun first.
    pub fn release_begins(
        &self,
        record: &Record,
        read: impl FnOnce() -> BTreeMap<String, HeldAtEnd>,
    ) {
        let uid = &record.plan.allocation.uid;
        if !self.state().at_end.contains_key(uid) {
            let at_end = read();
            self.state().at_end.insert(uid.clone(), at_end);
        }
    }

    /// The steps of a claim are undone: its end is on the disk when this returns.
    pub fn released(&self, record: &Record, ended: Ended) -> Result<(), FsError> {
        let is_new = {
            let mut state = self.state();
            let at_end = state.at_end.get(&record.plan.allocation.uid);
            let at_end = at_end.cloned().unwrap_or_default();
            let due = state.trail.released(record, ended, &at_end, self.now());
            self.write(&mut state, due)?
        };
        // Not under the lock, so that claims that end together wait for the disk together. If the file was
        // rotated meanwhile, it was synced before.
        if is_new {
            self.fs.sync(&self.current())?;
        }
        Ok(())
    }

    /// Whether the end of a claim, or of a part of it, is written.
    #[must_use]
    pub fn is_released(&self, record: &Record) -> bool {
        self.state().trail.is_released(record)
    }

    /// The journal of a claim is removed.
    pub fn forget(&self, record: &Record) {
        let mut state = self.state();
        state.trail.forget(record);
        state.at_end.remove(&record.plan.allocation.uid);
    }

    /// Appends lines; whether there were any.
    fn write(&self, state: &mut State, due: Vec<Line>) -> Result<bool, FsError> {
        if due.is_empty() {
            return Ok(false);
        }
        let content = due.iter().flat_map(Line::encode).collect::<Vec<_>>();
        let is_full = |length| length + content.len() as u64 > self.place.limits.file_bytes;
        if state.length.is_none_or(is_full)
            && let Err(error) = self.renew(state)
        {
            if state.length.is_none() {
                return Err(error);
            }
            warn!(%error, "cannot begin a new file of the audit trail; the current one grows until the cause is removed");
        }
        let length = state.length.unwrap_or_default();
        if let Err(error) = self.fs.append(&self.current(), length, &content) {
            // Some of the lines may be there, and nothing that they say holds. If this fails too, the next line replaces
            // them, or the next start takes account of them.
            let _ = self.fs.append(&self.current(), length, &[]);
            return Err(error);
        }
        state.length = Some(length + content.len() as u64);
        for line in due {
            state.trail.apply(line);
        }
        Ok(true)
    }

    /// Begins a new file, and drops the oldest one if there are too many.
    fn renew(&self, state: &mut State) -> Result<(), FsError> {
        let (fs, folder, current) = (&*self.fs, &self.place.folder, self.current());
        let lines = state.trail.snapshot(self.now());
        let content = lines.iter().flat_map(Line::encode).collect::<Vec<_>>();
        let new = folder.join(format!("{NAME}.tmp"));
        fs.write(&new, &content, MODE)?;
        if let Err(error) = fs.reserve(&new, self.place.limits.file_bytes) {
            debug!(%error, "on a full disk claims may not be released");
        }
        if !content.is_empty() {
            fs.sync(&new)?;
        }
        if let Some(length) = state.length {
            // Without the part of a line that a killed or failed write left.
            fs.append(&current, length, &[])?;
            fs.sync(&current)?;
            for nth in (1..self.place.limits.files - 1).rev() {
                let from = folder.join(earlier(nth));
                if fs.mode(&from)?.is_some() {
                    fs.rename(&from, &folder.join(earlier(nth + 1)))?;
                }
            }
            fs.rename(&current, &folder.join(earlier(1)))?;
            state.length = None;
        }
        fs.rename(&new, &current)?;
        state.length = Some(content.len() as u64);
        fs.sync(folder)
    }

    fn current(&self) -> PathBuf {
        self.place.folder.join(NAME)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No holder of the lock can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of the nth file before the current one.
fn earlier(nth: u32) -> String {
    format!("{NAME}.{nth}")
}

/// Applies the lines of a file. Returns the length of its whole lines: a kill may have cut the last one short.
fn replay(trail: &mut Trail, content: &[u8]) -> u64 {
    let mut length = 0;
    for line in content.split_inclusive(|byte| *byte == b'\n') {
        if !line.ends_with(b"\n") {
            warn!("the last line of the audit trail was cut short; it is written anew");
            break;
        }
        length += line.len() as u64;
        match Line::decode(line) {
            Ok(line) => trail.apply(line),
            Err(error) => {
                warn!(%error, "a line of the audit trail cannot be read and is left as it is");
            }
        }
    }
    length
}
