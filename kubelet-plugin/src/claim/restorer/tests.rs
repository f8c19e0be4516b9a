use std::fs;
use std::sync::Arc;

use crate::claim::restorer::Restorer;
use crate::testing::{Given, Plugin, World, capped, claim, claim_ref, partition, whole};

fn restorer(plugin: &Plugin) -> Restorer {
    Restorer {
        preparer: Arc::clone(&plugin.preparer),
    }
}

/// Looks once; the problems.
async fn round(plugin: &Plugin) -> Vec<String> {
    let failing = restorer(plugin).round(Vec::new()).await;
    failing.into_iter().map(|(_, problem)| problem).collect()
}

const NONE: [String; 0] = [];

fn has(text: &str, words: &[&str]) {
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

async fn prepared(device: Given) -> (World, Plugin) {
    let world = World::new();
    world.api.put(claim("a", &[device]));
    world.prepare("a").await;
    // Another process than the one that prepared it.
    let plugin = world.start();
    (world, plugin)
}

#[tokio::test]
async fn every_deleted_file_of_a_held_claim_comes_back() {
    for device in [
        whole("gpu", 0),
        capped("gpu", 0, "1Gi", 10),
        partition("gpu", 0, "1g10gb-6"),
    ] {
        let (world, plugin) = prepared(device).await;
        let before = world.contents();
        let files = before.iter().map(|(path, _)| world.dir.path().join(path));
        for path in files.filter(|path| path.is_file() && !path.starts_with(world.layout.gpus())) {
            fs::remove_file(&path).unwrap();
            assert_eq!(round(&plugin).await, NONE);
            assert!(path.exists(), "{}", path.display());
        }
        assert_eq!(world.contents(), before);
    }
}

#[tokio::test]
async fn the_specs_come_back_with_their_folder() {
    let (world, plugin) = prepared(capped("gpu", 0, "1Gi", 10)).await;
    plugin.preparer.ensure_specs().unwrap();
    let driver = world.layout.driver_spec();
    let (before, spec) = (world.contents(), fs::read(&driver).unwrap());
    fs::remove_dir_all(&world.layout.cdi).unwrap();
    assert_eq!(round(&plugin).await, NONE);
    assert_eq!(
        (world.contents(), fs::read(driver).unwrap()),
        (before, spec)
    );
}

#[tokio::test]
async fn an_account_comes_back_only_if_no_container_has_the_deleted_one() {
    let world = World::new();
    world.api.put(claim("a", &[capped("gpu", 0, "1Gi", 10)]));
    let record = world.prepare("a").await;
    let plugin = world.start();
    let key = &record.plan.devices[0].key;
    let account = world.layout.share("uid-of-a", key).account;
    world.run_in_container(&record, 4711);
    fs::remove_file(&account).unwrap();
    let [problem] = &round(&plugin).await[..] else {
        panic!("it has a problem")
    };
    has(problem, &["account", "1 processes", "delete the pods"]);
    let refusal = plugin.preparer.prepare(&claim_ref("a")).await;
    has(&refusal.unwrap_err().to_string(), &["team/a", "account"]);
    assert!(!account.exists());
    world.end(4711);
    assert_eq!(round(&plugin).await, NONE);
    assert!(account.exists());
}

#[tokio::test]
async fn nothing_comes_back_of_a_claim_that_is_released() {
    let (world, plugin) = prepared(capped("gpu", 0, "1Gi", 10)).await;
    fs::remove_file(world.layout.metadata().join("uid-of-a/gpu.json")).unwrap();
    let damaged = plugin.preparer.damaged();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    for claim in damaged {
        assert!(!plugin.preparer.restore(&claim).await.unwrap());
    }
    assert_eq!(world.traces(), NONE);
}
