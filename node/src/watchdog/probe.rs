//! Reads a sample: the accounts, NVML between two readings of them, and `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use tranche_driver::usage;

use super::compare::{Owner, ProcessId, ProcessSample, Sample, ShareSample, SlotSample};
use crate::nvml::{Driver, KeptNvml, NvmlError, ProcessMemory};
use crate::page::{AccountCopy, AccountFile};
use crate::processes::owner::{Identity, Proc};

/// How often the accounts and NVML are read if an account changes meanwhile.
const READINGS: u32 = 4;

/// What claims hold of a GPU, or of a partition that they share, by the plugin's ledger.
#[derive(Clone, Debug, Default)]
pub struct HeldOnGpu {
    /// The GPU, or the MIG device of the partition.
    pub gpu_uuid: String,
    /// The capped shares.
    pub shares: Vec<HeldShare>,
    /// The keys of the devices without a cap.
    pub uncapped: BTreeSet<String>,
    /// The keys of the devices that pods hold, by the pod's UID if it is known.
    pub pods: BTreeMap<String, BTreeSet<String>>,
    /// Bytes of a context, if they were measured.
    pub context: Option<u64>,
    /// Bytes that a process may hold beyond its charge.
    pub unaccounted: u64,
}

/// A capped share that is held.
#[derive(Clone, Debug)]
pub struct HeldShare {
    /// The device's key.
    pub key: String,
    /// Its account page; for an oversubscribed share the one of the memory that cannot move.
    pub account: PathBuf,
    /// Bytes of it that all its programs together may hold.
    pub memory: u64,
    /// Bytes of the charge of each context.
    pub context: u64,
    /// All memory of an oversubscribed share; `None` for others.
    pub all: Option<AllMemory>,
}

/// All memory of an oversubscribed share, also what the driver may move to the host.
#[derive(Clone, Debug)]
pub struct AllMemory {
    /// The account page.
    pub account: PathBuf,
    /// Bytes that all its programs together may hold.
    pub memory: u64,
}

/// The accounts, and NVML's answer between two readings of them.
struct Reading {
    shares: Vec<ShareSample>,
    processes: Vec<ProcessMemory>,
    /// Bytes in use on the GPU, if NVML reports them.
    used: Option<u64>,
}

/// Why a GPU cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum Unwatchable {
    /// NVML lists only processes of the caller's PID namespace.
    #[error(
        "the plugin is not in the host's PID namespace, so NVML does not list all processes to it: set hostPID: true for \
         its pod, and mount the host's /proc"
    )]
    Namespace,
    /// NVML.
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    /// NVML lists a process without its memory, and capped shares are held.
    #[error("NVML does not report how much memory each process holds (vGPU, or a GPU in MIG mode)")]
    NoProcessMemory,
}

/// Reads samples.
#[derive(Debug)]
pub struct Probe {
    proc: Proc,
    nvml: KeptNvml,
    known: BTreeMap<u32, Identity>,
    /// The keys of the processes of each pod that were seen, by the pod's UID.
    learned: BTreeMap<String, BTreeSet<String>>,
}

impl Probe {
    /// A probe that uses the NVML of `driver` and the host's `/proc`.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>, proc: Proc) -> Self {
        Self {
            proc,
            nvml: KeptNvml::new(driver),
            known: BTreeMap::new(),
            learned: BTreeMap::new(),
        }
    }

    /// Closes NVML because no claim holds a GPU, so that the driver can be unloaded.
    pub fn close(&mut self) {
        self.nvml.close();
        self.known.clear();
        self.learned.clear();
    }

    /// Whether NVML is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.nvml.is_open()
    }

    /// Samples one GPU. `is_key` is true for the keys of all held devices, on any GPU.
    pub fn sample(
        &mut self,
        held: &HeldOnGpu,
        is_key: impl Fn(&str) -> bool,
    ) -> Result<Sample, Unwatchable> {
        if !self.proc.is_own_namespace() {
            return Err(Unwatchable::Namespace);
        }
        let Reading {
            shares,
            processes,
            used,
        } = self.read(held)?;
        let is_known = processes.iter().all(|process| process.bytes.is_some());
        if !is_known && !held.shares.is_empty() {
            return Err(Unwatchable::NoProcessMemory);
        }
        // Without the bytes of the processes it is not known how much memory has an owner.
        let used = used.filter(|used| is_known || *used == 0);
        let mut listed = Vec::new();
        for ProcessMemory { pid, bytes } in processes {
            listed.push(self.process(held, pid, bytes.unwrap_or(0), &is_key));
        }
        Ok(Sample {
            shares,
            processes: listed,
            used,
            context: held.context,
            unaccounted: held.unaccounted,
        })
    }

    /// The owners of the processes in the last samples, by PID. `pods` has the keys of the devices that pods hold, by
    /// the pod's UID.
    #[must_use]
    pub fn owners(&self, pods: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<u32, usage::Owner> {
        let owner = |process: &Identity| {
            let mut keys: BTreeSet<String> = process.keys.iter().cloned().collect();
            if let (true, Some(pod)) = (keys.is_empty(), &process.pod) {
                let of_pod = pods.get(pod).into_iter().chain(self.learned.get(pod));
                keys.extend(of_pod.flatten().cloned());
            }
            if keys.is_empty() {
                return usage::Owner::Foreign;
            }
            usage::Owner::Claims {
                keys,
                pod_uid: process.pod.clone(),
                container: process.container.clone(),
            }
        };
        let known = self.known.iter();
        known.map(|(pid, process)| (*pid, owner(process))).collect()
    }

    /// Forgets all other processes, and all keys that are not held any more.
    pub fn keep(&mut self, pids: &BTreeSet<u32>, is_key: impl Fn(&str) -> bool) {
        self.known.retain(|pid, _| pids.contains(pid));
        self.learned.retain(|_, keys| {
            keys.retain(|key| is_key(key));
            !keys.is_empty()
        });
    }

    fn read(&mut self, held: &HeldOnGpu) -> Result<Reading, Unwatchable> {
        let mut readings = READINGS;
        loop {
            let before: Vec<_> = held.shares.iter().map(copy).collect();
            let (processes, used) = self.query(&held.gpu_uuid)?;
            let shares: Vec<_> = held
                .shares
                .iter()
                .zip(before)
                .map(|(share, before)| ShareSample {
                    key: share.key.clone(),
                    limit: share.memory.saturating_add(share.context),
                    context: share.context,
                    movable: movable(share, before.as_ref()),
                    slots: before.and_then(|before| Some(slots(&before, &copy(share)?))),
                })
                .collect();
            readings -= 1;
            let changed = |share: &ShareSample| {
                let slots = share.slots.iter().flatten();
                slots.into_iter().any(|slot| slot.charged.is_none())
            };
            if readings == 0 || !shares.iter().any(changed) {
                return Ok(Reading {
                    shares,
                    processes,
                    used,
                });
            }
        }
    }

    fn query(&mut self, gpu: &str) -> Result<(Vec<ProcessMemory>, Option<u64>), NvmlError> {
        let now = Instant::now();
        let nvml = self.nvml.get(now)?;
        let answer = nvml
            .processes(gpu)
            .map(|processes| (processes, nvml.used_memory(gpu).ok().map(counted)));
        if answer.is_err() {
            self.nvml.close_failed(now);
        }
        answer
    }

    fn process(
        &mut self,
        held: &HeldOnGpu,
        pid: u32,
        bytes: u64,
        is_key: &impl Fn(&str) -> bool,
    ) -> ProcessSample {
        let started = self.proc.started(pid);
        let is_known = |known: &Identity| Some(known.id.started) == started;
        if !self.known.get(&pid).is_some_and(is_known) {
            self.known.remove(&pid);
            if let Some(found) = self.proc.identify(pid, is_key) {
                if let Some(pod) = &found.pod {
                    let learned = self.learned.entry(pod.clone()).or_default();
                    learned.extend(found.keys.iter().cloned());
                }
                self.known.insert(pid, found);
            }
        }
        let Some(identity) = self.known.get(&pid) else {
            let started = started.unwrap_or(0);
            return ProcessSample {
                id: ProcessId { pid, started },
                inner_pid: None,
                bytes,
                owner: Owner::Ended,
            };
        };
        ProcessSample {
            id: identity.id,
            inner_pid: identity.inner_pid,
            bytes,
            owner: owner(held, identity, &self.learned),
        }
    }
}

/// The bytes in use that must have an owner. 0 in MIG mode: the driver removes a GPU instance only when no process has
/// memory in it, and creates one only where memory is free.
fn counted(used: Option<u64>) -> u64 {
    used.unwrap_or(0)
}

/// The owner of a process: by the devices on this GPU that its container has or, without any, that its
/// pod holds.
fn owner(
    held: &HeldOnGpu,
    process: &Identity,
    learned: &BTreeMap<String, BTreeSet<String>>,
) -> Owner {
    let shares_of = |keys: &mut dyn Iterator<Item = &String>| {
        let on_gpu = |key: &&String| held.shares.iter().any(|share| share.key == **key);
        keys.filter(on_gpu).cloned().collect::<BTreeSet<_>>()
    };
    let pod = process.pod.as_ref();
    let of_pod: Vec<&String> = pod
        .into_iter()
        .flat_map(|pod| held.pods.get(pod).into_iter().chain(learned.get(pod)))
        .flatten()
        .collect();
    let mut keys = shares_of(&mut process.keys.iter());
    let is_uncapped =
        |mut keys: std::slice::Iter<'_, String>| keys.any(|key| held.uncapped.contains(key));
    if keys.is_empty() && is_uncapped(process.keys.iter()) {
        return Owner::Uncapped;
    }
    if keys.is_empty() {
        keys = shares_of(&mut of_pod.iter().copied());
    }
    if !keys.is_empty() {
        return Owner::Shares {
            pod: process.pod.clone(),
            keys: keys.into_iter().collect(),
        };
    }
    if of_pod.iter().any(|key| held.uncapped.contains(*key)) {
        Owner::Uncapped
    } else {
        Owner::Foreign
    }
}

fn copy(share: &HeldShare) -> Option<AccountCopy> {
    copy_of(&share.account)
}

fn copy_of(account: &Path) -> Option<AccountCopy> {
    AccountFile::open(account)
        .and_then(|account| account.copy())
        .ok()
}

/// Bytes of a share that may be on the GPU as memory of no process: managed memory.
fn movable(share: &HeldShare, account: Option<&AccountCopy>) -> u64 {
    let Some(all) = &share.all else { return 0 };
    let used = |copy: &AccountCopy| copy.snapshot().used();
    let most = all.memory.saturating_add(share.context);
    let charged = copy_of(&all.account).map_or(most, |copy| used(&copy).min(most));
    charged.saturating_sub(account.map_or(0, used))
}

/// The slots of an account, from two copies of it. A slot that is the same in both, with no change in
/// progress, did not change between the end of the first copy and the beginning of the second: every
/// change is counted in the slot when it begins and when it ends.
fn slots(before: &AccountCopy, after: &AccountCopy) -> Vec<SlotSample> {
    let mut first: BTreeMap<usize, _> = before
        .snapshot()
        .processes()
        .map(|slot| (slot.slot, slot))
        .collect();
    let mut slots: Vec<_> = after
        .snapshot()
        .processes()
        .map(|now| {
            let is_same = first.remove(&now.slot).is_some_and(|then| {
                then.begun == then.ended
                    && (then.pid, then.begun, then.ended, then.charged)
                        == (now.pid, now.begun, now.ended, now.charged)
            });
            SlotSample {
                pid: now.pid,
                charged: is_same.then_some(now.charged),
            }
        })
        .collect();
    // It was released in between.
    slots.extend(first.into_values().map(|then| SlotSample {
        pid: then.pid,
        charged: None,
    }));
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> HeldOnGpu {
        let share = |key: &str| HeldShare {
            key: key.into(),
            account: PathBuf::new(),
            memory: 1 << 30,
            all: None,
            context: 0,
        };
        HeldOnGpu {
            gpu_uuid: "GPU-0".into(),
            shares: vec![share("share-a"), share("share-b")],
            uncapped: BTreeSet::from(["whole".to_owned()]),
            pods: BTreeMap::from([("pod-a".to_owned(), BTreeSet::from(["share-a".to_owned()]))]),
            context: None,
            unaccounted: 0,
        }
    }

    fn process(pod: Option<&str>, keys: &[&str]) -> Identity {
        Identity {
            id: ProcessId { pid: 1, started: 1 },
            inner_pid: None,
            pod: pod.map(str::to_owned),
            container: None,
            keys: keys.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn a_process_is_its_containers_or_its_pods_or_foreign() {
        let learned =
            BTreeMap::from([("pod-b".to_owned(), BTreeSet::from(["share-b".to_owned()]))]);
        let owner_of = |pod, keys: &[&str]| owner(&held(), &process(pod, keys), &learned);
        let shares = |pod: Option<&str>, keys: &[&str]| Owner::Shares {
            pod: pod.map(str::to_owned),
            keys: keys.iter().map(ToString::to_string).collect(),
        };
        // By its container's mounts, with and without a known pod.
        assert_eq!(
            owner_of(Some("pod-x"), &["share-b"]),
            shares(Some("pod-x"), &["share-b"])
        );
        assert_eq!(
            owner_of(None, &["share-a", "share-b"]),
            shares(None, &["share-a", "share-b"])
        );
        // By its pod only: a container without the claim, or its own mount namespace.
        assert_eq!(
            owner_of(Some("pod-a"), &[]),
            shares(Some("pod-a"), &["share-a"])
        );
        assert_eq!(
            owner_of(Some("pod-b"), &["elsewhere"]),
            shares(Some("pod-b"), &["share-b"])
        );
        assert_eq!(owner_of(Some("pod-x"), &["whole"]), Owner::Uncapped);
        // A host process, another system's pod, a pod whose claims are on another GPU.
        assert_eq!(owner_of(None, &[]), Owner::Foreign);
        assert_eq!(owner_of(Some("pod-x"), &["elsewhere"]), Owner::Foreign);
    }
}
