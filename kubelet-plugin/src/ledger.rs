//! What this node's claims hold, in memory: the journal, read once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tranche_api::Tier;
use tranche_driver::journal::Record;

use crate::claims::ClaimRef;
use crate::journal::Loaded;

/// The held claims by UID.
#[derive(Debug, Default)]
pub struct Ledger {
    claims: Mutex<BTreeMap<String, Entry>>,
    releases: watch::Sender<()>,
}

#[derive(Clone, Debug)]
enum Entry {
    Held(Arc<Record>),
    /// The journal cannot be read: why.
    Refused(Arc<str>),
}

impl Ledger {
    /// Starts from what the journal held.
    #[must_use]
    pub fn new(loaded: Loaded) -> Self {
        let held = loaded.records.into_iter().map(|record| {
            let uid = record.plan.allocation.uid.clone();
            (uid, Entry::Held(Arc::new(record)))
        });
        let refused = loaded
            .refused
            .into_iter()
            .map(|(uid, error)| (uid, Entry::Refused(error.to_string().into())));
        Self {
            claims: Mutex::new(held.chain(refused).collect()),
            releases: watch::Sender::default(),
        }
    }

    /// The record of a claim; an error where its journal cannot be read.
    pub fn get(&self, uid: &str) -> Result<Option<Arc<Record>>, Arc<str>> {
        match self.claims().get(uid) {
            None => Ok(None),
            Some(Entry::Held(record)) => Ok(Some(Arc::clone(record))),
            Some(Entry::Refused(why)) => Err(Arc::clone(why)),
        }
    }

    /// Everything held.
    #[must_use]
    pub fn held(&self) -> Vec<Arc<Record>> {
        self.claims()
            .values()
            .filter_map(|entry| match entry {
                Entry::Held(record) => Some(Arc::clone(record)),
                Entry::Refused(_) => None,
            })
            .collect()
    }

    /// The UIDs of all claims with a journal, readable or not.
    #[must_use]
    pub fn uids(&self) -> Vec<String> {
        self.claims().keys().cloned().collect()
    }

    /// How many journals cannot be read.
    #[must_use]
    pub fn refused(&self) -> usize {
        self.claims()
            .values()
            .filter(|entry| matches!(entry, Entry::Refused(_)))
            .count()
    }

    /// Prepared devices by tier.
    #[must_use]
    pub fn devices(&self) -> BTreeMap<Tier, i64> {
        let mut devices = BTreeMap::new();
        for record in self.held() {
            for device in &record.plan.devices {
                *devices.entry(device.tier).or_default() += 1;
            }
        }
        devices
    }

    /// Adds or replaces a claim's record.
    pub fn insert(&self, record: Record) -> Arc<Record> {
        let record = Arc::new(record);
        let uid = record.plan.allocation.uid.clone();
        self.claims().insert(uid, Entry::Held(Arc::clone(&record)));
        record
    }

    /// Forgets a claim.
    pub fn remove(&self, uid: &str) {
        if self.claims().remove(uid).is_some() {
            self.releases.send_replace(());
        }
    }

    /// Changes whenever a claim is forgotten.
    #[must_use]
    pub fn releases(&self) -> watch::Receiver<()> {
        self.releases.subscribe()
    }

    fn claims(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // Nothing that holds it can panic half way through a change.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A record's claim as the API server names it.
#[must_use]
pub fn claim_of(record: &Record) -> ClaimRef {
    let allocation = &record.plan.allocation;
    ClaimRef {
        uid: allocation.uid.clone(),
        namespace: allocation.namespace.clone(),
        name: allocation.name.clone(),
    }
}
