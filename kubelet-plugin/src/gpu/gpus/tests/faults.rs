//! The driver fails, is slow, or is not there.

use std::sync::Arc;

use super::*;
use crate::testing::timeshared;

fn one_partition() -> serde_json::Value {
    claim("a", &[partition("x", 0, "1g10gb-6")])
}

/// Refused with this in its message and in the event on the claim's pods, and nothing left.
async fn is_refused_for(world: &World, plugin: &Plugin, why: &str) {
    let error = refusal(plugin, "a").await;
    assert!(error.contains(why), "{error}");
    let failed = plugin.reports.failed.lock().unwrap().pop();
    assert_eq!(failed, Some(("a".to_owned(), error)));
    assert_eq!(world.traces(), NONE, "{why}");
    assert_eq!(actual(world, GPU).instances, []);
}

#[tokio::test]
async fn a_driver_that_does_not_start_is_named_and_a_retry_succeeds() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(one_partition());
    world.mig.unload(true);
    is_refused_for(&world, &plugin, "no driver").await;
    world.mig.unload(false);
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "a retry");
}

#[tokio::test]
async fn mig_mode_that_needs_a_reset_is_named_and_a_retry_succeeds() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(one_partition());
    world.mig.demand_reset(GPU);
    is_refused_for(&world, &plugin, "reset of the GPU").await;
    assert_eq!(actual(&world, GPU).mig_mode, MigMode::default());
    // `nvidia-smi -mig 1` leaves the GPU in this state.
    world.mig.set_pending(GPU, true);
    is_refused_for(&world, &plugin, "reset of the GPU").await;
    world.mig.reset(GPU);
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
    assert!(
        actual(&world, GPU).mig_mode.current,
        "the administrator switched it on"
    );
}

#[tokio::test(start_paused = true)]
async fn claims_of_each_tier_are_released_without_the_driver() {
    for given in [
        whole("x", 0),
        capped("x", 0, "1Gi", 10),
        timeshared("x", 0),
        partition("x", 0, "1g10gb-6"),
        capped_on("x", 0, "3g40gb-4", "1Gi", 10),
    ] {
        let what = format!("{given:?}");
        let world = World::new();
        let plugin = world.start();
        world.api.put(claim("a", &[given]));
        plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        world.mig.unload(true);
        let gone = DriverError::Nvml(NvmlError::Devices("no driver".into()));
        plugin
            .driver
            .send_replace(DriverState::Absent(Arc::new(gone)));
        plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        assert!(plugin.preparer.ledger().held().is_empty(), "{what}");
        world.mig.unload(false);
        plugin
            .driver
            .send_replace(DriverState::Ready(Arc::clone(&world.ready)));
        settle(&plugin).await;
        nothing_is_left(&world, &what);
    }
}

/// Otherwise its pod could not end.
#[tokio::test(start_paused = true)]
async fn a_claim_is_released_while_the_driver_hangs() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(one_partition());
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let stop = CancellationToken::new();
    let settling = tokio::spawn(Arc::clone(&plugin.gpus).settle(stop.clone()));
    let hangs = || NvmlError::Hangs {
        call: "nvmlDeviceGetMigMode",
        object: GPU.to_owned(),
    };
    // Also when it is settled for the first time.
    for _ in 0..2 {
        world.mig.fail_to_read(hangs());
    }
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(plugin.preparer.ledger().held().is_empty());
    while !is_undivided(&world) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    stop.cancel();
    settling.await.unwrap();
    nothing_is_left(&world, "it answers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_gpu_delays_no_other() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(one_partition());
    let others: Vec<String> = (0..4).map(|n| format!("b{n}")).collect();
    for (n, name) in others.iter().enumerate() {
        let of = format!("1g10gb-{n}");
        world.api.put(claim(name, &[partition("x", 1, &of)]));
    }
    world.mig.hold_back(GPU, true);
    let preparer = Arc::clone(&plugin.preparer);
    let slow = tokio::spawn(async move { preparer.prepare(&claim_ref("a")).await.map(|_| ()) });
    let mut results = Vec::new();
    for name in &others {
        let result = plugin.preparer.prepare(&claim_ref(name)).await;
        results.push(result.map(|_| ()));
    }
    let is_waiting = !slow.is_finished();
    // This comes before anything can fail: the end of the test waits for its threads.
    world.mig.hold_back(GPU, false);
    for result in results {
        result.unwrap();
    }
    assert!(is_waiting);
    slow.await.unwrap().unwrap();
    for name in others.iter().map(String::as_str).chain(["a"]) {
        plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
    }
    nothing_is_left(&world, "all released");
}
