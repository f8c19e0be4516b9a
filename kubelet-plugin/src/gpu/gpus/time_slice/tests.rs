//! The length of time slices, through the kubelet's calls.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use tranche_api::gpu_node::Published;
use tranche_api::sharing_policy::Interval;
use tranche_node::nvml::Nvml as _;

use crate::claim::orphans::schedule::SPREAD;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::DriverState;
use crate::host::fs::testing::{Fault, FaultyFs};
use crate::testing::{KubeletList, Plugin, World, claim, claim_ref, timeshared, whole};

/// What an administrator set before anybody claimed the GPU.
const BEFORE: Interval = Interval::Medium;

fn gpu(minor: usize) -> String {
    format!("GPU-{minor:08}-0000-0000-0000-00000000000{minor}")
}

/// What the controller publishes under a policy with this interval.
fn policy(world: &World, interval: &str) -> NodePolicy {
    let inventory = &world.ready.inventory;
    let gpus: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| json!({"uuid": gpu.uuid, "timeshared": {"interval": interval}}))
        .collect();
    let published = json!({"epoch": 1, "poolGeneration": 1, "gpus": gpus});
    NodePolicy::of(&serde_json::from_value::<Published>(published).unwrap())
}

fn world() -> World {
    let world = World::new();
    for minor in 0..2 {
        world.mig.set_time_slice(&gpu(minor), BEFORE).unwrap();
    }
    for name in ["a", "b"] {
        let shares = [timeshared("x", 0), timeshared("y", 1)];
        world.api.put(claim(name, &shares));
    }
    world
}

fn under(world: &World, plugin: Plugin, interval: &str) -> Plugin {
    plugin.policy.send_replace(policy(world, interval));
    plugin
}

#[track_caller]
fn every_slice_is(world: &World, interval: Interval, what: &str) {
    for minor in 0..2 {
        let slice = world.mig.time_slice(&gpu(minor)).unwrap();
        assert_eq!(slice, interval, "GPU {minor}, {what}");
    }
}

#[track_caller]
fn nothing_is_left(world: &World, what: &str) {
    assert_eq!(world.traces(), [""; 0], "{what}");
    every_slice_is(world, BEFORE, what);
}

/// Lets a process settle its GPUs, as it does when the driver is ready.
async fn settle(plugin: &Plugin) {
    let stop = CancellationToken::new();
    let settled = Arc::clone(&plugin.gpus).settle(stop.clone());
    let _ = tokio::time::timeout(Duration::from_secs(1), settled).await;
}

#[tokio::test]
async fn the_policys_length_holds_from_the_first_share_to_the_last() {
    let world = world();
    let plugin = under(&world, world.start(), "Long");
    for name in ["a", "b"] {
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        every_slice_is(&world, Interval::Long, name);
    }
    // A policy that changes does not disturb them.
    let plugin = under(&world, plugin, "Short");
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    every_slice_is(&world, Interval::Long, "b was prepared before the change");
    plugin.preparer.unprepare(&claim_ref("b")).await.unwrap();
    every_slice_is(&world, Interval::Short, "a was prepared after the change");
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "released");
}

#[tokio::test]
async fn without_an_interval_or_a_share_nothing_is_set() {
    let world = world();
    world.api.put(claim("whole", &[whole("gpu", 0)]));
    for (interval, name) in [("Default", "a"), ("Long", "whole")] {
        let plugin = under(&world, world.start(), interval);
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        every_slice_is(&world, BEFORE, name);
        let records = world.layout.gpus().read_dir().unwrap();
        assert_eq!(records.count(), 0, "{name}");
        plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
    }
}

#[derive(Clone, Copy, Debug)]
enum Ending {
    Retried,
    Released,
    Orphaned,
    Rebooted,
}

async fn ends_well(world: &World, ending: Ending, what: &str) {
    if let Ending::Rebooted = ending {
        world.mig.reboot();
    }
    let plugin = under(world, world.start(), "Long");
    settle(&plugin).await;
    match ending {
        Ending::Retried | Ending::Rebooted => {
            plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
            every_slice_is(world, Interval::Long, what);
            plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        }
        Ending::Released => plugin.preparer.unprepare(&claim_ref("a")).await.unwrap(),
        Ending::Orphaned => {
            world.api.delete(&claim("a", &[]));
            let search = plugin.search(world, &KubeletList::default()).await;
            search.run_for(SPREAD * 2).await;
        }
    }
    assert_eq!(world.traces(), [""; 0], "{what}");
    for minor in 0..2 {
        let slice = world.mig.time_slice(&gpu(minor)).unwrap();
        // A boot set the driver's own; a record that outlived it says what was before.
        let is_boots = matches!(ending, Ending::Rebooted) && slice == Interval::Default;
        assert!(
            slice == BEFORE || is_boots,
            "GPU {minor}, {what}: {slice:?}"
        );
    }
}

const ENDINGS: [Ending; 4] = [
    Ending::Retried,
    Ending::Released,
    Ending::Orphaned,
    Ending::Rebooted,
];

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_prepare_it_converges() {
    for ending in ENDINGS {
        for at in 0.. {
            let world = world();
            let fs = Arc::new(FaultyFs::new(at, Fault::Death));
            if let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) {
                let plugin = under(&world, plugin, "Long");
                let result = plugin.preparer.prepare(&claim_ref("a")).await;
                assert_eq!(result.is_err(), fs.struck(), "{at}");
            }
            ends_well(&world, ending, &format!("{ending:?} {at}")).await;
            if !fs.struck() {
                assert!(at > 30, "only {at} steps were tried");
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_unprepare_it_converges() {
    for ending in ENDINGS {
        for at in 0.. {
            let world = world();
            let plugin = under(&world, world.start(), "Long");
            plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
            drop(plugin);
            let fs = Arc::new(FaultyFs::new(at, Fault::Death));
            if let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) {
                let result = plugin.preparer.unprepare(&claim_ref("a")).await;
                assert_eq!(result.is_err(), fs.struck(), "{at}");
            }
            ends_well(&world, ending, &format!("{ending:?} {at}")).await;
            if !fs.struck() {
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_without_the_driver_is_completed_when_it_is_back() {
    let world = world();
    let plugin = under(&world, world.start(), "Long");
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world.mig.unload(true);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(plugin.preparer.ledger().held().is_empty());
    every_slice_is(&world, Interval::Long, "nobody could restore it");
    world.mig.unload(false);
    plugin
        .driver
        .send_replace(DriverState::Ready(Arc::clone(&world.ready)));
    settle(&plugin).await;
    nothing_is_left(&world, "the driver is back");
}
