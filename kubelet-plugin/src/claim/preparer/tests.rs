//! The kubelet's calls, and what may go wrong in them.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tranche_api::WithheldGpu;
use tranche_driver::audit::Ended;
use tranche_driver::cdi::DriverDevice;
use tranche_driver::competing_drivers::{Observations, verdict};
use tranche_driver::preparation::PAGES;
use tranche_shim_core::cap::CapPage;
use tranche_shim_core::layout::AccountPage;

use crate::claim::orphans::schedule::SPREAD;
use crate::claim::preparer::PrepareError;
use crate::cluster::node_policy::NodePolicy;
use crate::gpu::driver_state::{DriverError, DriverState};
use crate::host::fs::testing::{Fault, FaultyFs};
use crate::testing::api::Mood;
use crate::testing::{
    KubeletList, Plugin, World, capped, claim, claim_ref, oversubscribed, whole, with_priority,
};
use tranche_node::nvml::NvmlError;

/// The names of the held claims.
fn held(plugin: &Plugin) -> Vec<String> {
    let held = plugin.preparer.ledger().held();
    held.iter()
        .map(|record| record.plan.allocation.name.clone())
        .collect()
}

/// The error when `name` is prepared.
async fn refusal(plugin: &Plugin, name: &str) -> String {
    let error = plugin.preparer.prepare(&claim_ref(name)).await;
    error.map(|_| ()).unwrap_err().to_string()
}

/// An orphan may cause a conflict, so the search is notified.
async fn orphans_are_suspected(plugin: &Plugin) {
    let mut suspicions = plugin.suspicions.lock().await;
    let suspicion = tokio::time::timeout(Duration::from_secs(5), suspicions.recv()).await;
    assert!(suspicion.unwrap().is_some());
}

/// A Prepare of `name` that waits because of a conflict.
async fn waiting(plugin: &Plugin, name: &str) -> JoinHandle<Result<(), PrepareError>> {
    let (preparer, claim) = (Arc::clone(&plugin.preparer), claim_ref(name));
    let waiting = tokio::spawn(async move { preparer.prepare(&claim).await.map(|_| ()) });
    orphans_are_suspected(plugin).await;
    waiting
}

fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

const NONE: [&str; 0] = [];

#[tokio::test]
async fn an_exclusive_claim_gets_its_gpu_and_an_uncapped_page() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("gpu", 1)]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let [device] = &record.plan.devices[..] else {
        panic!("{record:?}")
    };
    assert_eq!(device.cdi_ids.len(), 2);
    assert!(device.cdi_ids[1].ends_with("/driver=full"), "{device:?}");
    assert_eq!(
        world.traces(),
        [
            "cdi/gpu.tranche.dev-claim.json",
            "plugin/claims/uid-of-a.json",
            "run/metadata/uid-of-a",
            "run/metadata/uid-of-a/gpu.json",
            "run/shares/uid-of-a",
            "run/shares/uid-of-a/uid-of-a-gpu-0",
            "run/shares/uid-of-a/uid-of-a-gpu-0/cap",
        ]
    );
    let share = world.layout.share("uid-of-a", &device.key);
    let page = std::fs::read(share.cap).unwrap();
    let cap = CapPage::decode(&page).unwrap();
    assert_eq!(
        (cap.memory_limit, cap.gpu_uuid),
        (None, device.gpu_uuid.as_str())
    );
    assert!(world.layout.driver_spec().exists());
    assert_eq!(*plugin.reports.prepared.lock().unwrap(), ["uid-of-a"]);

    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn libraries_that_a_policy_names_go_to_new_claims_only() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let before = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(before.plan.devices[0].cdi_ids.len(), 2);

    let gpu = &before.plan.devices[0].gpu_uuid;
    let capped_by = serde_json::json!({"extraDriverCapabilities": ["video", "unknown"]});
    let json = serde_json::json!({
        "epoch": 1, "poolGeneration": 1, "gpus": [{"uuid": gpu, "capped": capped_by}],
    });
    let published = serde_json::from_value(json).unwrap();
    plugin.policy.send_replace(NodePolicy::of(&published));
    // A container of a held claim that starts again has what it had.
    let again = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(again.plan, before.plan);
    world.api.put(claim("b", &[capped("gpu", 0, "20Gi", 25)]));
    let new = plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
    let ids = &new.plan.devices[0].cdi_ids;
    assert_eq!(ids.len(), 3);
    assert_eq!(ids[1], "gpu.tranche.dev/driver=video");
    assert_eq!(ids[2], DriverDevice::Capped { pages: PAGES }.id());
    // The journal keeps it, too.
    plugin.policy.send_replace(NodePolicy::default());
    let kept = world.prepare("b").await;
    assert_eq!(kept.plan, new.plan);
}

#[tokio::test(start_paused = true)]
async fn a_share_waits_for_the_policy_of_its_gpu() {
    let world = World::new();
    let plugin = world.start();
    let known = world.no_policy();
    plugin.policy.send_replace(NodePolicy::default());
    // Only shares need the policy.
    world.api.put(claim("whole", &[whole("gpu", 1)]));
    plugin.preparer.prepare(&claim_ref("whole")).await.unwrap();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let start = tokio::time::Instant::now();
    let error = plugin.preparer.prepare(&claim_ref("a")).await.unwrap_err();
    assert_eq!(error.problem.outcome(), "policy_unknown");
    assert_eq!(start.elapsed().as_secs(), 5);
    let text = error.to_string();
    assert!(text.contains("status.published.gpus"), "{text}");

    let preparer = Arc::clone(&plugin.preparer);
    let waits = tokio::spawn(async move { preparer.prepare(&claim_ref("a")).await.map(drop) });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!waits.is_finished());
    plugin.policy.send_replace(known);
    waits.await.unwrap().unwrap();
    // It keeps what it got, whatever the next process knows.
    let plugin = world.start();
    plugin.policy.send_replace(NodePolicy::default());
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
}

#[tokio::test]
async fn two_shares_on_two_gpus_have_each_its_cap() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim(
        "a",
        &[capped("x", 1, "30Gi", 30), capped("y", 0, "10Gi", 10)],
    ));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    for (device, (gib, cores)) in record.plan.devices.iter().zip([(30_u64, 30), (10, 10)]) {
        let share = world.layout.share("uid-of-a", &device.key);
        let page = std::fs::read(share.cap).unwrap();
        let cap = CapPage::decode(&page).unwrap();
        assert_eq!(cap.memory_limit, Some(gib << 30));
        assert_eq!(cap.context_memory, 300 << 20);
        assert_eq!(cap.cores, Some(cores));
        assert_eq!(cap.gpu_uuid, device.gpu_uuid);
        AccountPage::check(&std::fs::read(share.account).unwrap()).unwrap();
    }
}

#[tokio::test]
async fn an_oversubscribed_share_has_an_account_of_resident_memory() {
    let world = World::new();
    let plugin = world.start();
    let share = oversubscribed("gpu", 0, 250, "100Gi", 25);
    world.api.put(claim("a", &[share]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let share = world.layout.share("uid-of-a", &record.plan.devices[0].key);
    let page = std::fs::read(&share.cap).unwrap();
    let cap = CapPage::decode(&page).unwrap();
    let limits = (cap.memory_limit, cap.resident_limit);
    assert_eq!(limits, (Some(100 << 30), Some(40 << 30)));
    let pages = [share.account, share.resident];
    for page in &pages {
        AccountPage::check(&std::fs::read(page).unwrap()).unwrap();
    }
    let spec = world.cdi_devices("uid-of-a").to_string();
    for name in ["account", "resident"] {
        let key = &record.plan.devices[0].key;
        let mounted = format!("/usr/lib/tranche/shares/{key}/{name}");
        assert!(spec.contains(&mounted), "{spec}");
    }
    has(
        &spec,
        &[
            "TRANCHE_GPU_0_MEMORY=100Gi",
            "TRANCHE_GPU_0_RESIDENT_MEMORY=40Gi",
        ],
    );
    // Both are swept.
    assert_eq!(plugin.preparer.ledger().accounts(&world.layout), pages);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn a_replay_rebuilds_what_was_removed_and_keeps_the_account() {
    let world = World::new();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let first = world.prepare("a").await;
    let share = world.layout.share("uid-of-a", &first.plan.devices[0].key);
    // A container has a charge in its account.
    let mut account = std::fs::read(&share.account).unwrap();
    *account.last_mut().unwrap() = 7;
    std::fs::write(&share.account, &account).unwrap();
    let before = world.contents();

    std::fs::remove_file(&share.cap).unwrap();
    std::fs::remove_file(world.layout.claims_spec()).unwrap();
    std::fs::remove_file(world.layout.driver_spec()).unwrap();
    let again = world.prepare("a").await;
    assert_eq!(again.plan, first.plan);
    assert_eq!(world.contents(), before);
    assert!(world.layout.driver_spec().exists());
}

#[tokio::test]
async fn a_replay_leaves_the_page_that_containers_have_mounted() {
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};
    let world = World::new();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let plugin = world.start();
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let share = world.layout.share("uid-of-a", &record.plan.devices[0].key);
    let inode = || std::fs::metadata(&share.cap).unwrap().ino();
    let before = inode();
    // The sampler writes behind the limits.
    let cap = std::fs::File::options()
        .write(true)
        .open(&share.cap)
        .unwrap();
    cap.write_all_at(&[1; 8], 1024).unwrap();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(inode(), before);
    assert_eq!(std::fs::read(&share.cap).unwrap()[1024..1032], [1; 8]);
    // A page with another limit is replaced.
    cap.write_all_at(&[26], 24).unwrap();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_ne!(inode(), before);
}

#[tokio::test]
async fn a_broken_account_is_refused_not_renewed() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let share = world.layout.share("uid-of-a", &record.plan.devices[0].key);
    // A file of a terabyte is refused without reading it.
    for length in [0, 1 << 40] {
        let account = std::fs::File::options().write(true).open(&share.account);
        account.unwrap().set_len(length).unwrap();
        has(
            &refusal(&plugin, "a").await,
            &["team/a", "account", "bytes", "delete the pods"],
        );
    }
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
}

/// The versions of the pages of the release before, and of the next one that changes them.
const OTHERS: [u32; 2] = [PAGES - 1, PAGES + 1];

/// A claim as a release with other pages prepared it, before this one was installed instead. Returns its record.
async fn prepared_by_another_release(world: &World, pages: u32) -> String {
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let record = world.prepare("a").await;
    let journal = world.layout.claims().join("uid-of-a.json");
    let text = std::fs::read_to_string(&journal).unwrap();
    let device = |pages| DriverDevice::Capped { pages }.id();
    let other = text
        .replacen(
            &format!("\"pages\":{PAGES}"),
            &format!("\"pages\":{pages}"),
            1,
        )
        .replacen(&device(PAGES), &device(pages), 1);
    std::fs::write(&journal, &other).unwrap();
    let share = world.layout.share("uid-of-a", &record.plan.devices[0].key);
    for page in [&share.cap, &share.account] {
        std::fs::remove_file(page).unwrap();
        std::fs::write(page, "of another layout").unwrap();
    }
    let own = world.layout.libraries().join(PAGES.to_string());
    let folder = world.layout.libraries().join(pages.to_string());
    std::fs::create_dir_all(&folder).unwrap();
    for file in std::fs::read_dir(own).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    other
}

#[tokio::test]
async fn pages_of_another_release_are_left_alone() {
    for pages in OTHERS {
        left_alone(pages).await;
    }
}

async fn left_alone(pages: u32) {
    let world = World::new();
    let other = prepared_by_another_release(&world, pages).await;
    let before = world.contents();
    let plugin = world.start();
    // The kubelet asks again, for example for a second pod of the claim.
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let device = DriverDevice::Capped { pages }.id();
    assert_eq!(record.plan.devices[0].cdi_ids[1], device);
    assert_eq!(world.contents(), before);
    let journal = world.layout.claims().join("uid-of-a.json");
    assert_eq!(std::fs::read_to_string(journal).unwrap(), other);
    // They are not sampled, swept or truncated.
    assert_eq!(plugin.preparer.ledger().shares(&world.layout), []);
    let accounts = plugin.preparer.ledger().accounts(&world.layout);
    assert!(accounts.is_empty(), "{accounts:?}");

    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn a_page_of_another_release_that_is_missing_is_named() {
    for pages in OTHERS {
        let world = World::new();
        prepared_by_another_release(&world, pages).await;
        let folder = world.layout.share("uid-of-a", "uid-of-a-gpu-0").device;
        std::fs::remove_file(folder.join("account")).unwrap();
        let plugin = world.start();
        let version = format!("version {pages}");
        has(
            &refusal(&plugin, "a").await,
            &["team/a", "account", &version, "delete the pods"],
        );
    }
}

#[tokio::test]
async fn after_a_boot_a_claim_of_another_release_gets_new_pages() {
    for pages in OTHERS {
        made_anew(pages).await;
    }
}

async fn made_anew(pages: u32) {
    let world = World::new();
    prepared_by_another_release(&world, pages).await;
    // A boot removes the pages.
    let folder = world.layout.share("uid-of-a", "").claim;
    rustix::mount::unmount(&folder, rustix::mount::UnmountFlags::DETACH).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let plugin = world.start();
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(record.plan.pages, PAGES);
    let device = DriverDevice::Capped { pages: PAGES }.id();
    assert_eq!(record.plan.devices[0].cdi_ids[1], device);
    let account = world.layout.share("uid-of-a", "uid-of-a-gpu-0").account;
    AccountPage::check(&std::fs::read(account).unwrap()).unwrap();
}

#[tokio::test]
async fn the_same_claim_allocated_anew_leaves_the_old_device() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world.api.put(claim("a", &[whole("gpu", 1)]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(record.plan.devices[0].minor, 1);
    assert!(!world.traces().iter().any(|path| path.ends_with("account")));
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
}

/// The node's driver after a boot in which the kernel probed its two GPUs in the other order.
fn swapped(world: &World) -> DriverState {
    let mut ready = (*world.ready).clone();
    let [first, second] = &mut ready.inventory.gpus[..] else {
        panic!("two GPUs")
    };
    std::mem::swap(&mut first.minor, &mut second.minor);
    DriverState::Ready(Arc::new(ready))
}

/// The device nodes that the claim's containers get.
fn device_nodes(world: &World, name: &str) -> Vec<String> {
    let devices = world.cdi_devices(&format!("uid-of-{name}"));
    let nodes = devices.as_array().unwrap().iter().flat_map(|device| {
        let nodes = device["containerEdits"]["deviceNodes"].as_array();
        nodes.unwrap().iter().map(|node| &node["path"])
    });
    nodes
        .map(|path| path.as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn a_boot_that_swaps_minor_numbers_leaves_every_claim_its_gpu() {
    let world = World::new();
    for (name, gpu) in [("a", 0), ("b", 1)] {
        world.api.put(claim(name, &[whole("gpu", gpu)]));
        let record = world.prepare(name).await;
        assert_eq!(record.plan.devices[0].minor, gpu);
    }
    let plugin = world.start();
    plugin.driver.send_replace(swapped(&world));
    for (name, gpu) in [("a", 0), ("b", 1)] {
        let record = plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        let device = &record.plan.devices[0];
        assert_eq!(device.gpu_uuid, world.ready.inventory.gpus[gpu].uuid);
        assert_eq!(
            device_nodes(&world, name),
            [format!("/dev/nvidia{}", 1 - gpu)]
        );
    }
    // A restarted kubelet or plugin finds the same.
    let plugin = world.start();
    plugin.driver.send_replace(swapped(&world));
    let before = world.contents();
    for name in ["a", "b"] {
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
    }
    assert_eq!(world.contents(), before);
    for name in ["a", "b"] {
        plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
    }
    assert_eq!(world.traces(), NONE);
}

/// The kubelet may have lost its state while they run.
#[tokio::test(start_paused = true)]
async fn a_claim_that_is_allocated_anew_keeps_its_devices_while_containers_use_them() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[capped("x", 0, "1Gi", 10)]));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world.run_in_container(&record, 4711);
    let account = world
        .layout
        .share("uid-of-a", &record.plan.devices[0].key)
        .account;
    world.api.put(claim("a", &[capped("x", 1, "1Gi", 10)]));
    let refused = refusal(&plugin, "a").await;
    has(&refused, &["4711", "have ended"]);
    assert!(account.exists());
    assert_eq!(plugin.preparer.ledger().held()[0].plan, record.plan);
    world.end(4711);
    let moved = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_ne!(
        moved.plan.devices[0].gpu_uuid,
        record.plan.devices[0].gpu_uuid
    );
}

#[tokio::test]
async fn a_claim_whose_gpu_is_gone_is_refused_and_never_moved() {
    let world = World::new();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    world.prepare("a").await;
    let mut ready = (*world.ready).clone();
    let gone = ready.inventory.gpus.remove(0).uuid;
    // The remaining GPU has the minor number now.
    ready.inventory.gpus[0].minor = 0;
    let plugin = world.start();
    plugin
        .driver
        .send_replace(DriverState::Ready(Arc::new(ready)));
    has(
        &refusal(&plugin, "a").await,
        &[
            "team/a",
            "gpu-00000000",
            &gone,
            "is gone",
            "delete the claim's pods",
        ],
    );
    assert_eq!(
        device_nodes(&world, "a"),
        ["/dev/nvidia0"],
        "nothing of it was changed"
    );
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn unprepare_works_twice_without_driver_claim_or_knowledge() {
    let world = World::new();
    let object = claim("a", &[capped("gpu", 0, "20Gi", 25)]);
    world.api.put(object.clone());
    world.prepare("a").await;
    world.api.delete(&object);
    world.api.set_mood(Mood::NoAnswer);
    std::fs::remove_dir_all(world.driver_root()).unwrap();
    let plugin = world.start();
    plugin.driver.send_replace(DriverState::Unknown);
    for name in ["a", "a", "unknown", "../../etc"] {
        plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
    }
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn claims_that_are_gone_replaced_or_not_allocated_are_refused() {
    let world = World::new();
    let plugin = world.start();
    has(
        &refusal(&plugin, "gone").await,
        &["team/gone", "deleted", "delete the pod"],
    );

    let mut other = claim("a", &[whole("gpu", 0)]);
    other["metadata"]["uid"] = "another".into();
    world.api.put(other);
    has(
        &refusal(&plugin, "a").await,
        &["team/a", "metadata.uid", "another"],
    );
    assert!(
        plugin.reports.failed.lock().unwrap().is_empty(),
        "its pods are not ours to tell"
    );

    let mut bare = claim("b", &[]);
    bare["status"] = serde_json::json!({});
    world.api.put(bare);
    has(
        &refusal(&plugin, "b").await,
        &["team/b", "status.allocation"],
    );
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn the_pods_event_names_the_field_of_bad_parameters_and_sizes() {
    let world = World::new();
    let plugin = world.start();
    for (name, size, word) in [
        ("zero", "0", "consumedCapacity[memory]"),
        ("negative", "-1Gi", "consumedCapacity[memory]"),
        ("large", "200Gi", "memory"),
        ("text", "much", "consumedCapacity[memory]"),
    ] {
        world.api.put(claim(name, &[capped("gpu", 0, size, 25)]));
        has(
            &refusal(&plugin, name).await,
            &[name, "gpu-00000000-capped", word],
        );
    }
    for (name, parameters, word) in [
        (
            "unknown",
            r#"{"apiVersion":"gpu.tranche.dev/v1alpha1","kind":"ShareConfig","colour":1}"#,
            "colour",
        ),
        (
            "typed",
            r#"{"apiVersion":"gpu.tranche.dev/v1alpha1","kind":"ShareConfig","compute":{"mode":7}}"#,
            "compute.mode",
        ),
    ] {
        let mut object = claim(name, &[capped("gpu", 0, "1Gi", 25)]);
        object["status"]["allocation"]["devices"]["config"] = serde_json::json!([{
            "source": "FromClaim",
            "opaque": {"driver": "gpu.tranche.dev", "parameters": serde_json::from_str::<serde_json::Value>(parameters).unwrap()},
        }]);
        world.api.put(object);
        has(&refusal(&plugin, name).await, &[name, word]);
    }
    world.api.put(claim("lost", &[whole("gpu", 7)]));
    has(
        &refusal(&plugin, "lost").await,
        &["begins with 00000007 is gone", "delete the claim's pods"],
    );

    assert_eq!(world.traces(), NONE);
    let told = plugin.reports.failed.lock().unwrap();
    let names: Vec<_> = told.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "zero", "negative", "large", "text", "unknown", "typed", "lost"
        ]
    );
}

#[tokio::test]
async fn a_journal_that_cannot_be_read_is_refused_named_and_left() {
    for (content, word) in [
        ("", "corrupt"),
        ("{\"version\": 1, \"pl", "corrupt"),
        ("{\"version\": 99, \"minReader\": 99}", "version 99"),
    ] {
        let world = World::new();
        world.api.put(claim("a", &[whole("gpu", 0)]));
        world.api.put(claim("b", &[whole("gpu", 1)]));
        std::fs::create_dir_all(world.layout.claims()).unwrap();
        let path = world.layout.claims().join("uid-of-a.json");
        std::fs::write(&path, content).unwrap();
        let spec = world.layout.claims_spec();
        std::fs::create_dir_all(&world.layout.cdi).unwrap();
        let of_claim = serde_json::json!({
            "cdiVersion": "0.3.0",
            "kind": "gpu.tranche.dev/claim",
            "devices": [{"name": "uid-of-a-gpu-0", "containerEdits": {"env": ["A=b"]}}],
        });
        std::fs::write(&spec, of_claim.to_string()).unwrap();
        let plugin = world.start();
        has(
            &refusal(&plugin, "a").await,
            &["team/a", path.to_str().unwrap(), word, "delete"],
        );
        let error = plugin
            .preparer
            .unprepare(&claim_ref("a"))
            .await
            .unwrap_err();
        has(&error.to_string(), &[path.to_str().unwrap(), word]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        assert!(spec.exists(), "what it may have made stays too");
        // It is not known what it holds.
        has(
            &refusal(&plugin, "b").await,
            &[
                "team/b",
                "counts as taken",
                "uid-of-a",
                path.to_str().unwrap(),
            ],
        );
        assert_eq!(
            plugin.reports.failed.lock().unwrap().len(),
            2,
            "events on both pods"
        );

        // The remedy in the message works, whether the claim is still needed or not, and without a
        // restart.
        std::fs::remove_file(&path).unwrap();
        plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
        plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        assert!(plugin.preparer.ledger().refused().is_empty());
        std::fs::write(&path, content).unwrap();
        let plugin = world.start();
        refusal(&plugin, "a").await;
        std::fs::remove_file(&path).unwrap();
        plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        plugin.preparer.unprepare(&claim_ref("b")).await.unwrap();
        assert_eq!(world.traces(), NONE);
    }
}

#[tokio::test]
async fn the_gpus_that_an_unreadable_journal_names_count_as_taken() {
    let world = World::new();
    world.api.put(claim("a", &[capped("gpu", 0, "1Gi", 10)]));
    world.prepare("a").await;
    let path = world.layout.claims().join("uid-of-a.json");
    let record = std::fs::read_to_string(&path).unwrap();
    let newer = record.replacen("\"minReader\":", "\"minReader\":99,\"was\":", 1);
    assert_ne!(newer, record);
    std::fs::write(&path, newer).unwrap();

    let plugin = world.start();
    let objects = [
        claim("b", &[capped("gpu", 0, "1Gi", 10)]),
        claim("c", &[whole("gpu", 1)]),
        claim("d", &[whole("gpu", 0)]),
    ];
    for object in objects {
        world.api.put(object);
    }
    for name in ["b", "d"] {
        has(
            &refusal(&plugin, name).await,
            &[
                "counts as taken",
                path.to_str().unwrap(),
                "reads version 99",
            ],
        );
    }
    plugin.preparer.prepare(&claim_ref("c")).await.unwrap();
    // After the repair it blocks only what it blocked before, which is no share.
    std::fs::write(&path, record).unwrap();
    plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
    assert_eq!(held(&plugin), ["a", "b", "c"]);
}

/// An example is a journal of a newer plugin before a rollback, or one from a backup.
#[tokio::test]
async fn a_journal_that_was_mended_is_held_again() {
    let world = World::new();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    let record = world.prepare("a").await;
    let path = world.layout.claims().join("uid-of-a.json");
    let content = std::fs::read(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    let plugin = world.start();
    refusal(&plugin, "a").await;
    std::fs::write(&path, content).unwrap();
    let again = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(again.plan, record.plan);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn a_journal_under_another_claims_name_is_refused() {
    let world = World::new();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    world.prepare("a").await;
    let claims = world.layout.claims();
    std::fs::copy(claims.join("uid-of-a.json"), claims.join("uid-of-b.json")).unwrap();
    world.api.put(claim("b", &[whole("gpu", 1)]));
    has(
        &refusal(&world.start(), "b").await,
        &["uid-of-b.json", "uid-of-a"],
    );
}

#[tokio::test]
async fn no_driver_means_an_error_with_the_way_out() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    let not_found = NvmlError::NotFound {
        roots: "/driver-root".into(),
        searched: "/usr/lib64".into(),
    };
    let absent = DriverState::Absent(Arc::new(DriverError::Nvml(not_found)));
    plugin.driver.send_replace(absent);
    has(
        &refusal(&plugin, "a").await,
        &["team/a", "/driver-root", "install the NVIDIA driver"],
    );

    plugin
        .driver
        .send_replace(DriverState::Ready(Arc::clone(&world.ready)));
    std::fs::remove_file(world.driver_root().join("dev/nvidia0")).unwrap();
    has(
        &refusal(&plugin, "a").await,
        &["/dev/nvidia0", "nvidia-modprobe"],
    );
    std::fs::remove_dir_all(world.driver_root()).unwrap();
    has(&refusal(&plugin, "a").await, &["driver root", "driverRoot"]);
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn without_the_shim_only_capped_claims_are_refused() {
    let world = World::new();
    let plugin = world.start();
    std::fs::remove_file(
        world
            .layout
            .libraries()
            .join(format!("{PAGES}/libcuda.so.1")),
    )
    .unwrap();
    world.api.put(claim("a", &[capped("gpu", 0, "1Gi", 10)]));
    has(
        &refusal(&plugin, "a").await,
        &["team/a", "libcuda.so.1", "restart"],
    );
    assert_eq!(plugin.reports.failed.lock().unwrap().len(), 1);
    world.api.put(claim("b", &[whole("gpu", 1)]));
    plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_gpu_serves_one_tier_at_a_time_whatever_is_allocated() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[capped("gpu", 0, "40Gi", 40)]));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world.api.put(claim("b", &[whole("gpu", 0)]));
    has(
        &refusal(&plugin, "b").await,
        &["team/b", "team/a", "exclusive"],
    );
    world.api.put(claim("c", &[capped("gpu", 0, "60Gi", 10)]));
    has(
        &refusal(&plugin, "c").await,
        &["team/c", "team/a", "memory"],
    );
    orphans_are_suspected(&plugin).await;
}

/// The kubelet prepares the next pod's claim before it unprepares one of a pod that was deleted by
/// force.
#[tokio::test]
async fn a_claim_waits_for_a_holder_that_is_just_ending() {
    let world = World::new();
    let plugin = world.start();
    let objects = [
        claim("old", &[whole("gpu", 0)]),
        claim("new", &[capped("gpu", 0, "1Gi", 10)]),
    ];
    for object in &objects {
        world.api.put(object.clone());
    }
    plugin.preparer.prepare(&claim_ref("old")).await.unwrap();
    let prepared = waiting(&plugin, "new").await;
    world.api.delete(&objects[0]);
    plugin.preparer.unprepare(&claim_ref("old")).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), prepared)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(plugin.reports.failed.lock().unwrap().is_empty());
    assert_eq!(held(&plugin), ["new"]);
}

#[tokio::test]
async fn a_claim_that_is_deleted_while_it_waits_gets_nothing() {
    let world = World::new();
    let plugin = world.start();
    let new = claim("new", &[whole("gpu", 0)]);
    world.api.put(claim("old", &[whole("gpu", 0)]));
    world.api.put(new.clone());
    plugin.preparer.prepare(&claim_ref("old")).await.unwrap();
    let prepared = waiting(&plugin, "new").await;
    world.api.delete(&new);
    plugin.preparer.unprepare(&claim_ref("old")).await.unwrap();
    let waited = tokio::time::timeout(Duration::from_secs(5), prepared).await;
    has(
        &waited.unwrap().unwrap().unwrap_err().to_string(),
        &["deleted"],
    );
    assert_eq!(world.traces(), NONE);
}

#[tokio::test]
async fn a_claim_waits_for_the_first_check_of_the_driver() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    plugin.driver.send_replace(DriverState::Unknown);
    let claim = claim_ref("a");
    let early = plugin.preparer.prepare(&claim);
    let look = async {
        // Once it has read the claim, it waits only for the driver.
        while world.api.requests().is_empty() {
            tokio::task::yield_now().await;
        }
        plugin
            .driver
            .send_replace(DriverState::Ready(Arc::clone(&world.ready)));
    };
    let (prepared, ()) = tokio::join!(early, look);
    prepared.unwrap();
}

/// The kubelet retries only after more than a minute.
#[tokio::test(start_paused = true)]
async fn a_connection_that_breaks_is_tried_again() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    world.api.set_mood(Mood::Breaking(3));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    world.api.put(claim("b", &[whole("gpu", 1)]));
    world.api.set_mood(Mood::Breaking(4));
    has(&refusal(&plugin, "b").await, &["team/b", "cannot read it"]);
}

#[tokio::test(start_paused = true)]
async fn a_silent_api_server_costs_ten_seconds_and_one_request() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[whole("gpu", 0)]));
    world.api.set_mood(Mood::NoAnswer);
    let start = tokio::time::Instant::now();
    has(&refusal(&plugin, "a").await, &["team/a", "did not answer"]);
    assert_eq!(start.elapsed().as_secs(), 10);
    world.api.set_mood(Mood::Failing(503));
    has(&refusal(&plugin, "a").await, &["team/a", "503"]);
    assert_eq!(world.api.requests().len(), 2);
}

fn shares() -> serde_json::Value {
    let shares = [
        capped("x", 0, "20Gi", 25),
        oversubscribed("y", 1, 200, "10Gi", 10),
    ];
    with_priority(claim("a", &shares), "high")
}

/// A claim's files without an error.
async fn undisturbed(ending: Ending) -> Vec<(String, Vec<u8>)> {
    let mut world = World::new();
    if let Ending::Rebooted = ending {
        world.reboot_in_another_order();
    }
    world.api.put(shares());
    world.prepare("a").await;
    world.contents()
}

/// How a new process continues after a killed one.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Retried,
    Released,
    Orphaned,
    /// With the GPUs in another order.
    Rebooted,
}

const ENDINGS: [Ending; 4] = [
    Ending::Retried,
    Ending::Released,
    Ending::Orphaned,
    Ending::Rebooted,
];

/// The number of grants of [`shares`] that the trail must have: of what was prepared before `ending`, and of what is prepared
/// by it.
fn expected_grants(world: &World, ending: Ending, was_prepared: bool) -> usize {
    let is_prepared = matches!(ending, Ending::Retried | Ending::Rebooted);
    let is_held = world.layout.claims().join("uid-of-a.json").exists();
    let before = was_prepared || is_held;
    let anew = is_prepared && !is_held;
    2 * (usize::from(before) + usize::from(anew))
}

async fn ends_well(world: &mut World, ending: Ending, at: usize, wanted: &[(String, Vec<u8>)]) {
    if let Ending::Rebooted = ending {
        world.reboot_in_another_order();
    }
    let plugin = world.start();
    match ending {
        Ending::Retried | Ending::Rebooted => {
            plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
            assert_eq!(world.contents(), wanted, "{ending:?} {at}");
            plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
        }
        Ending::Released => plugin.preparer.unprepare(&claim_ref("a")).await.unwrap(),
        Ending::Orphaned => {
            world.api.delete(&shares());
            let search = plugin.search(world, &KubeletList::default()).await;
            search.run_for(SPREAD * 2).await;
        }
    }
    assert_eq!(world.traces(), NONE, "{ending:?} {at}");
    let has_ended = |(_, ended): &(String, Option<Ended>)| ended.is_some();
    assert!(world.grants().iter().all(has_ended), "{ending:?} {at}");
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_prepare_it_converges() {
    for ending in ENDINGS {
        let wanted = undisturbed(ending).await;
        let mut steps = 0;
        for at in 0.. {
            let mut world = World::new();
            world.api.put(shares());
            let fs = Arc::new(FaultyFs::new(at, Fault::Death));
            if let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) {
                let result = plugin.preparer.prepare(&claim_ref("a")).await;
                assert_eq!(result.is_err(), fs.struck(), "{at}");
            }
            let grants = expected_grants(&world, ending, false);
            ends_well(&mut world, ending, at, &wanted).await;
            assert_eq!(world.grants().len(), grants, "{ending:?} {at}");
            steps = at;
            if !fs.struck() {
                break;
            }
        }
        assert!(steps > 20, "only {steps} steps were tried");
    }
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_of_unprepare_it_converges() {
    for ending in ENDINGS {
        let wanted = undisturbed(ending).await;
        for at in 0.. {
            let mut world = World::new();
            world.api.put(shares());
            world.prepare("a").await;
            let fs = Arc::new(FaultyFs::new(at, Fault::Death));
            if let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) {
                let result = plugin.preparer.unprepare(&claim_ref("a")).await;
                assert_eq!(result.is_err(), fs.struck(), "{at}");
            }
            let grants = expected_grants(&world, ending, true);
            ends_well(&mut world, ending, at, &wanted).await;
            assert_eq!(world.grants().len(), grants, "{ending:?} {at}");
            if !fs.struck() {
                break;
            }
        }
    }
}

#[tokio::test]
async fn one_failing_step_leaves_nothing_half_prepared() {
    for at in 0.. {
        let world = World::new();
        world.api.put(shares());
        let fs = Arc::new(FaultyFs::new(at, Fault::Once));
        let Ok(plugin) = world.start_on(Arc::clone(&fs) as _) else {
            continue;
        };
        let result = plugin.preparer.prepare(&claim_ref("a")).await;
        if !fs.struck() {
            result.unwrap();
            return;
        }
        let error = result.unwrap_err().to_string();
        has(&error, &["team/a", "injected fault"]);
        assert_eq!(world.traces(), NONE, "{at}: {error}");
        assert_eq!(world.grants(), [], "{at}: nobody had it");
        // The same process can continue.
        plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    }
}

/// Eight claims of one GPU write their journals concurrently, so the disk can merge the syncs.
#[tokio::test]
async fn claims_on_one_gpu_do_not_wait_for_each_others_disk_writes() {
    let world = World::new();
    let fs = Arc::new(FaultyFs::meeting(8));
    let plugin = world.start_on(fs).unwrap();
    let calls = (0..8).map(|n| {
        let name = format!("c{n}");
        world.api.put(claim(&name, &[capped("gpu", 0, "1Gi", 3)]));
        let preparer = Arc::clone(&plugin.preparer);
        async move { preparer.prepare(&claim_ref(&name)).await.map(|_| ()) }
    });
    for result in futures::future::join_all(calls.collect::<Vec<_>>()).await {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_each_get_their_own_and_leave_nothing() {
    let world = World::new();
    let plugin = world.start();
    let names: Vec<String> = (0..64).map(|n| format!("c{n}")).collect();
    for (n, name) in names.iter().enumerate() {
        let minor = u32::try_from(n % 2).unwrap();
        world
            .api
            .put(claim(name, &[capped("gpu", minor, "1Gi", 3)]));
    }
    let all = |names: &[String]| {
        let calls = names.iter().map(|name| {
            let preparer = Arc::clone(&plugin.preparer);
            let claim = claim_ref(name);
            async move { preparer.prepare(&claim).await.map(|_| ()) }
        });
        futures::future::join_all(calls.collect::<Vec<_>>())
    };
    for result in all(&names).await {
        result.unwrap();
    }
    assert_eq!(plugin.preparer.ledger().held().len(), 64);
    for name in &names {
        plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
    }
    assert_eq!(world.traces(), NONE);
}

/// The result of an allocator that ignores shared counters: a share and the whole of one GPU.
#[tokio::test(start_paused = true)]
async fn a_gpu_that_an_allocator_gave_away_twice_is_prepared_once() {
    for (first, second) in [
        (capped("gpu", 0, "1Gi", 10), whole("gpu", 0)),
        (whole("gpu", 0), capped("gpu", 0, "1Gi", 10)),
        (whole("gpu", 0), whole("gpu", 0)),
    ] {
        let world = World::new();
        let plugin = world.start();
        world.api.put(claim("first", &[first]));
        world.api.put(claim("second", &[second]));
        plugin.preparer.prepare(&claim_ref("first")).await.unwrap();
        let before = world.contents();
        let text = refusal(&plugin, "second").await;
        has(&text, &["team/second", "held by claim team/first"]);
        assert_eq!(world.contents(), before, "the first claim's files");
        assert_eq!(held(&plugin), ["first"]);
        let failed = plugin.reports.failed.lock().unwrap().clone();
        assert_eq!(
            failed,
            [("second".to_owned(), text)],
            "an event for its pod"
        );
        // The first is prepared again, as after a restart of the kubelet.
        plugin.preparer.prepare(&claim_ref("first")).await.unwrap();
        plugin
            .preparer
            .unprepare(&claim_ref("first"))
            .await
            .unwrap();
        plugin.preparer.prepare(&claim_ref("second")).await.unwrap();
    }
}

#[tokio::test]
async fn a_withheld_gpu_is_refused_to_new_claims_only() {
    let mut world = World::new();
    let uuid = |gpu: usize| world.ready.inventory.gpus[gpu].uuid.clone();
    let (mine, other) = (uuid(0), uuid(1));
    world.api.put(claim("running", &[whole("gpu", 0)]));
    world.api.put(claim("new", &[capped("gpu", 1, "1Gi", 10)]));
    let plugin = world.start();
    plugin
        .preparer
        .prepare(&claim_ref("running"))
        .await
        .unwrap();
    // Another system starts and offers both.
    let seen = Observations {
        plugin_sockets: ["nvidia-gpu.sock".to_owned()].into(),
        ..Observations::default()
    };
    plugin
        .others
        .send_replace(Some(verdict(&world.ready.inventory, &seen)));
    has(
        &refusal(&plugin, "new").await,
        &[
            "team/new",
            &other,
            "OtherProvider",
            "nvidia-gpu.sock",
            "delete the pod",
        ],
    );
    assert_eq!(
        plugin.reports.failed.lock().unwrap().len(),
        1,
        "an event for its pod"
    );
    assert_eq!(held(&plugin), ["running"]);
    plugin
        .preparer
        .prepare(&claim_ref("running"))
        .await
        .unwrap();
    plugin.others.send_replace(Some(verdict(
        &world.ready.inventory,
        &Observations::default(),
    )));
    plugin.preparer.prepare(&claim_ref("new")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("new")).await.unwrap();

    // The same for GPUs that are withheld because of NVML.
    let mut ready = (*world.ready).clone();
    ready.withheld = vec![WithheldGpu::whole(
        &other,
        "MigMode",
        "MIG mode is on".into(),
    )];
    world.ready = Arc::new(ready);
    plugin
        .driver
        .send_replace(DriverState::Ready(Arc::clone(&world.ready)));
    has(&refusal(&plugin, "new").await, &[&other, "MigMode"]);
    assert!(!refusal(&plugin, "new").await.contains(&mine));
}
