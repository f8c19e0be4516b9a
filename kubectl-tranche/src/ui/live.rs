//! Keeps the page's records up to date: applies the changes from the watches, and publishes what the page shows.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::history::{History, Read};
use super::records::Records;
use super::store::{Change, Store};
use super::view::Page;
use crate::usage::{Usage, UsageResult};

/// How long changes are collected before they are published: a pod's start is several writes.
const TOGETHER: Duration = Duration::from_millis(50);

/// The records at one time.
#[derive(Clone, Debug, Default)]
pub struct Published {
    /// A number that increases by one with each publication.
    pub seq: u64,
    /// The records; `None` before the cluster has been read once.
    pub records: Option<Arc<Records>>,
}

/// The state from which the page is made.
struct Live {
    store: Store,
    page: Page,
    usage: UsageResult,
    history: History,
    began: Instant,
    /// The readings of the use since the last publication.
    read: Read,
    publisher: watch::Sender<Published>,
}

/// Publishes until the watches end. An error would be a bug.
pub(super) async fn keep(
    mut changes: mpsc::Receiver<Change>,
    mut readings: mpsc::Receiver<UsageResult>,
    publisher: watch::Sender<Published>,
) -> Result<(), super::records::RecordError> {
    let mut live = Live {
        store: Store::default(),
        page: Page::default(),
        usage: Ok(Usage::default()),
        history: History::default(),
        began: Instant::now(),
        read: Read::No,
        publisher,
    };
    let mut due: Option<Instant> = None;
    loop {
        let wait = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            change = changes.recv() => {
                let Some(change) = change else { return Ok(()) };
                live.store.apply(change);
            }
            Some(usage) = readings.recv() => live.used(usage),
            () = wait => {
                due = None;
                live.publish()?;
                continue;
            }
        }
        due.get_or_insert_with(|| Instant::now() + TOGETHER);
    }
}

impl Live {
    fn used(&mut self, usage: UsageResult) {
        let read = match &usage {
            Ok(usage) => {
                let minute = self.began.elapsed().as_secs() / 60;
                self.history.add(minute, usage)
            }
            Err(_) => Read::Again,
        };
        self.read = self.read.max(read);
        self.usage = usage;
    }

    fn publish(&mut self) -> Result<(), super::records::RecordError> {
        if !self.store.is_ready() {
            return Ok(());
        }
        let mut dirty = self.store.take_dirty();
        dirty.read = std::mem::take(&mut self.read);
        self.page
            .update(&self.store, &dirty, &self.usage, &self.history)?;
        self.publisher.send_if_modified(|published| {
            if published.records.as_deref() == Some(&self.page.records) {
                return false;
            }
            published.seq += 1;
            published.records = Some(Arc::new(self.page.records.clone()));
            true
        });
        Ok(())
    }
}
