//! The controller against an API server in the same process, in virtual time: what it publishes, what it leaves
//! alone, and how often it writes.

use crate::support;

use std::time::Duration;

use serde_json::{Value, json};
use support::Fault;
use support::cluster::Cluster;
use tokio::time::{Instant, sleep};
use tranche_controller::controller::REQUESTS_PER_SECOND;

const SOON: Duration = Duration::from_secs(30);
/// How soon a plugin sees that its slices vanished.
const FAST: Duration = Duration::from_millis(200);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A cluster with one node of two GPUs, published by one replica.
async fn published() -> (Cluster, support::cluster::Replica) {
    let cluster = Cluster::new();
    cluster.node("a");
    cluster.register("a", 2);
    let replica = cluster.replica("one");
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    (cluster, replica)
}

#[tokio::test(start_paused = true)]
async fn a_registered_node_is_published() {
    let cluster = Cluster::new();
    cluster.node("a");
    let _replica = cluster.replica("one");
    cluster.settle(SOON).await;
    assert!(cluster.api.writes().is_empty(), "nothing to publish yet");

    cluster.describe("a", 2);
    sleep(seconds(600)).await;
    assert!(
        cluster.api.writes().is_empty(),
        "the kubelet does not know the plugin yet"
    );

    cluster.bump("a");
    let took = cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert_eq!(
        cluster.devices("a"),
        [
            "gpu-00000000-capped",
            "gpu-00000000-timeshared",
            "gpu-00000000",
            "gpu-00000001-capped",
            "gpu-00000001-timeshared",
            "gpu-00000001"
        ]
    );
    assert_eq!(cluster.published("a")["problem"], json!(null));
    assert!(took < Duration::from_millis(300), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn missing_slices_are_counted_until_they_are_back() {
    let (cluster, replica) = published().await;
    let missing = || {
        let text = replica.metrics.text().expect("text");
        let mut lines = text.lines().map(str::to_owned);
        lines.find(|line| line.starts_with("tranche_controller_slices_missing{"))
    };
    assert_eq!(missing(), None);
    let slices = cluster.slices("a").len();
    // The plugin is gone, and so are its slices.
    cluster.wipe("a");
    sleep(SOON).await;
    let expected = format!("tranche_controller_slices_missing{{node=\"a\"}} {slices}");
    assert_eq!(missing(), Some(expected));
    let _plugin = cluster.plugin("a", seconds(1));
    sleep(SOON).await;
    cluster.assert_whole("a");
    assert_eq!(missing(), None);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_at_steady_state() {
    let (cluster, _replica) = published().await;
    let _plugin = cluster.plugin("a", seconds(20));
    let before = cluster.api.writes();
    // Six hours, with the node's heartbeat every five minutes.
    for _ in 0..72 {
        sleep(seconds(300)).await;
        cluster.api.edit("nodes", "a", |node| {
            node["metadata"]["annotations"] = json!({"heartbeat": "again"});
        });
    }
    assert_eq!(cluster.api.writes(), before);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_decided_on_a_copy_older_than_the_own_writes() {
    let cluster = Cluster::new();
    cluster.api.lag(seconds(1));
    cluster.node("a");
    let _replica = cluster.replica("one");
    cluster.settle(SOON).await;
    cluster.register("a", 2);
    sleep(seconds(20)).await;
    cluster.assert_whole("a");
    // Three slices and the record, none of them tried twice.
    assert_eq!(cluster.api.attempts(), 4);
    cluster.gpus("a", &[0, 1, 2]);
    sleep(seconds(20)).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.api.attempts(), 4 + 5);
}

/// A list of all slices is large, and an API server whose watches are late has enough to do.
#[tokio::test(start_paused = true)]
async fn a_late_watch_costs_a_read_of_each_written_object_and_no_list() {
    let cluster = Cluster::new();
    cluster.node("a");
    cluster.register("a", 2);
    cluster.api.lag(seconds(120));
    let _replica = cluster.replica("one");
    sleep(seconds(60)).await;
    cluster.assert_whole("a");
    let counts = || {
        let api = &cluster.api;
        let gets = ["resourceslices", "gpunodes"].map(|resource| api.gets(resource));
        (api.attempts(), gets, api.lists("resourceslices"))
    };
    // Three slices and the record, none of them tried twice, and each read once.
    assert_eq!(counts(), (4, [3, 1], 1));
    // The late events are older than what was read.
    sleep(seconds(300)).await;
    cluster.assert_whole("a");
    assert_eq!(counts(), (4, [3, 1], 1));
}

#[tokio::test(start_paused = true)]
async fn a_restart_writes_nothing() {
    let (cluster, replica) = published().await;
    replica.stop().await;
    let before = cluster.api.writes();
    let _replica = cluster.replica("two");
    sleep(seconds(60)).await;
    assert_eq!(cluster.api.writes(), before);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_known_yet_is_not_taken_for_gone() {
    for kind in ["gpunodes", "nodes", "sharingpolicies", "resourceslices"] {
        let (cluster, replica) = published().await;
        replica.stop().await;
        let before = cluster.api.writes();
        cluster
            .api
            .fault(&format!("list {kind}"), vec![Fault::Refuse(500); 4]);
        let _replica = cluster.replica("two");
        sleep(seconds(120)).await;
        assert_eq!(cluster.api.writes(), before, "{kind} came late");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_slice_comes_back_while_the_plugin_lives() {
    let (cluster, _replica) = published().await;
    let _plugin = cluster.plugin("a", FAST);
    let generation = cluster.published("a")["poolGeneration"].clone();
    for name in cluster.names("a") {
        cluster.api.remove("resourceslices", &name);
        let took = cluster.settle(SOON).await;
        cluster.assert_whole("a");
        assert!(took < seconds(1), "{took:?}");
    }
    assert!(cluster.published("a")["poolGeneration"].as_i64() > generation.as_i64());
}

#[tokio::test(start_paused = true)]
async fn slices_of_a_dead_plugin_do_not_come_back() {
    let (cluster, replica) = published().await;
    cluster.wipe("a");
    sleep(seconds(3600)).await;
    assert!(cluster.names("a").is_empty());

    // Not by a new leader, not by a policy, not by a label.
    replica.stop().await;
    let _replica = cluster.replica("two");
    cluster.policy("default", &json!({"tiers": ["exclusive", "capped"]}));
    cluster.api.edit("nodes", "a", |node| {
        node["metadata"]["labels"] = json!({"x": "y"});
    });
    sleep(seconds(3600)).await;
    assert!(cluster.names("a").is_empty());

    cluster.bump("a");
    let took = cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert!(took < Duration::from_millis(300), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_old_request_is_taken_only_from_a_plugin_that_is_ready() {
    let cluster = Cluster::new();
    cluster.node("a");
    cluster.register("a", 2);
    cluster.plugin_pod("a", false);
    // Nobody leads; meanwhile the plugin died, and the kubelet's wipe found nothing.
    sleep(seconds(40)).await;
    let _replica = cluster.replica("one");
    sleep(seconds(600)).await;
    assert!(cluster.names("a").is_empty());

    cluster.plugin_pod("a", true);
    sleep(seconds(15)).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.names("a").len(), 3);
    let before = cluster.api.writes();
    sleep(seconds(600)).await;
    assert_eq!(cluster.api.writes(), before);
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_a_dead_plugins_pool_is_removed() {
    let (cluster, _replica) = published().await;
    let first = cluster.names("a").remove(0);
    cluster.api.remove("resourceslices", &first);
    sleep(seconds(2)).await;
    assert_eq!(cluster.names("a").len(), 2, "the plugin may still ask");
    sleep(seconds(5)).await;
    assert!(cluster.names("a").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_wipe_at_any_moment_of_a_publication_heals() {
    for after in 0..12 {
        let cluster = Cluster::new();
        cluster.node("a");
        let _replica = cluster.replica("one");
        cluster.settle(SOON).await;
        let _plugin = cluster.plugin("a", FAST);
        cluster.register("a", 2);
        // The kubelet's own wipe at its start may come this late.
        while cluster.api.write_count() < after.min(4) {
            sleep(Duration::from_millis(1)).await;
        }
        sleep(Duration::from_millis(after as u64 * 3)).await;
        cluster.wipe("a");
        cluster.settle(SOON).await;
        assert_eq!(cluster.names("a").len(), 3, "wiped after {after}");
        cluster.assert_whole("a");
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_registration_of_a_whole_pool_is_one_write() {
    let (cluster, _replica) = published().await;
    let generation = cluster.published("a")["poolGeneration"].clone();
    let before = cluster.api.write_count();
    cluster.bump("a");
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.published("a")["poolGeneration"], generation);
    let writes = cluster.api.writes().split_off(before);
    assert_eq!(
        writes,
        [(
            "apply".to_owned(),
            "gpunodes/status".to_owned(),
            "a".to_owned()
        )]
    );
}

#[tokio::test(start_paused = true)]
async fn a_change_of_one_slice_is_one_write() {
    let (cluster, _replica) = published().await;
    let generation = cluster.published("a")["poolGeneration"].clone();
    let before = cluster.api.write_count();
    cluster.api.edit("gpunodes", "a", |object| {
        object["status"]["inventory"]["gpus"][1]["numaNode"] = json!(1);
    });
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    let writes = cluster.api.writes().split_off(before);
    assert_eq!(writes.len(), 1, "{writes:?}");
    assert_eq!(cluster.published("a")["poolGeneration"], generation);
}

#[tokio::test(start_paused = true)]
async fn a_new_gpu_is_a_new_generation() {
    let (cluster, _replica) = published().await;
    let generation = cluster.published("a")["poolGeneration"].as_i64();
    cluster.gpus("a", &[0, 1, 2]);
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.names("a").len(), 4);
    assert_eq!(
        cluster.published("a")["poolGeneration"].as_i64(),
        generation.map(|g| g + 1)
    );
}

#[tokio::test(start_paused = true)]
async fn edits_by_others_are_undone_and_their_metadata_stays() {
    let (cluster, _replica) = published().await;
    let name = cluster.names("a").remove(1);
    cluster.api.edit("resourceslices", &name, |slice| {
        slice["spec"]["devices"][0]["name"] = json!("mine");
        slice["metadata"]["labels"] = json!({"team": "a"});
    });
    // The stray device may be allocated: it goes after the grace and a look at the claims.
    cluster.settle(seconds(60)).await;
    sleep(seconds(60)).await;
    cluster.assert_whole("a");
    assert!(!cluster.devices("a").contains(&"mine".to_owned()));
    assert_eq!(
        cluster.api.one("resourceslices", &name)["metadata"]["labels"]["team"],
        "a"
    );
}

/// The events so far: reason, and what each is about.
fn events(cluster: &Cluster) -> Vec<(String, String)> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    cluster
        .api
        .all("events")
        .iter()
        .map(|event| (text(&event["reason"]), text(&event["regarding"]["kind"])))
        .collect()
}

fn condition(cluster: &Cluster) -> (String, String) {
    let status = cluster.api.one("gpunodes", "a")["status"].clone();
    let all = status["conditions"].as_array().cloned().unwrap_or_default();
    let condition = all
        .iter()
        .find(|c| c["type"] == "AllOffered")
        .unwrap_or_else(|| panic!("no condition AllOffered: {all:?}"));
    let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
    (text("status"), text("message"))
}

#[tokio::test(start_paused = true)]
async fn an_invalid_policy_costs_the_gpus_that_it_matches() {
    for (capped, reason, tier) in [
        (json!({"memoryStep": "0"}), "InvalidPolicy", ""),
        (json!({"contextMemory": "60Gi"}), "TooSmall", "capped"),
    ] {
        a_policy_is_broken_and_mended(&capped, reason, tier).await;
    }
}

async fn a_policy_is_broken_and_mended(capped: &serde_json::Value, reason: &str, tier: &str) {
    let (cluster, _replica) = published().await;
    assert_eq!(condition(&cluster).0, "True");
    let all = cluster.devices("a");
    cluster.policy(
        "default",
        &json!({"tiers": ["exclusive", "capped", "timeshared"], "capped": capped}),
    );
    cluster.settle(SOON).await;
    sleep(seconds(60)).await;
    cluster.assert_whole("a");
    let left = cluster.devices("a");
    assert_eq!(left.len(), if tier.is_empty() { 0 } else { 4 }, "{left:?}");
    let published = cluster.published("a");
    assert_eq!(published["withheldCount"], 2);
    for entry in published["withheld"].as_array().expect("a list") {
        assert_eq!(entry["reason"], reason);
        assert_eq!(entry["policy"], "default");
        assert_eq!(entry["tiers"][0].as_str().unwrap_or_default(), tier);
    }
    let (status, message) = condition(&cluster);
    assert_eq!(status, "False");
    assert!(message.contains(reason), "{message}");
    let seen = events(&cluster);
    for kind in ["GpuNode", "SharingPolicy"] {
        let event = ("GpuWithheld".to_owned(), kind.to_owned());
        assert_eq!(seen.iter().filter(|e| **e == event).count(), 2, "{seen:?}");
    }

    let before = cluster.api.writes();
    sleep(seconds(3600)).await;
    assert_eq!(cluster.api.writes(), before, "a problem is said once");

    cluster.policy(
        "default",
        &json!({"tiers": ["exclusive", "capped", "timeshared"]}),
    );
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.devices("a"), all);
    assert_eq!(cluster.published("a")["withheld"], json!(null));
    assert_eq!(condition(&cluster), ("True".to_owned(), String::new()));
}

#[tokio::test(start_paused = true)]
async fn a_withheld_gpu_is_not_offered_until_the_node_releases_it() {
    let (cluster, _replica) = published().await;
    let all = cluster.devices("a");
    let uuid = cluster.api.one("gpunodes", "a")["status"]["inventory"]["gpus"][1]["uuid"].clone();
    let entry =
        json!({"gpu": uuid, "reason": "OtherProvider", "message": "the device plugin offers it"});
    cluster.withhold("a", &json!([entry]));
    cluster.settle(SOON).await;
    sleep(seconds(60)).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.devices("a"), all[..3]);
    assert_eq!(cluster.published("a")["withheld"], json!([entry]));
    assert_eq!(
        condition(&cluster).1,
        format!(
            "GPU {} is not offered (OtherProvider): the device plugin offers it",
            uuid.as_str().expect("a UUID")
        )
    );

    cluster.withhold("a", &json!([]));
    cluster.settle(SOON).await;
    assert_eq!(cluster.devices("a"), all);
    let seen: Vec<_> = events(&cluster)
        .into_iter()
        .map(|(reason, _)| reason)
        .collect();
    assert_eq!(seen, ["GpuWithheld", "GpuReleased"]);
}

/// The taints of a node's devices, by the devices' names.
fn taints(cluster: &Cluster) -> std::collections::BTreeMap<String, Value> {
    let slices = cluster.slices("a");
    let devices = slices
        .iter()
        .filter_map(|it| it["spec"]["devices"].as_array());
    let taints = |device: &Value| {
        let name = device["name"].as_str().expect("a name").to_owned();
        (name, device["taints"].clone())
    };
    devices.flatten().map(taints).collect()
}

#[tokio::test(start_paused = true)]
async fn a_fault_taints_its_gpus_devices_with_one_write_and_a_stable_time() {
    let (cluster, _replica) = published().await;
    let before = taints(&cluster);
    let node = cluster.api.one("gpunodes", "a");
    let uuid = node["status"]["inventory"]["gpus"][1]["uuid"].clone();
    let report = |taint: Value| {
        cluster.api.edit("gpunodes", "a", |node| {
            node["status"]["gpus"] = json!([{"uuid": uuid, "taint": taint}]);
        });
    };
    let taint =
        |effect: &str, time: &str| json!({"value": "Xid79", "effect": effect, "timeAdded": time});
    let writes = cluster.api.writes().len();
    report(taint("NoSchedule", "2026-11-22T08:00:00Z"));
    cluster.settle(SOON).await;
    let wanted = |effect: &str, time: &str| json!([{"key": "gpu.tranche.dev/unhealthy", "value": "Xid79", "effect": effect, "timeAdded": time}]);
    let is_second = |name: &str| name.contains(&uuid.as_str().expect("a UUID")[4..12]);
    for (name, taints) in taints(&cluster) {
        let wanted = if is_second(&name) {
            wanted("NoSchedule", "2026-11-22T08:00:00Z")
        } else {
            Value::Null
        };
        assert_eq!(taints, wanted, "{name}");
    }
    assert_eq!(
        cluster.api.writes().len(),
        writes + 1,
        "one slice, and no record"
    );
    // A new generation of the pool keeps the time.
    let generation = cluster.published("a")["poolGeneration"].clone();
    cluster.withhold(
        "a",
        &json!([{"gpu": "GPU-other", "reason": "GpuLost", "message": ""}]),
    );
    cluster.wipe("a");
    cluster.bump("a");
    cluster.settle(SOON).await;
    assert_ne!(cluster.published("a")["poolGeneration"], generation);
    let second = |taints: std::collections::BTreeMap<String, Value>| {
        let mut of_second = taints.into_iter().filter(|(name, _)| is_second(name));
        of_second.next().expect("a device of the second GPU").1
    };
    assert_eq!(
        second(taints(&cluster)),
        wanted("NoSchedule", "2026-11-22T08:00:00Z")
    );
    report(taint("NoExecute", "2026-11-22T08:05:00Z"));
    cluster.settle(SOON).await;
    assert_eq!(
        second(taints(&cluster)),
        wanted("NoExecute", "2026-11-22T08:05:00Z")
    );
    // A word of a newer plugin.
    report(taint("NoBinding", "2026-11-22T08:05:00Z"));
    cluster.settle(SOON).await;
    assert_eq!(second(taints(&cluster))[0]["effect"], "NoSchedule");
    report(Value::Null);
    cluster.settle(SOON).await;
    assert_eq!(taints(&cluster), before);
}

/// A node of two GPUs at an API server that drops a field: the problem is recorded with this word, and nothing is
/// written again.
async fn with_dropped_field(field: &str, word: &str) -> (Cluster, support::cluster::Replica) {
    let cluster = Cluster::new();
    cluster.api.drop_fields(&[field]);
    cluster.node("a");
    cluster.register("a", 2);
    let replica = cluster.replica("one");
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    let problem = cluster.published("a")["problem"].to_string();
    assert!(problem.contains(word), "{problem}");
    let before = cluster.api.writes();
    sleep(seconds(3600)).await;
    assert_eq!(cluster.api.writes(), before);
    (cluster, replica)
}

#[tokio::test(start_paused = true)]
async fn dropped_fields_are_reported_by_gate_and_not_written_again() {
    let (cluster, replica) =
        with_dropped_field("allowMultipleAllocations", "DRAConsumableCapacity").await;

    // A new leader learns it by writing each slice once more.
    replica.stop().await;
    let before = cluster.api.write_count();
    let replica = cluster.replica("two");
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert!(cluster.api.write_count() - before <= 4);
    let before = cluster.api.writes();
    sleep(seconds(3600)).await;
    assert_eq!(cluster.api.writes(), before);

    // The gate is switched on.
    cluster.api.drop_fields(&[]);
    replica.stop().await;
    let _replica = cluster.replica("three");
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.published("a")["problem"], json!(null));
}

#[tokio::test(start_paused = true)]
async fn without_taints_a_withdrawn_tier_costs_no_requests() {
    let (cluster, _replica) = published().await;
    cluster.api.drop_fields(&["taints"]);
    cluster.policy("default", &json!({"tiers": ["exclusive"]}));
    cluster.settle(SOON).await;
    let problem = cluster.published("a")["problem"].to_string();
    assert!(problem.contains("DRADeviceTaints"), "{problem}");
    let requests = |cluster: &Cluster| {
        let reads = cluster.api.gets("resourceslices") + cluster.api.lists("resourceclaims");
        (reads, cluster.api.write_count())
    };
    let before = requests(&cluster);
    sleep(seconds(3600)).await;
    assert_eq!(requests(&cluster), before);
}

#[tokio::test(start_paused = true)]
async fn a_registration_alone_costs_one_write() {
    let (cluster, _replica) = published().await;
    // The kubelet removed the slices, and the plugin asks for them.
    cluster.wipe("a");
    cluster.bump("a");
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    let before = cluster.api.write_count();
    cluster.bump("a");
    cluster.settle(SOON).await;
    assert_eq!(cluster.api.write_count(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_node_is_told_what_the_policies_ask_of_it() {
    let (cluster, _replica) = published().await;
    let asked = |cluster: &Cluster| {
        let published = cluster.published("a");
        let gpus = published["gpus"].as_array().expect("a list");
        gpus.iter()
            .map(|gpu| (gpu["policy"].clone(), gpu["capped"]["onBypass"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        asked(&cluster),
        vec![(json!("default"), json!("Report")); 2]
    );

    // It costs one write, and no slice.
    let before = cluster.api.writes().len();
    let kill = json!({
        "priority": 1, "tiers": ["exclusive", "capped", "timeshared"], "capped": {"onBypass": "Kill"},
    });
    cluster.policy("strict", &kill);
    cluster.settle(SOON).await;
    assert_eq!(asked(&cluster), vec![(json!("strict"), json!("Kill")); 2]);
    let writes = cluster.api.writes().split_off(before);
    let write =
        |(verb, resource, name): &(String, String, String)| format!("{verb} {resource} {name}");
    assert_eq!(
        writes.iter().map(write).collect::<Vec<_>>(),
        ["apply gpunodes/status a"]
    );

    // The last valid settings stay while the policy is invalid.
    let broken = json!({
        "priority": 1, "tiers": ["capped"], "capped": {"onBypass": "Report", "memoryStep": "0"},
    });
    cluster.policy("strict", &broken);
    cluster.settle(SOON).await;
    assert_eq!(asked(&cluster), vec![(json!("strict"), json!("Kill")); 2]);

    cluster.api.remove("sharingpolicies", "strict");
    cluster.settle(SOON).await;
    assert_eq!(
        asked(&cluster),
        vec![(json!("default"), json!("Report")); 2]
    );
    let before = cluster.api.writes();
    sleep(seconds(3600)).await;
    assert_eq!(cluster.api.writes(), before);
}

#[tokio::test(start_paused = true)]
async fn an_older_gpunode_schema_is_reported_and_not_written_again() {
    let (cluster, replica) = with_dropped_field("gpus", "gpunodes.gpu.tranche.dev").await;

    cluster.api.drop_fields(&[]);
    replica.stop().await;
    let _replica = cluster.replica("two");
    cluster.settle(SOON).await;
    assert_eq!(cluster.published("a")["problem"], json!(null));
    assert_eq!(cluster.published("a")["gpus"][1]["policy"], "default");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_gone_takes_its_slices_with_it() {
    for kind in ["nodes", "gpunodes"] {
        let (cluster, _replica) = published().await;
        cluster.api.remove(kind, "a");
        // A plugin that lives writes its GpuNode again sooner.
        sleep(seconds(6)).await;
        cluster.settle(SOON).await;
        assert!(cluster.names("a").is_empty(), "{kind}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_slice_of_our_driver_that_nobody_knows_is_removed() {
    let (cluster, _replica) = published().await;
    let mut stray = cluster.slices("a").remove(0);
    stray["metadata"] = json!({"name": "stray"});
    cluster.api.put("resourceslices", stray.clone());
    stray["metadata"] = json!({"name": "stray-of-all-nodes"});
    stray["spec"]["nodeName"] = json!(null);
    stray["spec"]["allNodes"] = json!(true);
    cluster.api.put("resourceslices", stray);
    cluster.settle(SOON).await;
    assert_eq!(cluster.api.all("resourceslices").len(), 3);
    cluster.assert_whole("a");
}

/// A claim that holds, or held, the capped device of GPU 1.
fn claim(holds: bool) -> serde_json::Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "c", "namespace": "default"}, "spec": {},
        "status": if holds {
            json!({"allocation": {"devices": {"results": [{
                "request": "gpu", "driver": "gpu.tranche.dev", "pool": "a/gpu", "device": "gpu-00000001-capped",
            }]}}})
        } else {
            json!({})
        },
    })
}

/// The devices that are closed to new claims because they are no longer offered.
fn withdrawn(cluster: &Cluster) -> Vec<String> {
    cluster
        .slices("a")
        .iter()
        .flat_map(|s| s["spec"]["devices"].as_array().cloned().unwrap_or_default())
        .filter(|d| d["taints"][0]["key"] == "gpu.tranche.dev/withdrawn")
        .map(|d| d["name"].as_str().expect("a name").to_owned())
        .collect()
}

#[tokio::test(start_paused = true)]
async fn without_a_driver_only_tainted_allocated_devices_stay() {
    let (cluster, _replica) = published().await;
    cluster.api.put("resourceclaims", claim(true));
    cluster.no_driver("a");
    let took = cluster.settle(SOON).await;
    assert_eq!(withdrawn(&cluster).len(), 6, "nothing is offered at once");
    assert!(took < Duration::from_millis(300), "{took:?}");
    // The plugin registers anew, still without a driver: nothing comes back.
    cluster.bump("a");
    sleep(seconds(30)).await;
    cluster.assert_whole("a");
    assert_eq!(withdrawn(&cluster), ["gpu-00000001-capped"]);
    assert_eq!(cluster.devices("a"), ["gpu-00000001-capped"]);

    cluster.gpus("a", &[0, 1]);
    cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.devices("a").len(), 6);
    assert!(withdrawn(&cluster).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_node_that_registers_without_a_driver_offers_nothing() {
    let cluster = Cluster::new();
    cluster.node("a");
    cluster.register("a", 2);
    cluster.no_driver("a");
    let _replica = cluster.replica("one");
    cluster.settle(SOON).await;
    assert!(cluster.names("a").is_empty());
    cluster.assert_whole("a");
}

#[tokio::test(start_paused = true)]
async fn a_gpu_node_that_is_recreated_loses_no_allocated_device() {
    let (cluster, _replica) = published().await;
    cluster.api.put("resourceclaims", claim(true));
    // The tier is no longer offered; the device stays for its claim.
    cluster.policy("default", &json!({"tiers": ["exclusive"]}));
    sleep(seconds(30)).await;
    assert_eq!(withdrawn(&cluster), ["gpu-00000001-capped"]);
    let uids = |cluster: &Cluster| -> Vec<String> {
        let slices = cluster.slices("a");
        slices
            .iter()
            .map(|s| s["metadata"]["uid"].to_string())
            .collect()
    };
    let before = uids(&cluster);

    let old = cluster.api.one("gpunodes", "a");
    cluster.api.remove("gpunodes", "a");
    sleep(seconds(2)).await;
    cluster.api.put(
        "gpunodes",
        json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode",
            "metadata": {"name": "a"}, "spec": {},
            "status": {
                "inventory": old["status"]["inventory"],
                "registration": old["status"]["registration"],
            },
        }),
    );
    cluster.bump("a");
    let took = cluster.settle(SOON).await;
    cluster.assert_whole("a");
    assert!(took < seconds(1), "{took:?}");
    assert_eq!(withdrawn(&cluster), ["gpu-00000001-capped"]);
    assert_eq!(uids(&cluster), before, "no slice was removed meanwhile");
}

#[tokio::test(start_paused = true)]
async fn a_vanished_gpu_stays_tainted_until_no_claim_holds_it() {
    let (cluster, _replica) = published().await;
    cluster.api.put("resourceclaims", claim(true));
    cluster.gpus("a", &[0]);
    cluster.settle(SOON).await;
    assert_eq!(withdrawn(&cluster).len(), 3, "all devices of the GPU wait");
    cluster.assert_whole("a");

    sleep(seconds(30)).await;
    assert_eq!(withdrawn(&cluster), ["gpu-00000001-capped"]);
    cluster.assert_whole("a");
    let before = cluster.api.writes();
    sleep(seconds(3600)).await;
    assert_eq!(cluster.api.writes(), before, "waiting writes nothing");

    cluster.api.put("resourceclaims", claim(false));
    sleep(seconds(90)).await;
    cluster.settle(SOON).await;
    assert_eq!(cluster.names("a").len(), 2);
    assert!(withdrawn(&cluster).is_empty());
    cluster.assert_whole("a");
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_comes_back_is_offered_again() {
    let (cluster, _replica) = published().await;
    cluster.gpus("a", &[0]);
    cluster.settle(seconds(5)).await;
    cluster.gpus("a", &[0, 1]);
    cluster.settle(SOON).await;
    sleep(seconds(120)).await;
    cluster.assert_whole("a");
    assert_eq!(cluster.devices("a").len(), 6);
    let text = format!("{:?}", cluster.slices("a"));
    assert!(!text.contains("withdrawn"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn every_failure_of_a_write_converges() {
    let writes = [
        "create resourceslices",
        "update resourceslices",
        "delete resourceslices",
        "patch gpunodes/status",
    ];
    let faults = [
        Fault::Refuse(500),
        Fault::Refuse(409),
        Fault::LoseAnswer(504),
        Fault::Hang,
    ];
    for write in writes {
        for fault in &faults {
            for nth in 0..2 {
                let cluster = Cluster::new();
                cluster.node("a");
                let _replica = cluster.replica("one");
                let _plugin = cluster.plugin("a", FAST);
                cluster.settle(SOON).await;
                // A fault that no request meets changes nothing.
                let mut plan = vec![Fault::Refuse(503); nth];
                plan.push(fault.clone());
                cluster.api.fault(write, plan);
                let limit = seconds(60);
                let met = |what: &str| format!("{write}, {fault:?} after {nth}: {what}");
                cluster.register("a", 2);
                assert!(
                    cluster.converges("a", 3, limit).await,
                    "{}",
                    met("registered")
                );
                cluster.gpus("a", &[0, 1, 2]);
                assert!(
                    cluster.converges("a", 4, limit).await,
                    "{}",
                    met("a GPU more")
                );
                let name = cluster.names("a").remove(2);
                cluster.api.remove("resourceslices", &name);
                sleep(seconds(1)).await;
                assert!(
                    cluster.converges("a", 4, limit).await,
                    "{}",
                    met("a slice deleted")
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn two_hundred_nodes_are_published_and_quiet() {
    let cluster = Cluster::new();
    for i in 0..200 {
        let name = format!("node-{i}");
        cluster.node(&name);
        cluster.register(&name, 8);
    }
    let _replica = cluster.replica("one");
    cluster.settle(seconds(120)).await;
    // Nine slices and a record for each.
    assert_eq!(cluster.api.write_count(), 2_000);
    sleep(seconds(1800)).await;
    assert_eq!(cluster.api.write_count(), 2_000);
}

/// Nodes `node-000` and so on, published by one replica.
async fn many(nodes: u32, gpus: u32) -> (Cluster, support::cluster::Replica) {
    many_at(nodes, gpus, REQUESTS_PER_SECOND).await
}

/// The same with a limit of requests a second for changes that concern many nodes.
async fn many_at(nodes: u32, gpus: u32, per_second: u32) -> (Cluster, support::cluster::Replica) {
    let cluster = Cluster::new();
    for i in 0..nodes {
        let name = format!("node-{i:03}");
        cluster.node(&name);
        cluster.register(&name, gpus);
    }
    let replica = cluster.replica_at("one", per_second);
    cluster.settle(seconds(120)).await;
    (cluster, replica)
}

#[tokio::test(start_paused = true)]
async fn a_policy_change_is_paced_in_order_and_after_registrations() {
    // A change of 8 slices is a new generation of all 9, and the record.
    let (cluster, _replica) = many(60, 8).await;
    let before = cluster.api.write_count();
    let begun = Instant::now();
    cluster.policy(
        "default",
        &json!({"tiers": ["exclusive", "capped", "timeshared"], "capped": {"maxSharers": 4}}),
    );
    // A plugin that registers meanwhile does not wait for its turn.
    sleep(seconds(2)).await;
    cluster.bump("node-059");
    sleep(seconds(1)).await;
    cluster.assert_whole("node-059");
    cluster.settle(seconds(60)).await;

    let writes = cluster.api.writes_in_time().split_off(before);
    assert_eq!(writes.len(), 60 * 10);
    for (first, window) in writes.iter().zip(writes.windows(150)) {
        let took = window[149].0 - first.0;
        assert!(took >= seconds(1), "150 writes in {took:?}");
    }
    let took = writes[writes.len() - 1].0 - begun;
    assert!(took > seconds(5) && took < seconds(8), "{took:?}");
    let mut order: Vec<_> = writes
        .iter()
        .filter(|(_, (_, resource, name))| resource == "gpunodes/status" && name != "node-059")
        .map(|(_, (_, _, name))| name.clone())
        .collect();
    // Four are in the middle of it at a time.
    let done = order.clone();
    order.sort();
    for (place, name) in done.iter().enumerate() {
        let due = order.binary_search(name).expect("the same names");
        assert!(place.abs_diff(due) < 4, "{name} is done at place {place}");
    }
}

/// The change of all nodes takes much longer than the grace of a withdrawn device, which takes memory until it is removed.
#[tokio::test(start_paused = true)]
async fn nodes_amid_a_withdrawal_go_before_those_that_wait_to_begin() {
    let (cluster, _replica) = many_at(60, 2, 8).await;
    cluster.policy("default", &json!({"tiers": ["exclusive"]}));
    let withdrawn = || {
        let slices = cluster.api.all("resourceslices");
        let devices = slices
            .iter()
            .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
        let taint = "gpu.tranche.dev/withdrawn";
        devices.filter(|d| d["taints"][0]["key"] == taint).count()
    };
    let mut most = 0;
    for _ in 0..60 {
        sleep(seconds(2)).await;
        most = most.max(withdrawn());
    }
    assert_eq!(withdrawn(), 0);
    assert!((1..=120).contains(&most), "{most} of 240 at the same time");
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_tier_costs_one_list_of_the_claims_for_all_nodes() {
    let (cluster, _replica) = many(40, 2).await;
    for node in ["node-003", "node-017"] {
        let mut claim = claim(true);
        claim["metadata"]["name"] = json!(node);
        claim["status"]["allocation"]["devices"]["results"][0]["pool"] =
            json!(format!("{node}/gpu"));
        cluster.api.put("resourceclaims", claim);
    }
    let reads = cluster.api.gets("resourceslices");
    cluster.policy("default", &json!({"tiers": ["exclusive"]}));
    sleep(seconds(50)).await;
    let withdrawn = || -> Vec<String> {
        let slices = cluster.api.all("resourceslices");
        let devices = slices.iter().flat_map(|slice| {
            let devices = slice["spec"]["devices"].as_array().cloned();
            let pool = slice["spec"]["pool"]["name"].clone();
            devices
                .into_iter()
                .flatten()
                .map(move |d| (pool.clone(), d))
        });
        devices
            .filter(|(_, d)| d["taints"][0]["key"] == "gpu.tranche.dev/withdrawn")
            .map(|(pool, d)| format!("{pool} {}", d["name"]))
            .collect()
    };
    let held = [
        "\"node-003/gpu\" \"gpu-00000001-capped\"",
        "\"node-017/gpu\" \"gpu-00000001-capped\"",
    ];
    assert_eq!(withdrawn(), held);
    // The changes of 40 nodes take some seconds, so two lists may be needed.
    let lists = cluster.api.lists("resourceclaims");
    assert!((1..=3).contains(&lists), "{lists} lists of the claims");
    // A device that is no longer offered is read once.
    assert_eq!(cluster.api.gets("resourceslices") - reads, 80);

    // While claims hold devices, one list a minute for both nodes.
    sleep(seconds(600)).await;
    let more = cluster.api.lists("resourceclaims") - lists;
    assert!((8..=11).contains(&more), "{more} lists in ten minutes");
    assert_eq!(cluster.api.gets("resourceslices") - reads, 80);
    assert_eq!(withdrawn(), held);
    for node in ["node-003", "node-017"] {
        cluster.api.remove("resourceclaims", node);
    }
    sleep(seconds(90)).await;
    assert_eq!(withdrawn(), [""; 0]);
    for i in 0..40 {
        cluster.assert_whole(&format!("node-{i:03}"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_list_of_the_claims_is_retried_and_loses_no_device() {
    let (cluster, _replica) = published().await;
    cluster.api.put("resourceclaims", claim(true));
    cluster
        .api
        .fault("list resourceclaims", vec![Fault::Refuse(500); 3]);
    cluster.policy("default", &json!({"tiers": ["exclusive"]}));
    sleep(seconds(12)).await;
    assert_eq!(withdrawn(&cluster).len(), 4, "not known to be free");
    sleep(seconds(30)).await;
    assert_eq!(withdrawn(&cluster), ["gpu-00000001-capped"]);
    cluster.assert_whole("a");
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_changes_while_it_is_read_loses_no_device() {
    for fault in [Fault::Refuse(404), Fault::Refuse(500), Fault::Hang] {
        let (cluster, _replica) = published().await;
        cluster.api.put("resourceclaims", claim(true));
        cluster
            .api
            .fault("get resourceslices", vec![fault.clone(); 2]);
        cluster.policy("default", &json!({"tiers": ["exclusive"]}));
        sleep(seconds(90)).await;
        assert_eq!(withdrawn(&cluster), ["gpu-00000001-capped"], "{fault:?}");
        cluster.assert_whole("a");
    }
}

/// A driver that the node's plugin does not know closes the capped devices, until a policy allows it or the
/// plugin knows it.
#[tokio::test(start_paused = true)]
async fn an_untested_driver_closes_the_capped_devices() {
    let (cluster, _replica) = published().await;
    let tainted = || {
        let slices = cluster.api.all("resourceslices");
        let devices = slices
            .iter()
            .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
        devices
            .filter(|device| {
                let key = &device["taints"][0]["key"];
                let untested = &device["attributes"]["untestedDriver"]["bool"];
                *key == json!("gpu.tranche.dev/untested-driver") && *untested == json!(true)
            })
            .map(|device| device["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let know = |functions: serde_json::Value| {
        cluster.api.edit("gpunodes", "a", |node| {
            node["status"]["inventory"]["unknownFunctions"] = functions;
        });
    };
    assert_eq!(tainted(), [""; 0]);
    know(json!(["cuAskTheFuture"]));
    cluster.settle(SOON).await;
    assert_eq!(tainted(), ["gpu-00000000-capped", "gpu-00000001-capped"]);
    cluster.api.edit("sharingpolicies", "default", |policy| {
        policy["spec"]["capped"]["untestedDriver"] = json!("Allow");
    });
    cluster.settle(SOON).await;
    assert_eq!(tainted(), [""; 0]);
    cluster.api.edit("sharingpolicies", "default", |policy| {
        policy["spec"]["capped"]["untestedDriver"] = json!("Taint");
    });
    cluster.settle(SOON).await;
    assert_eq!(tainted().len(), 2);
    know(json!([]));
    cluster.settle(SOON).await;
    assert_eq!(tainted(), [""; 0]);
}
