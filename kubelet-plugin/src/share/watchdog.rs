//! Every second, compares the processes' memory in NVML with the accounts of all held shares, reports
//! memory that is in no account, and ends processes if the policy says so. See
//! [`tranche_node::watchdog`].

mod running;
#[cfg(test)]
mod tests;
mod watched_file;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tranche_api::sharing_policy::OnBypass;
use tranche_api::withheld::reason;
use tranche_api::{Quantity, WithheldGpu};
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{Cap, PAGES};
use tranche_driver::usage;
use tranche_driver::usage::departed::{Departed, Holding};
use tranche_driver::usage::peaks::Peaks;
use tranche_node::nvml::Driver;
use tranche_node::processes::owner::Proc;
use tranche_node::watchdog::INTERVAL;
use tranche_node::watchdog::compare::{
    Basis, Bypass, Findings, GpuWatch, ProcessId, Sample, UNOWNED_TOLERANCE,
};
use tranche_node::watchdog::contexts::Model;
use tranche_node::watchdog::end::{Ended, end};
use tranche_node::watchdog::probe::{AllMemory, HeldOnGpu, HeldShare, Probe, Unwatchable};

use self::running::{Alive, Devices};
use self::watched_file::WatchedFile;

use crate::cluster::events::{self, Events};
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::context_sizes::Contexts;
use crate::gpu::driver_state::DriverState;
use crate::host::fs::Fs;
use crate::host::layout::Layout;
use crate::ledger::{Ledger, claim_ref::claim_of};
use crate::metrics::Metrics;
use crate::periodic;
use crate::share::held_device::reference;
use crate::share::last_findings::{LastFindings, Ownership, Watched};

/// How long a GPU is watched after its last claim was released, to detect memory that its dead processes
/// leave.
const LINGER: Duration = Duration::from_mins(1);

/// How often GPUs are watched that no claim holds and that are withheld because of memory without an owner. NVML is closed
/// in between: a GPU cannot be reset while a process has it open (nvidia-smi(1), `--gpu-reset`).
const RARELY: Duration = Duration::from_secs(10);

/// How long a GPU must have been withheld for memory without an owner before the GpuNode says so. A Prepare waits
/// 25 s for such memory; if it is freed by then, the slices need no change.
const STAYS: Duration = Duration::from_secs(30);

/// The message about such a GPU. The amount of memory changes; a metric has it.
const UNOWNED: &str = "memory of the GPU is in use by no process, so no new claim gets the GPU until it is free \
     (tranche_gpu_unowned_memory_bytes); if it stays, reset the GPU (`nvidia-smi --gpu-reset`) or reboot the node";

/// What a watchdog reads and writes.
#[derive(Debug)]
pub struct WatchdogParts {
    pub ledger: Arc<Ledger>,
    /// The paths of the pages.
    pub layout: Layout,
    /// What the policies ask of this node.
    pub policy: watch::Receiver<NodePolicy>,
    pub state: watch::Receiver<DriverState>,
    /// The measured sizes of contexts.
    pub contexts: Arc<Contexts>,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    /// Where the findings go.
    pub last_findings: Arc<LastFindings>,
}

/// Watches the held GPUs.
#[derive(Debug)]
pub struct Watchdog {
    parts: WatchdogParts,
    proc: Proc,
    probe: Probe,
    unowned: watch::Sender<Vec<WithheldGpu>>,
    watched: WatchedFile,
    gpus: BTreeMap<String, Gpu>,
    /// The list of the last process could not be read: all GPUs are to be watched as soon as they are known.
    watch_all: bool,
    /// When the GPUs were last watched.
    last: Option<Instant>,
    peaks: Peaks,
    /// Processes that were ended and that NVML still lists, because an end takes time.
    ended: BTreeSet<ProcessId>,
    start: Instant,
}

#[derive(Debug)]
struct Gpu {
    watch: GpuWatch,
    /// When it was last held.
    held: Instant,
    /// The number of foreign processes that was logged.
    foreign: u32,
    /// Why it cannot be watched, as logged.
    unwatchable: Option<String>,
    /// While it is withheld: when the GpuNode says so.
    publish_at: Option<Instant>,
    /// Its partitions that claims share, by the UUIDs of their MIG devices.
    partitions: BTreeMap<String, WatchedPartition>,
    /// The owners of processes that died.
    departed: Departed<ProcessId>,
}

/// A partition that claims share, from sample to sample.
#[derive(Debug, Default)]
struct WatchedPartition {
    watch: GpuWatch,
    /// Consecutive samples that could not be read.
    failed: u32,
}

impl Gpu {
    fn new(now: Instant) -> Self {
        Self {
            watch: GpuWatch::default(),
            held: now,
            foreign: 0,
            unwatchable: None,
            publish_at: None,
            partitions: BTreeMap::new(),
            departed: Departed::default(),
        }
    }

    /// A GPU that an earlier process withheld, or of which nothing is known.
    fn withheld(now: Instant) -> Self {
        Self {
            watch: GpuWatch::withheld(),
            publish_at: Some(now),
            ..Self::new(now)
        }
    }
}

impl Watchdog {
    /// Watches what the ledger holds, and what an earlier process watched, with the NVML of `driver`; `proc` is the host's.
    /// When this returns, the last findings have the GPUs that an earlier process withheld.
    #[must_use]
    pub fn new(
        parts: WatchdogParts,
        fs: Arc<dyn Fs>,
        driver: Box<dyn Driver>,
        proc: PathBuf,
    ) -> Self {
        let proc = Proc::new(proc);
        let now = Instant::now();
        let (watched, known) = WatchedFile::load(fs, &parts.layout);
        let watch_all = known.is_none();
        let gpus = known
            .unwrap_or_default()
            .into_iter()
            .map(|(uuid, is_withheld)| {
                let gpu = if is_withheld {
                    warn!(gpu = uuid, "{UNOWNED}");
                    Gpu::withheld(now)
                } else {
                    Gpu::new(now)
                };
                (uuid, gpu)
            });
        let this = Self {
            parts,
            probe: Probe::new(driver, proc.clone()),
            proc,
            unowned: watch::Sender::default(),
            watched,
            gpus: gpus.collect(),
            watch_all,
            last: None,
            peaks: Peaks::default(),
            ended: BTreeSet::new(),
            start: now,
        };
        this.parts
            .last_findings
            .set(0, this.unread(), this.watch_all);
        this.publish_unowned(now);
        this
    }

    /// What is known of the GPUs before they are read.
    fn unread(&self) -> BTreeMap<String, Watched> {
        let unread = |gpu: &Gpu| Watched::No {
            is_withheld: gpu.watch.is_withheld(),
        };
        let gpus = self.gpus.iter();
        gpus.map(|(uuid, gpu)| (uuid.clone(), unread(gpu)))
            .collect()
    }

    /// The GPUs that have been withheld for a while because memory of them is in use by no process.
    #[must_use]
    pub fn unowned(&self) -> watch::Receiver<Vec<WithheldGpu>> {
        self.unowned.subscribe()
    }

    /// Watches until cancelled. A round reads tmpfs and /proc and calls NVML, which may block.
    pub async fn run(self, stop: CancellationToken) {
        let round = |watchdog: &mut Self| watchdog.round(Instant::now());
        periodic::run(self, INTERVAL, &stop, round, |watchdog, events| {
            for event in events {
                watchdog
                    .parts
                    .events
                    .bypass(event.regarding, event.bypass, &event.note);
            }
        })
        .await;
    }

    /// Watches each GPU once. Returns the events to write.
    fn round(&mut self, now: Instant) -> Vec<BypassEvent> {
        let devices = devices(&self.parts.ledger);
        if !self.is_due(now, &devices) {
            return Vec::new();
        }
        let elapsed = now.duration_since(self.start);
        let nanos = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let is_key = |key: &str| devices.contains_key(key);
        let mut events = Vec::new();
        let mut pids = BTreeSet::new();
        let mut last_findings = BTreeMap::new();
        let mut alive: Vec<(String, Alive)> = Vec::new();
        for (uuid, gpu) in &mut self.gpus {
            let model = model(&self.parts.state.borrow(), uuid);
            let nothing = HeldOnGpu {
                gpu_uuid: uuid.clone(),
                context: model
                    .as_ref()
                    .and_then(|model| self.parts.contexts.get(model)),
                unaccounted: self.parts.policy.borrow().unaccounted_memory(uuid),
                ..HeldOnGpu::default()
            };
            let (held, shared) = held(&self.parts.ledger, &self.parts.layout, &devices, nothing);
            let samples = self.probe.sample(&held, is_key).and_then(|whole| {
                let shared = shared.into_values();
                let of_partitions =
                    gpu.sample_partitions(shared, |held| self.probe.sample(held, is_key))?;
                Ok((whole, of_partitions))
            });
            let watched = match samples {
                Ok((sample, of_partitions)) => {
                    if let Some(model) = &model {
                        self.parts.contexts.note(model, uuid, &sample);
                    }
                    let all = of_partitions.values().chain([&sample]);
                    let processes = all.flat_map(|sample| &sample.processes);
                    pids.extend(processes.map(|process| process.id.pid));
                    let was_withheld = gpu.watch.is_withheld();
                    let mut findings = gpu.watch.step(nanos, &sample);
                    let on_gpu = Alive::new(&sample, &of_partitions, findings.unowned);
                    alive.push((uuid.clone(), on_gpu));
                    for (partition, sample) in &of_partitions {
                        let watched = gpu.partitions.entry(partition.clone()).or_default();
                        let found = watched.watch.step(nanos, sample);
                        // The GPU's own sample has the partition's other findings.
                        findings.bypasses.extend(found.bypasses);
                    }
                    gpu.log_findings(uuid, was_withheld, &findings);
                    for bypass in &findings.bypasses {
                        if let Some(device) = devices.get(&bypass.share) {
                            let verdict =
                                respond(&self.parts, &self.proc, &mut self.ended, &held, bypass);
                            events.extend(report(&self.parts, uuid, device, bypass, verdict));
                        }
                    }
                    Watched::Yes(findings)
                }
                Err(error) => {
                    gpu.watch.skip();
                    gpu.log_unwatchable(uuid, &error);
                    Watched::No {
                        is_withheld: gpu.watch.is_withheld(),
                    }
                }
            };
            last_findings.insert(uuid.clone(), watched);
        }
        for gpu in self.gpus.values_mut() {
            let is_withheld = gpu.watch.is_withheld();
            gpu.publish_at = is_withheld.then(|| gpu.publish_at.unwrap_or(now + STAYS));
        }
        self.publish_unowned(now);
        self.record_owners(nanos / 1_000_000_000, &devices, alive);
        self.probe.keep(&pids, is_key);
        self.ended.retain(|process| pids.contains(&process.pid));
        // The list is saved before a Prepare can be refused because of it.
        if !self.watch_all {
            let is_withheld = |gpu: &Gpu| gpu.watch.is_withheld();
            let gpus = self.gpus.iter();
            let watched = gpus.map(|(uuid, gpu)| (uuid.clone(), is_withheld(gpu)));
            self.watched.save(&watched.collect());
        }
        self.parts
            .last_findings
            .set(nanos, last_findings, self.watch_all);
        events
    }

    /// Records the owners of processes, the most memory that they held, and the owners of memory that dead processes left. `now`
    /// is in seconds.
    fn record_owners(&mut self, now: u64, devices: &Devices, alive: Vec<(String, Alive)>) {
        let mut pods: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (key, (record, _)) in devices {
            let uids = self.parts.ledger.pod_uids(&record.plan.allocation.uid);
            for uid in uids.into_keys() {
                pods.entry(uid).or_default().insert(key.clone());
            }
        }
        let owners = self.probe.owners(&pods);
        for (uuid, alive) in alive {
            let Some(gpu) = self.gpus.get_mut(&uuid) else {
                continue;
            };
            let bytes = alive
                .bytes
                .iter()
                .filter_map(|(pid, bytes)| Some((owners.get(pid)?, *bytes)));
            self.peaks.add(now, &alive.weights(devices, &uuid), bytes);
            let Alive { held, unowned, .. } = alive;
            let held = held.into_iter().filter_map(|(process, bytes)| {
                let holding = holding(&self.parts.ledger, devices, owners.get(&process.pid)?)?;
                Some((process, Holding { bytes, ..holding }))
            });
            let unowned = unowned.map(|bytes| if bytes > UNOWNED_TOLERANCE { bytes } else { 0 });
            gpu.departed.step(held.collect(), unowned);
        }
        // A process's memory is usually free a moment after its end.
        let withheld = self.gpus.iter().filter(|(_, gpu)| gpu.watch.is_withheld());
        let zombies = withheld
            .map(|(uuid, gpu)| (uuid.clone(), gpu.departed.zombies()))
            .collect();
        self.peaks.keep(|key| devices.contains_key(key));
        self.parts.last_findings.set_ownership(Ownership {
            owners,
            zombies,
            peaks: self.peaks.get(now),
        });
    }

    /// Chooses the GPUs to watch: those that claims hold or held a short time ago, and those that are withheld. False if no claim
    /// holds one and they were watched a short time ago.
    fn is_due(&mut self, now: Instant, devices: &Devices) -> bool {
        for (record, nth) in devices.values() {
            let uuid = &record.plan.devices[*nth].gpu_uuid;
            let gpu = self.gpus.entry(uuid.clone());
            gpu.or_insert_with(|| Gpu::new(now)).held = now;
        }
        self.watch_all(now);
        self.gpus
            .retain(|_, gpu| gpu.watch.is_withheld() || now.duration_since(gpu.held) < LINGER);
        // All GPUs, since the others were just removed.
        let is_unheld = |gpu: &Gpu| now.duration_since(gpu.held) >= LINGER;
        let are_unheld = self.gpus.values().all(is_unheld);
        if are_unheld {
            self.probe.close();
            let is_recent = |watched| now.duration_since(watched) < RARELY;
            if !self.gpus.is_empty() && self.last.is_some_and(is_recent) {
                return false;
            }
        }
        self.last = Some(now);
        true
    }

    /// If it is not known which GPUs were withheld, watches all of them as withheld, once they are known.
    fn watch_all(&mut self, now: Instant) {
        let state = self.parts.state.borrow();
        let (true, DriverState::Ready(ready)) = (self.watch_all, &*state) else {
            return;
        };
        for gpu in &ready.inventory.gpus {
            self.gpus.insert(gpu.uuid.clone(), Gpu::withheld(now));
        }
        self.watch_all = false;
    }

    fn publish_unowned(&self, now: Instant) {
        let is_due = |gpu: &Gpu| gpu.publish_at.is_some_and(|at| at <= now);
        let due = self.gpus.iter().filter(|(_, gpu)| is_due(gpu));
        let withheld =
            |uuid: &String| WithheldGpu::whole(uuid, reason::UNOWNED_MEMORY, UNOWNED.to_owned());
        let unowned: Vec<_> = due.map(|(uuid, _)| withheld(uuid)).collect();
        self.unowned.send_if_modified(|known| {
            let is_news = *known != unowned;
            *known = unowned;
            is_news
        });
    }
}

/// The claim and the pod of a process, without its bytes.
fn holding(ledger: &Ledger, devices: &Devices, owner: &usage::Owner) -> Option<Holding> {
    let usage::Owner::Claims { keys, pod_uid, .. } = owner else {
        return None;
    };
    let (record, _) = keys.iter().find_map(|key| devices.get(key))?;
    let pods = ledger.pod_uids(&record.plan.allocation.uid);
    // If no cgroup names the pod, it is the claim's only pod.
    let only = pods.iter().next().filter(|_| pods.len() == 1);
    let pod = match pod_uid {
        Some(uid) => pods.get_key_value(uid),
        None => only,
    };
    Some(Holding {
        claim: reference(record),
        pod: pod.map(|(_, name)| name.clone()),
        pod_uid: pod_uid.clone().or_else(|| pod.map(|(uid, _)| uid.clone())),
        bytes: 0,
    })
}

/// An event to write.
#[derive(Clone, Debug, PartialEq)]
struct BypassEvent {
    /// A pod, or a claim whose pods are not known.
    regarding: ObjectReference,
    bypass: events::Bypass,
    note: String,
}

/// What was done with the process of a bypass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Nothing but the report.
    Reported,
    /// It would have been ended, but no context was measured: an honest program's context may be as large.
    Unmeasured,
    /// It was ended now.
    Ended,
}

/// Ends the process of a bypass, if the policy says so and the size of a context is known.
fn respond(
    parts: &WatchdogParts,
    proc: &Proc,
    ended: &mut BTreeSet<ProcessId>,
    held: &HeldOnGpu,
    bypass: &Bypass,
) -> Verdict {
    match parts.policy.borrow().capped(&held.gpu_uuid).on_bypass {
        OnBypass::Report => return Verdict::Reported,
        OnBypass::Kill if held.context.is_none() => return Verdict::Unmeasured,
        OnBypass::Kill => {}
    }
    if !kill(proc, bypass) || !ended.insert(bypass.process) {
        return Verdict::Reported;
    }
    parts.metrics.bypasses_ended.inc();
    Verdict::Ended
}

/// Logs a bypass and returns its events, if it must be reported.
fn report(
    parts: &WatchdogParts,
    gpu_uuid: &str,
    (record, nth): &(Arc<ClaimRecord>, usize),
    bypass: &Bypass,
    verdict: Verdict,
) -> Vec<BypassEvent> {
    if !bypass.must_report && verdict != Verdict::Ended {
        return Vec::new();
    }
    let note = note(gpu_uuid, &record.plan.devices[*nth].device, bypass, verdict);
    warn!(claim = %claim_of(record), pod = bypass.pod, "{note}");
    let kind = match verdict {
        Verdict::Ended => events::Bypass::Ended,
        Verdict::Reported | Verdict::Unmeasured => events::Bypass::Noticed,
    };
    let event = |regarding| BypassEvent {
        regarding,
        bypass: kind,
        note: note.clone(),
    };
    let regarding = regarding(&parts.ledger, record, bypass);
    regarding.map(event).collect()
}

impl Gpu {
    /// Samples the partitions that claims share, and forgets all others. A partition that cannot be read once is left out: it is
    /// being removed, or a reboot removed it and its claims are not prepared again yet.
    fn sample_partitions(
        &mut self,
        held: impl Iterator<Item = HeldOnGpu>,
        mut sample: impl FnMut(&HeldOnGpu) -> Result<Sample, Unwatchable>,
    ) -> Result<BTreeMap<String, Sample>, Unwatchable> {
        let mut samples = BTreeMap::new();
        let mut known = std::mem::take(&mut self.partitions);
        let mut failure = Ok(());
        for held in held {
            let mut partition = known.remove(&held.gpu_uuid).unwrap_or_default();
            match sample(&held) {
                Ok(sample) => {
                    partition.failed = 0;
                    samples.insert(held.gpu_uuid.clone(), sample);
                }
                Err(error) => {
                    partition.failed = partition.failed.saturating_add(1);
                    partition.watch.skip();
                    if partition.failed > 1 {
                        failure = Err(error);
                    }
                }
            }
            self.partitions.insert(held.gpu_uuid, partition);
        }
        failure.map(|()| samples)
    }

    /// Logs what changed for the GPU as a whole.
    fn log_findings(&mut self, uuid: &str, was_withheld: bool, findings: &Findings) {
        if self.unwatchable.take().is_some() {
            info!(gpu = uuid, "the GPU's processes are watched again");
        }
        let (count, bytes) = findings.foreign;
        if count != self.foreign {
            self.foreign = count;
            if count > 0 {
                warn!(
                    gpu = uuid,
                    processes = count,
                    bytes,
                    "processes that belong to no claim of Tranche on this GPU use its memory: see on the node which they \
                     are (`nvidia-smi`), and give the GPU to one system only"
                );
            } else {
                info!(
                    gpu = uuid,
                    "no process without a claim is on the GPU any more"
                );
            }
        }
        match (was_withheld, findings.is_withheld) {
            (false, true) => warn!(
                gpu = uuid,
                bytes = findings.unowned,
                "memory of the GPU is in use by no process: no new claim gets the GPU until it is free; if it stays, \
                 reset the GPU (`nvidia-smi --gpu-reset`) or reboot the node"
            ),
            (true, false) => info!(gpu = uuid, "the GPU's memory is free again"),
            _ => {}
        }
    }

    fn log_unwatchable(&mut self, uuid: &str, error: &Unwatchable) {
        let text = error.to_string();
        if self.unwatchable.as_ref() != Some(&text) {
            warn!(gpu = uuid, %error, "the GPU's processes cannot be watched: memory that goes around a share's cap is not noticed");
            self.unwatchable = Some(text);
        }
    }
}

/// The model of a GPU and its driver, while there is a driver.
fn model(state: &DriverState, gpu_uuid: &str) -> Option<Model> {
    let DriverState::Ready(ready) = state else {
        return None;
    };
    let inventory = &ready.inventory;
    let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == gpu_uuid)?;
    Some(Model {
        product: gpu.product_name.clone(),
        driver: inventory.driver_version.clone(),
    })
}

/// All devices that are held, by key.
fn devices(ledger: &Ledger) -> Devices {
    let mut devices = BTreeMap::new();
    for record in ledger.held() {
        let all = record.plan.devices.iter().enumerate();
        // The driver does not know a GPU that is at VFIO.
        for (nth, device) in all.filter(|(_, device)| device.vfio.is_none()) {
            devices.insert(device.key.clone(), (Arc::clone(&record), nth));
        }
    }
    devices
}

/// What claims hold of one GPU, and of those of its partitions that they share, by the UUIDs of the MIG devices. NVML tells what
/// each process holds of a MIG device, so the shares of a partition are compared there. `whole` is the GPU with nothing held.
fn held(
    ledger: &Ledger,
    layout: &Layout,
    devices: &Devices,
    mut whole: HeldOnGpu,
) -> (HeldOnGpu, BTreeMap<String, HeldOnGpu>) {
    let nothing = whole.clone();
    let of = |uuid: &str| HeldOnGpu {
        gpu_uuid: uuid.to_owned(),
        ..nothing.clone()
    };
    let mut shared: BTreeMap<String, HeldOnGpu> = BTreeMap::new();
    for (key, (record, nth)) in devices {
        let device = &record.plan.devices[*nth];
        if device.gpu_uuid != nothing.gpu_uuid {
            continue;
        }
        let uid = &record.plan.allocation.uid;
        let pods = || ledger.pod_uids(uid).into_keys();
        for pod in pods() {
            whole.pods.entry(pod).or_default().insert(key.clone());
        }
        let Cap::Share {
            memory,
            resident,
            context_memory,
            ..
        } = device.cap
        else {
            whole.uncapped.insert(key.clone());
            continue;
        };
        // Pages of another release cannot be compared.
        if record.plan.pages != PAGES {
            whole.uncapped.insert(key.clone());
            continue;
        }
        let pages = layout.share(uid, key);
        // NVML counts for a process only what cannot move; it counts managed memory for no process.
        let (account, all) = if resident.is_some() {
            let account = pages.account;
            (pages.resident, Some(AllMemory { account, memory }))
        } else {
            (pages.account, None)
        };
        let share = HeldShare {
            key: key.clone(),
            account,
            memory: device.cap.on_gpu(),
            context: context_memory,
            all,
        };
        let Some(partition) = &device.partition else {
            whole.shares.push(share);
            continue;
        };
        whole.uncapped.insert(key.clone());
        if let Some(mig) = &partition.mig {
            let held = shared
                .entry(mig.uuid.clone())
                .or_insert_with(|| of(&mig.uuid));
            held.shares.push(share);
            for pod in pods() {
                held.pods.entry(pod).or_default().insert(key.clone());
            }
        }
    }
    (whole, shared)
}

/// Ends a process. Returns whether this call ended it.
fn kill(proc: &Proc, bypass: &Bypass) -> bool {
    match end(proc, bypass.process) {
        Ok(ended) => ended == Ended::Killed,
        Err(error) => {
            warn!(pid = bypass.process.pid, %error, "a process that goes around its share's cap cannot be ended");
            false
        }
    }
}

fn note(gpu: &str, device: &str, bypass: &Bypass, verdict: Verdict) -> String {
    let bytes = Quantity::from_bytes(bypass.bytes);
    let pid = bypass.process.pid;
    let what = match bypass.basis {
        Basis::Process => format!(
            "process {pid} of the node holds {bytes} more of GPU {gpu} than the account of its share ({device}) has"
        ),
        Basis::NoSlot => format!(
            "process {pid} of the node holds {bytes} of GPU {gpu} and is not in the account of its share ({device})"
        ),
        Basis::Sum => format!(
            "the processes of the share ({device}) hold {bytes} more of GPU {gpu} than its account or its limit has, process {pid} of the node most"
        ),
    };
    let then = match verdict {
        Verdict::Ended => "it was ended, as the SharingPolicy's capped.onBypass says",
        Verdict::Unmeasured => {
            "it is not ended yet, although the SharingPolicy's capped.onBypass says so, because the size of a CUDA context \
             was not measured for this GPU and driver: it is measured when a process of any share has one context and \
             nothing else"
        }
        Verdict::Reported => {
            "its programs go around the driver library that keeps the cap: end them, or use a tier that isolates by hardware"
        }
    };
    format!("{what}; {then}")
}

/// The process's pod; if its name is not known, the claim's pods or the claim.
fn regarding<'a>(
    ledger: &Ledger,
    record: &'a ClaimRecord,
    bypass: &Bypass,
) -> impl Iterator<Item = ObjectReference> + use<'a> {
    let allocation = &record.plan.allocation;
    let pods = ledger.pod_uids(&allocation.uid);
    let pod = |(uid, name): (String, String)| {
        events::pod_reference(Some(allocation.namespace.clone()), name, uid)
    };
    let its = bypass.pod.as_ref().and_then(|uid| pods.get_key_value(uid));
    let mut objects: Vec<_> = match its {
        Some((uid, name)) => vec![pod((uid.clone(), name.clone()))],
        None => pods.into_iter().map(pod).collect(),
    };
    if objects.is_empty() {
        objects.push(ObjectReference {
            api_version: Some("resource.k8s.io/v1".to_owned()),
            kind: Some("ResourceClaim".to_owned()),
            name: Some(allocation.name.clone()),
            namespace: Some(allocation.namespace.clone()),
            uid: Some(allocation.uid.clone()),
            ..ObjectReference::default()
        });
    }
    objects.into_iter()
}
