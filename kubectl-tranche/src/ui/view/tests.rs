//! The records of a cluster whose slices the driver's planner made.

use serde_json::{Value, json};
use tranche_api::usage::Peak;

use super::super::store::{Change, Object, WATCHED};
use super::*;
use crate::snapshot::{Cause, Gap, Resource, Scope};
use crate::testing::{World, gpu, object, part, share, uuid, whole};
use crate::usage::{PartUsed, Usage, Used};

const UNKNOWN: &str = "usage is not shown: nobody serves it";

fn store(world: &World) -> Store {
    let mut store = Store::default();
    for resource in WATCHED {
        store.apply(Change::Begin(resource));
    }
    let mut set = |object| store.apply(Change::Set(object));
    for it in world.gpu_nodes.iter().cloned() {
        set(Object::GpuNode(Box::new(it)));
    }
    for it in world.slices.iter().cloned() {
        set(Object::Slice(Box::new(it)));
    }
    for it in world.claims.iter().cloned() {
        set(Object::Claim(Box::new(it)));
    }
    for it in world.classes.iter().cloned() {
        set(Object::Class(Box::new(it)));
    }
    for it in world.pods.iter().cloned() {
        set(Object::Pod(Box::new(it)));
    }
    for resource in WATCHED {
        store.apply(Change::Complete(resource, Scope::All));
    }
    store
}

fn page(store: &mut Store, usage: &UsageResult, history: &History) -> Page {
    let mut page = Page::default();
    let dirty = store.take_dirty();
    page.update(store, &dirty, usage, history).unwrap();
    page
}

fn record(page: &Page, key: &str) -> Value {
    let text = page
        .records
        .get(key)
        .unwrap_or_else(|| panic!("no record {key}"));
    serde_json::from_str(text).unwrap()
}

fn without_usage(world: &World) -> Page {
    page(&mut store(world), &Err(UNKNOWN.into()), &History::default())
}

fn busy() -> World {
    let mut world = World::new();
    let shared = "gpu-a0000000-capped";
    world.claim(
        "team-a/notebook",
        &["notebook"],
        &[share("node-a", shared, "20Gi", "25")],
    );
    world.claim(
        "team-b/training",
        &["training"],
        &[share("node-a", shared, "40Gi", "75")],
    );
    world.claim(
        "team-a/left",
        &["left"],
        &[whole("node-a", "gpu-a0000001-mig-3g40gb-0")],
    );
    world.claim(
        "team-a/right",
        &["right"],
        &[whole("node-a", "gpu-a0000001-mig-3g40gb-4")],
    );
    world
}

#[test]
fn a_bar_has_a_segment_for_each_tenant_and_one_for_stranded() {
    let node = record(&without_usage(&busy()), "node/node-a");
    let shared = &node["gpus"][0];
    assert_eq!(shared["tier"], "capped");
    let bar = shared["bar"].as_array().unwrap();
    // 20 and 40 of 78960 MiB; no cores are left for the rest.
    assert_eq!(bar[0], json!({"tier": "capped", "at": 0, "size": 259}));
    assert_eq!(bar[1], json!({"tier": "capped", "at": 259, "size": 518}));
    assert_eq!(bar[2]["tier"], Value::Null);
    assert_eq!(shared["room"], "17.1Gi free, stranded: no cores are left");
    let has: Vec<&str> = shared["tenants"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["has"].as_str().unwrap())
        .collect();
    assert_eq!(has, ["20Gi · 25 %", "40Gi · 75 %"]);
    let divided = &node["gpus"][1];
    assert_eq!(
        divided["bar"],
        json!([{"tier": "partition", "at": 0, "size": 500}, {"tier": "partition", "at": 500, "size": 500}])
    );
    assert_eq!(divided["room"], "1 of 7 slices free, 1 stranded");
}

#[test]
fn segments_do_not_overlap_and_end_within_the_bar() {
    for world in [World::new(), busy()] {
        let page = without_usage(&world);
        for name in ["node-a", "node-b"] {
            for gpu in record(&page, &format!("node/{name}"))["gpus"]
                .as_array()
                .unwrap()
            {
                let mut end = 0;
                for segment in gpu["bar"].as_array().unwrap() {
                    let at = segment["at"].as_u64().unwrap();
                    assert!(at >= end, "{gpu}");
                    end = at + segment["size"].as_u64().unwrap();
                }
                assert!(end <= 1000, "{gpu}");
            }
        }
    }
}

#[test]
fn allocated_free_and_stranded_sum_to_all_gpus_and_their_price() {
    let summary = record(&without_usage(&busy()), "summary");
    let of = |name: &str| summary[name].as_f64().unwrap();
    assert_eq!(summary["gpus"], 3);
    assert!(
        (of("held") + of("free") + of("stranded") - 3.0).abs() < 0.02,
        "{summary}"
    );
    let money = |text: &Value| {
        text.as_str()
            .unwrap()
            .trim_start_matches('$')
            .parse::<f64>()
            .unwrap()
    };
    let parts: f64 = ["heldCost", "freeCost", "strandedCost"]
        .iter()
        .map(|it| money(&summary[*it]))
        .sum();
    assert!((money(&summary["cost"]) - parts).abs() < 0.02, "{summary}");
    assert_eq!(summary["cost"], "$7.50");
    let namespaces: f64 = summary["namespaces"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| money(&it["cost"]))
        .sum();
    assert!(
        (money(&summary["heldCost"]) - namespaces).abs() < 0.02,
        "{summary}"
    );
}

#[test]
fn a_pod_that_waits_shows_the_schedulers_message() {
    let mut world = World::new();
    world.claim("team-c/waits", &[], &[]);
    let pod = |name: &str, status: Value, node: Value| {
        json!({
            "metadata": {"namespace": "team-c", "name": name},
            "spec": {"containers": [], "nodeName": node, "resourceClaims": [{"name": "gpu", "resourceClaimName": "waits"}]},
            "status": status,
        })
    };
    let unscheduled = json!({"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]});
    let pulling = json!({"containerStatuses": [{"name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]});
    world
        .pods
        .push(object(pod("big", unscheduled, Value::Null)));
    world
        .pods
        .push(object(pod("starts", pulling, json!("node-a"))));
    // A pod with an extended resource has no claim yet.
    let class = world.classes[0].spec.as_mut().unwrap();
    class.extended_resource_name = Some("nvidia.com/gpu".into());
    let resources = json!({"requests": {"nvidia.com/gpu": "2"}});
    let mut asks = pod("asks", json!({}), Value::Null);
    asks["spec"] = json!({"containers": [{"name": "main", "resources": resources}]});
    world.pods.push(object(asks));
    let page = without_usage(&world);
    let big = record(&page, "pod/team-c/big");
    assert_eq!(big["reason"], "0/2 nodes are available");
    assert_eq!(big["wants"], json!(["capped 20Gi 25 %"]));
    assert_eq!(
        record(&page, "pod/team-c/starts")["reason"],
        "main: no such image"
    );
    let asking = record(&page, "pod/team-c/asks");
    assert_eq!(asking["wants"], json!(["2 × capped"]));
    assert_eq!(asking["reason"], "the scheduler has not looked at it yet");
}

#[test]
fn without_the_claims_no_gpu_is_shown_as_free() {
    let mut store = store(&busy());
    store.apply(Change::Gap(Gap {
        resource: Resource::ResourceClaims,
        cause: Cause::Forbidden,
        is_partial: false,
        message: "you may not list resourceclaims".into(),
    }));
    let page = page(&mut store, &Err(UNKNOWN.into()), &History::default());
    assert!(page.records.get("node/node-a").is_none());
    assert_eq!(
        record(&page, "notes")[0],
        json!({"text": "you may not list resourceclaims", "isObstacle": true})
    );
}

#[test]
fn a_node_that_is_gone_leaves_no_record() {
    let world = busy();
    let mut store = store(&world);
    let mut page = page(&mut store, &Ok(Usage::default()), &History::default());
    assert!(page.records.get("use/node-b").is_some());
    let of_b = |name: Option<&String>| name.is_some_and(|it| it.contains("node-b"));
    for slice in world
        .slices
        .iter()
        .filter(|it| of_b(it.spec.node_name.as_ref()))
    {
        store.apply(Change::Gone(Object::Slice(Box::new(slice.clone()))));
    }
    store.apply(Change::Gone(Object::GpuNode(Box::new(
        world.gpu_nodes[1].clone(),
    ))));
    let dirty = store.take_dirty();
    page.update(&store, &dirty, &Ok(Usage::default()), &History::default())
        .unwrap();
    assert!(page.records.get("node/node-b").is_none() && page.records.get("use/node-b").is_none());
    assert_eq!(record(&page, "summary")["gpus"], 2);
}

#[test]
fn use_is_shown_where_it_is_known_and_a_line_says_why_where_not() {
    let world = busy();
    let used = Used {
        memory: 40 << 30,
        time: Some(61.4),
        ..Used::default()
    };
    let notebook = PartUsed {
        all: Used {
            idle_seconds: Some(150),
            peak: Some(Peak {
                bytes: 50 << 30,
                watched_seconds: 600,
            }),
            ..used
        },
        ..PartUsed::default()
    };
    let mut usage = Usage {
        gpus: [(gpu('a', 0), used)].into(),
        parts: [(part("uid-team-a-notebook", "gpu-a0000000-capped"), notebook)].into(),
        ..Usage::default()
    };
    usage.add_node(&object(
        json!({"metadata": {"name": "node-b"}, "problem": "no answer"}),
    ));
    let mut history = History::default();
    history.add(0, &usage);
    let known = page(&mut store(&world), &Ok(usage), &history);
    let of_node = record(&known, "use/node-a");
    assert_eq!(
        of_node["gpus"][uuid('a', 0)],
        json!({"memory": "40Gi", "time": 61, "idle": null, "most": null})
    );
    let hour = record(&known, "hour/node-a");
    assert_eq!(hour, json!({uuid('a', 0): {"memory": [50], "time": [61]}}));
    // Each holder's key finds its own use.
    let tenants = &record(&known, "node/node-a")["gpus"][0]["tenants"];
    let key = tenants[0]["useKey"].as_str().unwrap();
    assert_eq!(
        of_node["claims"][key],
        json!({"memory": "40Gi", "time": 61, "idle": "2m", "most": "50Gi"})
    );
    assert_eq!(of_node["claims"].as_object().unwrap().len(), 1);
    assert_eq!(
        record(&known, "notes"),
        json!([{"text": "usage of node-b is not shown: no answer", "isObstacle": false}])
    );
    let unknown = without_usage(&world);
    assert!(unknown.records.get("use/node-a").is_none());
    assert_eq!(record(&unknown, "notes")[0]["text"], UNKNOWN);
}

#[test]
fn the_last_hour_is_sent_once_a_minute_and_stays_without_usage() {
    let used = |memory| Usage {
        gpus: [(
            gpu('a', 0),
            Used {
                memory,
                ..Used::default()
            },
        )]
        .into(),
        ..Usage::default()
    };
    let mut store = store(&busy());
    let mut history = History::default();
    history.add(0, &used(40 << 30));
    let mut page = page(&mut store, &Ok(used(40 << 30)), &history);
    let mut told = |usage: UsageResult, history: &History, read| {
        let dirty = Dirty {
            read,
            ..Dirty::default()
        };
        page.update(&store, &dirty, &usage, history).unwrap();
        let now = page.records.get("use/node-a").is_some();
        (
            now,
            record(&page, "hour/node-a")[uuid('a', 0)]["memory"].clone(),
        )
    };
    let read = history.add(0, &used(80 << 30));
    assert_eq!(
        told(Ok(used(80 << 30)), &history, read),
        (true, json!([50]))
    );
    assert_eq!(
        told(Err(UNKNOWN.into()), &history, Read::Again),
        (false, json!([50]))
    );
    let read = history.add(1, &used(80 << 30));
    assert_eq!(
        told(Ok(used(80 << 30)), &history, read),
        (true, json!([75, 100]))
    );
}
