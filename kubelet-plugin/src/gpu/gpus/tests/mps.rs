//! Concurrent shares: the GPU's MPS daemon and its compute mode.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tranche_api::{Tier, WithheldGpu};
use tranche_driver::gpu_state::{ComputeMode, GpuChanges, OwnedDaemon};
use tranche_mps::layout::{DeviceId, Files};

use super::{
    GPU, NONE, actual, nothing_is_left, placement, refusal, two_concurrent_shares,
    two_concurrent_shares_of_a_partition,
};
use crate::gpu::gpus::daemons::PERIOD;
use crate::testing::{
    Plugin, World, claim, claim_ref, concurrent, concurrent_on, partition, whole,
};

const OWNED: GpuChanges = GpuChanges {
    switched_mig_on: false,
    instances: Vec::new(),
    mps: Some(OwnedDaemon {
        compute_mode_before: ComputeMode::Default,
    }),
    partition_daemons: Vec::new(),
    time_slice: None,
    vfio: None,
};

async fn prepare(plugin: &Plugin, name: &str) {
    plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
}

async fn unprepare(plugin: &Plugin, name: &str) {
    plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
}

#[tokio::test]
async fn claims_share_a_gpus_daemon_until_the_last_is_released() {
    let world = World::new();
    let plugin = world.start();
    for name in ["a", "b"] {
        world
            .api
            .put(claim(name, &[concurrent("x", 0, "20Gi", 30)]));
        prepare(&plugin, name).await;
        assert_eq!(world.mps.serving(), [GPU]);
        assert_eq!(
            actual(&world, GPU).compute_mode,
            ComputeMode::ExclusiveProcess
        );
    }
    assert_eq!(plugin.gpus.records().load(GPU).unwrap(), OWNED);
    unprepare(&plugin, "a").await;
    assert_eq!(world.mps.serving(), [GPU], "the other claim's stays");
    assert_eq!(world.mps.ensured(), 2, "a release needs no daemon");
    unprepare(&plugin, "b").await;
    assert_eq!(actual(&world, GPU).compute_mode, ComputeMode::Default);
    nothing_is_left(&world, "released");
}

#[tokio::test]
async fn containers_get_the_daemons_files_and_a_page_of_limits() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(two_concurrent_shares());
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let spec = world.cdi_devices("uid-of-a").to_string();
    let files = Files::of(
        &world.layout.mps(),
        &DeviceId::try_from(GPU.to_owned()).unwrap(),
    );
    for folder in [files.pipes(), files.shm()] {
        assert!(spec.contains(&*folder.to_string_lossy()), "{spec}");
    }
    for (device, threads) in record.plan.devices.iter().zip([25, 30]) {
        let share = world.layout.share("uid-of-a", &device.key);
        let page = std::fs::read(share.cap).unwrap();
        let cap = tranche_shim_core::cap::CapPage::decode(&page).unwrap();
        assert_eq!((cap.mps_threads, cap.cores), (Some(threads), None));
        assert!(share.account.exists());
    }
}

#[tokio::test(start_paused = true)]
async fn no_other_tier_gets_the_gpu_meanwhile() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[concurrent("x", 0, "20Gi", 30)]));
    prepare(&plugin, "a").await;
    for (name, other) in [("b", whole("x", 0)), ("c", partition("x", 0, "1g10gb-6"))] {
        world.api.put(claim(name, &[other]));
        let error = refusal(&plugin, name).await;
        assert!(error.contains("team/a in the tier concurrent"), "{error}");
    }
    unprepare(&plugin, "a").await;
    for name in ["b", "c"] {
        prepare(&plugin, name).await;
        assert_eq!(world.mps.serving(), NONE);
        unprepare(&plugin, name).await;
    }
    nothing_is_left(&world, "released");
}

#[tokio::test(start_paused = true)]
async fn a_missing_supervisor_is_named_and_nothing_is_half_made() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(two_concurrent_shares());
    world.mps.goes_away(true);
    let error = refusal(&plugin, "a").await;
    for part in [GPU, "supervisor.sock", "DaemonSet `tranche-mps`"] {
        assert!(error.contains(part), "{error}");
    }
    nothing_is_left(&world, "refused");
    world.mps.goes_away(false);
    prepare(&plugin, "a").await;
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_does_not_start_leaves_the_gpu_as_it_was() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(two_concurrent_shares());
    world.mps.dies(GPU, true);
    let error = refusal(&plugin, "a").await;
    assert!(error.contains("cannot be started"), "{error}");
    assert_eq!(actual(&world, GPU).compute_mode, ComputeMode::Default);
    nothing_is_left(&world, "refused");
}

/// Otherwise the pod could not end.
#[tokio::test(start_paused = true)]
async fn a_release_without_the_supervisor_is_finished_when_it_is_back() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(two_concurrent_shares());
    prepare(&plugin, "a").await;
    let stop = CancellationToken::new();
    let settling = tokio::spawn(Arc::clone(&plugin.gpus).settle(stop.clone()));
    world.mps.goes_away(true);
    unprepare(&plugin, "a").await;
    world.api.put(claim("b", &[whole("x", 0)]));
    let error = refusal(&plugin, "b").await;
    assert!(error.contains("DaemonSet `tranche-mps`"), "{error}");
    world.mps.goes_away(false);
    while !world.mps.serving().is_empty()
        || world.layout.gpus().join(format!("{GPU}.json")).exists()
    {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    stop.cancel();
    settling.await.unwrap();
    nothing_is_left(&world, "it is back");
    prepare(&plugin, "b").await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_released_while_the_daemon_of_others_is_dead() {
    let world = World::new();
    let plugin = world.start();
    for name in ["a", "b"] {
        world
            .api
            .put(claim(name, &[concurrent("x", 0, "20Gi", 30)]));
        prepare(&plugin, name).await;
    }
    world.mps.dies(GPU, true);
    unprepare(&plugin, "a").await;
    world.api.put(claim("c", &[concurrent("x", 0, "20Gi", 30)]));
    let error = refusal(&plugin, "c").await;
    assert!(error.contains("cannot be started"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_dead_daemon_withholds_the_tier_until_it_is_back() {
    let world = World::new();
    let plugin = world.start();
    let (sender, mut withheld) = watch::channel(Vec::new());
    let stop = CancellationToken::new();
    let watching = tokio::spawn(Arc::clone(&plugin.gpus).watch_daemons(sender, stop.clone()));
    world.mps.goes_away(true);
    tokio::time::sleep(PERIOD * 5).await;
    assert!(
        !withheld.has_changed().unwrap(),
        "nobody needs the supervisor"
    );
    world.mps.goes_away(false);
    world.api.put(claim("a", &[concurrent("x", 0, "20Gi", 30)]));
    prepare(&plugin, "a").await;
    tokio::time::sleep(PERIOD * 5).await;
    assert!(!withheld.has_changed().unwrap(), "it answers");
    for (is_away, is_dead, part) in [
        (false, true, "its process 7 ended"),
        (true, false, "supervisor.sock"),
    ] {
        world.mps.goes_away(is_away);
        world.mps.dies(GPU, is_dead);
        withheld.changed().await.unwrap();
        let found = withheld.borrow_and_update().clone();
        let [entry] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!((&*entry.gpu, &*entry.reason), (GPU, "MpsDaemon"));
        assert_eq!(entry.tiers, [Tier::Concurrent]);
        assert!(entry.message.contains(part), "{}", entry.message);
        world.mps.goes_away(false);
        world.mps.dies(GPU, false);
        withheld.changed().await.unwrap();
        assert_eq!(*withheld.borrow_and_update(), []);
    }
    stop.cancel();
    watching.await.unwrap();
}

/// Otherwise the scheduler would give it to claims of other tiers, which cannot be prepared.
#[tokio::test(start_paused = true)]
async fn a_gpu_with_a_daemon_that_nobody_wants_is_withheld_until_it_has_ended() {
    let world = World::new();
    let plugin = world.start();
    let (sender, mut withheld) = watch::channel(Vec::new());
    let stop = CancellationToken::new();
    let watching = tokio::spawn(Arc::clone(&plugin.gpus).watch_daemons(sender, stop.clone()));
    world.api.put(two_concurrent_shares());
    prepare(&plugin, "a").await;
    let settling = tokio::spawn(Arc::clone(&plugin.gpus).settle(stop.clone()));
    world.mps.goes_away(true);
    let released = tokio::time::Instant::now();
    unprepare(&plugin, "a").await;
    withheld.changed().await.unwrap();
    assert!(released.elapsed() < Duration::from_secs(1));
    let is_whole = |all: &[WithheldGpu]| matches!(all, [it] if it.gpu == GPU && it.reason == "LeftOver" && it.tiers.is_empty());
    let found = withheld.borrow_and_update().clone();
    assert!(is_whole(&found), "{found:?}");
    assert!(found[0].message.contains("supervisor.sock"), "{found:?}");
    tokio::time::sleep(PERIOD * 5).await;
    let found = withheld.borrow_and_update().clone();
    assert!(is_whole(&found), "{found:?}");
    world.mps.goes_away(false);
    withheld.changed().await.unwrap();
    assert_eq!(*withheld.borrow(), []);
    stop.cancel();
    watching.await.unwrap();
    settling.await.unwrap();
    nothing_is_left(&world, "it is back");
}

/// A program that is just ending needs a moment.
#[tokio::test(start_paused = true)]
async fn a_gpu_with_an_instance_in_use_that_nobody_wants_is_withheld() {
    let world = World::new();
    let plugin = world.start();
    let (sender, mut withheld) = watch::channel(Vec::new());
    let stop = CancellationToken::new();
    let watching = tokio::spawn(Arc::clone(&plugin.gpus).watch_daemons(sender, stop.clone()));
    world.api.put(claim("a", &[partition("x", 0, "1g10gb-6")]));
    prepare(&plugin, "a").await;
    let instance = actual(&world, GPU).instances[0].id;
    world.mig.use_instance(GPU, instance, true);
    let refused = plugin.preparer.unprepare(&claim_ref("a")).await;
    assert!(refused.is_err());
    assert!(!withheld.has_changed().unwrap());
    let changed = tokio::time::timeout(PERIOD * 5, withheld.changed()).await;
    changed.unwrap().unwrap();
    let found = withheld.borrow_and_update().clone();
    assert_eq!((&*found[0].gpu, &*found[0].reason), (GPU, "LeftOver"));
    world.mig.use_instance(GPU, instance, false);
    unprepare(&plugin, "a").await;
    withheld.changed().await.unwrap();
    assert_eq!(*withheld.borrow(), []);
    stop.cancel();
    watching.await.unwrap();
    nothing_is_left(&world, "released");
}

fn share_of_partition(name: &str, threads: u32) -> serde_json::Value {
    claim(name, &[concurrent_on("x", 0, "3g40gb-4", "15Gi", threads)])
}

/// The UUID of the only MIG device of the GPU.
fn mig_uuid(world: &World) -> String {
    let instances = actual(world, GPU).instances;
    let [instance] = &instances[..] else {
        panic!("{instances:?}")
    };
    instance.compute[0].uuid.clone()
}

#[tokio::test]
async fn claims_share_a_partitions_daemon_and_compute_mode_stays() {
    let world = World::new();
    let plugin = world.start();
    for (name, threads) in [("a", 60), ("b", 40)] {
        world.api.put(share_of_partition(name, threads));
        prepare(&plugin, name).await;
        assert_eq!(world.mps.serving(), [mig_uuid(&world)]);
        assert_eq!(actual(&world, GPU).compute_mode, ComputeMode::Default);
    }
    let mig = mig_uuid(&world);
    for (name, threads) in [("a", 60), ("b", 40)] {
        let uid = format!("uid-of-{name}");
        let spec = world.cdi_devices(&uid).to_string();
        let device = DeviceId::try_from(mig.clone()).unwrap();
        let files = Files::of(&world.layout.mps(), &device);
        for folder in [files.pipes(), files.shm()] {
            assert!(spec.contains(&*folder.to_string_lossy()), "{spec}");
        }
        let share = world.layout.share(&uid, &format!("{uid}-x-0"));
        let page = std::fs::read(share.cap).unwrap();
        let cap = tranche_shim_core::cap::CapPage::decode(&page).unwrap();
        assert_eq!((cap.gpu_uuid, cap.mps_threads), (&*mig, Some(threads)));
    }
    // Another partition of the GPU has nothing to do with it.
    world.api.put(claim("c", &[partition("x", 0, "1g10gb-0")]));
    prepare(&plugin, "c").await;
    unprepare(&plugin, "a").await;
    assert_eq!(world.mps.serving(), [&*mig], "the other claim's stays");
    assert_eq!(world.mps.ensured(), 2, "only by what needs the daemon");
    unprepare(&plugin, "b").await;
    assert_eq!(world.mps.serving(), NONE);
    let left = actual(&world, GPU).instances;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].placement, placement("1g.10gb", 0));
    unprepare(&plugin, "c").await;
    nothing_is_left(&world, "released");
}

#[tokio::test(start_paused = true)]
async fn without_a_supervisor_only_its_shares_get_no_partition() {
    let world = World::new();
    let plugin = world.start();
    world.mps.goes_away(true);
    world.api.put(two_concurrent_shares_of_a_partition());
    let error = refusal(&plugin, "a").await;
    for part in [GPU, "supervisor.sock", "DaemonSet `tranche-mps`"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(world.mig.changes().is_empty(), "nothing was changed");
    nothing_is_left(&world, "refused");
    world.api.put(claim("b", &[partition("x", 0, "3g40gb-4")]));
    prepare(&plugin, "b").await;
}

#[tokio::test(start_paused = true)]
async fn a_partition_is_removed_if_its_daemon_does_not_start() {
    let world = World::new();
    let plugin = world.start();
    world.mps.all_die(true);
    world.api.put(two_concurrent_shares_of_a_partition());
    let error = refusal(&plugin, "a").await;
    assert!(error.contains("cannot be started"), "{error}");
    nothing_is_left(&world, "refused");
    world.mps.all_die(false);
    prepare(&plugin, "a").await;
}

/// The claim is released, and the other partitions of the GPU do not wait for the supervisor.
#[tokio::test(start_paused = true)]
async fn a_partition_stays_until_the_supervisor_can_end_its_daemon() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(share_of_partition("a", 60));
    prepare(&plugin, "a").await;
    let stop = CancellationToken::new();
    let settling = tokio::spawn(Arc::clone(&plugin.gpus).settle(stop.clone()));
    world.mps.goes_away(true);
    unprepare(&plugin, "a").await;
    world.api.put(claim("b", &[partition("x", 0, "1g10gb-0")]));
    prepare(&plugin, "b").await;
    let there = actual(&world, GPU).instances;
    assert_eq!(there.len(), 2);
    // A partition in its place, or the whole GPU, is refused with the reason.
    unprepare(&plugin, "b").await;
    for (name, other) in [("c", partition("x", 0, "4g40gb-0")), ("d", whole("x", 0))] {
        world.api.put(claim(name, &[other]));
        let is_beside = name == "c";
        let result = plugin.preparer.prepare(&claim_ref(name)).await;
        assert_eq!(result.is_ok(), is_beside, "{name}");
        if let Err(error) = result {
            let error = error.to_string();
            assert!(error.contains("DaemonSet `tranche-mps`"), "{error}");
        } else {
            unprepare(&plugin, name).await;
        }
    }
    world.api.put(claim("e", &[partition("x", 0, "2g20gb-4")]));
    let error = refusal(&plugin, "e").await;
    assert!(error.contains("DaemonSet `tranche-mps`"), "{error}");
    world.mps.goes_away(false);
    while !actual(&world, GPU).instances.is_empty() || actual(&world, GPU).mig_mode.current {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    stop.cancel();
    settling.await.unwrap();
    nothing_is_left(&world, "it is back");
    prepare(&plugin, "d").await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_daemon_of_a_partition_withholds_the_tier_of_its_gpu() {
    let world = World::new();
    let plugin = world.start();
    let (sender, mut withheld) = watch::channel(Vec::new());
    let stop = CancellationToken::new();
    let watching = tokio::spawn(Arc::clone(&plugin.gpus).watch_daemons(sender, stop.clone()));
    world.api.put(share_of_partition("a", 60));
    prepare(&plugin, "a").await;
    let mig = mig_uuid(&world);
    world.mps.dies(&mig, true);
    withheld.changed().await.unwrap();
    let found = withheld.borrow_and_update().clone();
    let [entry] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!((&*entry.gpu, &*entry.reason), (GPU, "MpsDaemon"));
    assert_eq!(entry.tiers, [Tier::Concurrent]);
    assert!(
        entry.message.contains(&format!("partition {mig}")),
        "{}",
        entry.message
    );
    world.mps.dies(&mig, false);
    withheld.changed().await.unwrap();
    assert_eq!(*withheld.borrow_and_update(), []);
    stop.cancel();
    watching.await.unwrap();
}
