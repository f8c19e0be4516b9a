//! FIFO locks by name: one per claim, one per GPU, none for the node.
//!
//! Claims on different GPUs never wait for each other, and a waiter is served in its turn. Whoever
//! needs several takes them in one call, which sorts them: no two callers can wait for each other.
//! A claim's own lock is taken before any GPU's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// What a lock guards.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// One claim's journal and everything it names, by claim UID.
    Claim(String),
    /// What a GPU is used for, by minor number.
    Gpu(u32),
}

/// The locks in use. An unused one takes no room.
#[derive(Debug, Default)]
pub struct Locks {
    table: Mutex<HashMap<Key, Arc<tokio::sync::Mutex<()>>>>,
}

/// Held locks; dropping releases them. May be moved to another thread, and so be kept by work
/// whose waiter gave up.
#[derive(Debug)]
pub struct Held {
    locks: Arc<Locks>,
    /// Without a guard: still waited for.
    guards: Vec<(Key, Option<OwnedMutexGuard<()>>)>,
}

impl Locks {
    /// Waits for all of the keys, in the order of arrival for each.
    pub async fn lock(self: &Arc<Self>, keys: impl IntoIterator<Item = Key>) -> Held {
        let mut keys: Vec<_> = keys.into_iter().collect();
        keys.sort_unstable();
        keys.dedup();
        let mut held = Held {
            locks: Arc::clone(self),
            guards: Vec::with_capacity(keys.len()),
        };
        for key in keys {
            let lock = Arc::clone(self.table().entry(key.clone()).or_default());
            // Listed before the wait, so that a waiter that gives up is forgotten too.
            held.guards.push((key, None));
            let guard = lock.lock_owned().await;
            if let Some((_, slot)) = held.guards.last_mut() {
                *slot = Some(guard);
            }
        }
        held
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Arc<tokio::sync::Mutex<()>>>> {
        // Nothing that holds it can panic half way through a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for (key, guard) in self.guards.drain(..).rev() {
            drop(guard);
            let mut table = self.locks.table();
            // Only the table's own reference is left: nobody holds it, nobody waits for it.
            if table
                .get(&key)
                .is_some_and(|lock| Arc::strong_count(lock) == 1)
            {
                table.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u32) -> Key {
        Key::Gpu(n)
    }

    #[tokio::test]
    async fn one_gpu_is_served_in_the_order_of_arrival() {
        let locks = Arc::new(Locks::default());
        let first = locks.lock([gpu(0)]).await;
        let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
        for n in 0..20 {
            let (locks, tx) = (Arc::clone(&locks), tx.clone());
            let queued = Arc::new(tokio::sync::Notify::new());
            let notify = Arc::clone(&queued);
            tokio::spawn(async move {
                let wait = locks.lock([gpu(0)]);
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
        assert!(locks.table().is_empty(), "an unused lock takes no room");
    }

    #[tokio::test]
    async fn another_gpu_does_not_wait() {
        let locks = Arc::new(Locks::default());
        let _zero = locks.lock([gpu(0)]).await;
        let one = tokio::time::timeout(std::time::Duration::from_secs(5), locks.lock([gpu(1)]));
        assert!(one.await.is_ok());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn opposite_orders_do_not_wait_for_each_other() {
        let locks = Arc::new(Locks::default());
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..64 {
            let locks = Arc::clone(&locks);
            let keys = if n % 2 == 0 {
                [gpu(0), gpu(1)]
            } else {
                [gpu(1), gpu(0)]
            };
            tasks.spawn(async move {
                let _held = locks.lock(keys).await;
                tokio::task::yield_now().await;
            });
        }
        let all = tokio::time::timeout(std::time::Duration::from_secs(10), tasks.join_all()).await;
        assert!(all.is_ok());
        assert!(locks.table().is_empty());
    }

    #[tokio::test]
    async fn a_waiter_that_gave_up_leaves_nothing() {
        let locks = Arc::new(Locks::default());
        let held = locks.lock([gpu(0)]).await;
        {
            let wait = locks.lock([gpu(0)]);
            tokio::pin!(wait);
            assert!(futures::poll!(wait.as_mut()).is_pending());
            drop(held);
        }
        assert!(locks.table().is_empty());
    }
}
