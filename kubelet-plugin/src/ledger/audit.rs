//! The audit trail: who had which part of which GPU, from when to when. It is best effort: it is written on a thread of its own,
//! and no claim waits for it or fails by it.
//!
//! ```text
//!  steps done ──► beginning ──┐
//!                             ├──► queue ──► this node's files
//!  journal removed ──► end ───┘
//! ```
//!
//! The next start adds what was queued and not written when the plugin ended ([`Trail::settle`]): a journal without
//! a beginning gets one, and a beginning without a journal gets an end. While the files cannot be written, the entries wait in
//! the queue; the log says so, and metrics count the failed attempts, and the entries for which the queue has no room.

#[cfg(test)]
mod tests;
mod writer;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::error;
use tranche_driver::audit::{Ended, HeldAtEnd, Pod};
use tranche_driver::journal::ClaimRecord;
use tranche_driver::moment::Moment;
use tranche_serving::Clock;

use self::writer::Writer;
use crate::host::fs::Fs;
use crate::ledger::journal::Loaded;
use crate::metrics::Metrics;

/// The most entries that wait for the disk.
const MOST: usize = 1000;

/// How long the end of the plugin waits for the disk.
const END: Duration = Duration::from_secs(2);

/// How much the trail may take of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of files, at least 2.
    pub files: u32,
    /// The length of a file, bytes. A single write may exceed it.
    pub file_bytes: u64,
}

impl Limits {
    /// This many files of 8 MiB, each for about 7,000 claims.
    #[must_use]
    pub const fn of(files: u32) -> Self {
        Self {
            files,
            file_bytes: 8 << 20,
        }
    }
}

/// The settings of a trail.
#[derive(Clone, Debug)]
pub struct TrailSettings {
    /// The folder of its files.
    pub folder: PathBuf,
    pub node: String,
    /// How much it may take of the disk.
    pub limits: Limits,
    /// The pause after a failed attempt to write.
    pub retry: Duration,
    pub clock: Clock,
}

/// What happened, for the trail.
#[derive(Debug)]
enum Entry {
    /// The plugin started with these journals. The claims in `unreadable`, by UID, have journals that cannot be read.
    Started {
        records: Vec<ClaimRecord>,
        unreadable: BTreeSet<String>,
    },
    /// A claim has its devices.
    Held {
        record: ClaimRecord,
        pods: BTreeSet<Pod>,
    },
    /// More pods use a claim.
    Joined {
        record: ClaimRecord,
        pods: BTreeSet<Pod>,
    },
    /// A claim's steps are undone, and its journal is removed.
    Released {
        record: ClaimRecord,
        ended: Ended,
        at_end: BTreeMap<String, HeldAtEnd>,
    },
}

/// The trail of this node. When it is dropped, what is queued is written if the disk answers.
#[derive(Debug)]
pub struct Audit {
    clock: Clock,
    queue: Arc<Queue>,
    metrics: Arc<Metrics>,
    /// What was in use when the release of a claim began, by its UID. The release removes the claim's account.
    at_end: Mutex<BTreeMap<String, BTreeMap<String, HeldAtEnd>>>,
}

impl Audit {
    /// Starts the thread that writes it.
    #[must_use]
    pub fn start(fs: Arc<dyn Fs>, settings: TrailSettings, metrics: Arc<Metrics>) -> Self {
        let queue = Arc::new(Queue::default());
        let this = Self {
            clock: settings.clock.clone(),
            queue: Arc::clone(&queue),
            metrics: Arc::clone(&metrics),
            at_end: Mutex::default(),
        };
        let writer = Writer::new(fs, settings, metrics);
        let thread = std::thread::Builder::new().name("audit".into());
        if let Err(error) = thread.spawn(move || writer.run(&queue)) {
            error!(%error, "there is no audit trail: its thread cannot be started");
            this.queue.state().has_ended = true;
        }
        this
    }

    /// The time for a line.
    #[must_use]
    pub fn now(&self) -> Moment {
        self.clock.now().into()
    }

    /// Completes the trail when the plugin starts: adds the claims of the journal that it lacks, and the ends of claims that
    /// are not in the journal any more.
    pub fn started(&self, loaded: &Loaded) {
        let unreadable = loaded.refused.iter().map(|(uid, _)| uid.clone());
        self.add(Entry::Started {
            records: loaded.records.clone(),
            unreadable: unreadable.collect(),
        });
    }

    /// Notes that a claim has its devices.
    pub fn held(&self, record: &ClaimRecord, pods: &BTreeSet<Pod>) {
        self.add(Entry::Held {
            record: record.clone(),
            pods: pods.clone(),
        });
    }

    /// Notes that more pods use a claim. A claim that was released meanwhile is left alone.
    pub fn joined(&self, record: &ClaimRecord, pods: &BTreeSet<Pod>) {
        self.add(Entry::Joined {
            record: record.clone(),
            pods: pods.clone(),
        });
    }

    /// Notes that the release of a claim begins: keeps how much of its memory was in use when the release first began.
    pub fn release_begins(
        &self,
        record: &ClaimRecord,
        read: impl FnOnce() -> BTreeMap<String, HeldAtEnd>,
    ) {
        let uid = &record.plan.allocation.uid;
        if !self.at_end().contains_key(uid) {
            let at_end = read();
            self.at_end().insert(uid.clone(), at_end);
        }
    }

    /// Notes that the steps of a claim are undone and that its journal is removed.
    pub fn released(&self, record: &ClaimRecord, ended: Ended) {
        let at_end = self.at_end().remove(&record.plan.allocation.uid);
        self.add(Entry::Released {
            record: record.clone(),
            ended,
            at_end: at_end.unwrap_or_default(),
        });
    }

    fn add(&self, entry: Entry) {
        let mut state = self.queue.state();
        if state.entries.len() >= MOST || state.has_ended {
            self.metrics.audit_entries_lost.inc();
            return;
        }
        let now = self.now();
        state.entries.push_back(Arc::new((entry, now)));
        drop(state);
        self.queue.changed.notify_all();
    }

    /// Waits until all is written or cannot be written, but not longer than `patience`. Returns whether it is written.
    pub fn flush(&self, patience: Duration) -> bool {
        let waits = |state: &mut State| !(state.entries.is_empty() || state.is_failing);
        let state = self
            .queue
            .changed
            .wait_timeout_while(self.queue.state(), patience, waits)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        state.entries.is_empty()
    }

    fn at_end(&self) -> MutexGuard<'_, BTreeMap<String, BTreeMap<String, HeldAtEnd>>> {
        // No holder of the lock can panic in the middle of a change.
        self.at_end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        self.queue.state().is_closed = true;
        self.queue.changed.notify_all();
        let runs = |state: &mut State| !state.has_ended;
        let waited = self
            .queue
            .changed
            .wait_timeout_while(self.queue.state(), END, runs);
        drop(waited);
    }
}

/// The entries that are not written yet.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The oldest first, each with the time at which it was added. One that is being written is still here.
    entries: VecDeque<Arc<(Entry, Moment)>>,
    /// The last attempt to write failed.
    is_failing: bool,
    /// No entry will be added.
    is_closed: bool,
    /// The thread has ended.
    has_ended: bool,
}

impl Queue {
    /// The oldest entry; waits for one. `None` after the last.
    fn first(&self) -> Option<Arc<(Entry, Moment)>> {
        let waits = |state: &mut State| state.entries.is_empty() && !state.is_closed;
        let state = self
            .changed
            .wait_while(self.state(), waits)
            .unwrap_or_else(PoisonError::into_inner);
        state.entries.front().map(Arc::clone)
    }

    /// Removes the oldest entry, which is written.
    fn written(&self) {
        let mut state = self.state();
        state.entries.pop_front();
        state.is_failing = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits before the next attempt to write the oldest entry. Returns whether there will be one.
    fn failed(&self, pause: Duration) -> bool {
        self.state().is_failing = true;
        self.changed.notify_all();
        let waits = |state: &mut State| !state.is_closed;
        let waited = self
            .changed
            .wait_timeout_while(self.state(), pause, waits)
            .unwrap_or_else(PoisonError::into_inner);
        !waited.0.is_closed
    }

    fn has_one(&self) -> bool {
        self.state().entries.len() <= 1
    }

    fn end(&self) {
        self.state().has_ended = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No holder of the lock can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
