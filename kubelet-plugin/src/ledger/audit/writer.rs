//! The files of the audit trail: `audit/audit.jsonl`, and those before it as `audit.jsonl.1`, `.2` and so on.
//!
//! Every file begins with the grants that were open then, so that the current file and the journals are enough to know what is due
//! ([`Trail`]). Room for the current file is reserved on the disk, so that lines can be written even when the disk is full.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use tracing::{debug, info, warn};
use tranche_driver::audit::{Line, Trail};
use tranche_driver::moment::Moment;

use super::{Entry, Queue, TrailSettings};
use crate::host::fs::{self, Fs, FsError};
use crate::metrics::Metrics;

/// The name of the current file.
pub(super) const NAME: &str = "audit.jsonl";

/// Log collectors that do not run as root can be given the group.
const MODE: u32 = 0o640;

#[derive(Debug)]
pub(super) struct Writer {
    fs: Arc<dyn Fs>,
    settings: TrailSettings,
    metrics: Arc<Metrics>,
    trail: Trail,
    /// Whether the files of earlier processes were read.
    is_open: bool,
    /// The length of the whole lines of the current file; `None` if there is no current file.
    length: Option<u64>,
    /// Ends were written that may not be on the disk.
    needs_sync: bool,
    /// A failure was logged since the last success.
    is_reported: bool,
}

impl Writer {
    pub(super) fn new(fs: Arc<dyn Fs>, settings: TrailSettings, metrics: Arc<Metrics>) -> Self {
        Self {
            trail: Trail::new(settings.node.clone()),
            fs,
            settings,
            metrics,
            is_open: false,
            length: None,
            needs_sync: false,
            is_reported: false,
        }
    }

    /// Writes until the queue is closed and empty, or closed while the files cannot be written.
    pub(super) fn run(mut self, queue: &Queue) {
        while let Some(entry) = queue.first() {
            let (entry, at) = &*entry;
            match self.write(entry, *at, queue.has_one()) {
                Ok(()) => {
                    if std::mem::take(&mut self.is_reported) {
                        info!("the audit trail is written again");
                    }
                    queue.written();
                }
                Err(error) => {
                    self.metrics.audit_write_failures.inc();
                    if !std::mem::replace(&mut self.is_reported, true) {
                        warn!(%error, "the audit trail cannot be written; its lines wait, up to 1,000 claims: make room on the disk, or remove what is in its files' place");
                    }
                    if !queue.failed(self.settings.retry) {
                        break;
                    }
                }
            }
        }
        queue.end();
    }

    /// Writes the lines that an entry makes due; `is_last` if no other entry waits.
    fn write(&mut self, entry: &Entry, at: Moment, is_last: bool) -> Result<(), FsError> {
        if !self.is_open {
            self.open()?;
        } else if self.is_reported {
            self.find_current()?;
        }
        let due = self.due(entry, at);
        self.append(due)?;
        self.needs_sync |= matches!(entry, Entry::Released { .. });
        // Claims that end together wait for the disk together.
        if self.needs_sync && is_last {
            self.fs.sync(&self.current())?;
            self.needs_sync = false;
        }
        // This comes last, so that another attempt after a failure adds no line.
        match entry {
            Entry::Released { record, .. } => self.trail.forget(record),
            // Forgets the grants that this start ended: they have no journal.
            Entry::Started { .. } => drop(self.due(entry, at)),
            Entry::Held { .. } | Entry::Joined { .. } => {}
        }
        Ok(())
    }

    fn due(&mut self, entry: &Entry, at: Moment) -> Vec<Line> {
        match entry {
            Entry::Started {
                records,
                unreadable,
            } => {
                let unreadable: BTreeSet<_> = unreadable.iter().map(String::as_str).collect();
                self.trail.settle(records, &unreadable, at)
            }
            Entry::Held { record, pods } => self.trail.held(record, pods, at),
            Entry::Joined { record, pods } => self.trail.joined(record, pods, at),
            Entry::Released {
                record,
                ended,
                at_end,
            } => self.trail.released(record, *ended, at_end, at),
        }
    }

    /// Reads the current file, and makes one if there is none.
    fn open(&mut self) -> Result<(), FsError> {
        let (fs, folder) = (Arc::clone(&self.fs), self.settings.folder.clone());
        fs.create_dir(&folder)?;
        fs::remove_temporaries(&*fs, &folder, NAME)?;
        let current = fs.read(&folder.join(NAME))?;
        let is_there = current.is_some();
        // A kill in the middle of a rotation leaves only the file before.
        let content = match current {
            Some(content) => Some(content),
            None => fs.read(&folder.join(earlier(1)))?,
        };
        self.trail = Trail::new(self.settings.node.clone());
        let length = replay(&mut self.trail, &content.unwrap_or_default());
        self.length = is_there.then_some(length);
        if !is_there {
            self.renew()?;
        }
        self.is_open = true;
        Ok(())
    }

    /// Finds the files after a failure: the folder or the current file may have been moved away.
    fn find_current(&mut self) -> Result<(), FsError> {
        self.fs.create_dir(&self.settings.folder)?;
        if self.fs.mode(&self.current())?.is_none() {
            self.length = None;
        }
        Ok(())
    }

    fn append(&mut self, due: Vec<Line>) -> Result<(), FsError> {
        if due.is_empty() {
            return Ok(());
        }
        let content = due.iter().flat_map(Line::encode).collect::<Vec<_>>();
        let is_full = |length| length + content.len() as u64 > self.settings.limits.file_bytes;
        if self.length.is_none_or(is_full)
            && let Err(error) = self.renew()
        {
            if self.length.is_none() {
                return Err(error);
            }
            warn!(%error, "cannot begin a new file of the audit trail; the current one grows until the cause is removed");
        }
        let length = self.length.unwrap_or_default();
        if let Err(error) = self.fs.append(&self.current(), length, &content) {
            // Some of the lines may be in the file although they do not hold. If they cannot be removed, the next line
            // replaces them, or the next start considers them.
            let _ = self.fs.append(&self.current(), length, &[]);
            return Err(error);
        }
        self.length = Some(length + content.len() as u64);
        for line in due {
            self.trail.apply(line);
        }
        Ok(())
    }

    /// Begins a new file, and drops the oldest one if there are too many.
    fn renew(&mut self) -> Result<(), FsError> {
        let (fs, folder, current) = (&*self.fs, &self.settings.folder, self.current());
        let now = self.settings.clock.now().into();
        let lines = self.trail.snapshot(now);
        let content = lines.iter().flat_map(Line::encode).collect::<Vec<_>>();
        let new = folder.join(format!("{NAME}.tmp"));
        fs.write(&new, &content, MODE)?;
        if let Err(error) = fs.reserve(&new, self.settings.limits.file_bytes) {
            debug!(%error, "on a full disk the trail may lack lines");
        }
        if !content.is_empty() {
            fs.sync(&new)?;
        }
        if let Some(length) = self.length {
            // This removes the part of a line that a killed or failed write left.
            fs.append(&current, length, &[])?;
            fs.sync(&current)?;
            for nth in (1..self.settings.limits.files - 1).rev() {
                let from = folder.join(earlier(nth));
                if fs.mode(&from)?.is_some() {
                    fs.rename(&from, &folder.join(earlier(nth + 1)))?;
                }
            }
            fs.rename(&current, &folder.join(earlier(1)))?;
            self.length = None;
        }
        fs.rename(&new, &current)?;
        self.length = Some(content.len() as u64);
        fs.sync(folder)
    }

    fn current(&self) -> PathBuf {
        self.settings.folder.join(NAME)
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
