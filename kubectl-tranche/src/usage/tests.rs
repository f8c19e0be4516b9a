//! What is read of the API's objects.

use serde_json::json;

use super::*;
use crate::testing::object;

fn node(name: &str, shares: &serde_json::Value) -> NodeReading {
    object(json!({
        "metadata": {"name": name}, "node": name, "unixMillis": 7,
        "gpus": [{
            "uuid": format!("GPU-{name}"), "minor": 0, "pciBusID": "0000:1b:00.0", "productName": "H100",
            "memory": {"total": 100, "reserved": 1, "used": 30, "free": 69}, "utilization": {"gpu": 4_160},
            "partitions": [{
                "uuid": "MIG-1", "profile": "1g.10gb", "gpuInstance": 1, "computeInstance": 0, "shares": shares,
            }],
        }],
    }))
}

fn share(uid: &str, share: Option<&str>) -> serde_json::Value {
    json!({
        "claim": {"namespace": "team", "name": "claim", "uid": uid}, "request": "gpu", "pool": "a/gpu", "device": "d",
        "shareId": share, "tier": "capped", "memory": {"allocated": 20, "reserved": 1, "used": 12, "peak": {"bytes": 20, "watchedSeconds": 60}},
        "utilization": {"gpu": 150}, "processes": 2, "idleSeconds": 5,
        "groups": [
            {"pod": "one", "container": "a", "used": 3, "processes": 1, "utilization": {"gpu": 50}},
            {"pod": "one", "container": "b", "used": 4, "processes": 1, "utilization": {"gpu": 100}},
            {"used": 5, "processes": 1},
        ],
    })
}

fn part(uid: &str, share: Option<&str>) -> Part {
    Part {
        node: "a".into(),
        claim: uid.into(),
        device: "d".into(),
        share: share.map(str::to_owned),
    }
}

fn of_nodes(nodes: &[NodeReading]) -> Usage {
    let mut usage = Usage::default();
    for node in nodes {
        usage.add_node(node);
    }
    usage
}

#[test]
fn gpus_parts_and_pods_have_their_own_use() {
    let mut two = share("1", Some("t"));
    two["groups"][2]["pod"] = json!("two");
    let shares = json!([share("1", Some("s")), two, share("2", None)]);
    let usage = of_nodes(&[node("a", &shares)]);
    let of_gpu = usage.gpus[&NodeGpu::new("a", "GPU-a")];
    assert_eq!((of_gpu.memory, of_gpu.time), (30, Some(41.6)));
    assert_eq!(usage.parts.len(), 3);
    let both = &usage.parts[&part("1", Some("t"))];
    assert_eq!(
        both.all,
        Used {
            memory: 12,
            time: Some(1.5),
            idle_seconds: Some(5),
            peak: Some(Peak {
                bytes: 20,
                watched_seconds: 60,
            }),
        }
    );
    // Containers of a pod are added up.
    let pods: Vec<_> = both
        .pods
        .iter()
        .map(|(pod, it)| (pod.as_str(), it.memory, it.time))
        .collect();
    assert_eq!(pods, [("one", 7, Some(1.5)), ("two", 5, None)]);
    // A claim of one pod has no use by pod.
    assert!(usage.parts[&part("2", None)].pods.is_empty());
    assert!(notes(&Ok(usage)).is_empty());
}

#[test]
fn a_node_says_nothing_of_another_nodes_gpus_and_claims() {
    let shares = json!([share("1", Some("s"))]);
    let honest = node("a", &shares);
    let mut liar = node("a", &shares);
    liar.metadata.name = Some("b".into());
    let gpu = &mut liar.gpus.as_mut().unwrap()[0];
    gpu.memory = Some(reading::Memory { used: 99 });
    let said = |nodes: &[NodeReading]| {
        let usage = of_nodes(nodes);
        let of_a = usage.gpus.into_iter().filter(|(gpu, _)| gpu.node == "a");
        of_a.collect::<Vec<_>>()
    };
    assert_eq!(said(&[honest.clone(), liar.clone()]), said(&[honest]));
    assert!(said(&[liar]).is_empty());
}

#[test]
fn the_use_of_claims_is_that_of_nodes() {
    let of_nodes = of_nodes(&[node("a", &json!([share("1", Some("s"))]))]);
    let mut device = share("1", Some("s"));
    device["unixMillis"] = json!(7);
    device["gpuUUID"] = json!("GPU-a");
    device["productName"] = json!("H100");
    let mut of_claims = Usage::default();
    of_claims.add_claim(&object(
        json!({"metadata": {"namespace": "team", "name": "claim"}, "devices": [device]}),
    ));
    assert_eq!(of_claims.parts, of_nodes.parts);
    assert!(of_claims.gpus.is_empty());
}

#[test]
fn what_is_missing_is_one_line_for_each_kind_of_object() {
    let mut broken = node("a", &json!([share("1", None)]));
    let gpu = &mut broken.gpus.as_mut().unwrap()[0];
    gpu.problem = Some("NVML: lost".into());
    gpu.memory = None;
    let dead = |name: &str| -> NodeReading {
        object(
            json!({"metadata": {"name": name}, "problem": format!("no answer\nof\u{1b}[31m {name}")}),
        )
    };
    let silent = object(json!({"metadata": {"name": "d"}}));
    let mut usage = of_nodes(&[broken, dead("b"), dead("c"), silent]);
    usage.add_claim(&object(
        json!({"metadata": {"namespace": "team", "name": "claim"}, "problem": "no answer"}),
    ));
    usage.partial = Some("only a part".into());
    assert!(usage.gpus.is_empty() && usage.parts.is_empty());
    assert_eq!(
        notes(&Ok(usage)),
        [
            "only a part",
            "usage of b and 2 more nodes is not shown: no answer of [31m b",
            "usage of GPU-a of a is not shown: NVML: lost",
            "usage of team/claim is not shown: no answer",
        ]
    );
    assert_eq!(notes(&Err("nothing".into())), ["nothing"]);
}
