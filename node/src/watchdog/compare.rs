//! What one sample of a GPU means, given those before it.
//!
//! **Why an honest share is never named.** The shim charges memory before the driver gives it and returns
//! the charge after the driver has it back, so at every instant a process holds no more than it is charged,
//! beyond what the shim does not see: rounding, code that is loaded at first use, and what its contexts
//! take beyond the assumed size. [`TOLERANCE`] is for these. A slot is compared only where it did not
//! change from before NVML was read until after; where it changes all the time, the share's limit takes its
//! place. What the driver frees late is gone by the next sample.
//!
//! **Why a bypass is named.** Memory in no account is in NVML's figure and not in the slot's. A tenant can
//! write its page: it may charge itself more than it allocated, but all slots together count no more than
//! the share's limit, so what lies beyond the share is always named; and it may keep a slot changing, to
//! the same end.

use std::collections::BTreeMap;

/// Bytes by which a process's memory may be more than its charge (and its contexts, measured): a
/// difference beyond this is named within two samples.
pub const TOLERANCE: u64 = 256 << 20;

/// Bytes of a context where nobody measured it: drivers since 535 take 250 to 550 MiB on data centre GPUs.
pub const UNMEASURED_CONTEXT: u64 = 512 << 20;

/// Bytes of a GPU that may be in use by nobody: what the driver keeps for itself beside its reserve.
pub const UNOWNED_TOLERANCE: u64 = 256 << 20;

/// Samples in a row after which a difference is named, or is over. One alone may be a free that the driver
/// has not finished, or a list that NVML made while memory came and went.
const CONFIRM: u32 = 2;

/// The same for memory that nobody owns: the driver frees a dead process's memory in some seconds.
const CONFIRM_UNOWNED: u32 = 5;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// As the host counts.
    pub pid: u32,
    /// When it started, in clock ticks since the boot: field 22 of `/proc/<pid>/stat`. Together with the PID
    /// it names one process.
    pub started: u64,
}

/// What was read of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The capped shares that are held on it.
    pub shares: Vec<ShareSample>,
    /// The processes that NVML lists.
    pub processes: Vec<ProcessSample>,
    /// Bytes in use (nvmlDeviceGetMemoryInfo_v2), where the driver says.
    pub used: Option<u64>,
    /// Bytes of a context on this GPU, where they were measured.
    pub context: Option<u64>,
}

/// What a share's pages say. The account's author is the tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareSample {
    /// The device's key.
    pub key: String,
    /// All that its processes may hold: its memory, and one context.
    pub limit: u64,
    /// What each context is charged.
    pub context: u64,
    /// The slots in use; `None` where the account cannot be read now.
    pub slots: Option<Vec<SlotSample>>,
}

/// A process's slot in an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotSample {
    /// The process, as its own PID namespace counts.
    pub pid: u64,
    /// Bytes charged; `None` where they changed while NVML was read.
    pub charged: Option<u64>,
}

/// A process that NVML lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSample {
    /// The process.
    pub id: ProcessId,
    /// The same as its own PID namespace counts, where `/proc` says.
    pub inner_pid: Option<u64>,
    /// Bytes that it holds, contexts included.
    pub bytes: u64,
    /// Whose it is.
    pub owner: Owner,
}

/// Whose a process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A container's that has capped shares of the GPU.
    Shares {
        /// The UID of its pod, where its cgroup says.
        pod: Option<String>,
        /// The shares' keys, at least one.
        keys: Vec<String>,
    },
    /// A container's that has the GPU without a cap.
    Uncapped,
    /// Nobody's that holds a claim of ours on the GPU.
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
    /// The process; of a share whose sum is too high, the one that holds most.
    pub process: ProcessId,
    /// Bytes on the GPU that the account does not have.
    pub bytes: u64,
    /// What was compared.
    pub basis: Basis,
    /// When it was seen first, in the caller's nanoseconds.
    pub since: u64,
    /// Whether it is to be told: it was not told before, or is twice as much by now.
    pub is_news: bool,
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

/// What a sample means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Confirmed bypasses, by share and process.
    pub bypasses: Vec<Bypass>,
    /// Processes that belong to no claim on the GPU, and their bytes.
    pub foreign: (u32, u64),
    /// Bytes that nobody owns any more, from the first sample on; `None` where the driver does not say.
    pub unowned: Option<u64>,
    /// Whether these are more than is usual, for long enough: the GPU is not to be handed on.
    pub is_withheld: bool,
}

/// One GPU, from sample to sample.
#[derive(Clone, Debug, Default)]
pub struct GpuWatch {
    suspects: BTreeMap<Suspect, Suspicion>,
    /// Samples in a row in which memory was nobody's; while it is withheld, in which none was.
    unowned: u32,
    is_withheld: bool,
}

type Suspect = (String, Basis, ProcessId);

#[derive(Clone, Debug)]
struct Suspicion {
    pod: Option<String>,
    bytes: u64,
    since: u64,
    /// Samples in a row in which it was seen, at most [`CONFIRM`].
    seen: u32,
    /// Samples in a row in which it was not.
    missed: u32,
    /// Bytes that were told; 0 for none.
    told: u64,
}

impl GpuWatch {
    /// Takes a sample in at `now`, nanoseconds of any clock that does not go back.
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
                    told: 0,
                });
            suspicion.bytes = difference.bytes;
            suspicion.seen = (suspicion.seen + 1).min(CONFIRM);
            suspicion.missed = 0;
        }
        self.suspects.retain(|suspect, suspicion| {
            if !seen.contains_key(suspect) {
                suspicion.missed += 1;
                // A difference must be seen twice in a row, and missed twice in a row.
                return suspicion.seen >= CONFIRM && suspicion.missed < CONFIRM;
            }
            true
        });
        let mut bypasses = Vec::new();
        for ((share, basis, process), suspicion) in &mut self.suspects {
            if suspicion.seen < CONFIRM {
                continue;
            }
            let is_news = suspicion.told == 0 || suspicion.bytes / 2 >= suspicion.told;
            if is_news {
                suspicion.told = suspicion.bytes.max(1);
            }
            bypasses.push(Bypass {
                share: share.clone(),
                pod: suspicion.pod.clone(),
                process: *process,
                bytes: suspicion.bytes,
                basis: *basis,
                since: suspicion.since,
                is_news,
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

    /// Nothing could be read.
    pub fn skip(&mut self) {
        // What is known stays, what is only suspected does not: two samples in a row are two.
        self.suspects
            .retain(|_, suspicion| suspicion.seen >= CONFIRM);
        if !self.is_withheld {
            self.unowned = 0;
        }
    }

    /// Whether the GPU is withheld because some of its memory is nobody's.
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

/// Who holds more than the accounts say in this one sample.
fn differences(sample: &Sample) -> BTreeMap<Suspect, Difference> {
    let mut found = BTreeMap::new();
    for group in groups(sample) {
        let named = group.compare_processes(sample.context, &mut found);
        group.compare_sum(sample.context, named, &mut found);
    }
    found
}

/// Bytes of the GPU that are in use, by no process and in no account.
fn unowned(sample: &Sample) -> Option<u64> {
    let alive = sample.processes.iter().filter(|p| p.owner != Owner::Ended);
    let held = sum(alive.map(|process| process.bytes));
    // A process that ended leaves its memory to its children by fork, and NVML does not list them. It stays
    // charged as long.
    let inherited = groups(sample).into_iter().map(|group| {
        let charged = sum(group.shares.iter().map(|share| charged(share)));
        charged.saturating_sub(sum(group.processes.iter().map(|process| process.bytes)))
    });
    Some(
        sample
            .used?
            .saturating_sub(held)
            .saturating_sub(sum(inherited)),
    )
}

/// Shares that have processes in common, through pods that hold several, and these processes.
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

/// What a share's account says that its processes hold: no more than they may.
fn charged(share: &ShareSample) -> u64 {
    let slots = share.slots.as_ref().map(|slots| {
        slots
            .iter()
            .try_fold(0u64, |sum, slot| Some(sum.saturating_add(slot.charged?)))
    });
    slots.flatten().unwrap_or(share.limit).min(share.limit)
}

impl Group<'_> {
    /// What a context takes beyond what it is charged.
    fn beyond(&self, context: Option<u64>) -> u64 {
        let charged = self.shares.iter().map(|share| share.context).max();
        context
            .unwrap_or(UNMEASURED_CONTEXT)
            .saturating_sub(charged.unwrap_or(0))
    }

    /// Compares each process with its slots. Two containers of a share may each have a process of one number:
    /// these are compared together. Returns the bytes that are named.
    fn compare_processes(
        &self,
        context: Option<u64>,
        found: &mut BTreeMap<Suspect, Difference>,
    ) -> u64 {
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
                (0, TOLERANCE, Basis::NoSlot)
            } else {
                let beyond = self.beyond(context).saturating_add(TOLERANCE);
                (sum(slots.iter().copied()), beyond, Basis::Process)
            };
            let bytes = sum(processes.iter().map(|process| process.bytes)).saturating_sub(charged);
            if bytes > times(each, processes.len()) {
                self.name(&processes, basis, bytes, found);
                named = named.saturating_add(bytes);
            }
        }
        named
    }

    /// The charges of the slots of a process; `None` where they are not known well enough.
    fn slots_of(&self, pid: u64) -> Option<Vec<u64>> {
        let mut charges = Vec::new();
        for share in &self.shares {
            for slot in share.slots.as_ref()?.iter().filter(|slot| slot.pid == pid) {
                charges.push(slot.charged?);
            }
        }
        Some(charges)
    }

    /// Compares all processes with the account, but for the bytes that are `named` already.
    fn compare_sum(
        &self,
        context: Option<u64>,
        named: u64,
        found: &mut BTreeMap<Suspect, Difference>,
    ) {
        let charged = sum(self.shares.iter().map(|share| charged(share)));
        let held = sum(self.processes.iter().map(|process| process.bytes));
        let each = self.beyond(context).saturating_add(TOLERANCE);
        let bytes = held.saturating_sub(charged).saturating_sub(named);
        if bytes > times(each, self.processes.len()) {
            self.name(&self.processes, Basis::Sum, bytes, found);
        }
    }

    /// Names the largest of some processes, for the first of its shares.
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
