//! Evaluates a sample of a GPU, given the samples before it.
//!
//! **Why an honest share is never reported.** The shim charges memory before the driver allocates it and
//! returns the charge after the driver has freed it, so at every instant a process holds no more than it is
//! charged, except for what the shim does not see: rounding, code that is loaded at first use, profilers' buffers.
//! The policy's `unaccountedMemory` covers these, and the measured size covers contexts beyond the assumed size. A
//! slot is compared only if it did not change while NVML was read; if it changes constantly, the share's limit is used instead. Memory that the
//! driver frees late is gone in the next sample.
//!
//! **Why a bypass is reported.** Memory that is in no account is in NVML's figure and not in the slot. A
//! tenant can write its page: it may charge itself more than it allocated, or change a slot constantly,
//! but all slots together count no more than the share's limit, so memory beyond the share's limit is
//! always reported.

pub use crate::processes::owner::ProcessId;

use std::collections::BTreeMap;

use tranche_driver::policy::UNMEASURED_CONTEXT;

/// Bytes of a GPU that may be in use without an owner: what the driver takes in addition to its
/// reserve.
pub const UNOWNED_TOLERANCE: u64 = 256 << 20;

/// Consecutive samples after which a difference is reported, or is over. A single difference may be a free that the
/// driver has not finished, or an inconsistent list of NVML.
const CONFIRM: u32 = 2;

/// The same for memory without an owner: the driver may take some seconds to free a dead process's
/// memory.
const CONFIRM_UNOWNED: u32 = 5;

/// One sample of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The capped shares that are held on it.
    pub shares: Vec<ShareSample>,
    /// The processes that NVML lists.
    pub processes: Vec<ProcessSample>,
    /// Bytes in use (nvmlDeviceGetMemoryInfo_v2), if the driver reports them.
    pub used: Option<u64>,
    /// Bytes of a context on this GPU, if they were measured.
    pub context: Option<u64>,
    /// Bytes by which a process's memory may exceed its charge (and its contexts' measured size): the policy's
    /// `unaccountedMemory`. A larger difference is reported within two samples.
    pub unaccounted: u64,
}

/// What a share's pages say. The account's author is the tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareSample {
    /// The device's key.
    pub key: String,
    /// The most that its processes may hold: its memory, and one context.
    pub limit: u64,
    /// The charge of each context.
    pub context: u64,
    /// Bytes on the GPU that may belong to no process, because they are managed memory.
    pub movable: u64,
    /// The slots in use; `None` if the account cannot be read now.
    pub slots: Option<Vec<SlotSample>>,
}

/// A process's slot in an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotSample {
    /// The PID in its own PID namespace.
    pub pid: u64,
    /// Bytes charged; `None` if they changed while NVML was read.
    pub charged: Option<u64>,
}

/// A process that NVML lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSample {
    /// The process.
    pub id: ProcessId,
    /// The PID in its own PID namespace, if `/proc` shows it.
    pub inner_pid: Option<u64>,
    /// Bytes that it holds, including contexts.
    pub bytes: u64,
    /// The owner.
    pub owner: Owner,
}

/// The owner of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A container that has capped shares of the GPU.
    Shares {
        /// The UID of its pod, where its cgroup says.
        pod: Option<String>,
        /// The shares' keys, at least one.
        keys: Vec<String>,
    },
    /// A container that has the GPU without a cap.
    Uncapped,
    /// A process of no claim of ours on the GPU.
    Foreign,
    /// It has ended.
    Ended,
}

/// A process, or a share as a whole, that holds more than the account says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bypass {
    /// The share's key.
    pub share: String,
    /// The UID of the process's pod, where its cgroup says.
    pub pod: Option<String>,
    /// The process; if the sum of a share is too high, the process that holds most.
    pub process: ProcessId,
    /// Bytes on the GPU that are not in the account.
    pub bytes: u64,
    /// What was compared.
    pub basis: Basis,
    /// When it was first seen, in the caller's nanoseconds.
    pub since: u64,
    /// Whether to report it: it was not reported before, or has doubled since.
    pub must_report: bool,
}

/// What was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Basis {
    /// The process with its slot.
    Process,
    /// The process, which has no slot.
    NoSlot,
    /// All processes of the share with its account, and with its limit.
    Sum,
}

/// The result of a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Confirmed bypasses, by share and process.
    pub bypasses: Vec<Bypass>,
    /// Processes that belong to no claim on the GPU, and their bytes.
    pub foreign: (u32, u64),
    /// Bytes without an owner, from the first sample on; `None` if the driver does not report them.
    pub unowned: Option<u64>,
    /// Whether these were too many for so long that no new claim may get the GPU.
    pub is_withheld: bool,
}

/// One GPU, from sample to sample.
#[derive(Clone, Debug, Default)]
pub struct GpuWatch {
    suspects: BTreeMap<Suspect, Suspicion>,
    /// Consecutive samples with memory without an owner; while the GPU is withheld, those without
    /// such memory.
    unowned: u32,
    is_withheld: bool,
}

type Suspect = (String, Basis, ProcessId);

#[derive(Clone, Debug)]
struct Suspicion {
    pod: Option<String>,
    bytes: u64,
    since: u64,
    /// Consecutive samples in which it was seen, at most [`CONFIRM`].
    seen: u32,
    /// Consecutive samples in which it was not seen.
    missed: u32,
    /// Bytes that were reported; 0 for none.
    reported: u64,
}

impl GpuWatch {
    /// A GPU that is withheld until samples show that its memory is free, because an earlier process of the node found
    /// memory without an owner.
    #[must_use]
    pub fn withheld() -> Self {
        Self {
            is_withheld: true,
            ..Self::default()
        }
    }

    /// Evaluates a sample at `now`, in nanoseconds of any monotonic clock.
    pub fn step(&mut self, now: u64, sample: &Sample) -> Findings {
        let seen = differences(sample);
        for (suspect, difference) in &seen {
            let suspicion = self
                .suspects
                .entry(suspect.clone())
                .or_insert_with(|| Suspicion {
                    pod: difference.pod.clone(),
                    bytes: 0,
                    since: now,
                    seen: 0,
                    missed: 0,
                    reported: 0,
                });
            suspicion.bytes = difference.bytes;
            suspicion.seen = (suspicion.seen + 1).min(CONFIRM);
            suspicion.missed = 0;
        }
        self.suspects.retain(|suspect, suspicion| {
            if !seen.contains_key(suspect) {
                suspicion.missed += 1;
                // A difference must be seen in two consecutive samples, and be missing in two to
                // end.
                return suspicion.seen >= CONFIRM && suspicion.missed < CONFIRM;
            }
            true
        });
        let mut bypasses = Vec::new();
        for ((share, basis, process), suspicion) in &mut self.suspects {
            if suspicion.seen < CONFIRM {
                continue;
            }
            let must_report = suspicion.reported == 0 || suspicion.bytes / 2 >= suspicion.reported;
            if must_report {
                suspicion.reported = suspicion.bytes.max(1);
            }
            bypasses.push(Bypass {
                share: share.clone(),
                pod: suspicion.pod.clone(),
                process: *process,
                bytes: suspicion.bytes,
                basis: *basis,
                since: suspicion.since,
                must_report,
            });
        }
        let unowned = unowned(sample);
        self.withhold(unowned);
        let foreign = sample
            .processes
            .iter()
            .filter(|p| p.owner == Owner::Foreign);
        Findings {
            bypasses,
            foreign: foreign.fold((0, 0), |(count, sum), process| {
                (count + 1, process.bytes.saturating_add(sum))
            }),
            unowned,
            is_withheld: self.is_withheld,
        }
    }

    /// Handles a sample that could not be read.
    pub fn skip(&mut self) {
        // Confirmed differences stay, unconfirmed ones do not: only consecutive samples confirm.
        self.suspects
            .retain(|_, suspicion| suspicion.seen >= CONFIRM);
        if !self.is_withheld {
            self.unowned = 0;
        }
    }

    /// Whether the GPU is withheld because some of its memory has no owner.
    #[must_use]
    pub fn is_withheld(&self) -> bool {
        self.is_withheld
    }

    fn withhold(&mut self, unowned: Option<u64>) {
        let Some(bytes) = unowned else { return };
        let is_much = bytes > UNOWNED_TOLERANCE;
        if is_much == self.is_withheld {
            self.unowned = 0;
            return;
        }
        self.unowned += 1;
        let enough = if self.is_withheld {
            CONFIRM
        } else {
            CONFIRM_UNOWNED
        };
        if self.unowned >= enough {
            self.is_withheld = is_much;
            self.unowned = 0;
        }
    }
}

#[derive(Debug)]
struct Difference {
    pod: Option<String>,
    bytes: u64,
}

/// The processes and shares that hold more than their accounts in this sample.
fn differences(sample: &Sample) -> BTreeMap<Suspect, Difference> {
    let mut found = BTreeMap::new();
    for group in groups(sample) {
        let named = group.compare_processes(sample, &mut found);
        group.compare_sum(sample, named, &mut found);
    }
    found
}

/// Bytes of the GPU that are in use by no process and are in no account.
fn unowned(sample: &Sample) -> Option<u64> {
    let alive = sample.processes.iter().filter(|p| p.owner != Owner::Ended);
    let held = sum(alive.map(|process| process.bytes));
    // The forked children of an ended process keep its memory, and NVML does not list them. It stays charged as long.
    let inherited = groups(sample).into_iter().map(|group| {
        let charged = sum(group.shares.iter().map(|share| charged(share)));
        charged.saturating_sub(sum(group.processes.iter().map(|process| process.bytes)))
    });
    let movable = sample.shares.iter().map(|share| share.movable);
    Some(
        sample
            .used?
            .saturating_sub(held)
            .saturating_sub(sum(inherited))
            .saturating_sub(sum(movable)),
    )
}

/// Shares with common processes, because a pod holds several of them, and these processes.
#[derive(Debug, Default)]
struct Group<'a> {
    shares: Vec<&'a ShareSample>,
    processes: Vec<&'a ProcessSample>,
}

fn groups(sample: &Sample) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = sample
        .shares
        .iter()
        .map(|share| Group {
            shares: vec![share],
            processes: Vec::new(),
        })
        .collect();
    for process in &sample.processes {
        let Owner::Shares { keys, .. } = &process.owner else {
            continue;
        };
        let (theirs, mut others): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .partition(|group| group.shares.iter().any(|share| keys.contains(&share.key)));
        let mut merged = Group::default();
        for group in theirs {
            merged.shares.extend(group.shares);
            merged.processes.extend(group.processes);
        }
        merged.processes.push(process);
        if !merged.shares.is_empty() {
            others.push(merged);
        }
        groups = others;
    }
    groups
}

/// What a share's processes hold by its account, at most its limit.
fn charged(share: &ShareSample) -> u64 {
    let slots = share.slots.as_ref().map(|slots| {
        slots
            .iter()
            .try_fold(0u64, |sum, slot| Some(sum.saturating_add(slot.charged?)))
    });
    slots.flatten().unwrap_or(share.limit).min(share.limit)
}

impl Group<'_> {
    /// Bytes that a process may hold beyond its charge: what its context takes beyond that, and what is in no account.
    fn beyond(&self, sample: &Sample) -> u64 {
        let charged = self.shares.iter().map(|share| share.context).max();
        let context = sample.context.unwrap_or(UNMEASURED_CONTEXT);
        context
            .saturating_sub(charged.unwrap_or(0))
            .saturating_add(sample.unaccounted)
    }

    /// Compares each process with its slots. Two containers of a share may each have a process with the same
    /// PID: these are compared together. Returns the reported bytes.
    fn compare_processes(&self, sample: &Sample, found: &mut BTreeMap<Suspect, Difference>) -> u64 {
        let mut named = 0u64;
        let mut by_pid: BTreeMap<u64, Vec<&ProcessSample>> = BTreeMap::new();
        for process in &self.processes {
            if let Some(pid) = process.inner_pid {
                by_pid.entry(pid).or_default().push(process);
            }
        }
        for (pid, processes) in by_pid {
            let Some(slots) = self.slots_of(pid) else {
                continue;
            };
            let (charged, each, basis) = if slots.is_empty() {
                (0, sample.unaccounted, Basis::NoSlot)
            } else {
                (
                    sum(slots.iter().copied()),
                    self.beyond(sample),
                    Basis::Process,
                )
            };
            let bytes = sum(processes.iter().map(|process| process.bytes)).saturating_sub(charged);
            if bytes > times(each, processes.len()) {
                self.name(&processes, basis, bytes, found);
                named = named.saturating_add(bytes);
            }
        }
        named
    }

    /// The charges of the slots of a process; `None` if one of them is not known.
    fn slots_of(&self, pid: u64) -> Option<Vec<u64>> {
        let mut charges = Vec::new();
        for share in &self.shares {
            for slot in share.slots.as_ref()?.iter().filter(|slot| slot.pid == pid) {
                charges.push(slot.charged?);
            }
        }
        Some(charges)
    }

    /// Compares all processes with the account, without the bytes that are already reported (`named`).
    fn compare_sum(&self, sample: &Sample, named: u64, found: &mut BTreeMap<Suspect, Difference>) {
        let charged = sum(self.shares.iter().map(|share| charged(share)));
        let held = sum(self.processes.iter().map(|process| process.bytes));
        let each = self.beyond(sample);
        let bytes = held.saturating_sub(charged).saturating_sub(named);
        if bytes > times(each, self.processes.len()) {
            self.name(&self.processes, Basis::Sum, bytes, found);
        }
    }

    /// Reports the largest of some processes, for the first of its shares.
    fn name(
        &self,
        processes: &[&ProcessSample],
        basis: Basis,
        bytes: u64,
        found: &mut BTreeMap<Suspect, Difference>,
    ) {
        let largest = processes.iter().max_by_key(|p| (p.bytes, p.id));
        let Some((process, Owner::Shares { pod, keys })) = largest.map(|p| (p, &p.owner)) else {
            return;
        };
        let of_group = |key: &&String| self.shares.iter().any(|share| share.key == **key);
        let Some(share) = keys.iter().find(of_group) else {
            return;
        };
        let difference = Difference {
            pod: pod.clone(),
            bytes,
        };
        found.insert((share.clone(), basis, process.id), difference);
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

fn times(bytes: u64, count: usize) -> u64 {
    bytes.saturating_mul(count as u64)
}
