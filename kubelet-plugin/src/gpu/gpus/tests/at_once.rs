//! Many claims at once, on several GPUs.

use super::*;
use crate::testing::{Given, timeshared};

/// Claims on one GPU take turns at its state, and none of them waits for another GPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_each_get_their_own() {
    let world = World::new();
    let plugin = world.start();
    let names: Vec<String> = (0..14).map(|n| format!("c{n}")).collect();
    for (n, name) in (0_u32..).zip(&names) {
        let of = format!("1g10gb-{}", n / 2);
        world.api.put(claim(name, &[partition("x", n % 2, &of)]));
    }
    for _ in 0..3 {
        let calls = names.iter().map(|name| {
            let (preparer, claim) = (Arc::clone(&plugin.preparer), claim_ref(name));
            async move { preparer.prepare(&claim).await.map(|_| ()) }
        });
        for result in futures::future::join_all(calls.collect::<Vec<_>>()).await {
            result.unwrap();
        }
        let calls = names.iter().map(|name| {
            let (preparer, claim) = (Arc::clone(&plugin.preparer), claim_ref(name));
            async move { preparer.unprepare(&claim).await }
        });
        for result in futures::future::join_all(calls.collect::<Vec<_>>()).await {
            result.unwrap();
        }
        nothing_is_left(&world, "all released");
    }
}

/// A GPU whose driver does not answer for a while.
const SLOW: u32 = 5;

/// 32 claims on eight GPUs, in all served tiers, with the GPU of each.
fn thirty_two() -> Vec<(u32, Given)> {
    let mut all = vec![
        (0, whole("x", 0)),
        (6, capped_on("x", 6, "7g80gb-0", "10Gi", 10)),
        (7, whole("x", 7)),
    ];
    for _ in 0..6 {
        all.push((1, capped("x", 1, "10Gi", 10)));
        all.push((2, concurrent("x", 2, "10Gi", 10)));
        all.push((3, timeshared("x", 3)));
    }
    all.extend((0..7).map(|start| (4, partition("x", 4, &format!("1g10gb-{start}")))));
    let slow = ["2g20gb-0", "2g20gb-2", "2g20gb-4", "1g10gb-6"];
    all.extend(slow.map(|name| (SLOW, partition("x", SLOW, name))));
    assert_eq!(all.len(), 32);
    all
}

/// Runs a call for each claim at once, while one GPU is slow. The calls for the others return before it is fast again.
async fn while_one_is_slow<C>(world: &World, gpus: &[u32], call: impl Fn(String) -> C)
where
    C: Future<Output = Result<(), String>> + Send + 'static,
{
    let uuid = format!("GPU-{SLOW:08}-0000-0000-0000-{SLOW:012}");
    world.mig.hold_back(&uuid, true);
    let calls = gpus
        .iter()
        .enumerate()
        .map(|(n, gpu)| (*gpu, tokio::spawn(call(format!("c{n}")))));
    let (slow, others): (Vec<_>, Vec<_>) = calls.partition(|(gpu, _)| *gpu == SLOW);
    let joined = futures::future::join_all(others.into_iter().map(|(_, call)| call));
    let results = tokio::time::timeout(Duration::from_secs(30), joined).await;
    let is_waiting = slow.iter().all(|(_, call)| !call.is_finished());
    // This comes before anything can fail: the end of the test waits for its threads.
    world.mig.hold_back(&uuid, false);
    for result in results.expect("the other GPUs waited for the slow one") {
        result.unwrap().unwrap();
    }
    assert!(is_waiting);
    for (_, call) in slow {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thirty_two_claims_in_all_tiers_wait_for_no_other_gpu() {
    let world = World::with_gpus(8);
    let plugin = world.start();
    let all = thirty_two();
    for (n, (_, given)) in all.iter().enumerate() {
        let object = claim(&format!("c{n}"), std::slice::from_ref(given));
        world.api.put(object);
    }
    let gpus: Vec<u32> = all.iter().map(|(gpu, _)| *gpu).collect();
    while_one_is_slow(&world, &gpus, |name| {
        let preparer = Arc::clone(&plugin.preparer);
        async move {
            let result = preparer.prepare(&claim_ref(&name)).await;
            result.map(drop).map_err(|error| error.to_string())
        }
    })
    .await;
    let held = plugin.preparer.ledger().held();
    assert_eq!(held.len(), 32);
    let gpus_of_node = world.ready.inventory.gpus.iter();
    let instances: Vec<_> = gpus_of_node
        .map(|gpu| actual(&world, &gpu.uuid).instances.len())
        .collect();
    assert_eq!(instances, [0, 0, 0, 0, 7, 4, 1, 0]);
    assert_eq!(world.mps.serving().len(), 1);

    while_one_is_slow(&world, &gpus, |name| {
        let preparer = Arc::clone(&plugin.preparer);
        async move {
            let result = preparer.unprepare(&claim_ref(&name)).await;
            result.map_err(|error| error.to_string())
        }
    })
    .await;
    nothing_is_left(&world, "all released");
}

/// Waits until a condition holds, which others bring about.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), wait).await;
    assert!(waited.is_ok(), "{what}");
}

/// With the threads of a plugin: more claims than may write files at a time.
#[test]
fn claims_that_wait_for_a_gpu_hold_no_thread() {
    let runtime = crate::app::runtime().unwrap();
    runtime.block_on(async {
        let world = World::new();
        let plugin = world.start();
        let names: Vec<String> = (0..20).map(|n| format!("c{n}")).collect();
        for name in names.iter().map(String::as_str).chain(["d"]) {
            world.api.put(claim(name, &[concurrent("x", 0, "1Gi", 4)]));
        }
        for name in ["o1", "o2"] {
            world.api.put(claim(name, &[concurrent("x", 1, "1Gi", 4)]));
        }
        let prepare = |name: &str| {
            let (preparer, claim) = (Arc::clone(&plugin.preparer), claim_ref(name));
            tokio::spawn(async move { preparer.prepare(&claim).await.map(drop) })
        };
        let other_is_ready = async |name: &str, all_wait: &(dyn Fn() -> bool + Sync)| {
            let other = tokio::time::timeout(Duration::from_secs(30), prepare(name)).await;
            let is_waiting = all_wait();
            world.mps.sleeps(GPU, false);
            other.expect("it waited for another GPU").unwrap().unwrap();
            assert!(is_waiting);
        };
        world.mps.sleeps(GPU, true);
        let waiting: Vec<_> = names.iter().map(|name| prepare(name)).collect();
        let journals = || std::fs::read_dir(world.layout.claims()).unwrap().count();
        let all_wait = || journals() == names.len() && world.mps.ensured() == 1;
        until("not all claims got as far as their GPU", all_wait).await;
        other_is_ready("o1", &|| waiting.iter().all(|call| !call.is_finished())).await;
        for call in waiting {
            call.await.unwrap().unwrap();
        }

        // The same while they are released.
        world.mps.sleeps(GPU, true);
        let before = world.mps.ensured();
        let slow = prepare("d");
        until("the daemon was not asked", || world.mps.ensured() > before).await;
        let waiting: Vec<_> = names
            .iter()
            .map(|name| {
                let (preparer, claim) = (Arc::clone(&plugin.preparer), claim_ref(name));
                tokio::spawn(async move { preparer.unprepare(&claim).await })
            })
            .collect();
        let is_left =
            |name: &&str| world.cdi_devices(&format!("uid-of-{name}")) != serde_json::json!([]);
        let have_gone = || !names.iter().any(|name| is_left(&name.as_str()));
        until("not all claims got as far as their GPU", have_gone).await;
        other_is_ready("o2", &|| waiting.iter().all(|call| !call.is_finished())).await;
        slow.await.unwrap().unwrap();
        for call in waiting {
            call.await.unwrap().unwrap();
        }
        for name in ["d", "o1", "o2"] {
            plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
        }
        nothing_is_left(&world, "all released");
    });
}
