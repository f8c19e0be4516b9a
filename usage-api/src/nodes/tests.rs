use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Bytes;
use futures::future::BoxFuture;
use serde_json::json;
use tranche_node_usage::Plugins;
use tranche_node_usage::reader::{AT_ONCE, DEADLINE, MAX_ANSWER, Scrape};

use super::*;

/// Plugins by port: 1 is dead, 2 does not answer, 3 speaks for another node, 4 answers nonsense, 5 speaks for another node's
/// pool; all others answer.
#[derive(Clone, Default)]
struct Fake(Arc<AtomicUsize>);

impl Scrape for Fake {
    fn scrape(&self, plugin: SocketAddr) -> BoxFuture<'_, Result<Bytes, String>> {
        let count = self.0.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move {
            let node = match plugin.port() {
                1 => return Err("connect: connection refused".to_owned()),
                2 => std::future::pending::<&str>().await,
                3 => "other",
                4 => return Ok(Bytes::from("<html>")),
                5 => "foreign",
                _ => "good",
            };
            let gpus = if plugin.port() == 5 {
                json!([{
                    "uuid": "GPU-a", "minor": 0, "pciBusID": "0000:1b:00.0", "productName": "H100", "shares": [{
                        "claim": {"namespace": "team", "name": "claim", "uid": "1"}, "request": "gpu", "pool": "other/gpu",
                        "device": "d", "tier": "capped", "memory": {"reserved": 1, "used": 12}, "processes": 0,
                    }],
                }])
            } else {
                json!([])
            };
            let usage = json!({"node": node, "unixMillis": count, "gpus": gpus});
            Ok(Bytes::from(usage.to_string()))
        })
    }
}

fn nodes() -> (Arc<Nodes>, Fake) {
    let endpoints = [
        ("good", 9),
        ("dead", 1),
        ("silent", 2),
        ("liar", 3),
        ("broken", 4),
        ("foreign", 5),
    ];
    let endpoints =
        endpoints.map(|(node, port)| (node.to_owned(), SocketAddr::from(([127, 0, 0, 1], port))));
    let fake = Fake::default();
    (
        Arc::new(Nodes::new(Reader::new(
            Plugins::fixed(endpoints),
            fake.clone(),
        ))),
        fake,
    )
}

#[tokio::test(start_paused = true)]
async fn a_node_that_fails_costs_only_its_own_answer_which_says_why() {
    let (nodes, _) = nodes();
    let begun = Instant::now();
    let all = [
        "good", "dead", "silent", "liar", "broken", "gone", "foreign",
    ];
    let answers = futures::future::join_all(all.map(|node| nodes.answer(node))).await;
    assert_eq!(
        begun.elapsed(),
        DEADLINE,
        "they were asked one after another"
    );
    let problem = |index: usize| answers[index].as_ref().as_ref().unwrap_err().as_str();
    assert_eq!(
        answers[0].as_ref().as_ref().unwrap().unpack().unwrap().node,
        "good"
    );
    assert_eq!(
        problem(1),
        "the node plugin at 127.0.0.1:1 did not answer: connect: connection refused"
    );
    assert_eq!(
        problem(2),
        "the node plugin at 127.0.0.1:2 did not answer: no answer within 2 s"
    );
    assert!(
        problem(3).ends_with("it speaks for the node \"other\""),
        "{}",
        problem(3)
    );
    assert!(problem(4).contains("no NodeUsage"), "{}", problem(4));
    assert_eq!(problem(5), "no node plugin runs on the node gone");
    assert!(
        problem(6).ends_with("it speaks for the pool \"other/gpu\""),
        "{}",
        problem(6)
    );
}

#[tokio::test(start_paused = true)]
async fn many_readers_cost_as_one_and_data_is_at_most_two_seconds_old() {
    let (nodes, fake) = nodes();
    let asked = || fake.0.load(Ordering::SeqCst);
    let all = futures::future::join_all((0..50).map(|_| nodes.answer("good"))).await;
    assert_eq!(asked(), 1);
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    tokio::time::advance(FRESH.mul_f64(0.999)).await;
    nodes.answer("good").await;
    assert_eq!(asked(), 1);
    tokio::time::advance(FRESH.mul_f64(0.001)).await;
    assert_ne!(nodes.answer("good").await, all[0]);
    assert_eq!(asked(), 2);
    // A dead node is not asked each time.
    for _ in 0..3 {
        nodes.answer("dead").await;
        tokio::time::advance(FRESH).await;
    }
    assert_eq!(asked(), 3);
    tokio::time::advance(FAILED).await;
    nodes.answer("dead").await;
    assert_eq!(asked(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_goes_away_does_not_keep_others_waiting() {
    let (nodes, fake) = nodes();
    let asking = nodes.answer("silent");
    let given_up = tokio::time::timeout(Duration::from_millis(10), asking).await;
    assert!(given_up.is_err());
    let answer = nodes.answer("silent").await;
    assert!(answer.is_err());
    assert_eq!(fake.0.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn answers_that_nobody_reads_any_more_are_forgotten() {
    let (nodes, _) = nodes();
    let forgetting = tokio::spawn({
        let nodes = Arc::clone(&nodes);
        async move { nodes.forget().await }
    });
    nodes.answer("good").await;
    nodes.answer("dead").await;
    assert_eq!(nodes.entries().len(), 2);
    tokio::time::sleep(2 * FAILED + FRESH).await;
    assert_eq!(nodes.entries().len(), 0);
    forgetting.abort();
}

/// The most that a thousand full nodes' answers may take while they are kept.
const MOST: usize = 32 << 20;

/// A full node: 8 GPUs with 16 shares each, with names and UIDs that differ as real ones do.
fn full(node: u32) -> String {
    let uid = |n: u32| {
        // A number that looks like none of its neighbours, as 32 hexadecimal digits.
        let n = (u128::from(node) << 32) | u128::from(n);
        let scattered = n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        format!("{:032x}", scattered ^ (scattered >> 61))
    };
    let share = |gpu: u32, n: u32| {
        let id = uid(gpu * 16 + n);
        let used = u64::from(n) * 335_544_321;
        json!({
            "claim": {"namespace": format!("team-{}", &id[..4]), "name": format!("notebook-{}", &id[..10]), "uid": id},
            "request": "gpu", "pool": format!("node-{node}/gpu"), "device": format!("gpu-{gpu:08x}-capped"),
            "shareId": uid(10_000 + gpu * 16 + n), "tier": "capped",
            "memory": {"allocated": 5_368_709_120_u64, "reserved": 536_870_912, "used": used, "free": 5, "account": used},
            "utilization": {"gpu": n * 611, "memoryCopy": n * 13, "smActive": n * 207}, "processes": 1, "idleSeconds": n * 77,
            "groups": [{
                "pod": format!("notebook-{}", &id[..10]), "podUid": uid(20_000 + gpu * 16 + n), "container": "main",
                "used": used, "processes": 1,
            }],
        })
    };
    let gpu = |gpu: u32| {
        json!({
            "uuid": format!("GPU-{}", uid(30_000 + gpu)), "minor": gpu, "pciBusID": format!("0000:{gpu:02x}:00.0"),
            "productName": "NVIDIA H100 80GB HBM3", "shares": (0..16).map(|n| share(gpu, n)).collect::<Vec<_>>(),
        })
    };
    let gpus: Vec<_> = (0..8).map(gpu).collect();
    json!({"node": format!("node-{node}"), "unixMillis": 7, "gpus": gpus}).to_string()
}

#[test]
fn a_thousand_full_nodes_are_kept_in_bounded_memory() {
    let (mut plain, mut packed) = (0, 0);
    for node in 0..10 {
        let body = full(node);
        assert!(body.len() < MAX_ANSWER);
        plain += body.len();
        packed += Packed::pack(body.as_bytes()).unwrap().0.len();
    }
    println!("10 of 1,000 nodes: {plain} bytes, packed {packed}");
    assert!(
        packed * 100 < MOST,
        "{} bytes for 1,000 nodes",
        packed * 100
    );
    // An answer that was read, what it is parsed into, and its packed form, for all that are asked at the same time.
    const { assert!(AT_ONCE * MAX_ANSWER <= 64 << 20) };
}

/// Counts how many are asked at the same time, and the most.
#[derive(Clone, Default)]
struct Crowd(Arc<(AtomicUsize, AtomicUsize)>);

impl Scrape for Crowd {
    fn scrape(&self, plugin: SocketAddr) -> BoxFuture<'_, Result<Bytes, String>> {
        let now = self.0.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.1.fetch_max(now, Ordering::SeqCst);
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            self.0.0.fetch_sub(1, Ordering::SeqCst);
            let node = format!("node-{}", plugin.port());
            Ok(json!({"node": node, "unixMillis": 7, "gpus": []})
                .to_string()
                .into())
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_nodes_are_asked_a_few_at_a_time_however_many_read() {
    let name = |port: u16| format!("node-{port}");
    let endpoints = (1..=1_000).map(|port| (name(port), SocketAddr::from(([127, 0, 0, 1], port))));
    let crowd = Crowd::default();
    let nodes = Nodes::new(Reader::new(Plugins::fixed(endpoints), crowd.clone()));
    let begun = Instant::now();
    let readers = (0..3).flat_map(|_| 1..=1_000).map(|port| {
        let (nodes, name) = (&nodes, name(port));
        async move { nodes.answer(&name).await.is_ok() }
    });
    let answers = futures::future::join_all(readers).await;
    assert!(answers.into_iter().all(|is_known| is_known));
    assert_eq!(crowd.0.1.load(Ordering::SeqCst), AT_ONCE);
    // 16 rounds of 64, whatever the number of readers.
    assert_eq!(begun.elapsed().as_millis(), 16 * 20);
}
