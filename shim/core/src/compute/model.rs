//! Every interleaving of a few threads, by loom: see `shim/core/deep-check`.

use std::vec::Vec;

use loom::sync::Arc;
use loom::thread;

use super::bucket::Wait;
use super::{Batch, Bucket, Refill, RefillPage};
use crate::Account;
use crate::sync::Ordering;

const SECOND: u64 = 1_000_000_000;

fn explore(preemptions: usize, scene: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(scene);
}

/// Two processes launch at once while a third corrects: no payment is lost, and a debt of one is
/// visible to the other.
#[test]
fn payments_add_up() {
    explore(3, || {
        let account: Arc<Account<1>> = Arc::new(Account::empty());
        let bucket = Bucket::new(&Refill::default(), 50, SECOND);
        let start = SECOND / 2 - 50_000_000;
        let payers: Vec<_> = [3 * SECOND, 5 * SECOND]
            .into_iter()
            .map(|price| {
                let account = Arc::clone(&account);
                thread::spawn(move || bucket.take(&account, price).map_or(0, |()| price))
            })
            .collect();
        bucket.correct(&account, 7);
        let paid: u64 = payers.into_iter().map(|payer| payer.join().unwrap()).sum();
        // The second process was in debt.
        assert!(paid == 3 * SECOND || paid == 5 * SECOND);
        let position = account.position.load(Ordering::Relaxed);
        // The correction counts, or expired with unused grant.
        assert!(position == start + paid || position == start + paid + 7);
        assert_eq!(account.spent.load(Ordering::Relaxed), paid + 7);
        assert!(matches!(bucket.take(&account, 1), Err(Wait(_))));
    });
}

/// The node writes twice while a process reads: the process reads one of the three refills completely, or none.
#[test]
fn a_refill_is_read_whole() {
    explore(3, || {
        let page = Arc::new(RefillPage::fresh());
        let refill = |n: u64| Refill {
            since: n,
            base: n,
            rate: n,
            until: n,
            scale: n,
            falls_until: n,
        };
        let node = {
            let page = Arc::clone(&page);
            thread::spawn(move || {
                page.write(&refill(1));
                page.write(&refill(2));
            })
        };
        if let Some(read) = page.read() {
            assert!((0..3).any(|n| read == refill(n)), "{read:?}");
        }
        node.join().unwrap();
        assert_eq!(page.read(), Some(refill(2)));
    });
}

/// Two threads with one batch: no nanosecond is spent twice.
#[test]
fn a_batch_pays_once() {
    explore(3, || {
        let batch = Arc::new(Batch::fresh());
        batch.fill(10);
        let other = {
            let batch = Arc::clone(&batch);
            thread::spawn(move || u64::from(batch.pay(6)) * 6)
        };
        let own = u64::from(batch.pay(5)) * 5;
        let paid = own + other.join().unwrap();
        batch.fill(1);
        assert_eq!(paid + batch.take(100), 11);
    });
}
