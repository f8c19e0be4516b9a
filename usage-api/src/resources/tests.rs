use tranche_api::Tier;
use tranche_api::usage::{ClaimReference, GpuUsage, Memory, PartitionUsage, ShareMemory};

use super::*;

const GIB: u64 = 1 << 30;

fn share(uid: &str, tier: Tier, used: u64, busy: u32) -> ShareUsage {
    ShareUsage {
        claim: ClaimReference {
            namespace: "team".into(),
            name: format!("claim-{uid}"),
            uid: uid.into(),
        },
        request: "gpu".into(),
        pool: "a/gpu".into(),
        device: format!("gpu-1-{}", tier.as_str()),
        share_id: Some("s".into()),
        tier,
        memory: ShareMemory {
            allocated: tier.has_shim().then_some(20 * GIB),
            reserved: GIB / 2,
            used,
            free: Some(7),
            account: None,
            peak: None,
        },
        utilization: [(Measure::Gpu, busy)].into_iter().collect(),
        processes: 2,
        idle_seconds: Some(3_725),
        groups: Vec::new(),
    }
}

/// Two GPUs: two claims share the first, the second has a partition.
fn node() -> NodeUsage {
    NodeUsage {
        node: "a".into(),
        driver_version: Some("535.261.03".into()),
        unix_millis: 7,
        gpus: vec![
            GpuUsage {
                uuid: "GPU-1".into(),
                product_name: "H100".into(),
                memory: Some(Memory {
                    total: 80 * GIB,
                    used: 3 * GIB,
                    ..Memory::default()
                }),
                utilization: [(Measure::Gpu, 7_000)].into_iter().collect(),
                shares: vec![
                    share("1", Tier::Capped, GIB, 2_549),
                    share("2", Tier::Capped, 2 * GIB, 4_451),
                ],
                ..GpuUsage::default()
            },
            GpuUsage {
                uuid: "GPU-2".into(),
                product_name: "H100".into(),
                partitions: vec![PartitionUsage {
                    uuid: "MIG-1".into(),
                    profile: "1g.10gb".into(),
                    shares: vec![share("1", Tier::Partition, 1, 0)],
                    ..PartitionUsage::default()
                }],
                ..GpuUsage::default()
            },
        ],
    }
}

fn claim(uid: &str) -> Claim {
    Claim {
        namespace: "team".into(),
        name: format!("claim-{uid}"),
        uid: uid.into(),
        labels: None,
        nodes: ["a".to_owned()].into(),
    }
}

fn object(uid: &str, usage: NodeUsage) -> Object {
    let (mut devices, mut problems) = (Vec::new(), BTreeSet::new());
    for (of, device) in devices_of(usage, &[uid.to_owned()].into()) {
        assert_eq!(of, uid);
        match device {
            Ok(device) => devices.push(device),
            Err(problem) => {
                problems.insert(problem);
            }
        }
    }
    claim(uid).object(devices, problems)
}

/// Its row by the names of the columns.
fn row(resource: Resource, object: &Object) -> BTreeMap<String, String> {
    let (columns, cells) = (resource.columns(), object.cells());
    let columns = columns.as_array().unwrap();
    assert_eq!(columns.len(), cells.len());
    let text = |cell: &Value| {
        cell.as_str()
            .map_or_else(|| cell.to_string(), str::to_owned)
    };
    let cell = |(column, cell): (&Value, &Value)| {
        // kubectl prints a value as it is, so a number must be a JSON number.
        let kind = column["type"] == "integer";
        assert!(
            cell.is_null() || cell.is_number() == kind,
            "{column}: {cell}"
        );
        (column["name"].as_str().unwrap().to_owned(), text(cell))
    };
    columns.iter().zip(&cells).map(cell).collect()
}

#[test]
fn a_claim_shows_its_own_devices_and_nothing_of_its_neighbours() {
    let object = object("1", node());
    let json = object.json();
    assert_eq!(json["apiVersion"], "usage.gpu.tranche.dev/v1alpha1");
    assert_eq!(json["kind"], "ClaimUsage");
    assert_eq!(
        json["metadata"],
        json!({"name": "claim-1", "namespace": "team"})
    );
    let devices = json["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!(
        (&devices[0]["gpuUUID"], &devices[0]["partition"]),
        (&json!("GPU-1"), &Value::Null)
    );
    assert_eq!(
        devices[1]["partition"],
        json!({"uuid": "MIG-1", "profile": "1g.10gb"})
    );
    assert_eq!(
        devices[0]["memory"],
        json!({"allocated": 20 * GIB, "reserved": GIB / 2, "used": GIB})
    );
    let text = json.to_string();
    assert!(
        !text.contains("claim-2") && !text.contains("free"),
        "{text}"
    );
    // It is the same whatever the neighbour does.
    let mut other = node();
    other.gpus[0].shares[1].memory.used = 50 * GIB;
    other.gpus[0].memory = None;
    other.gpus[0].shares[0].memory.free = Some(0);
    assert_eq!(super::tests::object("1", other), object);
}

#[test]
fn a_claims_row_adds_its_devices_up() {
    let row = row(Resource::ClaimUsages, &object("1", node()));
    for (column, cell) in [
        ("Name", "claim-1"),
        ("Node", "a"),
        ("Tier", "capped,partition"),
        ("Device", "gpu-1-capped,gpu-1-partition"),
        ("UUID", "GPU-1,MIG-1"),
        ("Memory-Used", "1025Mi"),
        // One of the devices has no limit.
        ("Memory", ""),
        ("Reserved", "1024Mi"),
        ("GPU", "25%,0%"),
        ("Processes", "4"),
        ("Idle", "1h2m"),
        ("Problem", ""),
    ] {
        assert_eq!(row[column], cell, "{column}");
    }
    let row = super::tests::row(Resource::ClaimUsages, &object("2", node()));
    assert_eq!(
        (row["Memory"].as_str(), row["GPU"].as_str()),
        ("20480Mi", "45%")
    );
}

#[test]
fn a_claim_whose_node_does_not_answer_has_a_row_that_says_why() {
    let problems = ["a is down".to_owned(), "b, too".to_owned()];
    let object = claim("1").object(Vec::new(), problems.into());
    assert_eq!(object.json()["problem"], "a is down; b, too");
    let row = row(Resource::ClaimUsages, &object);
    assert_eq!(
        (row["Problem"].as_str(), row["Node"].as_str()),
        ("a is down; b, too", "a")
    );
    assert_eq!(
        (row["Memory-Used"].as_str(), row["Processes"].as_str()),
        ("", "null")
    );
}

/// The node lists its share with zeros, which were not read.
#[test]
fn a_claim_on_a_gpu_that_does_not_answer_shows_no_zero() {
    let mut lost = node();
    lost.gpus[0].problem = Some("lost".into());
    lost.gpus[0].shares[0].memory.used = 0;
    let row_of = |uid| row(Resource::ClaimUsages, &object(uid, lost.clone()));
    let both = row_of("1");
    assert_eq!(
        (both["UUID"].as_str(), both["Problem"].as_str()),
        ("MIG-1", "GPU-1: lost")
    );
    let one = row_of("2");
    assert_eq!(
        (one["Memory-Used"].as_str(), one["Problem"].as_str()),
        ("", "GPU-1: lost")
    );
}

#[test]
fn a_nodes_row_counts_its_gpus_and_claims() {
    let mut usage = node();
    usage.gpus[1].problem = Some("lost".into());
    let row = row(Resource::NodeUsages, &node_object("a", Ok(usage)));
    for (column, cell) in [
        ("Name", "a"),
        ("Driver", "535.261.03"),
        ("GPUs", "2"),
        ("Claims", "2"),
        ("Memory-Used", "3072Mi"),
        ("Memory", "81920Mi"),
        ("GPU", "70%"),
        ("Problem", "GPU-2: lost"),
    ] {
        assert_eq!(row[column], cell, "{column}");
    }
    let dead = node_object("b", Err("no answer".into()));
    assert_eq!(dead.json()["problem"], "no answer");
    assert_eq!(
        super::tests::row(Resource::NodeUsages, &dead)["Problem"],
        "no answer"
    );
}

#[test]
fn claims_with_our_devices_are_on_the_nodes_of_their_pools() {
    let claim = |results: Value| {
        let claim = json!({
            "metadata": {"namespace": "team", "name": "c", "uid": "1", "labels": {"app": "x"}},
            "spec": {},
            "status": {"allocation": {"devices": {"results": results}}},
        });
        Claim::new(serde_json::from_value(claim).unwrap())
    };
    let result = |driver: &str, pool: &str| json!({"driver": driver, "pool": pool, "request": "r", "device": "d"});
    let ours = claim(json!([
        result(DRIVER, "b/gpu"),
        result(DRIVER, "a/gpu"),
        result("other", "c/gpu")
    ]))
    .unwrap();
    assert_eq!(ours.nodes, ["a".to_owned(), "b".to_owned()].into());
    assert_eq!(ours.labels.unwrap()["app"], "x");
    assert_eq!(claim(json!([result("other", "a/gpu")])), None);
    let waiting = json!({"metadata": {"name": "c"}, "spec": {}});
    assert_eq!(Claim::new(serde_json::from_value(waiting).unwrap()), None);
}

#[test]
fn idle_times_have_two_units() {
    for (seconds, text) in [
        (0, "0s"),
        (45, "45s"),
        (60, "1m"),
        (723, "12m3s"),
        (3_600, "1h"),
        (3_605, "1h"),
        (12_000, "3h20m"),
        (187_200, "2d4h"),
    ] {
        assert_eq!(duration(seconds), text);
    }
}

#[test]
fn numbers_that_no_node_can_have_end_nothing() {
    let mut usage = node();
    usage.gpus[0].memory = usage.gpus[0].memory.map(|it| Memory {
        total: u64::MAX,
        used: u64::MAX,
        ..it
    });
    usage.gpus[1].memory = usage.gpus[0].memory;
    for gpu in &mut usage.gpus {
        gpu.utilization = [(Measure::Gpu, u32::MAX)].into_iter().collect();
        let partitions = gpu.partitions.iter_mut().flat_map(|it| &mut it.shares);
        for share in gpu.shares.iter_mut().chain(partitions) {
            share.memory = ShareMemory {
                allocated: Some(u64::MAX),
                reserved: u64::MAX,
                used: u64::MAX,
                ..share.memory
            };
            share.processes = u32::MAX;
            share.utilization = [(Measure::Gpu, u32::MAX)].into_iter().collect();
            share.idle_seconds = Some(u64::MAX);
        }
    }
    for object in [node_object("a", Ok(usage.clone())), object("1", usage)] {
        assert!(!object.cells().is_empty() && object.json().is_object());
    }
}
