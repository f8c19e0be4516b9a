use std::ffi::CString;
use std::fs;
use std::time::Duration;

use serde_json::Value;
use tranche_shim_core::{Locks as _, layout};
use tranche_shim_runtime::sys::File;

use super::schedule::{GRACE, LONGEST, SPREAD};
use crate::testing::api::Mood;
use crate::testing::{KubeletList, Plugin, World, capped, claim, claim_ref, whole};

const HOUR: Duration = Duration::from_hours(1);

/// Prepares these claims, each a small share of the first GPU.
async fn prepare(world: &World, plugin: &Plugin, names: &[&str]) -> Vec<Value> {
    let mut objects = Vec::new();
    for name in names {
        let object = claim(name, &[capped("gpu", 0, "1Gi", 2)]);
        world.api.put(object.clone());
        plugin.preparer.prepare(&claim_ref(name)).await.unwrap();
        objects.push(object);
    }
    objects
}

fn held(plugin: &Plugin) -> Vec<String> {
    let held = plugin.preparer.ledger().held();
    held.iter()
        .map(|record| record.plan.allocation.name.clone())
        .collect()
}

#[tokio::test(start_paused = true)]
async fn at_steady_state_the_api_server_is_asked_for_nothing() {
    let world = World::new();
    let claims: Vec<_> = (0..20).map(|n| format!("claim-{n}")).collect();
    let names: Vec<_> = claims.iter().map(String::as_str).collect();
    prepare(&world, &world.start(), &names).await;
    let plugin = world.start();
    let kubelet = KubeletList::of(&plugin.preparer.ledger().held());

    let search = plugin.search(&world, &kubelet).await;
    let requests = || world.api.requests().len();
    let before = requests();
    search.run_for(SPREAD + 2 * GRACE).await;
    assert_eq!(
        requests() - before,
        20,
        "a new life asks for each claim once"
    );

    let before = requests();
    search.run_for(24 * HOUR).await;
    assert_eq!(requests() - before, 0);
    assert_eq!(
        plugin.preparer.ledger().pods("uid-of-claim-7"),
        ["pod-of-claim-7"]
    );

    // Without the kubelet's list: each claim about four times a day.
    kubelet.stop_answering();
    search.run_for(LONGEST * 4).await;
    let before = requests();
    search.run_for(24 * HOUR).await;
    let per_hour = (requests() - before).div_ceil(24);
    assert!((1..=5).contains(&per_hour), "{per_hour} requests per hour");
    assert_eq!(held(&plugin).len(), 20);
}

#[tokio::test(start_paused = true)]
async fn gone_and_replaced_claims_are_released_and_others_stay() {
    let world = World::new();
    let objects = prepare(&world, &world.start(), &["gone", "kept", "replaced"]).await;
    world.api.delete(&objects[0]);
    let mut other = objects[2].clone();
    other["metadata"]["uid"] = "another".into();
    world.api.put(other);

    // After a restart they are found too, and the status of the remaining one is published again, because
    // it is not known whether the earlier process did it.
    let plugin = world.start();
    plugin
        .search(&world, &KubeletList::default())
        .await
        .run_for(HOUR)
        .await;
    assert_eq!(held(&plugin), ["kept"]);
    let prepared = plugin.reports.prepared.lock().unwrap();
    assert!(!prepared.is_empty() && prepared.iter().all(|uid| uid == "uid-of-kept"));
    let traces = world.traces();
    let others = traces.iter().filter(|path| !path.contains("kept"));
    assert!(others.eq(["cdi/gpu.tranche.dev-claim.json"]), "{traces:?}");
    assert_eq!(
        world.cdi_devices("uid-of-kept").as_array().unwrap().len(),
        1
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_not_the_api_servers_word_releases_nothing() {
    let world = World::new();
    let objects = prepare(&world, &world.start(), &["a"]).await;
    let plugin = world.start();
    let search = plugin.search(&world, &KubeletList::default()).await;
    for mood in [
        Mood::Failing(404),
        Mood::Failing(500),
        Mood::NoAnswer,
        Mood::Breaking(u32::MAX),
    ] {
        world.api.set_mood(mood);
        search.run_for(24 * HOUR).await;
        assert_eq!(held(&plugin), ["a"], "{mood:?}");
    }
    world.api.set_mood(Mood::Well);
    for (field, value) in [
        ("uid", Value::Null),
        ("uid", "".into()),
        ("name", "b".into()),
    ] {
        let mut broken = objects[0].clone();
        broken["metadata"]["uid"] = "another".into();
        broken["metadata"][field] = value;
        world.api.put_at(
            "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/a",
            broken,
        );
        search.run_for(24 * HOUR).await;
        assert_eq!(held(&plugin), ["a"], "{field}");
    }
    world.api.delete(&objects[0]);
    search.run_for(24 * HOUR).await;
    assert!(held(&plugin).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_gone_keeps_its_gpu_while_a_container_has_it() {
    for given in [capped("gpu", 0, "1Gi", 10), whole("gpu", 0)] {
        let world = World::new();
        let plugin = world.start();
        let object = claim("a", &[given]);
        world.api.put(object.clone());
        plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
        world.api.delete(&object);
        world.run_in_container(&plugin.preparer.ledger().held()[0], 4711);
        let search = plugin.search(&world, &KubeletList::default()).await;
        search.run_for(24 * HOUR).await;
        assert_eq!(held(&plugin), ["a"]);
        world.end(4711);
        search.run_for(HOUR).await;
        assert!(held(&plugin).is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_gone_claim_keeps_its_gpu_while_processes_may_be_left() {
    let world = World::new();
    let plugin = world.start();
    let objects = prepare(&world, &plugin, &["a"]).await;
    world.api.delete(&objects[0]);
    let search = plugin.search(&world, &KubeletList::default()).await;
    fs::remove_dir(world.proc()).unwrap();
    search.run_for(HOUR).await;
    assert_eq!(
        held(&plugin),
        ["a"],
        "it is not known which processes there are"
    );
    fs::create_dir(world.proc()).unwrap();

    let record = &plugin.preparer.ledger().held()[0];
    let account = world
        .layout
        .share("uid-of-a", &record.plan.devices[0].key)
        .account;
    let mut bytes = fs::read(&account).unwrap();
    // Slot 0 is taken, and its lock is held.
    bytes[512] |= 1;
    fs::write(&account, bytes).unwrap();
    let path = CString::new(account.to_str().unwrap()).unwrap();
    let process = File::open(&path, true).unwrap();
    assert!(process.try_lock(layout::slot_lock(0)));
    search.run_for(24 * HOUR).await;
    assert_eq!(held(&plugin), ["a"]);
    drop(process);
    search.run_for(24 * HOUR).await;
    assert!(held(&plugin).is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_the_kubelet_lists_is_never_released() {
    let world = World::new();
    let plugin = world.start();
    let objects = prepare(&world, &plugin, &["a"]).await;
    let kubelet = KubeletList::of(&plugin.preparer.ledger().held());
    world.api.delete(&objects[0]);
    let plugin = world.start();
    let search = plugin.search(&world, &kubelet).await;
    search.run_for(24 * HOUR).await;
    assert_eq!(held(&plugin), ["a"]);
    kubelet.lists(&[]);
    search.run_for(HOUR).await;
    assert!(held(&plugin).is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_the_kubelet_lists_at_the_last_moment_is_not_released() {
    let world = World::new();
    let objects = prepare(&world, &world.start(), &["a"]).await;
    world.api.delete(&objects[0]);
    let plugin = world.start();
    let kubelet = KubeletList::default();
    let search = plugin.search(&world, &kubelet).await;
    kubelet.lists(&[]);
    let gets = world.api.requests().len();
    while world.api.requests().len() == gets {
        search.run_for(Duration::from_millis(100)).await;
    }
    // It is gone, and would be released at the next answer.
    kubelet.lists(&plugin.preparer.ledger().held());
    search.run_for(GRACE + Duration::from_secs(1)).await;
    assert_eq!(world.api.requests().len(), gets + 2);
    assert_eq!(held(&plugin), ["a"]);
    kubelet.lists(&[]);
    search.run_for(HOUR).await;
    assert!(held(&plugin).is_empty());
}

/// The new claim's Prepare waits for less than half a minute.
#[tokio::test(start_paused = true)]
async fn an_orphan_in_the_way_is_released_while_the_new_claim_waits() {
    let world = World::new();
    let plugin = world.start();
    let objects = prepare(&world, &plugin, &["old"]).await;
    world.api.delete(&objects[0]);
    world.api.put(claim("new", &[whole("gpu", 0)]));
    let search = plugin.search(&world, &KubeletList::default()).await;
    let new = claim_ref("new");
    tokio::select! {
        () = search.run_for(HOUR) => panic!("the new claim is still waiting"),
        prepared = plugin.preparer.prepare(&new) => drop(prepared.unwrap()),
    }
    assert_eq!(held(&plugin), ["new"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_joins_a_held_claim_costs_one_request() {
    let world = World::new();
    let plugin = world.start();
    let mut objects = prepare(&world, &plugin, &["a"]).await;
    let kubelet = KubeletList::of(&plugin.preparer.ledger().held());
    let search = plugin.search(&world, &kubelet).await;
    search.run_for(24 * HOUR).await;
    let before = world.api.requests().len();
    let mut pods = objects[0]["status"]["reservedFor"].clone();
    let joins = serde_json::json!({"resource": "pods", "name": "joins", "uid": "joins-uid"});
    pods.as_array_mut().unwrap().push(joins);
    objects[0]["status"]["reservedFor"] = pods;
    world.api.put(objects.remove(0));
    kubelet.lists_pod(&plugin.preparer.ledger().held(), "joins");
    search.run_for(24 * HOUR).await;
    assert_eq!(world.api.requests().len() - before, 1);
    let uids = plugin.preparer.ledger().pod_uids("uid-of-a");
    assert_eq!(uids["joins-uid"], "joins");
    // A pod that the claim does not name, because the claim is reserved for its group, costs one
    // too.
    kubelet.lists_pod(&plugin.preparer.ledger().held(), "of-a-group");
    search.run_for(24 * HOUR).await;
    assert_eq!(world.api.requests().len() - before, 2);
}
