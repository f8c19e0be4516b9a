use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use serde_json::json;
use tokio::time::{Duration, timeout};
use tranche_driver::audit::{Event, Line};

use k8s_openapi::api::resource::v1::ResourceClaim;

use super::writer::NAME;
use super::*;
use crate::claim::orphans::schedule::SPREAD;
use crate::host::fs::HostFs;
use crate::host::fs::testing::{Fault, FaultyFs};
use crate::testing::{KubeletList, World, capped, claim, claim_ref, whole};

/// The events of a claim's devices, and the requests.
fn events(world: &World, claim: &str) -> Vec<String> {
    let lines = world.trail();
    let of_claim = lines.iter().filter(|line| line.grant.claim == claim);
    let text = |line: &Line| match line.event {
        Event::Allocated {} => format!("{} allocated", line.grant.request),
        Event::Held {} => format!("{} held", line.grant.request),
        Event::Released { ended, .. } => format!("{} {ended:?}", line.grant.request),
    };
    of_claim.map(text).collect()
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until the trail could be written.
fn written(world: &World) {
    let start = std::time::Instant::now();
    while !world.flush_audit(PATIENCE) {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The claim's object with the pods for which it is reserved.
fn reserved(mut object: serde_json::Value, pods: &[&str]) -> serde_json::Value {
    let pod =
        |name: &&str| json!({"resource": "pods", "name": name, "uid": format!("uid-of-{name}")});
    object["status"]["reservedFor"] = pods.iter().map(pod).collect();
    object
}

#[tokio::test]
async fn each_device_of_a_claim_has_a_line_for_its_start_and_its_end() {
    let world = World::new();
    let plugin = world.start();
    let object = claim("a", &[capped("x", 0, "20Gi", 25), whole("y", 1)]);
    world.api.put(reserved(object, &["p"]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    // The kubelet's repetitions are no news.
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world
        .start()
        .preparer
        .prepare(&claim_ref("a"))
        .await
        .unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();

    let expected = ["x allocated", "y allocated", "x Unprepared", "y Unprepared"];
    assert_eq!(events(&world, "a"), expected);
    let lines = world.trail();
    let share = &lines[2];
    let pods: Vec<_> = share.grant.pods.iter().map(|pod| &*pod.name).collect();
    assert_eq!((pods, &*share.node), (vec!["p"], crate::testing::NODE));
    assert_eq!(share.grant.start, record.since);
    assert!(share.grant.start.unwrap() <= share.time);
    assert_eq!(share.grant.gpu_uuid, record.plan.devices[0].gpu_uuid);
    let limits = share.grant.cap.unwrap();
    assert_eq!((limits.memory_bytes, limits.cores), (20 << 30, 25));
    assert_eq!(lines[3].grant.cap, None);
    let held = |line: &Line| match &line.event {
        Event::Released { held_at_end, .. } => *held_at_end,
        other => panic!("{other:?}"),
    };
    // No process has a slot in its account; the other has none.
    assert_eq!(held(share).account_bytes, Some(0));
    assert_eq!(held(&lines[3]).account_bytes, None);
    let mode = std::fs::metadata(world.layout.audit().join(NAME)).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o640);
}

#[tokio::test]
async fn a_claim_that_is_allocated_again_ends_and_begins() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("x", 0)]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world.api.put(claim("a", &[whole("x", 1)]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(
        events(&world, "a"),
        ["x allocated", "x Reallocated", "x allocated"]
    );
    assert_eq!(world.grants().len(), 2);
}

#[tokio::test]
async fn a_claim_that_cannot_be_prepared_has_no_line() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("x", 7)]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap_err();
    assert_eq!(world.trail(), []);
}

#[tokio::test(start_paused = true)]
async fn an_orphan_is_called_so_and_pods_that_join_are_named() {
    let world = World::new();
    let plugin = world.start();
    let object = claim("a", &[whole("x", 0)]);
    world.api.put(reserved(object.clone(), &["p"]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    // A second pod of the claim: the kubelet does not call Prepare for it.
    world.api.put(reserved(object.clone(), &["p", "q"]));
    let kubelet = KubeletList::of(&[record]);
    let search = plugin.search(&world, &kubelet).await;
    search.run_for(SPREAD).await;
    assert_eq!(events(&world, "a"), ["x allocated", "x held"]);
    world.api.delete(&object);
    kubelet.lists(&[]);
    let ended = async {
        while events(&world, "a").len() < 3 {
            search.run_for(Duration::from_secs(1)).await;
        }
    };
    timeout(SPREAD * 2, ended).await.unwrap();
    assert_eq!(events(&world, "a")[2], "x Orphan");
    let end = &world.trail()[2];
    let pods: Vec<_> = end.grant.pods.iter().map(|pod| &*pod.name).collect();
    assert_eq!(pods, ["p", "q"]);
}

#[tokio::test]
async fn a_journal_removed_by_hand_ends_its_grant_at_the_next_start() {
    let world = World::new();
    world.api.put(claim("a", &[whole("x", 0)]));
    world.prepare("a").await;
    std::fs::remove_file(world.layout.claims().join("uid-of-a.json")).unwrap();
    drop(world.start());
    drop(world.start());
    assert_eq!(events(&world, "a"), ["x allocated", "x Unrecorded"]);
}

/// This happens after an upgrade, and after the trail's folder was removed.
#[tokio::test]
async fn claims_that_a_trail_lacks_are_added_at_the_start() {
    let world = World::new();
    world.api.put(claim("a", &[whole("x", 0)]));
    let record = world.prepare("a").await;
    std::fs::remove_dir_all(world.layout.audit()).unwrap();
    let plugin = world.start();
    assert_eq!(events(&world, "a"), ["x allocated"]);
    assert_eq!(world.trail()[0].grant.start, record.since);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.grants()[0].1, Some(Ended::Unprepared));
}

#[tokio::test]
async fn files_are_bounded_and_each_names_what_is_held() {
    let mut world = World::new();
    world.audit_limits = Limits {
        files: 3,
        file_bytes: 4 << 10,
    };
    let plugin = world.start();
    let [long, short] =
        [("long", 0), ("short", 1)].map(|(name, gpu)| claim(name, &[whole("x", gpu)]));
    world.api.put(long);
    world.api.put(short);
    plugin.preparer.prepare(&claim_ref("long")).await.unwrap();
    for _ in 0..20 {
        plugin.preparer.prepare(&claim_ref("short")).await.unwrap();
        plugin
            .preparer
            .unprepare(&claim_ref("short"))
            .await
            .unwrap();
    }
    written(&world);
    let files: Vec<_> = std::fs::read_dir(world.layout.audit()).unwrap().collect();
    let mut names = Vec::new();
    for file in files {
        let file = file.unwrap();
        let content = std::fs::read(file.path()).unwrap();
        assert!(content.len() <= 4 << 10, "{}", content.len());
        let mut lines = content.split_inclusive(|byte| *byte == b'\n');
        let first = Line::decode(lines.next().unwrap()).unwrap();
        assert_eq!((&*first.grant.claim, first.event), ("long", Event::Held {}));
        names.push(file.file_name().into_string().unwrap());
    }
    names.sort();
    assert_eq!(names, ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]);
    // Its beginning is in none of them, and it is not begun again.
    drop(world.start());
    plugin.preparer.unprepare(&claim_ref("long")).await.unwrap();
    let long: Vec<_> = events(&world, "long").into_iter().collect();
    assert!(!long.contains(&"x allocated".to_owned()), "{long:?}");
    assert_eq!(long.last().unwrap(), "x Unprepared");
}

#[tokio::test]
async fn killed_at_any_step_of_a_rotation_no_line_is_lost_or_doubled() {
    for at in 0.. {
        let mut world = World::new();
        // Large enough for all files of the test together.
        world.audit_limits = Limits {
            files: 64,
            file_bytes: 1,
        };
        world.api.put(claim("a", &[whole("x", 0)]));
        world.api.put(claim("b", &[whole("x", 1)]));
        world.prepare("a").await;
        let fs = Arc::new(FaultyFs::new(at, Fault::Death));
        world.audit_fs = Arc::clone(&fs) as _;
        let plugin = world.start();
        plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
        plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        world.flush_audit(PATIENCE);
        drop(plugin);
        world.audit_fs = Arc::new(HostFs);
        let plugin = world.start();
        plugin.preparer.unprepare(&claim_ref("b")).await.unwrap();
        // It checks that no line is doubled.
        let grants = world.grants();
        assert_eq!(grants.len(), 2, "{at}: {grants:?}");
        // The next start makes good an end that was not written.
        let ends = [Ended::Unprepared, Ended::Unrecorded].map(Some);
        assert!(ends.contains(&grants[0].1), "{at}: {grants:?}");
        assert_eq!(grants[1].1, Some(Ended::Unprepared), "{at}: {grants:?}");
        if !fs.struck() {
            assert_eq!(grants[0].1, Some(Ended::Unprepared));
            return;
        }
    }
}

/// A full disk, for example.
#[tokio::test]
async fn if_no_file_can_be_begun_the_current_one_grows() {
    let mut world = World::new();
    world.audit_limits = Limits {
        files: 3,
        file_bytes: 1,
    };
    world.api.put(claim("a", &[whole("x", 0)]));
    let plugin = world.start();
    written(&world);
    // This is in the way of the new file.
    std::fs::create_dir(world.layout.audit().join("audit.jsonl.tmp")).unwrap();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(events(&world, "a"), ["x allocated", "x Unprepared"]);
    assert!(!world.layout.audit().join("audit.jsonl.1").exists());
}

#[tokio::test]
async fn no_claim_fails_by_a_trail_that_cannot_be_written() {
    let world = World::new();
    let folder = world.layout.audit();
    std::fs::write(&folder, "in its place").unwrap();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("x", 0)]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(!world.flush_audit(PATIENCE));
    assert!(plugin.metrics.audit_write_failures.get() > 0);
    // What waits is written when the cause is removed.
    std::fs::remove_file(&folder).unwrap();
    written(&world);
    assert_eq!(events(&world, "a"), ["x allocated", "x Unprepared"]);
}

#[tokio::test]
async fn a_trail_that_was_moved_away_begins_anew_with_what_is_held() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("x", 0)]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    written(&world);
    let away = world.dir.path().join("away");
    std::fs::rename(world.layout.audit(), &away).unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    written(&world);
    assert_eq!(events(&world, "a"), ["x held", "x Unprepared"]);
}

#[tokio::test]
async fn no_claim_waits_for_the_trails_disk() {
    let mut world = World::new();
    world.api.put(claim("a", &[whole("x", 0)]));
    // The first sync does not return for seconds: there is no second writer.
    world.audit_fs = Arc::new(FaultyFs::meeting(2));
    world.audit_limits.file_bytes = 1;
    let plugin = world.start();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(
        !world.flush_audit(Duration::ZERO),
        "the disk answered sooner than the plugin"
    );
}

#[tokio::test]
async fn more_than_the_queue_takes_is_counted() {
    let world = World::new();
    std::fs::write(world.layout.audit(), "in its place").unwrap();
    world.api.put(claim("a", &[whole("x", 0)]));
    let plugin = world.start();
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    for _ in 0..MOST {
        plugin
            .preparer
            .note_pods(&record, &ResourceClaim::default());
    }
    // The queue has the start and the beginning, too.
    assert_eq!(plugin.metrics.audit_entries_lost.get(), 2);
}

#[tokio::test]
async fn room_for_the_current_file_is_reserved() {
    let world = World::new();
    let _plugin = world.start();
    written(&world);
    let current = std::fs::metadata(world.layout.audit().join(NAME)).unwrap();
    assert_eq!(current.len(), 0);
    assert!(current.blocks() * 512 >= world.audit_limits.file_bytes);
    HostFs
        .append(&world.layout.audit().join(NAME), 0, b"{}\n")
        .unwrap();
    let written = std::fs::metadata(world.layout.audit().join(NAME)).unwrap();
    assert_eq!(written.len(), 3);
    assert!(written.blocks() * 512 >= world.audit_limits.file_bytes);
}
