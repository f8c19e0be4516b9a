//! The claims that this node holds, in memory: the content of the journal, read once, except for
//! unreadable files.
//!
//! Only the ledger decides which claim gets a GPU: [`Ledger::book`] plans a claim against all others
//! and records the result in one step. A plan is carried out, with its disk writes, outside of that
//! step, so that claims on one GPU do not wait for each other's writes.

pub mod audit;
pub mod claim_ref;
pub mod journal;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::watch;
use tranche_api::Tier;
use tranche_api::sharing_policy::Interval;
use tranche_driver::claim::Allocation;
use tranche_driver::journal::ClaimRecord;
use tranche_driver::moment::Moment;
use tranche_driver::preparation::{
    HeldOfGpu, PAGES, PreparationPlan, PreparedDevice, held_of, wanted_time_slices,
};

use self::claim_ref::pods_of;
use self::journal::{Loaded, MayHold, StoreError};
use crate::host::layout::{Layout, SharePaths};

/// The held claims by UID.
#[derive(Debug, Default)]
pub struct Ledger {
    claims: Mutex<BTreeMap<String, Entry>>,
    /// The names of the pods of held claims, by the UIDs of claim and pod; kept only while the plugin runs.
    pods: Mutex<BTreeMap<String, BTreeMap<String, String>>>,
    releases: watch::Sender<()>,
    refused: watch::Sender<Refused>,
}

/// The claims whose journals cannot be read, by UID, and why not.
pub type Refused = BTreeMap<String, Arc<str>>;

#[derive(Clone, Debug)]
enum Entry {
    /// Planned, and being carried out.
    Reserved(Arc<ClaimRecord>),
    Held(Arc<ClaimRecord>),
    /// Being released: it still counts as held, but needs nothing of its GPUs any more.
    Releasing(Arc<ClaimRecord>),
    /// The journal cannot be read.
    Refused(Arc<Refusal>),
}

#[derive(Debug)]
struct Refusal {
    why: Arc<str>,
    may_hold: MayHold,
}

impl From<StoreError> for Entry {
    fn from(error: StoreError) -> Self {
        Self::Refused(Arc::new(Refusal {
            why: error.to_string().into(),
            may_hold: error.may_hold(),
        }))
    }
}

/// A GPU counts as taken, because a claim with an unreadable journal may hold it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("GPU {gpu_uuid} counts as taken, since it is not known what claim {holder} holds: {why}")]
pub struct MayBeHeld {
    pub gpu_uuid: String,
    /// The UID of the claim that may hold it.
    pub holder: String,
    /// What is wrong with its journal.
    pub why: Arc<str>,
}

impl Entry {
    fn plan(&self) -> Option<&PreparationPlan> {
        match self {
            Self::Held(record) | Self::Reserved(record) | Self::Releasing(record) => {
                Some(&record.plan)
            }
            Self::Refused(_) => None,
        }
    }
}

/// The result of a booking.
#[derive(Debug)]
pub enum Booking {
    /// The record that it has: the allocation is the prepared one.
    Kept(Arc<ClaimRecord>),
    /// The record that must be released first: the claim was allocated again.
    Moved(Arc<ClaimRecord>),
    New(Reservation),
}

/// A plan that counts as held while it is carried out. Dropping it removes the claim, unless the claim is held by then.
#[derive(Debug)]
pub struct Reservation {
    ledger: Arc<Ledger>,
    record: Arc<ClaimRecord>,
    held: bool,
}

impl Reservation {
    /// The record to carry out.
    #[must_use]
    pub const fn record(&self) -> &Arc<ClaimRecord> {
        &self.record
    }

    /// The reservation with the plan as it was carried out.
    #[must_use]
    pub fn with_plan(mut self, plan: PreparationPlan) -> Self {
        if plan != self.record.plan {
            self.record = Arc::new(self.record.with_plan(plan));
        }
        self
    }

    /// Turns the reservation into a held claim.
    #[expect(clippy::must_use_candidate)]
    pub fn hold(mut self) -> Arc<ClaimRecord> {
        self.held = true;
        let uid = self.record.plan.allocation.uid.clone();
        let entry = Entry::Held(Arc::clone(&self.record));
        self.ledger.claims().insert(uid, entry);
        Arc::clone(&self.record)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.held {
            self.ledger.remove(&self.record.plan.allocation.uid);
        }
    }
}

impl Ledger {
    /// Starts with the content of the journal.
    #[must_use]
    pub fn new(loaded: Loaded) -> Self {
        let held = loaded.records.into_iter().map(|record| {
            let uid = record.plan.allocation.uid.clone();
            (uid, Entry::Held(Arc::new(record)))
        });
        let refused = loaded
            .refused
            .into_iter()
            .map(|(uid, error)| (uid, error.into()));
        let ledger = Self {
            claims: Mutex::new(held.chain(refused).collect()),
            pods: Mutex::default(),
            releases: watch::Sender::default(),
            refused: watch::Sender::default(),
        };
        ledger.publish_refused();
        ledger
    }

    /// The record of a claim; an error if its journal cannot be read.
    pub fn get(&self, uid: &str) -> Result<Option<Arc<ClaimRecord>>, Arc<str>> {
        match self.claims().get(uid) {
            None | Some(Entry::Reserved(_)) => Ok(None),
            Some(Entry::Held(record) | Entry::Releasing(record)) => Ok(Some(Arc::clone(record))),
            Some(Entry::Refused(refusal)) => Err(Arc::clone(&refusal.why)),
        }
    }

    /// Reads a claim's journal again if it could not be read: the file may have been repaired or
    /// deleted since. The caller holds the claim's lock.
    pub fn reload(
        &self,
        uid: &str,
        load: impl FnOnce() -> Result<Option<ClaimRecord>, StoreError>,
    ) {
        if self.get(uid).is_ok() {
            return;
        }
        match load() {
            Ok(Some(record)) => {
                let entry = Entry::Held(Arc::new(record));
                self.claims().insert(uid.to_owned(), entry);
            }
            Ok(None) => self.remove(uid),
            Err(error) => {
                self.claims().insert(uid.to_owned(), error.into());
            }
        }
        self.publish_refused();
    }

    #[must_use]
    pub fn held(&self) -> Vec<Arc<ClaimRecord>> {
        self.claims()
            .values()
            .filter_map(|entry| match entry {
                Entry::Held(record) | Entry::Releasing(record) => Some(Arc::clone(record)),
                Entry::Reserved(_) | Entry::Refused(_) => None,
            })
            .collect()
    }

    /// What claims need of a GPU: its partitions, and its MPS daemon.
    #[must_use]
    pub fn held_of(&self, gpu_uuid: &str) -> HeldOfGpu {
        held_of(gpu_uuid, wanting(&self.claims()))
    }

    /// The lengths of a GPU's time slices that claims want.
    #[must_use]
    pub fn time_slices(&self, gpu_uuid: &str) -> BTreeSet<Interval> {
        wanted_time_slices(gpu_uuid, wanting(&self.claims()))
    }

    /// Whether a claim needs the load page that this device has.
    #[must_use]
    pub fn needs_load_page(&self, device: &PreparedDevice) -> bool {
        let claims = self.claims();
        let mut devices = wanting(&claims).flat_map(|plan| &plan.devices);
        devices.any(|other| other.shares_load_page(device))
    }

    /// Marks a claim as being released: from here on it needs nothing of its GPUs.
    pub fn begin_release(&self, uid: &str) {
        let mut claims = self.claims();
        if let Some(entry) = claims.get_mut(uid)
            && let Entry::Held(record) | Entry::Reserved(record) = entry
        {
            *entry = Entry::Releasing(Arc::clone(record));
        }
    }

    /// The claims whose journals cannot be read, by UID, and why not.
    #[must_use]
    pub fn refused(&self) -> Refused {
        let claims = self.claims();
        let refused = claims.iter().filter_map(|(uid, entry)| match entry {
            Entry::Refused(refusal) => Some((uid.clone(), Arc::clone(&refusal.why))),
            Entry::Reserved(_) | Entry::Held(_) | Entry::Releasing(_) => None,
        });
        refused.collect()
    }

    /// [`Self::refused`], with notifications of changes.
    #[must_use]
    pub fn watch_refused(&self) -> watch::Receiver<Refused> {
        self.refused.subscribe()
    }

    fn publish_refused(&self) {
        let refused = self.refused();
        self.refused.send_if_modified(|known| {
            let changed = *known != refused;
            *known = refused;
            changed
        });
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

    /// Returns the claim's record if it is held. Otherwise calls `plan` with everything that is held or
    /// reserved, and reserves the result since `now`, unless it takes a GPU that a claim with an unreadable journal
    /// may hold. The caller holds the claim's lock.
    ///
    /// A held claim is compared by its allocation, to detect that it was allocated again. How this
    /// release would plan it does not matter: its containers use the plan that was carried out.
    pub fn book<E: From<MayBeHeld>>(
        self: &Arc<Self>,
        allocation: &Allocation,
        now: Moment,
        plan: impl FnOnce(&mut dyn Iterator<Item = &PreparationPlan>) -> Result<PreparationPlan, E>,
    ) -> Result<Booking, E> {
        let mut claims = self.claims();
        if let Some(Entry::Held(record) | Entry::Releasing(record)) = claims.get(&allocation.uid) {
            let record = Arc::clone(record);
            return Ok(if record.plan.allocation.is_same_as(allocation) {
                // A release that failed is over.
                let entry = Entry::Held(Arc::clone(&record));
                claims.insert(allocation.uid.clone(), entry);
                Booking::Kept(record)
            } else {
                Booking::Moved(record)
            });
        }
        let plan = plan(&mut claims.values().filter_map(Entry::plan))?;
        if let Some(taken) = claims.iter().find_map(|entry| may_be_held(&plan, entry)) {
            return Err(taken.into());
        }
        let record = Arc::new(ClaimRecord::new(plan, Some(now)));
        let entry = Entry::Reserved(Arc::clone(&record));
        claims.insert(allocation.uid.clone(), entry);
        Ok(Booking::New(Reservation {
            ledger: Arc::clone(self),
            record,
            held: false,
        }))
    }

    /// Replaces the record of a held claim. The caller holds the claim's lock.
    pub fn replace(&self, record: Arc<ClaimRecord>) {
        let uid = record.plan.allocation.uid.clone();
        self.claims().insert(uid, Entry::Held(record));
    }

    /// All account pages whose version is this release's, of all shares.
    #[must_use]
    pub fn accounts(&self, layout: &Layout) -> Vec<PathBuf> {
        let mut accounts = Vec::new();
        for record in self.held() {
            let plan = &record.plan;
            if plan.pages != PAGES {
                continue;
            }
            for device in &plan.devices {
                let share = layout.share(&plan.allocation.uid, &device.key);
                let pages = device.cap.accounts().iter();
                accounts.extend(pages.map(|account| share.page_of(*account).clone()));
            }
        }
        accounts
    }

    /// The files of all shares whose pages have this release's version. Pages of another release are left alone,
    /// because this release can neither read nor write them.
    #[must_use]
    pub fn shares(&self, layout: &Layout) -> Vec<SharePaths> {
        let mut shares = Vec::new();
        for record in self.held() {
            let plan = &record.plan;
            if plan.pages == PAGES {
                let capped = plan.devices.iter().filter(|device| device.cap.is_share());
                shares.extend(capped.map(|d| layout.share(&plan.allocation.uid, &d.key)));
            }
        }
        shares
    }

    /// Records the pods for which a held claim is reserved, for metrics and the watchdog.
    pub fn note_pods(&self, claim: &ResourceClaim) {
        let Some(uid) = &claim.metadata.uid else {
            return;
        };
        let pods = pods_of(claim)
            .into_iter()
            .map(|pod| (pod.uid, pod.name))
            .collect();
        // The lock is held until the pods are recorded, so that no pods are recorded for a released
        // claim.
        let claims = self.claims();
        if claims.contains_key(uid) {
            self.all_pods().insert(uid.clone(), pods);
        }
    }

    /// The names of the pods for which a claim is reserved, by the pods' UIDs, as far as this process has
    /// read them.
    #[must_use]
    pub fn pod_uids(&self, uid: &str) -> BTreeMap<String, String> {
        self.all_pods().get(uid).cloned().unwrap_or_default()
    }

    /// The names of these pods, sorted.
    #[must_use]
    pub fn pods(&self, uid: &str) -> Vec<String> {
        let mut names: Vec<_> = self.pod_uids(uid).into_values().collect();
        names.sort_unstable();
        names
    }

    fn all_pods(&self) -> MutexGuard<'_, BTreeMap<String, BTreeMap<String, String>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn remove(&self, uid: &str) {
        let mut claims = self.claims();
        self.all_pods().remove(uid);
        let known = claims.remove(uid).is_some();
        drop(claims);
        if known {
            self.releases.send_replace(());
        }
    }

    /// Changes whenever a claim is removed.
    #[must_use]
    pub fn releases(&self) -> watch::Receiver<()> {
        self.releases.subscribe()
    }

    /// Lock this before [`Self::all_pods`] if both are needed.
    fn claims(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // No holder of the lock can panic in the middle of a change.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The plans of the claims that need something of their GPUs.
fn wanting(claims: &BTreeMap<String, Entry>) -> impl Iterator<Item = &PreparationPlan> {
    claims.values().filter_map(|entry| match entry {
        Entry::Held(record) | Entry::Reserved(record) => Some(&record.plan),
        Entry::Releasing(_) | Entry::Refused(_) => None,
    })
}

/// The GPU of a plan that another claim may hold, if that claim's journal is unreadable.
fn may_be_held(plan: &PreparationPlan, (holder, entry): (&String, &Entry)) -> Option<MayBeHeld> {
    let Entry::Refused(refusal) = entry else {
        return None;
    };
    // Admin access takes nothing from other claims.
    let mut devices = plan.devices.iter().filter(|device| !device.admin_access);
    let device = devices.find(|device| refusal.may_hold.includes(&device.gpu_uuid))?;
    Some(MayBeHeld {
        gpu_uuid: device.gpu_uuid.clone(),
        holder: holder.clone(),
        why: Arc::clone(&refusal.why),
    })
}

#[cfg(test)]
mod tests {
    use tranche_api::ShareConfig;
    use tranche_driver::claim::{AllocatedDevice, Grant};
    use tranche_driver::preparation::Step;

    use super::*;

    fn allocation(uid: &str) -> Allocation {
        Allocation {
            uid: uid.into(),
            namespace: "team".into(),
            name: uid.into(),
            pod_claim_name: None,
            devices: vec![AllocatedDevice {
                request: "gpu".into(),
                pool: "node/gpu".into(),
                device: "gpu-00000000".parse().unwrap(),
                grant: Grant::Whole {},
                config: ShareConfig::default(),
            }],
        }
    }

    fn now() -> Moment {
        jiff::Timestamp::UNIX_EPOCH.into()
    }

    fn empty_plan(uid: &str) -> PreparationPlan {
        PreparationPlan {
            allocation: allocation(uid),
            pages: PAGES,
            devices: Vec::new(),
            steps: Vec::new(),
        }
    }

    impl From<MayBeHeld> for Vec<String> {
        fn from(taken: MayBeHeld) -> Self {
            vec![taken.holder]
        }
    }

    /// Books the whole node: a conflict names the others.
    fn book(ledger: &Arc<Ledger>, uid: &str) -> Result<Booking, Vec<String>> {
        ledger.book(&allocation(uid), now(), |others| {
            let others = others.map(|plan| plan.allocation.uid.clone());
            match others.filter(|other| other != uid).collect::<Vec<_>>() {
                others if others.is_empty() => Ok(empty_plan(uid)),
                others => Err(others),
            }
        })
    }

    fn reserve(ledger: &Arc<Ledger>, uid: &str) -> Reservation {
        match book(ledger, uid).unwrap() {
            Booking::New(reservation) => reservation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_of_many_at_once_gets_it() {
        let ledger = Arc::new(Ledger::default());
        let start = std::sync::Barrier::new(8);
        let booked: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|n| {
                    let (ledger, start) = (&ledger, &start);
                    scope.spawn(move || {
                        start.wait();
                        book(ledger, &format!("claim-{n}"))
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(booked.iter().filter(|b| b.is_ok()).count(), 1);
    }

    #[test]
    fn a_reservation_blocks_without_holding_and_ends_with_its_owner() {
        let ledger = Arc::new(Ledger::default());
        let mut released = ledger.releases();
        let reservation = reserve(&ledger, "a");
        assert_eq!(book(&ledger, "b").unwrap_err(), ["a"]);
        assert!(ledger.held().is_empty());
        assert!(ledger.get("a").unwrap().is_none());
        assert!(!released.has_changed().unwrap());
        drop(reservation);
        assert!(released.has_changed().unwrap(), "waiting claims are woken");
        released.mark_unchanged();

        let record = reserve(&ledger, "b").hold();
        assert_eq!(ledger.held(), [Arc::clone(&record)]);
        assert_eq!(ledger.get("b").unwrap(), Some(record));
        assert!(!released.has_changed().unwrap());
        ledger.remove("b");
        assert!(released.has_changed().unwrap());
        assert!(ledger.held().is_empty());
    }

    #[test]
    fn the_pods_of_a_released_claim_are_not_noted() {
        let ledger = Arc::new(Ledger::default());
        let claim: ResourceClaim = serde_json::from_value(serde_json::json!({
            "metadata": {"uid": "a"}, "spec": {},
            "status": {"reservedFor": [{"resource": "pods", "name": "pod", "uid": "p"}]},
        }))
        .unwrap();
        reserve(&ledger, "a").hold();
        ledger.note_pods(&claim);
        assert_eq!(ledger.pods("a"), ["pod"]);
        ledger.remove("a");
        ledger.note_pods(&claim);
        assert!(ledger.pods("a").is_empty());
    }

    /// A release that plans differently must not remove what containers use.
    #[test]
    fn a_held_claim_keeps_its_plan_however_it_would_be_planned_now() {
        let ledger = Arc::new(Ledger::default());
        let record = reserve(&ledger, "a").hold();
        let again = ledger.book(&allocation("a"), now(), |_| {
            let mut plan = empty_plan("a");
            plan.steps.push(Step::WriteCdiSpec {});
            Ok::<_, Vec<String>>(plan)
        });
        assert!(matches!(again, Ok(Booking::Kept(kept)) if kept == record));
        // It keeps the plan even if it could not be planned at all now.
        let again = ledger.book(&allocation("a"), now(), |_| Err(Vec::<String>::new()));
        assert!(matches!(again, Ok(Booking::Kept(kept)) if kept == record));
    }

    #[test]
    fn a_claim_that_was_allocated_anew_moves() {
        let ledger = Arc::new(Ledger::default());
        let record = reserve(&ledger, "a").hold();
        let mut elsewhere = allocation("a");
        elsewhere.devices[0].device = "gpu-00000001".parse().unwrap();
        let anew = ledger.book(&elsewhere, now(), |_| Ok::<_, Vec<String>>(empty_plan("a")));
        assert!(matches!(anew, Ok(Booking::Moved(old)) if old == record));
        assert_eq!(ledger.held(), [record], "it is still held");
    }
}
