//! Looks at the health of GPUs: the Xids that the driver reports, and what NVML says about recovery and memory.
//!
//! NVML reports only Xids that come while a GPU is watched, so NVML stays open. [`Watch`] is the only reader of Xids:
//! others get their counts from [`XidCounts`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tranche_api::usage::Xids;
use tranche_driver::health::Seen;

use crate::nvml::{Driver, KeptNvml, NvmlError};

/// How often NVML is asked about a GPU without an Xid.
const PERIOD: Duration = Duration::from_secs(5);

/// How often NVML is opened anew while a GPU is lost: an open NVML does not find a GPU that has come back.
const SEARCH: Duration = Duration::from_secs(30);

/// The Xids of each GPU since the process began. Clones are the same counts.
#[derive(Clone, Debug, Default)]
pub struct XidCounts(Arc<Mutex<BTreeMap<String, Xids>>>);

impl XidCounts {
    /// The Xids of a GPU; `None` if it was never watched.
    #[must_use]
    pub fn of(&self, gpu_uuid: &str) -> Option<Xids> {
        self.with(|counts| counts.get(gpu_uuid).cloned())
    }

    fn watch(&self, gpu_uuid: &str) {
        self.with(|counts| {
            counts.entry(gpu_uuid.to_owned()).or_default();
        });
    }

    fn add(&self, gpu_uuid: &str, xid: u64, unix: u64) {
        self.with(|counts| {
            let of_gpu = counts.entry(gpu_uuid.to_owned()).or_default();
            of_gpu.add(xid, unix);
        });
    }

    fn with<T>(&self, use_counts: impl FnOnce(&mut BTreeMap<String, Xids>) -> T) -> T {
        use_counts(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A look at a GPU, with the Xids since the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// What was seen.
    pub seen: Seen,
    /// The Xids.
    pub xids: Vec<u64>,
}

/// Looks at GPUs again and again.
#[derive(Debug)]
pub struct Watch {
    nvml: KeptNvml,
    counts: XidCounts,
    last: BTreeMap<String, (Instant, Seen)>,
    /// When NVML was last opened anew for a lost GPU.
    searched: Option<Instant>,
}

impl Watch {
    /// With the NVML of `driver`, which stays open. The Xids are added to `counts`.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>, counts: XidCounts) -> Self {
        Self {
            nvml: KeptNvml::new(driver),
            counts,
            last: BTreeMap::new(),
            searched: None,
        }
    }

    /// Looks at these GPUs at `now`, which is `unix` in Unix seconds, and forgets all others.
    pub fn look(&mut self, now: Instant, unix: u64, gpus: &[&str]) -> BTreeMap<String, Looked> {
        self.last.retain(|uuid, _| gpus.contains(&uuid.as_str()));
        self.search(now);
        let mut xids: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        if let Ok(found) = self.nvml.get(now).and_then(|nvml| nvml.xids(gpus)) {
            for uuid in gpus {
                self.counts.watch(uuid);
            }
            for (uuid, xid) in found {
                self.counts.add(&uuid, xid, unix);
                xids.entry(uuid).or_default().push(xid);
            }
        }
        let look = |uuid: &&str| {
            let xids = xids.remove(*uuid).unwrap_or_default();
            let seen = self.see(now, uuid, !xids.is_empty());
            ((*uuid).to_owned(), Looked { seen, xids })
        };
        gpus.iter().map(look).collect()
    }

    /// Closes NVML, so that GPUs can be reset and the driver can be unloaded.
    pub fn close(&mut self) {
        self.nvml.close();
        self.last.clear();
        self.searched = None;
    }

    fn see(&mut self, now: Instant, uuid: &str, is_news: bool) -> Seen {
        if let Some((at, seen)) = self.last.get(uuid)
            && !is_news
            && now.saturating_duration_since(*at) < PERIOD
        {
            return seen.clone();
        }
        let seen = match self.nvml.get(now).and_then(|nvml| nvml.health(uuid)) {
            Ok(report) => Seen::Report(report),
            Err(NvmlError::GpuLost { .. }) => Seen::Lost,
            Err(error) => Seen::Unwatched(error.to_string()),
        };
        self.last.insert(uuid.to_owned(), (now, seen.clone()));
        seen
    }

    fn search(&mut self, now: Instant) {
        let is_lost = |(_, seen): &(Instant, Seen)| *seen == Seen::Lost;
        if !self.last.values().any(is_lost) {
            self.searched = None;
            return;
        }
        let since = *self.searched.get_or_insert(now);
        if now.saturating_duration_since(since) >= SEARCH {
            self.searched = Some(now);
            self.nvml.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use tranche_driver::health::{RecoveryAction, Report};

    use super::*;
    use crate::testing::MigGpus;

    fn start() -> (tempfile::TempDir, MigGpus, [String; 2], Watch, XidCounts) {
        let root = tempfile::tempdir().unwrap();
        let gpus = MigGpus::two_h100(root.path());
        let uuids: Vec<String> = gpus.addresses().into_keys().collect();
        let uuids: [String; 2] = uuids.try_into().unwrap();
        let counts = XidCounts::default();
        let watch = Watch::new(Box::new(gpus.clone()), counts.clone());
        (root, gpus, uuids, watch, counts)
    }

    #[test]
    fn xids_are_counted_also_for_a_lost_gpu() {
        let (_root, gpus, [first, second], mut watch, counts) = start();
        let start = Instant::now();
        let of_both = [first.as_str(), second.as_str()];
        assert_eq!(counts.of(&first), None, "not watched yet");
        watch.look(start, 1_000, &of_both);
        assert_eq!(counts.of(&first).unwrap().counts, BTreeMap::new());
        gpus.err(&first, 31);
        gpus.err(&second, 79);
        let looked = watch.look(start, 1_001, &of_both);
        assert_eq!(
            (&*looked[&first].xids, &*looked[&second].xids),
            (&[31][..], &[79][..])
        );
        for xid in [31, 48] {
            gpus.err(&first, xid);
        }
        watch.look(start, 1_002, &of_both);
        let of_first = counts.of(&first).unwrap();
        assert_eq!(
            (of_first.last, of_first.counts),
            (Some(48), [(31, 2), (48, 1)].into())
        );
        assert_eq!(of_first.times, [(31, 1_002), (48, 1_002)].into());
        let of_second = counts.of(&second).unwrap();
        assert_eq!(
            (of_second.last, of_second.times),
            (Some(79), [(79, 1_001)].into())
        );
        // The driver no longer answers for it.
        gpus.lose(&second, true);
        gpus.err(&second, 79);
        let looked = watch.look(start, 1_003, &of_both);
        assert_eq!(
            looked[&second],
            Looked {
                seen: Seen::Lost,
                xids: vec![79]
            }
        );
        assert_eq!(looked[&first].seen, Seen::Report(Report::default()));
    }

    #[test]
    fn nvml_is_asked_at_once_after_an_xid_and_every_few_seconds_otherwise() {
        let (_root, gpus, [first, _], mut watch, _) = start();
        let start = Instant::now();
        let seen =
            |watch: &mut Watch, at| watch.look(start + at, 0, &[&first])[&first].seen.clone();
        assert_eq!(
            seen(&mut watch, Duration::ZERO),
            Seen::Report(Report::default())
        );
        let report = Report {
            recovery_action: Some(RecoveryAction::Reset),
            ..Report::default()
        };
        gpus.report(&first, report);
        assert_eq!(
            seen(&mut watch, PERIOD / 2),
            Seen::Report(Report::default())
        );
        gpus.err(&first, 48);
        assert_eq!(seen(&mut watch, PERIOD / 2), Seen::Report(report));
        gpus.report(&first, Report::default());
        assert_eq!(seen(&mut watch, PERIOD), Seen::Report(report));
        assert_eq!(
            seen(&mut watch, 2 * PERIOD),
            Seen::Report(Report::default())
        );
    }

    #[test]
    fn a_gpu_that_cannot_be_asked_is_not_called_lost() {
        let (_root, gpus, [first, _], mut watch, _) = start();
        gpus.has_left(&first, true);
        let looked = watch.look(Instant::now(), 0, &[&first]);
        assert!(
            matches!(looked[&first].seen, Seen::Unwatched(_)),
            "{looked:?}"
        );
    }
}
