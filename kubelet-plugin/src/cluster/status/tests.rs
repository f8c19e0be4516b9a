//! What is published, how often, and what happens if it fails.

use std::time::Duration;

use kube::client::Body;
use tokio::sync::Notify;

use crate::testing::api::Mood;
use crate::testing::{World, capped, claim};

use super::*;

fn noon() -> Clock {
    Clock::new(|| "2026-11-21T12:00:00.5Z".parse().unwrap())
}

async fn prepared() -> (World, Arc<ClaimRecord>, StatusWriter) {
    let world = World::new();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    let record = world.prepare("a").await;
    let writer = StatusWriter::new(world.api.client(), noon());
    (world, record, writer)
}

async fn until_patched(world: &World, times: usize) {
    let wait = async {
        while world.api.paths("PATCH").len() < times {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), wait)
        .await
        .unwrap();
}

#[tokio::test]
async fn an_entry_says_which_gpu_and_how_much_of_it() {
    let (world, record, writer) = prepared().await;
    for _ in 0..3 {
        writer.publish(&record);
    }
    until_patched(&world, 1).await;
    let requests = world.api.requests();
    let patches: Vec<_> = requests
        .iter()
        .filter(|(method, ..)| method == "PATCH")
        .collect();
    let [(_, path, body)] = patches[..] else {
        panic!("published once: {patches:?}")
    };
    assert_eq!(
        path,
        "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/a/status"
    );
    assert_eq!(
        body["metadata"]["uid"], "uid-of-a",
        "another claim of that name is refused"
    );
    assert_eq!(
        body["status"]["devices"],
        json!([{
            "driver": "gpu.tranche.dev",
            "pool": "node-a/gpu",
            "device": "gpu-00000000-capped",
            "shareID": "00000000-0000-4000-8000-000000000001",
            "data": {
                "tier": "capped",
                "gpuUUID": "GPU-00000000-0000-0000-0000-000000000000",
                "pciBusID": "0000:1b:00.0",
                "memory": "20Gi",
                "cores": 25,
            },
            "conditions": [{
                "type": "Ready",
                "status": "True",
                "reason": "Prepared",
                "message": "containers get it by CDI",
                "lastTransitionTime": "2026-11-21T12:00:00Z",
            }],
        }])
    );
}

#[tokio::test(start_paused = true)]
async fn it_is_tried_again_until_it_works() {
    let (world, record, writer) = prepared().await;
    world.api.set_mood(Mood::Failing(500));
    writer.publish(&record);
    until_patched(&world, 3).await;
    world.api.set_mood(Mood::Well);
    until_patched(&world, 4).await;
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!(world.api.paths("PATCH").len(), 4);
}

/// A half-open connection does the same.
#[tokio::test(start_paused = true)]
async fn a_silent_api_server_holds_nobody_up_for_long() {
    let (world, record, writer) = prepared().await;
    world.api.set_mood(Mood::NoAnswer);
    for n in 0..=CONCURRENT {
        let mut other = ClaimRecord::clone(&record);
        other.plan.allocation.uid = format!("{n}");
        writer.publish(&Arc::new(other));
    }
    until_patched(&world, CONCURRENT + 1).await;
    // It is retried.
    world.api.set_mood(Mood::Well);
    until_patched(&world, CONCURRENT + 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_released_claim_is_not_published() {
    let (world, record, writer) = prepared().await;
    world.api.set_mood(Mood::Failing(500));
    writer.publish(&record);
    writer.forget("uid-of-a");
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!(world.api.paths("PATCH").len(), 0, "released at once");
    writer.publish(&record);
    until_patched(&world, 1).await;
    writer.forget("uid-of-a");
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!(world.api.paths("PATCH").len(), 1);
}

/// A cancelled request closes its connection, and the next one must open a new one.
#[tokio::test]
async fn a_request_under_way_is_let_finish() {
    let (_world, record, _) = prepared().await;
    let (begun, go, finished) = (Arc::default(), Arc::default(), Arc::default());
    let signals: [Arc<Notify>; 3] = [Arc::clone(&begun), Arc::clone(&go), Arc::clone(&finished)];
    let service = tower::service_fn(move |_: http::Request<Body>| {
        let [begun, go, finished] = signals.clone();
        async move {
            begun.notify_one();
            go.notified().await;
            finished.notify_one();
            Ok::<_, std::convert::Infallible>(http::Response::new(Body::empty()))
        }
    });
    let writer = StatusWriter::new(Client::new(service, "default"), noon());
    writer.publish(&record);
    begun.notified().await;
    writer.forget("uid-of-a");
    // Time in which the writer could cancel the request.
    for _ in 0..16 {
        tokio::task::yield_now().await;
    }
    go.notify_one();
    tokio::time::timeout(Duration::from_secs(10), finished.notified())
        .await
        .unwrap();
}
