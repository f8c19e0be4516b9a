//! FIFO locks: one per claim, and one per GPU for changes of its state; none for the node.
//!
//! A claim's calls are served one after another, in the order of arrival. Locks do not decide which
//! claim gets a GPU: the [`ledger`](crate::ledger) does that in one step. Nobody waits for a second lock of the same table.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

type Table = HashMap<String, Arc<tokio::sync::Mutex<()>>>;

/// The locks in use, by the UID of a claim or a GPU. Unused locks are removed.
#[derive(Debug, Default)]
pub struct Locks {
    table: Mutex<Table>,
}

/// A held lock; dropping it releases it. Work on another thread can own it, so that it stays locked
/// after the waiting call was cancelled.
#[derive(Debug)]
pub struct LockGuard {
    locks: Arc<Locks>,
    uid: String,
    /// `None` while waiting.
    guard: Option<OwnedMutexGuard<()>>,
}

impl Locks {
    /// Waits for a lock.
    pub async fn lock(self: &Arc<Self>, uid: &str) -> LockGuard {
        let (lock, mut held) = self.entry(uid);
        held.guard = Some(lock.lock_owned().await);
        held
    }

    /// The lock, if it is free.
    #[must_use]
    pub fn try_lock(self: &Arc<Self>, uid: &str) -> Option<LockGuard> {
        let (lock, mut held) = self.entry(uid);
        held.guard = Some(lock.try_lock_owned().ok()?);
        Some(held)
    }

    /// Whether somebody holds the lock or waits for it.
    #[must_use]
    pub fn is_in_use(&self, uid: &str) -> bool {
        self.table().contains_key(uid)
    }

    /// A lock, and a guard that does not hold it yet. The guard exists before the wait, so that a cancelled wait is
    /// removed too.
    fn entry(self: &Arc<Self>, uid: &str) -> (Arc<tokio::sync::Mutex<()>>, LockGuard) {
        let lock = Arc::clone(self.table().entry(uid.to_owned()).or_default());
        let guard = LockGuard {
            locks: Arc::clone(self),
            uid: uid.to_owned(),
            guard: None,
        };
        (lock, guard)
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        // No holder of the lock can panic in the middle of a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        drop(self.guard.take());
        let mut table = self.locks.table();
        // Only the table's own reference is left: it is neither held nor waited for.
        if table
            .get(&self.uid)
            .is_some_and(|lock| Arc::strong_count(lock) == 1)
        {
            table.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_claim_is_served_in_the_order_of_arrival() {
        let locks = Arc::new(Locks::default());
        let first = locks.lock("a").await;
        let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
        for n in 0..20 {
            let (locks, tx) = (Arc::clone(&locks), tx.clone());
            let queued = Arc::new(tokio::sync::Notify::new());
            let notify = Arc::clone(&queued);
            tokio::spawn(async move {
                let wait = locks.lock("a");
                notify.notify_one();
                let _held = wait.await;
                tx.send(n).unwrap();
            });
            queued.notified().await;
            tokio::task::yield_now().await;
        }
        drop((first, tx));
        let mut order = Vec::new();
        while let Some(n) = rx.recv().await {
            order.push(n);
        }
        assert_eq!(order, (0..20).collect::<Vec<_>>());
        assert!(locks.table().is_empty(), "an unused lock is removed");
    }

    #[tokio::test]
    async fn another_claim_does_not_wait() {
        let locks = Arc::new(Locks::default());
        let _a = locks.lock("a").await;
        let b = tokio::time::timeout(std::time::Duration::from_secs(5), locks.lock("b"));
        assert!(b.await.is_ok());
    }

    #[tokio::test]
    async fn a_waiter_that_gave_up_leaves_nothing() {
        let locks = Arc::new(Locks::default());
        let held = locks.lock("a").await;
        {
            let wait = locks.lock("a");
            tokio::pin!(wait);
            assert!(futures::poll!(wait.as_mut()).is_pending());
            drop(held);
        }
        assert!(locks.table().is_empty());
    }
}
