//! Load pages, through the kubelet's calls.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;

use serde_json::json;
use tranche_shim_core::{CapPage, Priority, load, paths};

use crate::cluster::node_policy::NodePolicy;
use crate::testing::{World, capped, capped_on, claim, claim_ref, with_priority};

const GPU: &str = "GPU-00000000-0000-0000-0000-000000000000";

/// A claim of a capped share of the first GPU.
fn share(world: &World, name: &str, priority: &str) {
    let claim = claim(name, &[capped("gpu", 0, "1Gi", 10)]);
    world.api.put(with_priority(claim, priority));
}

fn page(world: &World, uuid: &str) -> PathBuf {
    world.layout.load().join(uuid).join(paths::LOAD)
}

/// The options of the mount of the load page in a claim's CDI spec.
fn mount_options(world: &World, name: &str) -> Option<Vec<String>> {
    let devices = world.cdi_devices(&claim_ref(name).uid);
    let mounts = &devices[0]["containerEdits"]["mounts"];
    let is_load = |mount: &&serde_json::Value| {
        let [from, to] = ["hostPath", "containerPath"].map(|it| mount[it].as_str().unwrap());
        to.ends_with("/load") && from == page(world, GPU).to_str().unwrap()
    };
    let found = mounts.as_array().unwrap().iter().find(is_load)?;
    serde_json::from_value(found["options"].clone()).unwrap()
}

fn priority(world: &World, name: &str) -> Priority {
    let uid = claim_ref(name).uid;
    let share = world.layout.share(&uid, &format!("{uid}-gpu-0"));
    CapPage::decode(&fs::read(share.cap).unwrap())
        .unwrap()
        .priority
}

#[tokio::test]
async fn a_gpu_has_a_page_while_a_share_of_it_has_a_priority() {
    let world = World::new();
    let plugin = world.start();
    let page = page(&world, GPU);
    for (name, of) in [("n", "normal"), ("h", "high"), ("l", "low")] {
        share(&world, name, of);
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        assert_eq!(page.exists(), name != "n", "{name}");
    }
    let found = fs::metadata(&page).unwrap();
    assert_eq!(
        (found.len(), found.mode() & 0o777),
        (load::LEN as u64, 0o666)
    );
    let has = |name, option| {
        mount_options(&world, name)
            .unwrap()
            .contains(&String::from(option))
    };
    assert!(mount_options(&world, "n").is_none());
    assert!(has("h", "rw") && has("l", "ro"));
    assert_eq!(priority(&world, "n"), Priority::Normal);
    assert_eq!(priority(&world, "h"), Priority::High);
    assert_eq!(priority(&world, "l"), Priority::Low { floor: 10 });

    // Containers have it mounted: it stays, also after a restart and a repeated call.
    plugin.preparer.unprepare(&claim_ref("h")).await.unwrap();
    let plugin = world.start();
    plugin.preparer.prepare(&claim_ref("l")).await.unwrap();
    assert_eq!(fs::metadata(&page).unwrap().ino(), found.ino());
    plugin.preparer.unprepare(&claim_ref("l")).await.unwrap();
    assert_eq!(fs::read_dir(world.layout.load()).unwrap().count(), 0);
    plugin.preparer.unprepare(&claim_ref("n")).await.unwrap();
}

#[tokio::test]
async fn the_policys_floor_is_in_the_cap_page_of_new_claims() {
    let world = World::new();
    let plugin = world.start();
    let publish = |floor: u32| {
        let gpus = json!([{"uuid": GPU, "capped": {"lowPriorityFloor": floor}}]);
        let json = json!({"epoch": 1, "poolGeneration": 1, "gpus": gpus});
        let published = serde_json::from_value(json).unwrap();
        plugin.policy.send_replace(NodePolicy::of(&published));
    };
    for (name, floor, enforced) in [("a", 25, 25), ("b", 0, 0), ("c", 400, 100)] {
        publish(floor);
        share(&world, name, "low");
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        assert_eq!(priority(&world, name), Priority::Low { floor: enforced });
    }
    // What containers have stays.
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(priority(&world, "a"), Priority::Low { floor: 25 });
}

#[tokio::test]
async fn the_shares_of_a_partition_have_its_own_page() {
    let world = World::new();
    let plugin = world.start();
    for (name, of) in [("a", "high"), ("b", "low")] {
        let claim = claim(name, &[capped_on("gpu", 0, "3g40gb-4", "10Gi", 25)]);
        world.api.put(with_priority(claim, of));
    }
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let partition = record.plan.devices[0].partition.clone().unwrap();
    let page = page(&world, &partition.mig.unwrap().uuid);
    assert!(page.exists());
    plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
    assert_eq!(fs::read_dir(world.layout.load()).unwrap().count(), 1);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(page.exists());
    plugin.preparer.unprepare(&claim_ref("b")).await.unwrap();
    assert!(world.traces().is_empty(), "{:?}", world.traces());
}

#[tokio::test]
async fn a_page_without_a_claim_is_removed_at_the_start() {
    let world = World::new();
    share(&world, "a", "high");
    share(&world, "b", "low");
    let record = world.prepare("a").await;
    world.prepare("b").await;
    let orphan = page(&world, "GPU-11111111-0000-0000-0000-000000000000");
    fs::create_dir_all(orphan.parent().unwrap()).unwrap();
    fs::write(&orphan, "").unwrap();
    // Nobody knows what a claim with an unreadable journal has.
    let journal = world.layout.claims().join("uid-of-b.json");
    let content = fs::read(&journal).unwrap();
    fs::write(&journal, "{").unwrap();
    world.start();
    assert!(orphan.exists() && page(&world, GPU).exists());
    fs::write(&journal, content).unwrap();
    world.start();
    assert!(!orphan.parent().unwrap().exists() && page(&world, GPU).exists());
    for name in ["a", "b"] {
        fs::remove_file(world.layout.claims().join(format!("uid-of-{name}.json"))).unwrap();
    }
    drop(record);
    world.start();
    assert!(world.traces().is_empty(), "{:?}", world.traces());
}

#[tokio::test]
async fn a_tenant_that_makes_the_page_longer_takes_memory_from_nobody() {
    let world = World::new();
    share(&world, "a", "high");
    world.prepare("a").await;
    let tenant = File::options().write(true).open(page(&world, GPU)).unwrap();
    for at in [4096, 1 << 20] {
        let error = tenant.write_all_at(&[1; 4096], at).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
    }
    // The page itself has its memory.
    tenant.write_all_at(&[1; load::LEN], 0).unwrap();
}
