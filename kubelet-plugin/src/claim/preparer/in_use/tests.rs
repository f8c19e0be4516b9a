use std::fs;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tranche_driver::journal::ClaimRecord;

use crate::claim::preparer::{ENDING_PAUSE, PATIENCE, Problem, UnprepareError};
use crate::testing::{
    Given, Plugin, World, capped, claim, claim_ref, concurrent, partition, whole,
};

/// A plugin with a prepared claim `a`.
async fn prepared(device: Given) -> (World, Plugin, Arc<ClaimRecord>) {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[device]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    (world, plugin, record)
}

async fn unprepare(plugin: &Plugin) -> Result<(), UnprepareError> {
    plugin.preparer.unprepare(&claim_ref("a")).await
}

fn is_held(plugin: &Plugin) -> bool {
    !plugin.preparer.ledger().held().is_empty()
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_released_when_its_processes_have_ended() {
    for device in [
        whole("gpu", 0),
        capped("gpu", 0, "1Gi", 10),
        concurrent("gpu", 0, "1Gi", 10),
        partition("gpu", 0, "1g10gb-6"),
    ] {
        let (world, plugin, record) = prepared(device).await;
        world.run_in_container(&record, 4711);
        world.run_in_container(&record, 4712);
        let release = unprepare(&plugin);
        tokio::pin!(release);
        for pid in [4711, 4712] {
            let early = tokio::time::timeout(PATIENCE / 3, &mut release).await;
            assert!(early.is_err() && is_held(&plugin), "{early:?}");
            world.end(pid);
        }
        let ended = Instant::now();
        release.await.unwrap();
        assert!(ended.elapsed() <= ENDING_PAUSE, "{:?}", ended.elapsed());
        assert!(!is_held(&plugin) && world.traces().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_stays_held_until_its_processes_have_ended() {
    let (world, plugin, record) = prepared(whole("gpu", 0)).await;
    world.run_in_container(&record, 4711);
    world.api.put(claim("next", &[whole("gpu", 0)]));
    let (before, start) = (world.contents(), Instant::now());
    let error = unprepare(&plugin).await.unwrap_err();
    // Within the time that the kubelet gives the call.
    let took = start.elapsed();
    assert!(
        took >= PATIENCE && took < Duration::from_secs(40),
        "{took:?}"
    );
    assert!(matches!(error.problem, Problem::InUse(_)), "{error}");
    assert!(error.to_string().contains("4711"), "{error}");
    assert_eq!(world.contents(), before);
    let refused = plugin.preparer.prepare(&claim_ref("next")).await;
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("is held by claim team/a")
    );
    world.end(4711);
    unprepare(&plugin).await.unwrap();
    plugin.preparer.prepare(&claim_ref("next")).await.unwrap();
}

/// Ended processes, and processes of others and of the host, do not delay the release.
#[tokio::test(start_paused = true)]
async fn a_claim_whose_processes_have_ended_is_released_at_once() {
    let (world, plugin, _) = prepared(capped("gpu", 0, "1Gi", 10)).await;
    world.api.put(claim("b", &[capped("gpu", 0, "1Gi", 10)]));
    let other = plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
    world.run_in_container(&other, 4711);
    // Linux's zombies have no namespaces.
    fs::create_dir(world.proc().join("4712")).unwrap();
    let start = Instant::now();
    unprepare(&plugin).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(plugin.preparer.ledger().held(), [other]);
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_kept_while_processes_are_not_known() {
    let (world, plugin, _) = prepared(whole("gpu", 0)).await;
    fs::remove_dir(world.proc()).unwrap();
    let error = unprepare(&plugin).await.unwrap_err();
    assert!(matches!(error.problem, Problem::UsersUnknown(_)), "{error}");
    assert!(is_held(&plugin));
    fs::create_dir(world.proc()).unwrap();
    unprepare(&plugin).await.unwrap();
}
