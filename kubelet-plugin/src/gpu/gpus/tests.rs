//! Partitions and concurrent shares of claims, through the kubelet's calls.

mod at_once;
mod faults;
mod mps;
mod vfio;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tranche_api::gpu_node::MigMode;
use tranche_driver::gpu_state::{Actual, Change, ComputeMode};
use tranche_driver::mig::Placement;

use crate::claim::orphans::schedule::SPREAD;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::{DriverError, DriverState};
use crate::host::fs::testing::{Fault, FaultyFs};
use crate::testing::{
    KubeletList, Plugin, World, capped, capped_on, claim, claim_ref, concurrent, concurrent_on,
    partition, passthrough, whole,
};
use tranche_node::nvml::{Nvml as _, NvmlError};
use tranche_shim_core::cap::CapPage;

const GPU: &str = "GPU-00000000-0000-0000-0000-000000000000";
const NONE: [&str; 0] = [];

fn two_partitions() -> serde_json::Value {
    claim(
        "a",
        &[
            partition("x", 0, "1g10gb-6"),
            partition("y", 0, "3g40gb-0"),
            partition("z", 1, "7g80gb-0"),
        ],
    )
}

fn two_concurrent_shares() -> serde_json::Value {
    let two = [
        concurrent("x", 0, "20Gi", 25),
        concurrent("y", 0, "10Gi", 30),
    ];
    claim("a", &two)
}

fn two_shares_of_a_partition() -> serde_json::Value {
    let two = [
        capped_on("x", 0, "3g40gb-4", "20Gi", 25),
        capped_on("y", 0, "3g40gb-4", "10Gi", 30),
    ];
    claim("a", &two)
}

fn two_concurrent_shares_of_a_partition() -> serde_json::Value {
    let two = [
        concurrent_on("x", 0, "3g40gb-4", "20Gi", 25),
        concurrent_on("y", 0, "3g40gb-4", "10Gi", 30),
    ];
    claim("a", &two)
}

fn two_at_vfio() -> serde_json::Value {
    claim("a", &[passthrough("x", 0), passthrough("y", 1)])
}

fn product<A: Clone, B: Clone>(
    first: impl IntoIterator<Item = A>,
    second: impl IntoIterator<Item = B> + Clone,
) -> impl Iterator<Item = (A, B)> {
    first
        .into_iter()
        .flat_map(move |a| second.clone().into_iter().map(move |b| (a.clone(), b)))
}

fn placement(profile: &str, start: u8) -> Placement {
    Placement {
        start,
        profile: profile.parse().unwrap(),
    }
}

/// No claim, no record, no instance, no daemon, and MIG mode and compute mode as they were.
fn nothing_is_left(world: &World, what: &str) {
    assert_eq!(world.traces(), NONE, "{what}");
    assert_eq!(world.mps.serving(), NONE, "{what}");
    assert_eq!(world.pci.changed(), NONE, "{what}");
    assert!(is_undivided(world), "{what}: {:?}", world.mig);
}

fn is_undivided(world: &World) -> bool {
    let gpus = world.ready.inventory.gpus.iter();
    let mut states = gpus.map(|gpu| world.mig.mig_state(&gpu.uuid).unwrap());
    states.all(|state| state == Actual::default())
}

fn actual(world: &World, gpu: &str) -> Actual {
    world.mig.mig_state(gpu).unwrap()
}

async fn refusal(plugin: &Plugin, name: &str) -> String {
    let error = plugin.preparer.prepare(&claim_ref(name)).await;
    error.map(|_| ()).unwrap_err().to_string()
}

/// Lets a process settle its GPUs, as it does when the driver is ready.
async fn settle(plugin: &Plugin) {
    let stop = CancellationToken::new();
    let settled = Arc::clone(&plugin.gpus).settle(stop.clone());
    let _ = tokio::time::timeout(Duration::from_secs(1), settled).await;
}

#[tokio::test]
async fn a_claims_partitions_are_made_and_removed() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(two_partitions());
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(actual(&world, GPU).instances.len(), 2);
    // The plan on disk is the same.
    let after_a_restart = world.start().preparer.ledger().held();
    assert_eq!(after_a_restart[0].plan, record.plan);
    for device in &record.plan.devices {
        let partition = device.partition.as_ref().unwrap();
        let mig = partition.mig.as_ref().unwrap();
        let instances = actual(&world, &device.gpu_uuid).instances;
        let instance = instances
            .iter()
            .find(|it| it.id == mig.gpu_instance)
            .unwrap();
        assert_eq!(
            (instance.placement, &instance.compute[0].uuid),
            (partition.placement, &mig.uuid)
        );
        let share = world.layout.share("uid-of-a", &device.key);
        let page = std::fs::read(share.cap).unwrap();
        let cap = CapPage::decode(&page).unwrap();
        assert_eq!(cap.gpu_uuid, mig.uuid, "programs see the MIG device");
    }
    let spec = world.cdi_devices("uid-of-a").to_string();
    assert_eq!(
        spec.matches("/dev/nvidia-caps/nvidia-cap").count(),
        12,
        "{spec}"
    );
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "unprepared");
}

#[tokio::test]
async fn the_first_share_makes_a_partition_and_the_last_removes_it() {
    let world = World::new();
    let plugin = world.start();
    for (name, cores) in [("a", 60), ("b", 40)] {
        let share = capped_on("x", 0, "3g40gb-4", "15Gi", cores);
        world.api.put(claim(name, &[share]));
    }
    world.api.put(claim("c", &[partition("x", 0, "1g10gb-0")]));
    plugin.preparer.prepare(&claim_ref("c")).await.unwrap();
    let mut devices = Vec::new();
    for name in ["a", "b"] {
        let record = plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        let device = record.plan.devices[0].clone();
        let mig = device.partition.clone().unwrap().mig.unwrap();
        let share = world.layout.share(&format!("uid-of-{name}"), &device.key);
        let page = std::fs::read(share.cap).unwrap();
        let cap = CapPage::decode(&page).unwrap();
        // Programs see the MIG device, and have a cap on it.
        assert_eq!(cap.gpu_uuid, mig.uuid);
        assert_eq!(cap.memory_limit, Some(15 << 30));
        assert!(share.account.exists());
        let spec = world.cdi_devices(&format!("uid-of-{name}")).to_string();
        for minor in mig.capabilities {
            let node = format!("\"/dev/nvidia-caps/nvidia-cap{minor}\"");
            assert!(spec.contains(&node), "{spec}");
        }
        devices.push(mig);
    }
    assert_eq!(devices[0], devices[1], "one instance for both");
    assert_eq!(actual(&world, GPU).instances.len(), 2);
    let changes = world.mig.changes().len();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.mig.changes().len(), changes, "the other share has it");
    plugin.preparer.unprepare(&claim_ref("b")).await.unwrap();
    let left: Vec<_> = actual(&world, GPU).instances;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].placement, placement("1g.10gb", 0));
    plugin.preparer.unprepare(&claim_ref("c")).await.unwrap();
    nothing_is_left(&world, "unprepared");
}

#[tokio::test]
async fn a_neighbour_is_not_touched() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[partition("x", 0, "3g40gb-0")]));
    world.api.put(claim("b", &[partition("x", 0, "1g10gb-6")]));
    let a = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("b")).await.unwrap();
    assert_eq!(actual(&world, GPU).instances.len(), 1);
    let again = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(a.plan, again.plan);
    let changes = world.mig.changes();
    let of_neighbour = |(_, change): &(String, Change)| {
        matches!(
            change,
            Change::DestroyInstance { instance: 1 }
                | Change::DestroyComputeInstance { instance: 1, .. }
        )
    };
    assert!(!changes.iter().any(of_neighbour), "{changes:?}");
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "unprepared");
}

/// What an allocator that ignores counters might give away.
#[tokio::test(start_paused = true)]
async fn what_overlaps_is_refused() {
    for (first, second) in [
        (partition("x", 0, "3g40gb-0"), partition("x", 0, "2g20gb-2")),
        (partition("x", 0, "3g40gb-0"), partition("x", 0, "3g40gb-0")),
        (partition("x", 0, "3g40gb-0"), whole("x", 0)),
        (
            capped_on("x", 0, "3g40gb-0", "10Gi", 10),
            partition("x", 0, "3g40gb-0"),
        ),
        (
            partition("x", 0, "3g40gb-0"),
            capped_on("x", 0, "3g40gb-0", "10Gi", 10),
        ),
        (
            capped_on("x", 0, "3g40gb-0", "30Gi", 10),
            capped_on("x", 0, "3g40gb-0", "10Gi", 10),
        ),
        (
            capped_on("x", 0, "3g40gb-0", "10Gi", 10),
            capped_on("x", 0, "1g10gb-0", "5Gi", 10),
        ),
        (
            capped_on("x", 0, "3g40gb-0", "10Gi", 10),
            capped("x", 0, "10Gi", 10),
        ),
        (
            capped_on("x", 0, "3g40gb-0", "10Gi", 10),
            concurrent_on("x", 0, "3g40gb-0", "10Gi", 10),
        ),
        (
            concurrent_on("x", 0, "3g40gb-0", "10Gi", 10),
            concurrent("x", 0, "10Gi", 10),
        ),
        (
            concurrent("x", 0, "10Gi", 10),
            concurrent_on("x", 0, "3g40gb-0", "10Gi", 10),
        ),
        (whole("x", 0), partition("x", 0, "3g40gb-0")),
    ] {
        let world = World::new();
        let plugin = world.start();
        world.api.put(claim("first", &[first]));
        world.api.put(claim("second", &[second]));
        plugin.preparer.prepare(&claim_ref("first")).await.unwrap();
        let before = actual(&world, GPU);
        let error = refusal(&plugin, "second").await;
        assert!(error.contains("team/first"), "{error}");
        assert_eq!(actual(&world, GPU), before);
        plugin
            .preparer
            .unprepare(&claim_ref("first"))
            .await
            .unwrap();
        plugin.preparer.prepare(&claim_ref("second")).await.unwrap();
        plugin
            .preparer
            .unprepare(&claim_ref("second"))
            .await
            .unwrap();
        nothing_is_left(&world, &error);
    }
    let world = World::new();
    let plugin = world.start();
    world
        .api
        .put(claim("none", &[partition("x", 0, "2g20gb-1")]));
    let error = refusal(&plugin, "none").await;
    assert!(error.contains("2g.20gb at memory slice 1"), "{error}");
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    Retried,
    Released,
    Orphaned,
    Rebooted,
    RebootedInAnotherOrder,
}

const ENDINGS: [Ending; 5] = [
    Ending::Retried,
    Ending::Released,
    Ending::Orphaned,
    Ending::Rebooted,
    Ending::RebootedInAnotherOrder,
];

impl Ending {
    fn boot(self, world: &mut World) {
        match self {
            Self::Rebooted => world.reboot(),
            Self::RebootedInAnotherOrder => world.reboot_in_another_order(),
            Self::Retried | Self::Released | Self::Orphaned => {}
        }
    }
}

/// The claims whose every step is interrupted.
fn interrupted() -> [serde_json::Value; 5] {
    [
        two_partitions(),
        two_shares_of_a_partition(),
        two_concurrent_shares(),
        two_concurrent_shares_of_a_partition(),
        two_at_vfio(),
    ]
}

/// The record of a GPU, whose instances have no order.
fn in_any_order(record: &[u8]) -> String {
    let mut record: serde_json::Value = serde_json::from_slice(record).unwrap();
    if let Some(instances) = record["changes"]["instances"].as_array_mut() {
        instances.sort_by_key(ToString::to_string);
    }
    record.to_string()
}

/// The text without what differs between two MIG devices of the same partition: the first digits of their UUIDs.
fn anonymous(text: &str) -> String {
    let parts: Vec<_> = text
        .split("MIG-")
        .enumerate()
        .map(|(n, part)| if n == 0 { part } else { &part[8..] })
        .collect();
    parts.join("MIG-")
}

/// What a prepared claim has on the node: its files, its placements on the GPUs, and the GPUs' daemons and compute modes.
#[derive(Debug, PartialEq)]
struct Prepared {
    files: Vec<(String, String)>,
    /// By the GPU's UUID.
    gpus: BTreeMap<String, (BTreeSet<Placement>, ComputeMode)>,
    daemons: Vec<String>,
    /// The PCI functions that are not bound as at boot.
    functions: Vec<String>,
}

impl Prepared {
    fn of(world: &World) -> Self {
        // A MIG device that is made again has another UUID, which is part of a page's checksum.
        let text = |path: &str, content: &[u8]| {
            let raw = std::fs::read(world.dir.path().join(path)).unwrap_or_default();
            anonymous(&match CapPage::decode(&raw) {
                Ok(page) => format!("{page:?}"),
                Err(_) if path.starts_with("plugin/gpus/GPU-") => in_any_order(content),
                Err(_) => String::from_utf8_lossy(content).into_owned(),
            })
        };
        let contents = world.contents().into_iter();
        let state = |gpu: &tranche_api::gpu_node::Gpu| {
            // The driver does not know a GPU that is at VFIO.
            let actual = world.mig.mig_state(&gpu.uuid).unwrap_or_default();
            let placements = actual.instances.iter().map(|it| it.placement).collect();
            (gpu.uuid.clone(), (placements, actual.compute_mode))
        };
        Self {
            files: contents
                .map(|(path, content)| (path.clone(), text(&path, &content)))
                .collect(),
            gpus: world.ready.inventory.gpus.iter().map(state).collect(),
            daemons: world.mps.serving().iter().map(|it| anonymous(it)).collect(),
            functions: world.pci.changed(),
        }
    }

    /// Without a crash, on a machine that was booted in this way.
    async fn undisturbed(object: &serde_json::Value, ending: Ending) -> Self {
        let mut world = World::new();
        ending.boot(&mut world);
        world.api.put(object.clone());
        world.prepare("a").await;
        Self::of(&world)
    }
}

async fn ends_well(
    world: &mut World,
    object: &serde_json::Value,
    ending: Ending,
    wanted: &Prepared,
    what: &str,
) {
    ending.boot(world);
    let plugin = world.start();
    settle(&plugin).await;
    match ending {
        Ending::Retried | Ending::Rebooted | Ending::RebootedInAnotherOrder => {
            plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
            let prepared = Prepared::of(world);
            for (there, wanted) in prepared.files.iter().zip(&wanted.files) {
                assert_eq!(there, wanted, "{what}");
            }
            assert_eq!(prepared, *wanted, "{what}");
            plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        }
        Ending::Released => plugin.preparer.unprepare(&claim_ref("a")).await.unwrap(),
        Ending::Orphaned => {
            world.api.delete(object);
            let search = plugin.search(world, &KubeletList::default()).await;
            search.run_for(SPREAD * 2).await;
        }
    }
    nothing_is_left(world, what);
}

/// Nothing but the order of the GPUs changed, and all that a claim has is on the GPU with the same UUID.
#[tokio::test]
async fn an_undisturbed_claim_has_the_same_gpus_in_any_order() {
    for object in interrupted() {
        let usual = Prepared::undisturbed(&object, Ending::Rebooted).await;
        let other = Prepared::undisturbed(&object, Ending::RebootedInAnotherOrder).await;
        assert_ne!(usual.files, other.files, "device nodes have other numbers");
        assert_eq!((usual.gpus, usual.daemons), (other.gpus, other.daemons));
    }
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_prepare_it_converges() {
    for (object, ending) in product(interrupted(), ENDINGS) {
        let wanted = Prepared::undisturbed(&object, ending).await;
        for at in 0.. {
            let mut world = World::new();
            world.api.put(object.clone());
            let fs = Arc::new(FaultyFs::new(at, Fault::Death));
            if let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) {
                let result = plugin.preparer.prepare(&claim_ref("a")).await;
                assert_eq!(result.is_err(), fs.struck(), "{at}");
            }
            let what = format!("{ending:?} {at}");
            ends_well(&mut world, &object, ending, &wanted, &what).await;
            if !fs.struck() {
                assert!(at > 30, "only {at} steps were tried");
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_unprepare_it_converges() {
    for (object, ending) in product(interrupted(), ENDINGS) {
        let wanted = Prepared::undisturbed(&object, ending).await;
        for at in 0.. {
            let mut world = World::new();
            world.api.put(object.clone());
            world.prepare("a").await;
            let fs = Arc::new(FaultyFs::new(at, Fault::Death));
            if let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) {
                let result = plugin.preparer.unprepare(&claim_ref("a")).await;
                // The daemon of a released claim may be ended later.
                assert!(result.is_ok() || fs.struck(), "{at}");
            }
            let what = format!("{ending:?} {at}");
            ends_well(&mut world, &object, ending, &wanted, &what).await;
            if !fs.struck() {
                break;
            }
        }
    }
}

#[tokio::test]
async fn one_failing_step_leaves_nothing_half_made() {
    for object in interrupted() {
        for at in 0.. {
            let world = World::new();
            world.api.put(object.clone());
            let fs = Arc::new(FaultyFs::new(at, Fault::Once));
            let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) else {
                continue;
            };
            let result = plugin.preparer.prepare(&claim_ref("a")).await;
            if !fs.struck() {
                result.unwrap();
                break;
            }
            let error = result.unwrap_err().to_string();
            assert!(error.contains("injected fault"), "{error}");
            nothing_is_left(&world, &format!("{at}: {error}"));
            plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        }
    }
}

/// For example, a call fails after the GPU instance was made and before the compute instance.
#[tokio::test]
async fn a_failing_call_of_the_driver_is_undone_and_named() {
    let any = placement("1g.10gb", 6);
    for change in [
        Change::SwitchMigMode { on: true },
        Change::CreateInstance(any),
        Change::CreateComputeInstance { instance: 1 },
    ] {
        let world = World::new();
        let plugin = world.start();
        world.api.put(two_partitions());
        let error = NvmlError::Call {
            call: "nvmlCall",
            object: GPU.into(),
            reason: "an internal driver error occurred".into(),
        };
        world.mig.fail(change, error.into());
        let error = refusal(&plugin, "a").await;
        assert!(
            error.contains("an internal driver error occurred"),
            "{error}"
        );
        nothing_is_left(&world, &format!("{change:?}"));
        plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        nothing_is_left(&world, &format!("{change:?}"));
    }
}

#[tokio::test]
async fn an_instance_in_use_stays_held_until_it_is_free() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[partition("x", 0, "1g10gb-6")]));
    world.api.put(claim("b", &[partition("x", 0, "1g10gb-6")]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world.mig.use_instance(GPU, 1, true);
    let refused = plugin.preparer.unprepare(&claim_ref("a")).await;
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
    let held = plugin.preparer.ledger().held();
    assert_eq!(held.len(), 1, "its slices stay counted");
    world.mig.use_instance(GPU, 1, false);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "freed");
    plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
}

/// The kubelet asks again only after a minute.
#[tokio::test(start_paused = true)]
async fn a_gpu_that_a_program_has_open_is_waited_for() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[partition("x", 0, "1g10gb-6")]));
    world.mig.use_whole(GPU, true);
    let (preparer, gpus) = (Arc::clone(&plugin.preparer), world.mig.clone());
    let waiting = tokio::spawn(async move { preparer.prepare(&claim_ref("a")).await.map(|_| ()) });
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(!waiting.is_finished());
    gpus.use_whole(GPU, false);
    waiting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_release_without_the_driver_is_finished_when_it_is_back() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(two_partitions());
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let gone = DriverError::Nvml(NvmlError::Devices("no driver".into()));
    plugin
        .driver
        .send_replace(DriverState::Absent(Arc::new(gone)));
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(plugin.preparer.ledger().held().is_empty());
    assert!(!is_undivided(&world), "nobody could remove them");
    plugin
        .driver
        .send_replace(DriverState::Ready(Arc::clone(&world.ready)));
    settle(&plugin).await;
    nothing_is_left(&world, "the driver is back");
}

/// A boot script may make an instance with the placement and the id that a claim's had.
#[tokio::test]
async fn an_instance_that_somebody_made_after_a_boot_stays() {
    let world = World::new();
    world.api.put(claim("a", &[partition("x", 0, "2g20gb-4")]));
    world
        .start()
        .preparer
        .prepare(&claim_ref("a"))
        .await
        .unwrap();
    let ours = actual(&world, GPU).instances;
    world.reboot();
    let administrator = world.driver();
    for change in [
        Change::SwitchMigMode { on: true },
        Change::CreateInstance(placement("2g.20gb", 4)),
        Change::CreateComputeInstance { instance: 1 },
    ] {
        administrator.change_mig(GPU, &change).unwrap();
    }
    let theirs = actual(&world, GPU).instances;
    assert_eq!(
        (theirs[0].id, theirs[0].placement),
        (ours[0].id, ours[0].placement)
    );
    let plugin = world.start();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(actual(&world, GPU).instances, theirs);
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn an_administrators_partition_is_used_and_stays() {
    let world = World::new();
    let plugin = world.start();
    let administrator = world.driver();
    for change in [
        Change::SwitchMigMode { on: true },
        Change::CreateInstance(placement("2g.20gb", 4)),
        Change::CreateComputeInstance { instance: 1 },
    ] {
        administrator.change_mig(GPU, &change).unwrap();
    }
    let before = actual(&world, GPU);
    world.api.put(claim(
        "a",
        &[partition("x", 0, "2g20gb-4"), partition("y", 0, "1g10gb-0")],
    ));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let used = record.plan.devices[0]
        .partition
        .as_ref()
        .unwrap()
        .mig
        .as_ref()
        .unwrap();
    assert_eq!(used.uuid, before.instances[0].compute[0].uuid);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(actual(&world, GPU), before);
    assert_eq!(
        before.mig_mode,
        MigMode {
            current: true,
            pending: true
        }
    );
}

/// The policy names another profile, another tier, or nothing of the GPU.
#[tokio::test]
async fn a_policy_that_offers_less_leaves_what_claims_hold() {
    for object in interrupted() {
        let world = World::new();
        let plugin = world.start();
        world.api.put(object);
        let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        let before = Prepared::of(&world);
        for plugin in [plugin, world.start()] {
            plugin.policy.send_replace(NodePolicy::default());
            settle(&plugin).await;
            assert_eq!(Prepared::of(&world), before);
            // A container that starts again has what it had.
            let again = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
            assert_eq!(again.plan, record.plan);
            assert_eq!(Prepared::of(&world), before);
        }
        let plugin = world.start();
        plugin.policy.send_replace(NodePolicy::default());
        plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        nothing_is_left(&world, "released under another policy");
    }
}

#[tokio::test]
async fn a_record_that_cannot_be_read_keeps_its_gpu_from_all_claims() {
    let world = World::new();
    let plugin = world.start();
    let file = world.layout.gpus().join(format!("{GPU}.json"));
    std::fs::write(&file, br#"{"version": 9, "minReader": 9}"#).unwrap();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    world.api.put(claim("b", &[whole("gpu", 1)]));
    let error = refusal(&plugin, "a").await;
    assert!(
        error.contains(&*file.to_string_lossy()) && error.contains("version 9"),
        "{error}"
    );
    plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
    std::fs::remove_file(file).unwrap();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
}
