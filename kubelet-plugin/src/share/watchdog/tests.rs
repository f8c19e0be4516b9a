//! Programs that bypass the cap, on a node with a scripted NVML, `/proc` and pages.

use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use tranche_api::sharing_policy::Interval;
use tranche_api::usage::{NodeUsage, Peak};
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};
use tranche_driver::preparation::Account;
use tranche_node::devices::DeviceNodes;
use tranche_node::nvml::{
    ChangeError, Description, GpuUse, Nvml, NvmlError, Opened, ProcessMemory, ProcessSample, Traces,
};
use tranche_node::root::DriverRoot;
use tranche_shim_core::layout;

use super::*;
use crate::http::{Known, exposition};
use crate::testing::{
    Given, NODE, Plugin, World, capped, capped_on, claim, claim_ref, oversubscribed, partition,
    whole,
};

const POD: &str = "6b1d9c5e-3f5c-4a2b-9a5b-0d5e6f7a8b9c";
const GIB: u64 = 1 << 30;
const CONTEXT: u64 = 300 << 20;

/// The GPU's processes with their bytes, and bytes without an owner; whether it is in MIG mode.
#[derive(Clone, Debug, Default)]
struct Gpus(Arc<Mutex<(Vec<ProcessMemory>, u64)>>, Arc<AtomicBool>);

impl Driver for Gpus {
    fn open(&self) -> Result<Opened, NvmlError> {
        let root = DriverRoot::open(Path::new("/"))?;
        Ok(Opened {
            nvml: Box::new(self.clone()),
            nodes: DeviceNodes::find(&root, &root)?,
            pass: None,
            root,
        })
    }

    fn traces(&self) -> Traces {
        Traces::default()
    }
}

impl Nvml for Gpus {
    fn describe(&self) -> Result<Description, NvmlError> {
        unreachable!("nobody asks")
    }

    fn utilization_rates(&self, _: &str) -> Result<[u32; 2], NvmlError> {
        unreachable!("nobody asks")
    }

    fn xids(&self, _: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        Ok(Vec::new())
    }

    fn health(&self, _: &str) -> Result<tranche_driver::health::Report, NvmlError> {
        unreachable!("nobody asks")
    }

    fn usage(&self, _: &str) -> Result<GpuUse, NvmlError> {
        unreachable!("nobody asks")
    }

    fn process_utilization(&self, _: &str, _: u64) -> Result<Vec<ProcessSample>, NvmlError> {
        unreachable!("nobody asks")
    }

    fn processes(&self, uuid: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
        let mut processes = self.0.lock().unwrap().0.clone();
        if self.1.load(Ordering::SeqCst) && !uuid.starts_with("MIG-") {
            // Only the MIG devices report the memory of processes.
            for process in &mut processes {
                process.bytes = None;
            }
        }
        Ok(processes)
    }

    fn used_memory(&self, _: &str) -> Result<Option<u64>, NvmlError> {
        if self.1.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let gpu = self.0.lock().unwrap();
        let held = gpu.0.iter().filter_map(|process| process.bytes);
        Ok(Some(held.sum::<u64>() + gpu.1))
    }

    fn mig_state(&self, _: &str) -> Result<Actual, NvmlError> {
        unreachable!("nobody asks")
    }

    fn change_mig(&self, _: &str, _: &Change) -> Result<(), ChangeError> {
        unreachable!("nobody asks")
    }

    fn minor(&self, _: &str) -> Result<u32, NvmlError> {
        unreachable!("nobody asks")
    }

    fn compute_mode(&self, _: &str) -> Result<ComputeMode, NvmlError> {
        unreachable!("nobody asks")
    }

    fn set_compute_mode(&self, _: &str, _: ComputeMode) -> Result<(), NvmlError> {
        unreachable!("nobody asks")
    }

    fn time_slice(&self, _: &str) -> Result<Interval, NvmlError> {
        unreachable!("nobody asks")
    }

    fn set_time_slice(&self, _: &str, _: Interval) -> Result<(), NvmlError> {
        unreachable!("nobody asks")
    }
}

/// A node with a capped share of 20 GiB, held by a pod.
struct Node {
    world: World,
    plugin: Plugin,
    gpus: Gpus,
    policy: watch::Sender<NodePolicy>,
    metrics: Arc<Metrics>,
    watchdog: Watchdog,
    now: Instant,
    key: String,
    gpu_uuid: String,
}

impl Node {
    async fn new() -> Self {
        Self::with(capped("gpu", 0, "20Gi", 25)).await
    }

    async fn with(given: Given) -> Self {
        let world = World::new();
        let plugin = world.start();
        let mut object = claim("a", &[given]);
        object["status"]["reservedFor"][0]["uid"] = POD.into();
        world.api.put(object);
        let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        let device = &record.plan.devices[0];
        let proc = world.dir.path().join("proc");
        fs::create_dir_all(proc.join("1/ns")).unwrap();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap();
        symlink(namespace, proc.join("1/ns/pid")).unwrap();
        let gpus = Gpus::default();
        let (policy, policy_rx) = watch::channel(NodePolicy::default());
        let metrics = Arc::new(Metrics::default());
        let watchdog = watchdog(&world, &plugin, &gpus, policy_rx, &metrics);
        Self {
            key: device.key.clone(),
            gpu_uuid: device.gpu_uuid.clone(),
            now: Instant::now(),
            world,
            plugin,
            gpus,
            policy,
            metrics,
            watchdog,
        }
    }

    /// Ends the plugin, and starts another one on the same node.
    fn restart(&mut self) {
        self.plugin = self.world.start();
        let policy = self.policy.subscribe();
        self.watchdog = watchdog(&self.world, &self.plugin, &self.gpus, policy, &self.metrics);
        self.now = Instant::now();
    }

    /// Releases the share, so that no claim holds the GPU.
    async fn release(&self) {
        let preparer = &self.plugin.preparer;
        preparer.unprepare(&claim_ref("a")).await.unwrap();
    }

    /// Whether a new claim gets no share of the GPU.
    async fn refuses(&self) -> bool {
        let claim = claim("b", &[capped("gpu", 0, "20Gi", 25)]);
        self.world.api.put(claim);
        let preparer = &self.plugin.preparer;
        let result = preparer.prepare(&claim_ref("b")).await;
        if result.is_ok() {
            preparer.unprepare(&claim_ref("b")).await.unwrap();
        }
        result.is_err()
    }

    /// Gives a process another PID in its own PID namespace than 7.
    fn inner_pid(&self, pid: u32, inner: u32) {
        let folder = self.world.dir.path().join("proc").join(pid.to_string());
        fs::write(folder.join("status"), format!("NSpid:\t{pid}\t{inner}\n")).unwrap();
    }

    /// A process on the GPU, in the cgroup `cgroup`.
    fn process(&self, pid: u32, bytes: u64, cgroup: &str) {
        let started = Proc::new("/proc").started(pid).unwrap_or(4711);
        let folder = self.world.dir.path().join("proc").join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        let tail = format!("1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0");
        fs::write(folder.join("stat"), format!("{pid} (x) S {tail}")).unwrap();
        self.inner_pid(pid, 7);
        fs::write(folder.join("cgroup"), format!("0::{cgroup}\n")).unwrap();
        fs::write(
            folder.join("mountinfo"),
            "1 2 0:9 / / rw - tmpfs tmpfs rw\n",
        )
        .unwrap();
        let bytes = Some(bytes);
        self.gpus
            .0
            .lock()
            .unwrap()
            .0
            .push(ProcessMemory { pid, bytes });
    }

    fn in_pod(&self, pid: u32, bytes: u64) {
        self.process(
            pid,
            bytes,
            &format!("/kubepods/burstable/pod{POD}/container"),
        );
    }

    /// Writes the first slot of the share's account: a process's inner PID and its charge.
    fn slot(&self, pid: u64, charged: u64) {
        self.slot_of(Account::Memory, pid, charged);
    }

    fn slot_of(&self, account: Account, pid: u64, charged: u64) {
        let share = self.world.layout.share("uid-of-a", &self.key);
        let account = share.page_of(account);
        let file = fs::File::options().write(true).open(account).unwrap();
        let at = layout::HEADER_LEN as u64;
        for (at, word) in [(128, charged), (512, 1), (at + 16, charged), (at + 32, pid)] {
            file.write_all_at(&word.to_le_bytes(), at).unwrap();
        }
    }

    /// Runs for so many seconds; returns the events.
    fn seconds(&mut self, count: u32) -> Vec<BypassEvent> {
        (0..count)
            .flat_map(|_| {
                self.now += INTERVAL;
                self.watchdog.round(self.now)
            })
            .collect()
    }

    fn metric(&self, name: &str) -> f64 {
        let ledger = self.plugin.preparer.ledger();
        let text = exposition(
            &self.metrics,
            ledger,
            &self.world.layout,
            &self.plugin.last_findings,
            &NodeUsage::default(),
            &Known {
                sensors: true,
                ..Known::default()
            },
        );
        let of_name = |line: &&str| {
            line.starts_with(&format!("{name}{{")) || line.starts_with(&format!("{name} "))
        };
        let line = text
            .lines()
            .find(of_name)
            .unwrap_or_else(|| panic!("no {name}: {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::float_cmp,
        reason = "whole GiB are exact"
    )]
    fn bypass_bytes(&self) -> u64 {
        let bytes = self.metric("tranche_share_bypass_bytes");
        (0..200)
            .map(|gib| gib * GIB)
            .find(|b| *b as f64 == bytes)
            .unwrap_or(u64::MAX)
    }

    fn asks(&self, on_bypass: &str) {
        self.asks_of_capped(&json!({"onBypass": on_bypass}));
    }

    fn asks_of_capped(&self, capped: &Value) {
        let gpus = json!([{"uuid": self.gpu_uuid, "capped": capped}]);
        let published =
            serde_json::from_value(json!({"epoch": 1, "poolGeneration": 1, "gpus": gpus}));
        self.policy
            .send_replace(NodePolicy::of(&published.unwrap()));
    }
}

fn watchdog(
    world: &World,
    plugin: &Plugin,
    gpus: &Gpus,
    policy: watch::Receiver<NodePolicy>,
    metrics: &Arc<Metrics>,
) -> Watchdog {
    let fs = Arc::new(crate::host::fs::HostFs);
    let parts = WatchdogParts {
        ledger: Arc::clone(plugin.preparer.ledger()),
        layout: world.layout.clone(),
        policy,
        state: watch::channel(DriverState::Ready(Arc::clone(&world.ready))).1,
        contexts: Arc::new(Contexts::load(Arc::clone(&fs) as _, &world.layout)),
        events: Events::new(world.api.client(), NODE),
        metrics: Arc::clone(metrics),
        last_findings: Arc::clone(&plugin.last_findings),
    };
    Watchdog::new(parts, fs, Box::new(gpus.clone()), world.proc())
}

#[tokio::test]
async fn a_program_without_an_account_is_named_within_two_seconds() {
    // A static program, or one with its own libcuda: no slot, and nothing of ours mapped or mounted.
    let mut node = Node::new().await;
    node.slot(3, CONTEXT);
    node.in_pod(4_000_001, 8 * GIB);
    let events = node.seconds(2);
    let [event] = &events[..] else {
        panic!("{events:?}")
    };
    let (pod, message) = (&event.regarding, &event.note);
    assert_eq!(event.bypass, events::Bypass::Noticed);
    assert_eq!(pod.kind.as_deref(), Some("Pod"));
    assert_eq!(pod.name.as_deref(), Some("pod-of-a"));
    assert_eq!(pod.uid.as_deref(), Some(POD));
    assert!(
        message.contains("4000001")
            && message.contains("8Gi")
            && message.contains("not in the account"),
        "{message}"
    );
    assert_eq!(node.bypass_bytes(), 8 * GIB);
    assert!((node.metric("tranche_share_bypass_age_seconds") - 1.0).abs() < 0.01);
    assert!((node.metric("tranche_gpu_watched") - 1.0).abs() < 0.01);
    assert_eq!(node.seconds(60), [], "reported once");
    node.gpus.0.lock().unwrap().0.clear();
    node.seconds(3);
    assert_eq!(node.bypass_bytes(), 0);
}

#[tokio::test]
async fn a_bypass_on_a_shared_partition_is_seen_on_its_mig_device() {
    let mut node = Node::with(capped_on("gpu", 0, "3g40gb-4", "20Gi", 25)).await;
    node.gpus.1.store(true, Ordering::SeqCst);
    node.slot(3, CONTEXT);
    node.in_pod(4_000_001, 8 * GIB);
    let events = node.seconds(2);
    let [event] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(event.regarding.name.as_deref(), Some("pod-of-a"));
    assert!(event.note.contains("gpu-00000000-capped-3g40gb-4"));
    assert_eq!(node.bypass_bytes(), 8 * GIB);
    assert!((node.metric("tranche_gpu_watched") - 1.0).abs() < 0.01);
    // An honest process is not named.
    let mut node = Node::with(capped_on("gpu", 0, "3g40gb-4", "20Gi", 25)).await;
    node.gpus.1.store(true, Ordering::SeqCst);
    node.slot(7, 8 * GIB + CONTEXT);
    node.in_pod(4_000_001, 8 * GIB);
    assert_eq!(node.seconds(5), []);
    node.release().await;
    assert_eq!(node.seconds(5), []);
}

#[tokio::test]
async fn the_most_memory_of_a_device_is_kept_as_long_as_it_is_held() {
    for (given, is_mig) in [
        (capped("gpu", 0, "20Gi", 25), false),
        (whole("gpu", 0), false),
        (capped_on("gpu", 0, "3g40gb-4", "20Gi", 25), true),
    ] {
        let mut node = Node::with(given).await;
        node.gpus.1.store(is_mig, Ordering::SeqCst);
        node.in_pod(4_000_001, 8 * GIB);
        node.seconds(2);
        node.gpus.0.lock().unwrap().0.clear();
        node.in_pod(4_000_001, 2 * GIB);
        node.seconds(3);
        let peaks = node.plugin.last_findings.ownership().peaks.clone();
        let peak = Peak {
            bytes: 8 * GIB,
            watched_seconds: 4,
        };
        assert_eq!(peaks, [(node.key.clone(), peak)].into());
        node.release().await;
        node.seconds(1);
        assert_eq!(node.plugin.last_findings.ownership().peaks, BTreeMap::new());
    }
    // NVML does not tell what the processes of this device hold.
    let mut node = Node::with(partition("gpu", 0, "1g10gb-0")).await;
    node.gpus.1.store(true, Ordering::SeqCst);
    node.in_pod(4_000_001, 8 * GIB);
    node.seconds(2);
    assert_eq!(node.plugin.last_findings.ownership().peaks, BTreeMap::new());
}

#[tokio::test]
async fn a_page_written_by_its_tenant_hides_nothing_beyond_the_share() {
    let mut node = Node::new().await;
    // The page has less than it holds.
    node.slot(7, GIB + CONTEXT);
    node.in_pod(4_000_001, 4 * GIB + CONTEXT);
    assert_eq!(node.seconds(2).len(), 1);
    assert_eq!(node.bypass_bytes(), 3 * GIB);
    // The page has as much as it holds, which is more than the share's limit.
    let mut node = Node::new().await;
    node.slot(7, 60 * GIB);
    node.in_pod(4_000_001, 60 * GIB + CONTEXT);
    let events = node.seconds(2);
    assert!(
        events[0].note.contains("its account or its limit"),
        "{events:?}"
    );
    assert_eq!(node.bypass_bytes(), 40 * GIB);
    // It breaks the page.
    let account = node.world.layout.share("uid-of-a", &node.key).account;
    fs::write(account, b"").unwrap();
    node.seconds(2);
    assert_eq!(node.bypass_bytes(), 40 * GIB);
}

#[tokio::test]
async fn an_honest_share_is_left_alone() {
    let mut node = Node::new().await;
    node.asks("Kill");
    node.slot(7, 20 * GIB + CONTEXT);
    node.in_pod(4_000_001, 20 * GIB + CONTEXT + (100 << 20));
    assert_eq!(node.seconds(30), []);
    assert_eq!(node.bypass_bytes(), 0);
}

#[tokio::test]
async fn the_policy_says_how_much_a_process_may_hold_in_no_account() {
    let mut node = Node::new().await;
    node.slot(7, 4 * GIB + CONTEXT);
    node.in_pod(4_000_001, 4 * GIB + CONTEXT + (700 << 20));
    node.asks_of_capped(&json!({"unaccountedMemory": "1Gi"}));
    assert_eq!(node.seconds(5), []);
    node.asks_of_capped(&json!({}));
    assert_eq!(node.seconds(2).len(), 1);
}

#[tokio::test]
async fn by_policy_a_process_is_ended_and_a_foreign_one_never() {
    let mut node = Node::new().await;
    // Each ends with this test, however that ends.
    let start = || Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let (mut bypassing, mut foreign) = (start(), start());
    node.in_pod(bypassing.id(), 8 * GIB);
    node.process(foreign.id(), 9 * GIB, "/system.slice/another.service");
    node.seconds(5);
    assert!(
        bypassing.try_wait().unwrap().is_none(),
        "the policy says Report"
    );
    node.asks("Kill");
    // An honest program's context may be as large, until one was measured.
    node.seconds(5);
    assert!(bypassing.try_wait().unwrap().is_none());
    node.slot(8, CONTEXT);
    node.in_pod(4_000_001, CONTEXT);
    node.inner_pid(4_000_001, 8);
    let events = node.seconds(4);
    assert!(
        events
            .iter()
            .any(|event| event.bypass == events::Bypass::Ended && event.note.contains("was ended")),
        "{events:?}"
    );
    assert_eq!(bypassing.wait().unwrap().signal(), Some(9));
    assert!((node.metric("tranche_bypassing_processes_ended_total") - 1.0).abs() < 0.01);
    node.seconds(5);
    assert!(foreign.try_wait().unwrap().is_none());
    assert!((node.metric("tranche_gpu_foreign_processes") - 1.0).abs() < 0.01);
    foreign.kill().unwrap();
    foreign.wait().unwrap();
}

#[tokio::test]
async fn what_cannot_be_watched_is_reported_and_is_not_zero() {
    let mut node = Node::new().await;
    node.in_pod(4_000_001, GIB);
    node.gpus.0.lock().unwrap().0[0].bytes = None;
    assert_eq!(node.seconds(3), []);
    assert!(node.metric("tranche_gpu_watched").abs() < 0.01);
    let ledger = node.plugin.preparer.ledger();
    let text = exposition(
        &node.metrics,
        ledger,
        &node.world.layout,
        &node.plugin.last_findings,
        &NodeUsage::default(),
        &Known {
            sensors: true,
            ..Known::default()
        },
    );
    assert!(!text.contains("tranche_share_bypass_bytes{"), "{text}");
    // Nor in a PID namespace that is not the host's.
    let namespace = node.world.dir.path().join("proc/1/ns/pid");
    fs::remove_file(&namespace).unwrap();
    symlink(Path::new("pid:[1]"), &namespace).unwrap();
    node.gpus.0.lock().unwrap().0.clear();
    node.seconds(1);
    assert!(node.metric("tranche_gpu_watched").abs() < 0.01);
}

#[tokio::test(start_paused = true)]
async fn a_gpu_is_not_handed_on_while_nobody_owns_some_of_its_memory() {
    let mut node = Node::new().await;
    node.gpus.0.lock().unwrap().1 = 2 * GIB;
    node.seconds(5);
    assert!((node.metric("tranche_gpu_withheld") - 1.0).abs() < 0.01);
    let other = claim("b", &[capped("gpu", 0, "20Gi", 25)]);
    node.world.api.put(other);
    let error = node
        .plugin
        .preparer
        .prepare(&claim_ref("b"))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&node.gpu_uuid) && text.contains("reset"),
        "{text}"
    );
    // A claim that was prepared before stays prepared.
    node.plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    // Freed while the claim waits.
    let preparer = Arc::clone(&node.plugin.preparer);
    let waits = tokio::spawn(async move { preparer.prepare(&claim_ref("b")).await.map(drop) });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!waits.is_finished());
    node.gpus.0.lock().unwrap().1 = 0;
    node.seconds(2);
    waits.await.unwrap().unwrap();
}

#[tokio::test]
async fn memory_of_a_dead_process_is_named_by_claim_until_it_is_free() {
    let mut node = Node::new().await;
    node.in_pod(4_000_001, 2 * GIB);
    assert_eq!(node.seconds(1), []);
    let owner = node.plugin.last_findings.ownership().owners[&4_000_001].clone();
    let usage::Owner::Claims { keys, pod_uid, .. } = owner else {
        panic!("{owner:?}")
    };
    assert!(keys.contains(&node.key));
    assert_eq!(pod_uid.as_deref(), Some(POD));
    let zombies = |node: &Node| {
        let seen = node.plugin.last_findings.ownership();
        seen.zombies
            .get(&node.gpu_uuid)
            .cloned()
            .unwrap_or_default()
    };
    // The process dies, its memory stays, and the claim is released.
    fs::remove_dir_all(node.world.dir.path().join("proc/4000001")).unwrap();
    *node.gpus.0.lock().unwrap() = (Vec::new(), 2 * GIB);
    node.release().await;
    node.seconds(2);
    assert_eq!(
        zombies(&node),
        [],
        "the driver may be about to free the memory"
    );
    node.seconds(5);
    let [zombie] = &zombies(&node)[..] else {
        panic!("{:?}", zombies(&node))
    };
    assert_eq!(zombie.claim.namespace, "team");
    assert_eq!(zombie.claim.name, "a");
    assert_eq!(zombie.pod.as_deref(), Some("pod-of-a"));
    assert_eq!(zombie.pod_uid.as_deref(), Some(POD));
    assert_eq!(zombie.used, 2 * GIB);
    node.gpus.0.lock().unwrap().1 = 0;
    node.seconds(5);
    assert_eq!(zombies(&node), []);
}

#[tokio::test(start_paused = true)]
async fn in_mig_mode_no_memory_withholds_a_gpu() {
    let mut node = Node::new().await;
    node.gpus.0.lock().unwrap().1 = 2 * GIB;
    node.seconds(5);
    node.release().await;
    assert!(node.refuses().await);
    // NVML reports the processes of partitions, on some drivers without their memory.
    node.gpus.1.store(true, Ordering::SeqCst);
    node.in_pod(4_000_001, GIB);
    node.gpus.0.lock().unwrap().0[0].bytes = None;
    node.seconds(30);
    assert!((node.metric("tranche_gpu_watched") - 1.0).abs() < 0.01);
    assert!(node.metric("tranche_gpu_withheld").abs() < 0.01);
    assert!(!node.refuses().await);
}

#[tokio::test]
async fn ownerless_memory_withholds_the_gpu_after_half_a_minute() {
    let mut node = Node::new().await;
    let mut unowned = node.watchdog.unowned();
    node.gpus.0.lock().unwrap().1 = 2 * GIB;
    // Confirmed after five samples; a Prepare waits for it meanwhile.
    node.seconds(30);
    assert!(!unowned.has_changed().unwrap());
    node.seconds(10);
    let withheld = unowned.borrow_and_update().clone();
    assert_eq!(withheld.len(), 1);
    assert_eq!(
        (&*withheld[0].gpu, &*withheld[0].reason),
        (&*node.gpu_uuid, "UnownedMemory")
    );
    assert!(
        withheld[0].message.contains("reset"),
        "{}",
        withheld[0].message
    );
    // Another amount changes nothing.
    node.gpus.0.lock().unwrap().1 = 3 * GIB;
    node.seconds(10);
    assert!(!unowned.has_changed().unwrap());
    node.gpus.0.lock().unwrap().1 = 0;
    node.seconds(2);
    assert_eq!(*unowned.borrow_and_update(), []);
}

/// NVML counts managed memory on the GPU for no process; what cannot move is compared with its own account.
#[tokio::test]
async fn managed_memory_is_owned_and_unmovable_memory_has_a_limit() {
    let mut node = Node::with(oversubscribed("gpu", 0, 200, "40Gi", 25)).await;
    node.in_pod(100, GIB);
    node.slot_of(Account::Memory, 7, 31 * GIB);
    node.slot_of(Account::Resident, 7, GIB);
    let free = |node: &Node, bytes: u64| node.gpus.0.lock().unwrap().1 = bytes;
    free(&node, 30 * GIB);
    assert_eq!(node.seconds(60).len(), 0);
    assert_eq!(*node.watchdog.unowned().borrow(), []);
    assert_eq!(node.bypass_bytes(), 0);
    // What exceeds the account has no owner.
    free(&node, 32 * GIB);
    node.seconds(60);
    assert_eq!(node.watchdog.unowned().borrow().len(), 1);
    free(&node, 0);
    node.seconds(60);
    // Memory that cannot move, beyond what is charged for it.
    node.in_pod(100, 9 * GIB);
    node.gpus.0.lock().unwrap().0.remove(0);
    assert!(!node.seconds(10).is_empty());
    assert_eq!(node.bypass_bytes(), 8 * GIB);
}

#[tokio::test(start_paused = true)]
async fn a_withheld_gpu_stays_withheld_when_the_plugin_restarts() {
    let mut node = Node::new().await;
    node.gpus.0.lock().unwrap().1 = 2 * GIB;
    node.seconds(5);
    node.release().await;
    // No claim holds the GPU now.
    for _ in 0..2 {
        node.restart();
        assert!(node.refuses().await, "before the first sample");
        let unowned = node.watchdog.unowned();
        assert_eq!(unowned.borrow()[0].gpu, node.gpu_uuid);
        node.seconds(3);
        assert_eq!(unowned.borrow().len(), 1);
        assert!(node.refuses().await);
    }
    node.gpus.0.lock().unwrap().1 = 0;
    node.seconds(2);
    assert_eq!(*node.watchdog.unowned().borrow(), []);
    assert!(!node.refuses().await);
    node.restart();
    assert!(!node.refuses().await);
}

#[tokio::test(start_paused = true)]
async fn a_gpu_without_claims_stays_watched_after_a_restart() {
    let mut node = Node::new().await;
    node.seconds(1);
    // Its processes have left memory, and the plugin ends before that is confirmed.
    node.release().await;
    node.gpus.0.lock().unwrap().1 = 2 * GIB;
    node.seconds(1);
    node.restart();
    node.seconds(5);
    assert!(node.refuses().await);
}

#[tokio::test(start_paused = true)]
async fn nvml_is_mostly_closed_if_only_ownerless_memory_is_left() {
    let mut node = Node::new().await;
    node.gpus.0.lock().unwrap().1 = 2 * GIB;
    node.seconds(5);
    node.release().await;
    node.seconds(70);
    // The GPU can be reset now.
    let mut open = 0;
    for _ in 0..60 {
        node.seconds(1);
        open += u32::from(node.watchdog.probe.is_open());
    }
    assert_eq!(open, 6);
    assert!(node.refuses().await);
    node.gpus.0.lock().unwrap().1 = 0;
    node.seconds(20);
    assert!(!node.refuses().await);
}

#[tokio::test(start_paused = true)]
async fn a_broken_list_of_watched_gpus_withholds_all_until_seen_free() {
    let mut node = Node::new().await;
    node.release().await;
    fs::write(node.world.layout.watched(), b"{").unwrap();
    node.restart();
    assert!(node.refuses().await);
    node.seconds(1);
    assert!(node.refuses().await);
    node.seconds(1);
    assert!(!node.refuses().await);
}

#[tokio::test]
async fn the_size_of_a_context_is_measured_and_used() {
    let mut node = Node::new().await;
    // The process holds only its context, which is larger than assumed for the share.
    node.slot(7, CONTEXT);
    node.in_pod(4_000_001, 700 << 20);
    node.seconds(2);
    let mut inventory = node.world.ready.inventory.clone();
    node.watchdog.parts.contexts.describe(&mut inventory);
    let measured = inventory.gpus[0].context_memory;
    assert_eq!(measured, Some(Quantity::from_bytes(704 << 20)));
    node.seconds(10);
    assert_eq!(node.bypass_bytes(), 0, "what contexts take is no bypass");
}
