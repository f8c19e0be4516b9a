//! A driver that is installed late, fails and changes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::host::install::shims;
use crate::testing::{World, claim, claim_ref, partition, passthrough};
use tranche_api::sharing_policy::Interval;
use tranche_api::vgpu::VgpuRole;
use tranche_api::withheld::reason;
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};
use tranche_driver::mig::Placement;
use tranche_node::devices::DeviceNodes;
use tranche_node::inventory::testing::two_h100;
use tranche_node::nvml::{
    BrokenGpu, ChangeError, Description, GpuUse, Nvml, ProcessMemory, ProcessSample, Session,
};
use tranche_node::root::DriverRoot;

type Answers<T> = Arc<Mutex<VecDeque<Result<T, NvmlError>>>>;

/// Opens as scripted, and after that always.
#[derive(Debug)]
struct ScriptedDriver {
    root: PathBuf,
    openings: Answers<()>,
    descriptions: Answers<Description>,
    traces: Arc<Mutex<Traces>>,
    open: Arc<AtomicU32>,
}

/// Describes as scripted, and after that two H100.
#[derive(Debug)]
struct ScriptedNvml {
    descriptions: Answers<Description>,
    open: Arc<AtomicU32>,
}

impl Drop for ScriptedNvml {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Driver for ScriptedDriver {
    fn open(&self) -> Result<Opened, NvmlError> {
        let next = self.openings.lock().unwrap().pop_front();
        next.unwrap_or(Ok(()))?;
        let root = DriverRoot::open(&self.root)?;
        self.open.fetch_add(1, Ordering::SeqCst);
        Ok(Opened {
            nvml: Box::new(ScriptedNvml {
                descriptions: Arc::clone(&self.descriptions),
                open: Arc::clone(&self.open),
            }),
            nodes: DeviceNodes::find(&root, &root)?,
            pass: None,
            root,
        })
    }

    fn traces(&self) -> Traces {
        self.traces.lock().unwrap().clone()
    }
}

impl Nvml for ScriptedNvml {
    fn describe(&self) -> Result<Description, NvmlError> {
        let next = self.descriptions.lock().unwrap().pop_front();
        next.unwrap_or_else(|| Ok(two_h100()))
    }

    fn utilization_rates(&self, _: &str) -> Result<[u32; 2], NvmlError> {
        Err(absent())
    }

    fn xids(&self, _: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        Ok(Vec::new())
    }

    fn health(&self, _: &str) -> Result<tranche_driver::health::Report, NvmlError> {
        unreachable!("nobody asks")
    }

    fn usage(&self, _: &str) -> Result<GpuUse, NvmlError> {
        Err(absent())
    }

    fn process_utilization(&self, _: &str, _: u64) -> Result<Vec<ProcessSample>, NvmlError> {
        Err(absent())
    }

    fn processes(&self, _: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
        Err(absent())
    }

    fn used_memory(&self, _: &str) -> Result<Option<u64>, NvmlError> {
        Err(absent())
    }

    fn mig_state(&self, _: &str) -> Result<Actual, NvmlError> {
        Err(absent())
    }

    fn change_mig(&self, _: &str, _: &Change) -> Result<(), ChangeError> {
        Err(absent().into())
    }

    fn minor(&self, _: &str) -> Result<u32, NvmlError> {
        Err(absent())
    }

    fn compute_mode(&self, _: &str) -> Result<ComputeMode, NvmlError> {
        Err(absent())
    }

    fn set_compute_mode(&self, _: &str, _: ComputeMode) -> Result<(), NvmlError> {
        Err(absent())
    }

    fn time_slice(&self, _: &str) -> Result<Interval, NvmlError> {
        Err(absent())
    }

    fn set_time_slice(&self, _: &str, _: Interval) -> Result<(), NvmlError> {
        Err(absent())
    }
}

fn absent() -> NvmlError {
    NvmlError::NotFound {
        roots: "/driver-root".into(),
        searched: "/usr/lib64".into(),
    }
}

struct Observed {
    world: World,
    openings: Answers<()>,
    descriptions: Answers<Description>,
    traces: Arc<Mutex<Traces>>,
    open: Arc<AtomicU32>,
    state: watch::Receiver<DriverState>,
    _stop: tokio_util::sync::DropGuard,
}

/// An observer of a world's GPUs, which partitions divide.
fn observer(world: &World) -> Observer {
    std::fs::create_dir_all(&world.layout.cdi).unwrap();
    let fs: Arc<dyn Fs> = Arc::new(fs::HostFs);
    Observer {
        driver: Box::new(world.driver()),
        sysfs: "/nowhere".into(),
        groups: Arc::new(world.groups_for(Arc::clone(&fs))),
        spec_file: Arc::new(SpecFile::new(Arc::clone(&fs), &world.layout)),
        layout: world.layout.clone(),
        shims: shims(&*fs, &world.layout.libraries()).unwrap(),
        contexts: Arc::new(Contexts::load(Arc::clone(&fs), &world.layout)),
        records: GpuRecords::open(fs, world.layout.gpus(), &world.boot()).unwrap(),
        hangs: Hangs::default(),
        known_gpus: Mutex::default(),
        refresh: Duration::from_mins(1),
    }
}

/// The GPU is not withheld either, although it is in MIG mode.
#[tokio::test]
async fn a_claims_partition_does_not_change_what_the_node_describes() {
    let world = World::new();
    let observer = observer(&world);
    let before = observer.check().unwrap();
    assert_eq!(before.inventory.mig_geometries.len(), 1);
    let plugin = world.start();
    world.api.put(claim("a", &[partition("x", 0, "1g10gb-6")]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(observer.check().unwrap(), before);
    // It describes an administrator's partition.
    let made = Change::CreateInstance(Placement {
        start: 4,
        profile: "2g.20gb".parse().unwrap(),
    });
    let uuid = &before.inventory.gpus[0].uuid;
    world.driver().change_mig(uuid, &made).unwrap();
    let after = observer.check().unwrap();
    let instances = &after.inventory.gpus[0].mig_instances;
    assert_eq!((instances.len(), instances[0].start), (1, 4));
}

/// NVML does not describe it, and no other GPU takes its place.
#[tokio::test]
async fn a_gpu_at_vfio_stays_in_the_inventory() {
    let world = World::new();
    let before = observer(&world).check().unwrap();
    let vfio = before.inventory.gpus[1].vfio.as_ref().unwrap();
    assert_eq!((vfio.iommu_group, &vfio.obstacle), (0x1c, &None));
    let plugin = world.start();
    for (name, gpu) in [("a", 1), ("b", 0)] {
        world.api.put(claim(name, &[passthrough("x", gpu)]));
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        // A new process, which has not seen the GPU before, describes the same.
        assert_eq!(observer(&world).check().unwrap(), before, "{name}");
    }
    assert_eq!(world.driver().describe().unwrap().gpus, []);
    for name in ["a", "b"] {
        plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
        assert_eq!(observer(&world).check().unwrap(), before, "{name}");
    }
    assert_eq!(world.driver().describe().unwrap().gpus.len(), 2);
}

fn observe(
    openings: impl IntoIterator<Item = Result<(), NvmlError>>,
    descriptions: impl IntoIterator<Item = Result<Description, NvmlError>>,
) -> Observed {
    let world = World::new();
    let openings = Arc::new(Mutex::new(openings.into_iter().collect()));
    let descriptions = Arc::new(Mutex::new(descriptions.into_iter().collect()));
    let (traces, open) = <(Arc<Mutex<Traces>>, Arc<AtomicU32>)>::default();
    let observer = Observer {
        driver: Box::new(ScriptedDriver {
            root: world.driver_root(),
            openings: Arc::clone(&openings),
            descriptions: Arc::clone(&descriptions),
            traces: Arc::clone(&traces),
            open: Arc::clone(&open),
        }),
        ..observer(&world)
    };
    let (sender, state) = watch::channel(DriverState::default());
    let stop = CancellationToken::new();
    tokio::spawn(observer.run(sender, stop.clone()));
    Observed {
        world,
        openings,
        descriptions,
        traces,
        open,
        state,
        _stop: stop.drop_guard(),
    }
}

impl Observed {
    async fn until(&mut self, what: impl FnMut(&DriverState) -> bool) -> DriverState {
        let wait = tokio::time::timeout(Duration::from_hours(1), self.state.wait_for(what));
        wait.await.unwrap().unwrap().clone()
    }

    async fn until_gpus(&mut self, count: usize) {
        self.until(|s| matches!(s, DriverState::Ready(r) if r.inventory.gpus.len() == count))
            .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_comes_late_is_found() {
    let mut observed = observe([Err(absent()), Err(absent()), Ok(())], []);
    let absent = observed
        .until(|s| matches!(s, DriverState::Absent(_)))
        .await;
    let DriverState::Absent(why) = absent else {
        unreachable!()
    };
    assert!(why.to_string().contains("driverRoot"), "{why}");
    observed.until_gpus(2).await;
    assert!(observed.openings.lock().unwrap().is_empty());
    assert!(observed.world.layout.driver_spec().exists());
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_stops_answering_is_opened_again() {
    let lost = NvmlError::Call {
        call: "nvmlDeviceGetCount_v2",
        object: String::new(),
        reason: "GPU is lost".into(),
    };
    let lasting = std::iter::repeat_n(Err(lost), 6);
    let all = [Ok(two_h100())].into_iter().chain(lasting);
    let mut observed = observe([], all);
    observed.until_gpus(2).await;
    let gone = observed
        .until(|s| matches!(s, DriverState::Absent(_)))
        .await;
    observed.openings.lock().unwrap().push_back(Err(absent()));
    assert!(matches!(gone, DriverState::Absent(why) if why.to_string().contains("GPU is lost")));
    observed
        .until(|s| matches!(s, DriverState::Absent(why) if why.to_string().contains("driverRoot")))
        .await;
    observed.until_gpus(2).await;
}

fn failed() -> NvmlError {
    NvmlError::Call {
        call: "nvmlDeviceGetCount_v2",
        object: String::new(),
        reason: "an unknown internal error".into(),
    }
}

#[tokio::test(start_paused = true)]
async fn checks_that_fail_for_a_moment_withdraw_nothing() {
    let mut not_described = two_h100();
    let gpu = not_described.gpus.pop().unwrap();
    not_described.broken.push(BrokenGpu {
        index: 1,
        uuid: Some(gpu.uuid),
        error: failed(),
    });
    for answer in [Err(failed()), Ok(not_described)] {
        let two = [answer.clone(), answer.clone()];
        let mut observed = observe([], [Ok(two_h100())].into_iter().chain(two));
        observed.until_gpus(2).await;
        let left = || observed.descriptions.lock().unwrap().len();
        while left() > 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(!observed.state.has_changed().unwrap());
        // They last.
        *observed.descriptions.lock().unwrap() = vec![answer; 20].into();
        let began = tokio::time::Instant::now();
        let changed = |state: &DriverState| match state {
            DriverState::Ready(ready) => ready.inventory.gpus.len() < 2,
            _ => true,
        };
        observed.until(changed).await;
        // The next check, and then a few seconds.
        assert!(began.elapsed() < Duration::from_mins(1) + 2 * LASTING);
        observed.descriptions.lock().unwrap().clear();
        observed.until_gpus(2).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_module_that_is_gone_withdraws_at_once() {
    let mut observed = observe([], []);
    observed.until_gpus(2).await;
    let gone = NvmlError::Start {
        path: "/usr/lib64/libnvidia-ml.so.1".into(),
        reason: "the driver is not loaded".into(),
    };
    *observed.openings.lock().unwrap() = vec![Err(gone); 2].into();
    let version = PathBuf::from("/proc/driver/nvidia/version");
    *observed.traces.lock().unwrap() = Traces(vec![(version, String::new())]);
    observed
        .until(|s| matches!(s, DriverState::Absent(_)))
        .await;
    assert_eq!(observed.openings.lock().unwrap().len(), 1, "one check");
}

/// An observer of a world's GPUs whose calls may hang.
fn observe_hangs(
    world: &World,
) -> (
    Hangs,
    watch::Receiver<DriverState>,
    tokio_util::sync::DropGuard,
) {
    let hangs = Hangs::default();
    let session = Session::new(Arc::new(world.mig.clone()), &hangs);
    let observer = Observer {
        driver: Box::new(session),
        hangs: hangs.clone(),
        ..observer(world)
    };
    let (sender, state) = watch::channel(DriverState::default());
    let stop = CancellationToken::new();
    tokio::spawn(observer.run(sender, stop.clone()));
    (hangs, state, stop.drop_guard())
}

async fn until_withheld(state: &mut watch::Receiver<DriverState>, wanted: &[&str]) -> Arc<Ready> {
    let is_so = |state: &DriverState| match state {
        DriverState::Ready(ready) => {
            let hanging = ready.withheld.iter();
            let hanging = hanging.filter(|it| it.reason == reason::DRIVER_HANGS);
            hanging.map(|it| it.gpu.as_str()).eq(wanted.iter().copied())
        }
        _ => false,
    };
    match state.wait_for(is_so).await.unwrap().clone() {
        DriverState::Ready(ready) => ready,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_hangs_is_withheld_until_its_call_returns() {
    let world = World::new();
    let uuids: Vec<_> = world
        .ready
        .inventory
        .gpus
        .iter()
        .map(|it| it.uuid.clone())
        .collect();
    let (hangs, mut state, _stop) = observe_hangs(&world);
    let before = until_withheld(&mut state, &[]).await;
    assert_eq!(before.inventory.gpus.len(), 2);
    // A sampler's call, for example.
    let entered = hangs.enter(&uuids[1], "nvmlDeviceGetUtilizationRates", Duration::ZERO);
    let began = tokio::time::Instant::now();
    let ready = until_withheld(&mut state, &[&uuids[1]]).await;
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "no description was due"
    );
    assert!(
        ready.withheld[0]
            .message
            .contains("nvmlDeviceGetUtilizationRates")
    );
    assert_eq!(
        (ready.hang.is_none(), ready.inventory.gpus.len()),
        (true, 1)
    );
    drop(entered);
    assert_eq!(until_withheld(&mut state, &[]).await, before);

    // NVML does not start any more.
    let entered = hangs.enter("", "nvmlInit_v2", Duration::ZERO);
    let ready = until_withheld(&mut state, &[&uuids[0], &uuids[1]]).await;
    assert!(ready.hang.is_some());
    assert_eq!(ready.inventory, before.inventory);
    drop(entered);
    assert_eq!(until_withheld(&mut state, &[]).await, before);
}

#[tokio::test(start_paused = true)]
async fn a_gpu_without_its_device_node_is_withheld_until_it_is_there() {
    let mut observed = observe([], []);
    observed.until_gpus(2).await;
    let node = observed.world.driver_root().join("dev/nvidia1");
    std::fs::remove_file(&node).unwrap();
    let is_withheld = |state: &DriverState| match state {
        DriverState::Ready(ready) => !ready.withheld.is_empty(),
        _ => false,
    };
    let DriverState::Ready(ready) = observed.until(is_withheld).await else {
        unreachable!()
    };
    let [entry] = &ready.withheld[..] else {
        panic!("{:?}", ready.withheld)
    };
    assert_eq!(
        (&*entry.gpu, &*entry.reason, &entry.tiers[..]),
        (
            &*ready.inventory.gpus[1].uuid,
            reason::NO_DEVICE_NODE,
            &[][..]
        )
    );
    assert!(entry.message.contains("/dev/nvidia1"), "{entry:?}");
    observed.world.make_node("nvidia1");
    observed.until(|state| !is_withheld(state)).await;
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_breaks_leaves_the_others_and_keeps_its_name() {
    let mut one = two_h100();
    one.gpus.retain(|gpu| gpu.index == 0);
    one.broken.push(BrokenGpu {
        index: 1,
        uuid: None,
        error: NvmlError::GpuLost {
            call: "nvmlDeviceGetHandleByIndex_v2",
            object: "index 1".into(),
        },
    });
    let mut observed = observe([], [Ok(two_h100())]);
    observed.until_gpus(2).await;
    observed.descriptions.lock().unwrap().push_back(Ok(one));
    observed.until_gpus(1).await;
    let DriverState::Ready(ready) = observed.state.borrow().clone() else {
        panic!("the driver answers for the other GPU")
    };
    let withheld: Vec<_> = ready
        .withheld
        .iter()
        .map(|w| (&*w.gpu, &*w.reason))
        .collect();
    assert_eq!(
        withheld,
        [("GPU-00000001-0000-0000-0000-000000000001", "GpuLost")]
    );
    observed.until_gpus(2).await;
    observed
        .until(|s| matches!(s, DriverState::Ready(ready) if ready.withheld.is_empty()))
        .await;
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_driver_root_is_no_driver() {
    let mut other = two_h100();
    other.driver_version = "550.54.15".into();
    let mut observed = observe([], [Ok(other)]);
    let absent = observed
        .until(|s| matches!(s, DriverState::Absent(_)))
        .await;
    assert!(
        matches!(absent, DriverState::Absent(why) if why.to_string().contains("libcuda.so.550.54.15"))
    );
    observed.until_gpus(2).await;
}

#[tokio::test(start_paused = true)]
async fn unknown_functions_are_reported() {
    let mut observed = observe([], []);
    let ready = observed
        .until(|s| matches!(s, DriverState::Ready(r) if r.inventory.unknown_functions.is_empty()))
        .await;
    assert!(matches!(ready, DriverState::Ready(_)));
    let libcuda = "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03";
    let newer = tranche_node::untested::testing::library(&["cuInit", "cuAskTheFuture"]);
    std::fs::write(observed.world.driver_root().join(libcuda), newer).unwrap();
    observed
        .until(|s| matches!(s, DriverState::Ready(r) if r.inventory.unknown_functions == ["cuAskTheFuture"]))
        .await;
}

#[tokio::test(start_paused = true)]
async fn nvml_is_closed_after_every_check() {
    let mut observed = observe([], []);
    observed.until_gpus(2).await;
    assert_eq!(observed.open.load(Ordering::SeqCst), 0);
    let mut one = two_h100();
    one.gpus.truncate(1);
    observed.descriptions.lock().unwrap().push_back(Ok(one));
    observed.until_gpus(1).await;
    assert_eq!(observed.open.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_driver_whose_traces_change_is_checked_within_seconds() {
    let mut observed = observe([], []);
    observed.until_gpus(2).await;
    for (version, state) in [("", false), ("550.54.15", false), ("535.261.03", true)] {
        if version.is_empty() {
            let gone = [Err(absent())];
            *observed.openings.lock().unwrap() = gone.into();
        } else {
            let mut other = two_h100();
            other.driver_version = version.to_owned();
            *observed.descriptions.lock().unwrap() = [Ok(other)].into();
        }
        let changed = tokio::time::Instant::now();
        let trace = (
            PathBuf::from("/proc/driver/nvidia/version"),
            version.to_owned(),
        );
        *observed.traces.lock().unwrap() = Traces(vec![trace]);
        observed.state.mark_unchanged();
        observed
            .until(|s| matches!(s, DriverState::Ready(_)) == state)
            .await;
        assert!(changed.elapsed() < Duration::from_secs(5), "{version}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_nvml_of_before_the_change_hides_it_for_seconds_only() {
    let mut observed = observe([], []);
    observed.until_gpus(2).await;
    let mut one = two_h100();
    one.gpus.truncate(1);
    *observed.descriptions.lock().unwrap() = [Ok(two_h100()), Ok(one)].into();
    let changed = tokio::time::Instant::now();
    let trace = (PathBuf::from("/dev/nvidia1"), "gone".to_owned());
    *observed.traces.lock().unwrap() = Traces(vec![trace]);
    observed.until_gpus(1).await;
    assert!(changed.elapsed() < Duration::from_secs(20));
}

#[tokio::test(start_paused = true)]
async fn missing_device_nodes_are_an_error_with_a_reason() {
    let mut observed = observe([], []);
    observed.until_gpus(2).await;
    let uvm = observed.world.driver_root().join("dev/nvidia-uvm");
    std::fs::remove_file(uvm).unwrap();
    let state = observed
        .until(|s| matches!(s, DriverState::Absent(_)))
        .await;
    let DriverState::Absent(why) = state else {
        unreachable!()
    };
    assert_eq!(why.reason(), "DeviceNodesMissing");
    assert!(why.to_string().contains("/dev/nvidia-uvm"), "{why}");
    observed.world.make_node("nvidia-uvm");
    observed.until_gpus(2).await;
}

/// The driver of a vGPU host has neither nvidia-uvm nor libcuda.
#[tokio::test(start_paused = true)]
async fn a_vgpu_hosts_driver_is_described_and_offers_nothing() {
    let mut host = two_h100();
    for gpu in &mut host.gpus {
        gpu.vgpu_role = Some(VgpuRole::Host);
    }
    let mut without_libcuda = host.clone();
    without_libcuda.driver_version = "550.54.15".into();
    let mut mixed = without_libcuda.clone();
    mixed.gpus[0].vgpu_role = None;
    let mut observed = observe([], [Ok(host), Ok(without_libcuda), Ok(mixed)]);
    observed.until(|s| !matches!(s, DriverState::Unknown)).await;
    let is_host =
        |state: &DriverState| matches!(state, DriverState::Ready(ready) if ready.spec.is_none());
    let DriverState::Ready(ready) = observed.until(is_host).await else {
        unreachable!()
    };
    let uuids: Vec<_> = ready.inventory.gpus.iter().map(|gpu| &gpu.uuid).collect();
    let withheld: Vec<_> = ready.withheld.iter().map(|it| &it.gpu).collect();
    assert_eq!((withheld, uuids.len()), (uuids, 2));
    for entry in &ready.withheld {
        assert_eq!(
            (&*entry.reason, &entry.tiers[..]),
            (reason::VGPU_HOST, &[][..])
        );
        assert!(entry.message.contains("libcuda"), "{entry:?}");
    }
    // One that is no host of vGPUs must have CUDA.
    let is_absent = |state: &DriverState| matches!(state, DriverState::Absent(_));
    observed.until(is_absent).await;
}

/// It is in sysfs only.
#[tokio::test]
async fn a_gpu_with_a_vgpu_is_withheld() {
    let world = World::new();
    let sysfs = tempfile::tempdir().unwrap();
    let observer = Observer {
        sysfs: sysfs.path().to_owned(),
        ..observer(&world)
    };
    let before = observer.check().unwrap();
    assert_eq!(before.withheld, []);
    let gpu = &before.inventory.gpus[1];
    let device = sysfs.path().join("bus/pci/devices").join(&gpu.pci_bus_id);
    let vgpu = "mdev_supported_types/nvidia-233/devices/070bcb42-18fc-4971-9aa9-67f5ee1281c3";
    std::fs::create_dir_all(device.join(vgpu)).unwrap();
    let after = observer.check().unwrap();
    assert_eq!(after.inventory.gpus[1].vgpu.as_ref().unwrap().devices, 1);
    let withheld: Vec<_> = after
        .withheld
        .iter()
        .map(|it| (&it.gpu, &*it.reason))
        .collect();
    assert_eq!(withheld, [(&gpu.uuid, reason::VGPU_HOST)]);
}
