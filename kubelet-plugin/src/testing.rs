//! Test fixtures: an API server, a node's files, and a plugin that can be killed.

pub mod api;
pub mod mig;
pub mod mps;
pub mod vfio;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::ResourceClaim;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tranche_api::gpu_node::{Published, PublishedGpu};
use tranche_driver::audit::{Ended, Event, Line};
use tranche_driver::cdi::driver_spec;
use tranche_driver::competing_drivers;
use tranche_driver::competing_drivers::Verdict;
use tranche_driver::journal::ClaimRecord;
use tranche_serving::Clock;

use self::api::FakeApi;
use self::mig::MortalDriver;
use self::mps::{MortalClient, Supervisor};
use self::vfio::{Machine, MortalGroups};
use crate::claim::executor::Executor;
use crate::claim::orphans::{OrphanSearch, suspicions};
use crate::claim::preparer::{Preparer, PreparerParts, Problem, Reporter};
use crate::cluster::claims::ClaimReader;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::{DriverState, Ready, SpecFile};
use crate::gpu::gpus::{Gpus, Hardware};
use crate::gpu::load_pages::LoadPages;
use crate::gpu::records::GpuRecords;
use crate::host::fs::{Fs, HostFs};
use crate::host::install::{Installation, shims, testing::lay_out_image};
use crate::host::layout::{Layout, testing::below};
use crate::kubelet::pod_resources::{Container, InUse, Kubelet, Listing, PodResourcesError};
use crate::ledger::Ledger;
use crate::ledger::audit::{self, Audit};
use crate::ledger::claim_ref::ClaimRef;
use crate::metrics::Metrics;
use crate::share::last_findings::LastFindings;
use tranche_node::devices::DeviceNodes;
use tranche_node::discover::discover;
use tranche_node::inventory::inventory;
use tranche_node::nvml::{Gate, Hangs, Nvml as _};
use tranche_node::processes::containers::Containers;
use tranche_node::root::DriverRoot;
use tranche_node::testing::{self as files, MigGpus};
use tranche_node::vfio::Groups as _;

pub const NODE: &str = "node-a";
pub const POOL: &str = "node-a/gpu";

/// More bytes than the trees of all tests at a time need.
const ROOM: u64 = 256 << 20;

/// A new folder, in memory where there is room. A node has hundreds of small files, a test of crashes has hundreds of nodes:
/// on a disk it takes twice as long.
fn folder() -> tempfile::TempDir {
    let memory = "/dev/shm";
    let has_room = rustix::fs::statvfs(memory).is_ok_and(|it| it.f_bavail * it.f_frsize >= ROOM);
    if has_room && let Ok(folder) = tempfile::tempdir_in(memory) {
        return folder;
    }
    tempfile::tempdir().unwrap()
}

/// A node's disk and its API server, which outlive a plugin.
pub struct World {
    pub dir: tempfile::TempDir,
    pub layout: Layout,
    pub api: FakeApi,
    /// The driver when it is ready.
    pub ready: Arc<Ready>,
    /// The GPUs' MIG state.
    pub mig: MigGpus,
    pub mps: Supervisor,
    /// The GPUs' IOMMU groups.
    pub pci: Machine,
    /// How much the audit trail may take.
    pub audit_limits: audit::Limits,
    /// The file system of the audit trail.
    pub audit_fs: Arc<dyn Fs>,
    /// The trails of all processes.
    pub audits: Mutex<Vec<Weak<Audit>>>,
}

pub struct Plugin {
    pub preparer: Arc<Preparer>,
    pub gpus: Arc<Gpus>,
    pub gate: Gate,
    pub reports: Arc<Reports>,
    pub metrics: Arc<Metrics>,
    pub last_findings: Arc<LastFindings>,
    pub driver: watch::Sender<DriverState>,
    pub suspicions: tokio::sync::Mutex<mpsc::Receiver<String>>,
    pub others: watch::Sender<Option<Verdict>>,
    pub policy: watch::Sender<NodePolicy>,
}

/// Records the reports to the cluster.
#[derive(Debug, Default)]
pub struct Reports {
    pub prepared: Mutex<Vec<String>>,
    pub failed: Mutex<Vec<(String, String)>>,
    pub released: Mutex<Vec<String>>,
}

impl Reporter for Reports {
    fn prepared(&self, record: &Arc<ClaimRecord>) {
        let uid = record.plan.allocation.uid.clone();
        self.prepared.lock().unwrap().push(uid);
    }

    fn failed(&self, claim: &ResourceClaim, _: &Problem, text: &str) {
        let name = claim.metadata.name.clone().unwrap();
        self.failed.lock().unwrap().push((name, text.to_owned()));
    }

    fn released(&self, uid: &str) {
        self.released.lock().unwrap().push(uid.to_owned());
    }
}

/// A kubelet that lists given claims, or does not answer.
#[derive(Clone, Debug, Default)]
pub struct KubeletList(Arc<Mutex<Option<InUse>>>);

/// The container `main` of a pod of the team.
fn main_of(pod: &str) -> Container {
    Container {
        namespace: "team".to_owned(),
        pod: pod.to_owned(),
        name: "main".to_owned(),
    }
}

impl KubeletList {
    /// A kubelet that lists all of these, each for its pod.
    pub fn of(records: &[Arc<ClaimRecord>]) -> Self {
        let listing = Self::default();
        listing.lists(records);
        listing
    }

    pub fn lists(&self, records: &[Arc<ClaimRecord>]) {
        let of = |record: &Arc<ClaimRecord>| {
            let pod = format!("pod-of-{}", record.plan.allocation.name);
            let ids = record.plan.devices.iter().map(|d| d.cdi_ids[0].clone());
            ids.map(|id| (id, main_of(&pod))).collect::<Vec<_>>()
        };
        *self.0.lock().unwrap() = Some(records.iter().flat_map(of).collect());
    }

    /// Lists all of these for one pod.
    pub fn lists_pod(&self, records: &[Arc<ClaimRecord>], pod: &str) {
        let devices = records.iter().flat_map(|record| &record.plan.devices);
        let pairs = devices.map(|device| (device.cdi_ids[0].clone(), main_of(pod)));
        *self.0.lock().unwrap() = Some(pairs.collect());
    }

    pub fn stop_answering(&self) {
        *self.0.lock().unwrap() = None;
    }
}

impl Kubelet for KubeletList {
    fn list(&self, _: Duration) -> BoxFuture<'_, Result<Arc<Listing>, PodResourcesError>> {
        let in_use = self.0.lock().unwrap().clone();
        let listing = |in_use| Listing {
            in_use,
            others: Ok(competing_drivers::Kubelet::default()),
        };
        let told = in_use
            .map(listing)
            .map(Arc::new)
            .ok_or_else(|| PodResourcesError {
                socket: "scripted".into(),
                problem: "it says nothing".into(),
            });
        Box::pin(async { told })
    }
}

/// A running search for orphans.
pub struct Search(tokio::sync::Mutex<BoxFuture<'static, ()>>);

impl Search {
    /// Runs for this time, on a paused clock.
    pub async fn run_for(&self, time: Duration) {
        let mut search = self.0.lock().await;
        let ended = tokio::time::timeout(time, &mut *search).await;
        assert!(ended.is_err(), "the search ended by itself");
    }
}

impl Plugin {
    /// A search for orphans of this process.
    pub async fn search(&self, world: &World, kubelet: &KubeletList) -> Search {
        let search = OrphanSearch {
            preparer: Arc::clone(&self.preparer),
            claims: ClaimReader::new(world.api.client()),
            kubelet: Arc::new(kubelet.clone()),
            reporter: Arc::clone(&self.reports) as _,
            metrics: Arc::default(),
        };
        let (_, nobody) = suspicions();
        let suspicions = std::mem::replace(&mut *self.suspicions.lock().await, nobody);
        let run = search.run(suspicions, CancellationToken::new());
        Search(tokio::sync::Mutex::new(Box::pin(run)))
    }
}

impl World {
    /// A node with two H100 and Debian's driver.
    pub fn new() -> Self {
        Self::with_gpus(2)
    }

    /// A node with so many H100, at most ten, and Debian's driver.
    pub fn with_gpus(count: u32) -> Self {
        let dir = folder();
        let layout = below(dir.path());
        lay_out_image(&dir.path().join("image"));
        for folder in [&layout.plugin, &layout.registry] {
            std::fs::create_dir_all(folder).unwrap();
        }
        let driver_root = dir.path().join("driver");
        files::lay_out(&driver_root, files::DEBIAN_535);
        std::fs::create_dir(driver_root.join("dev")).unwrap();
        std::fs::create_dir(dir.path().join("proc")).unwrap();
        for name in ["nvidiactl", "nvidia-uvm"] {
            make_node(&driver_root, name);
        }
        for minor in 0..count {
            make_node(&driver_root, &format!("nvidia{minor}"));
        }
        let mig = MigGpus::h100(count, &driver_root);
        Self {
            ready: Arc::new(ready(&driver_root, &layout, &mig)),
            layout,
            api: FakeApi::default(),
            pci: Machine::of(&mig),
            mig,
            mps: Supervisor::default(),
            audit_fs: Arc::new(HostFs),
            audits: Mutex::default(),
            audit_limits: audit::Limits {
                files: 4,
                file_bytes: 64 << 10,
            },
            dir,
        }
    }

    pub fn driver_root(&self) -> PathBuf {
        self.dir.path().join("driver")
    }

    /// The host's `/proc`, with no process.
    pub fn proc(&self) -> PathBuf {
        self.dir.path().join("proc")
    }

    /// The driver, for a caller that does not die.
    pub fn driver(&self) -> MortalDriver {
        self.driver_for(Arc::new(HostFs))
    }

    fn driver_for(&self, fs: Arc<dyn Fs>) -> MortalDriver {
        MortalDriver {
            gpus: self.mig.clone(),
            fs,
            proc: self.proc(),
        }
    }

    /// The IOMMU groups, for a plugin that dies with this file system.
    pub fn groups_for(&self, fs: Arc<dyn Fs>) -> MortalGroups {
        MortalGroups {
            machine: self.pci.clone(),
            fs,
            folder: self.proc(),
        }
    }

    /// The kernel's boot.
    pub fn boot(&self) -> String {
        self.groups_for(Arc::new(HostFs)).boot().unwrap()
    }

    pub fn make_node(&self, name: &str) {
        make_node(&self.driver_root(), name);
    }

    /// Boots the machine: everything that was only in memory is gone.
    pub fn reboot(&self) {
        self.mig.reboot();
        self.pci.reboot();
        self.mps.reboot();
        self.unmount_all();
        let run = self.layout.shares.parent().unwrap();
        for folder in [run, &self.layout.cdi, &self.proc()] {
            let _ = std::fs::remove_dir_all(folder);
        }
        std::fs::create_dir(self.proc()).unwrap();
    }

    /// Boots the machine with its GPUs in another order: each has another one's minor number and PCI address.
    pub fn reboot_in_another_order(&mut self) {
        self.reboot();
        self.mig.reorder();
        self.pci.reboot();
        let description = self.mig.describe().unwrap();
        self.ready = Arc::new(Ready {
            inventory: inventory(&description, Path::new("/nowhere")),
            ..(*self.ready).clone()
        });
    }

    /// A plugin on this node, as `app` starts it; its driver is ready.
    pub fn start(&self) -> Plugin {
        self.start_on(Arc::new(HostFs)).unwrap()
    }

    /// Prepares a claim in a process that ends afterwards.
    pub async fn prepare(&self, claim: &str) -> Arc<ClaimRecord> {
        let plugin = self.start();
        plugin.preparer.prepare(&claim_ref(claim)).await.unwrap()
    }

    /// A plugin on a file system that may fail.
    pub fn start_on(&self, fs: Arc<dyn Fs>) -> Result<Plugin, crate::host::fs::FsError> {
        let image = self.dir.path().join("image");
        let installation = Installation::install(
            Arc::new(HostFs),
            &image,
            &self.layout.libraries(),
            &self.layout.hooks,
        );
        let metrics = Arc::<Metrics>::default();
        let settings = audit::TrailSettings {
            folder: self.layout.audit(),
            node: NODE.to_owned(),
            limits: self.audit_limits,
            retry: Duration::from_millis(20),
            clock: Clock::system(),
        };
        // Another process writes the trail only after the one before has ended, and a process writes everything before it ends.
        self.flush_audit(Duration::from_secs(5));
        let trail = Audit::start(Arc::clone(&self.audit_fs), settings, Arc::clone(&metrics));
        let audit = Arc::new(trail);
        self.audits.lock().unwrap().push(Arc::downgrade(&audit));
        let executor = Executor::new(Arc::clone(&fs), self.layout.clone(), audit)?;
        let ledger = Arc::new(Ledger::new(executor.recover()?));
        let reports = Arc::new(Reports::default());
        let last_findings = Arc::new(LastFindings::default());
        let (others, others_rx) = watch::channel(None);
        let (policy, policy_rx) = watch::channel(self.no_policy());
        let (driver, driver_rx) = watch::channel(DriverState::Ready(Arc::clone(&self.ready)));
        let (suspect_orphans, suspicions) = suspicions();
        let gate = Gate::default();
        let gpus = Arc::new(Gpus::new(
            GpuRecords::open(Arc::clone(&fs), self.layout.gpus(), &self.boot())?,
            LoadPages::open(Arc::clone(&fs), self.layout.load(), Arc::clone(&ledger))?,
            Arc::clone(&ledger),
            Hardware {
                nvml: Box::new(self.driver_for(Arc::clone(&fs))),
                hangs: Hangs::default(),
                daemons: Box::new(MortalClient {
                    supervisor: self.mps.clone(),
                    fs: Arc::clone(&fs),
                    folder: self.proc(),
                }),
                groups: Arc::new(self.groups_for(Arc::clone(&fs))),
                gate: gate.clone(),
                open_patience: Duration::ZERO,
                proc: self.proc(),
            },
            driver_rx.clone(),
        ));
        let preparer = Preparer::new(PreparerParts {
            pool: POOL.into(),
            spec_file: Arc::new(SpecFile::new(fs, &self.layout)),
            executor,
            installation,
            driver: driver_rx,
            others: others_rx,
            policy: policy_rx,
            claims: ClaimReader::new(self.api.client()),
            gpus: Arc::clone(&gpus),
            ledger,
            reporter: Arc::clone(&reports) as _,
            metrics: Arc::clone(&metrics),
            last_findings: Arc::clone(&last_findings),
            layout: self.layout.clone(),
            containers: Containers::new(self.proc()),
            suspect_orphans,
        });
        Ok(Plugin {
            preparer,
            gpus,
            gate,
            reports,
            metrics,
            last_findings,
            driver,
            suspicions: tokio::sync::Mutex::new(suspicions),
            others,
            policy,
        })
    }

    /// Starts a process of a container that has the claim's first device.
    pub fn run_in_container(&self, record: &ClaimRecord, pid: u32) {
        let key = &record.plan.devices[0].key;
        let folder = self.proc().join(pid.to_string());
        std::fs::create_dir_all(folder.join("ns")).unwrap();
        symlink("mnt:[7]", folder.join("ns/mnt")).unwrap();
        let mounts = format!("9 2 0:50 /{key}/cap /etc/tranche/0/cap ro - tmpfs tmpfs rw\n");
        std::fs::write(folder.join("mountinfo"), mounts).unwrap();
    }

    pub fn end(&self, pid: u32) {
        std::fs::remove_dir_all(self.proc().join(pid.to_string())).unwrap();
    }

    /// What the controller publishes for this node without any SharingPolicy.
    pub fn no_policy(&self) -> NodePolicy {
        let gpus = self.ready.inventory.gpus.iter();
        let gpu = |gpu: &tranche_api::gpu_node::Gpu| PublishedGpu {
            uuid: gpu.uuid.clone(),
            ..PublishedGpu::default()
        };
        NodePolicy::of(&Published {
            gpus: gpus.map(gpu).collect(),
            ..Published::default()
        })
    }

    /// Waits until the running processes have written the audit trail; whether they could.
    pub fn flush_audit(&self, patience: Duration) -> bool {
        let audits = self.audits.lock().unwrap();
        let mut running = audits.iter().filter_map(Weak::upgrade);
        running.all(|audit| audit.flush(patience))
    }

    /// The whole lines of the audit trail, the oldest first.
    pub fn trail(&self) -> Vec<Line> {
        self.flush_audit(Duration::from_secs(5));
        let folder = self.layout.audit();
        let mut names: Vec<_> = (1..self.audit_limits.files)
            .map(|nth| format!("audit.jsonl.{nth}"))
            .collect();
        names.reverse();
        names.push("audit.jsonl".to_owned());
        let read = |name: String| std::fs::read(folder.join(name)).unwrap_or_default();
        let content: Vec<_> = names.into_iter().flat_map(read).collect();
        let lines = content.split_inclusive(|byte| *byte == b'\n');
        let whole = lines.filter(|line| line.ends_with(b"\n"));
        whole.map(|line| Line::decode(line).unwrap()).collect()
    }

    /// How each grant of the trail ended, in the order of their beginnings; checks that each has one beginning and at most one
    /// end.
    pub fn grants(&self) -> Vec<(String, Option<Ended>)> {
        let mut grants: Vec<(String, Option<Ended>)> = Vec::new();
        for line in self.trail() {
            let known = grants.iter_mut().find(|(id, _)| *id == line.grant.grant);
            match (line.event, known) {
                (Event::Allocated {}, None) => grants.push((line.grant.grant, None)),
                (Event::Released { ended, .. }, Some((_, end @ None))) => *end = Some(ended),
                (Event::Held {}, Some((_, None))) => {}
                (event, known) => panic!("{event:?} of {known:?} in {:#?}", self.trail()),
            }
        }
        grants
    }

    /// Every file of claims on the node, including temporary ones, without the driver's spec, the
    /// plugin's own files and empty top folders; paths from the node's root.
    pub fn traces(&self) -> Vec<String> {
        let mut traces = Vec::new();
        for folder in [
            self.layout.claims(),
            self.layout.gpus(),
            self.layout.shares.clone(),
            self.layout.metadata(),
            self.layout.load(),
            self.layout.cdi.clone(),
        ] {
            collect(&folder, &mut traces);
        }
        let driver = self.layout.driver_spec();
        traces.retain(|path| *path != driver);
        let root = self.dir.path();
        let mut traces: Vec<_> = traces
            .iter()
            .map(|path| {
                path.strip_prefix(root)
                    .unwrap()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        traces.sort();
        traces
    }

    /// The devices of a claim in the CDI spec, an array.
    pub fn cdi_devices(&self, uid: &str) -> serde_json::Value {
        let Ok(content) = std::fs::read(self.layout.claims_spec()) else {
            return serde_json::json!([]);
        };
        let mut spec: serde_json::Value = serde_json::from_slice(&content).unwrap();
        let of_claim = |device: &serde_json::Value| {
            let name = device["name"].as_str().unwrap();
            name.starts_with(&format!("{uid}-"))
        };
        let devices = spec["devices"].as_array_mut().unwrap();
        devices.retain(of_claim);
        std::mem::take(&mut spec["devices"])
    }

    /// The traces with their contents, without the journals.
    pub fn contents(&self) -> Vec<(String, Vec<u8>)> {
        self.traces()
            .into_iter()
            .filter(|path| !path.starts_with("plugin/claims"))
            .map(|path| {
                let content = std::fs::read(self.dir.path().join(&path)).unwrap_or_default();
                // CDI specs contain the path of this node's folder.
                let text = String::from_utf8_lossy(&content);
                let content = text.replace(self.dir.path().to_str().unwrap(), "ROOT");
                (path, content.into_bytes())
            })
            .collect()
    }
}

impl World {
    fn unmount_all(&self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points: Vec<_> = mounts
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .filter(|point| Path::new(point).starts_with(self.dir.path()))
            .collect();
        for point in points.into_iter().rev() {
            let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

impl Drop for World {
    /// Mounts would prevent the removal of the folder.
    fn drop(&mut self) {
        self.unmount_all();
    }
}

fn ready(driver_root: &Path, layout: &Layout, gpus: &MigGpus) -> Ready {
    let description = gpus.describe().unwrap();
    let root = DriverRoot::open(driver_root).unwrap();
    let found = discover(&root, &description.driver_version).unwrap();
    let nodes = DeviceNodes::find(&root, &root).unwrap();
    let files = found.driver_files(root.on_host(), nodes.control());
    let paths = layout.node_paths(root.on_host());
    let shims = shims(&HostFs, &layout.libraries()).unwrap();
    Ready {
        inventory: inventory(&description, Path::new("/nowhere")),
        withheld: Vec::new(),
        hang: None,
        spec: Some(driver_spec(&files, &paths, &shims).unwrap().encode()),
        dev_root: root.path().to_owned(),
        dev_root_on_host: root.on_host().to_owned(),
    }
}

fn make_node(driver_root: &Path, name: &str) {
    let path = driver_root.join("dev").join(name);
    let null = makedev(1, 3);
    mknodat(CWD, &path, FileType::CharacterDevice, Mode::RUSR, null)
        .expect("tests make device nodes: run them with CAP_MKNOD");
}

fn collect(folder: &Path, into: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, into);
        }
        into.push(path);
    }
}

/// A share or a whole GPU, as the scheduler writes it.
#[derive(Clone, Debug)]
pub struct Given {
    request: String,
    device: String,
    /// The share's id and what it consumes.
    share: Option<(String, serde_json::Value)>,
}

/// All of a GPU.
pub fn whole(request: &str, minor: u32) -> Given {
    Given {
        request: request.into(),
        device: format!("gpu-{minor:08}"),
        share: None,
    }
}

pub fn capped(request: &str, minor: u32, memory: &str, cores: u32) -> Given {
    let share = format!("00000000-0000-4000-8000-{:012}", minor + 1);
    Given {
        request: request.into(),
        device: format!("gpu-{minor:08}-capped"),
        share: Some((
            share,
            serde_json::json!({
                "memory": memory, "cores": cores.to_string(), "sharers": "1", "contextMemory": "300Mi",
            }),
        )),
    }
}

/// A claim whose shares have a priority.
pub fn with_priority(mut claim: serde_json::Value, priority: &str) -> serde_json::Value {
    let parameters = serde_json::json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "ShareConfig", "compute": {"priority": priority},
    });
    let config = serde_json::json!({
        "source": "FromClaim", "opaque": {"driver": "gpu.tranche.dev", "parameters": parameters},
    });
    claim["status"]["allocation"]["devices"]["config"] = serde_json::json!([config]);
    claim
}

/// A share of a GPU whose shares together have `percent` of its memory.
pub fn oversubscribed(request: &str, minor: u32, percent: u32, memory: &str, cores: u32) -> Given {
    Given {
        device: format!("gpu-{minor:08}-capped-{percent}"),
        ..capped(request, minor, memory, cores)
    }
}

pub fn timeshared(request: &str, minor: u32) -> Given {
    Given {
        request: request.into(),
        device: format!("gpu-{minor:08}-timeshared"),
        share: Some((
            "00000000-0000-4000-8000-00000000000f".into(),
            serde_json::json!({"sharers": "1"}),
        )),
    }
}

pub fn concurrent(request: &str, minor: u32, memory: &str, threads: u32) -> Given {
    Given {
        device: format!("gpu-{minor:08}-concurrent"),
        ..capped(request, minor, memory, threads)
    }
}

pub fn partition(request: &str, minor: u32, name: &str) -> Given {
    Given {
        request: request.into(),
        device: format!("gpu-{minor:08}-mig-{name}"),
        share: None,
    }
}

/// A capped share of a partition.
pub fn capped_on(request: &str, minor: u32, name: &str, memory: &str, cores: u32) -> Given {
    Given {
        device: format!("gpu-{minor:08}-capped-{name}"),
        ..capped(request, minor, memory, cores)
    }
}

/// A concurrent share of a partition.
pub fn concurrent_on(request: &str, minor: u32, name: &str, memory: &str, threads: u32) -> Given {
    Given {
        device: format!("gpu-{minor:08}-mps-{name}"),
        ..capped(request, minor, memory, threads)
    }
}

/// A GPU for a virtual machine.
pub fn passthrough(request: &str, minor: u32) -> Given {
    Given {
        device: format!("gpu-{minor:08}-passthrough"),
        ..whole(request, minor)
    }
}

/// The name by which the kubelet asks for the claim `name`.
pub fn claim_ref(name: &str) -> ClaimRef {
    ClaimRef {
        uid: uid(name),
        namespace: "team".into(),
        name: name.into(),
    }
}

fn uid(name: &str) -> String {
    format!("uid-of-{name}")
}

/// An allocated claim that a pod reserved.
pub fn claim(name: &str, given: &[Given]) -> serde_json::Value {
    let results: Vec<_> = given
        .iter()
        .map(|given| {
            let mut result = serde_json::json!({
                "request": given.request, "driver": "gpu.tranche.dev", "pool": POOL, "device": given.device,
            });
            if let Some((share, consumed)) = &given.share {
                result["shareID"] = share.as_str().into();
                result["consumedCapacity"] = consumed.clone();
            }
            result
        })
        .collect();
    serde_json::json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "team", "uid": uid(name)},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": format!("pod-of-{name}"), "uid": "pod-uid"}],
        },
    })
}
