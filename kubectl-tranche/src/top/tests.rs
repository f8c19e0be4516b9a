//! What `top` shows of nodes, GPUs and pods.

use crate::output::{Format, text};
use crate::testing::{World, busy, gpu, part, share};
use crate::usage::{PartUsed, Usage};

use super::*;

fn shown(kind: TopKind, usage: &crate::usage::UsageResult) -> Vec<Vec<String>> {
    let model = Model::new(&busy().snapshot(), usage);
    let text = text(&answer(&model, kind, &Scope::All), Format::Table).unwrap();
    let text = anstream::adapter::strip_str(&text).to_string();
    let cells = |line: &str| {
        let cells = line
            .split("   ")
            .map(str::trim)
            .filter(|cell| !cell.is_empty());
        cells.map(str::to_owned).collect()
    };
    text.lines().map(cells).collect()
}

#[test]
fn allocated_numbers_need_no_usage() {
    let rows = shown(TopKind::Nodes, &Err("nobody serves it".into()));
    assert_eq!(
        rows[1],
        [
            "node-a",
            "2",
            "0",
            "4",
            "159.3Gi",
            "139Gi (87%)",
            "0",
            "80%",
            "-",
            "-"
        ]
    );
    assert_eq!(
        rows[2],
        [
            "node-b",
            "1",
            "0",
            "1",
            "15Gi",
            "15Gi (100%)",
            "0",
            "100%",
            "-",
            "-"
        ]
    );
    let rows = shown(TopKind::Gpus, &Err(String::new()));
    let shared = &rows[1];
    assert_eq!(
        shared[1..5],
        ["GPU-a0000000", "NVIDIA H100 80GB HBM3", "capped", "2"]
    );
    assert_eq!(
        shared[6..],
        ["60Gi (75%)", "17.1Gi 25% 14 places", "-", "-", "-"]
    );
    let divided = &rows[2];
    assert_eq!(divided[7..9], ["nothing fits", "1/7 compute"]);
    let rows = shown(TopKind::Pods, &Err(String::new()));
    let names: Vec<_> = rows.iter().map(|row| row[1].as_str()).collect();
    assert_eq!(
        names,
        ["POD", "left", "notebook", "right", "training", "card"]
    );
    assert_eq!(rows[2][6..], ["20Gi", "-", "25%", "-", "-"]);
}

#[test]
fn usage_is_shown_where_it_is_known() {
    let used = Used {
        memory: 3 << 30,
        time: Some(41.6),
        ..Used::default()
    };
    let all = Used {
        idle_seconds: Some(7_384),
        ..used
    };
    let key = part("uid-team-a-notebook", "gpu-a0000000-capped");
    let usage = Usage {
        gpus: [(gpu('a', 0), used)].into(),
        parts: [(
            key,
            PartUsed {
                all,
                ..PartUsed::default()
            },
        )]
        .into(),
        ..Usage::default()
    };
    let usage = Ok(usage);
    assert_eq!(shown(TopKind::Gpus, &usage)[1][9..], ["3Gi", "42%"]);
    assert_eq!(shown(TopKind::Pods, &usage)[2][9..], ["3Gi", "42%"]);
    let model = Model::new(&busy().snapshot(), &usage);
    let wide = text(&answer(&model, TopKind::Pods, &Scope::All), Format::Wide).unwrap();
    assert!(wide.contains("2h 3m"), "{wide}");
    // A sum is not known if a part of it is not known.
    assert_eq!(shown(TopKind::Nodes, &usage)[1][8..], ["-", "-"]);
}

/// Each of two pods that share a claim has its own use.
#[test]
fn pods_of_one_claim_have_their_own_use() {
    let used = |memory| Used {
        memory,
        ..Used::default()
    };
    let mut world = World::new();
    let device = "gpu-a0000000-capped";
    world.claim(
        "team-a/both",
        &["first", "second", "third"],
        &[share("node-a", device, "20Gi", "25")],
    );
    let both = PartUsed {
        all: used(7 << 30),
        pods: [("first", 2), ("second", 5)]
            .map(|(pod, memory)| (pod.to_owned(), used(memory << 30)))
            .into(),
    };
    let usage = Usage {
        parts: [(part("uid-team-a-both", device), both)].into(),
        ..Usage::default()
    };
    let model = Model::new(&world.snapshot(), &Ok(usage));
    let TopReport::Pods { pods } = answer(&model, TopKind::Pods, &Scope::All) else {
        panic!("no pods")
    };
    let rows: Vec<_> = pods
        .iter()
        .map(|row| (row.pod.as_str(), row.tenant.used.map(|it| it.memory >> 30)))
        .collect();
    assert_eq!(
        rows,
        [("first", Some(2)), ("second", Some(5)), ("third", None)]
    );
}

/// A program may hold the context memory beside the share's memory, so that USED can be more than MEMORY.
#[test]
fn context_memory_has_its_column() {
    let mut world = World::new();
    let mut result = share("node-a", "gpu-a0000000-capped", "3Gi", "25");
    result["consumedCapacity"]["contextMemory"] = "512Mi".into();
    world.claim("team-a/one", &["one"], &[result]);
    let model = Model::new(&world.snapshot(), &Err(String::new()));
    let text = text(&answer(&model, TopKind::Pods, &Scope::All), Format::Table).unwrap();
    assert!(text.contains("CONTEXT") && text.contains("512Mi"), "{text}");
}

#[test]
fn who_observes_is_an_admin_and_has_no_limits() {
    let mut world = busy();
    let mut result = share("node-b", "gpu-b0000000-capped", "4935Mi", "6");
    result["adminAccess"] = true.into();
    world.claim("monitoring/exporter", &["exporter"], &[result]);
    let model = Model::new(&world.snapshot(), &Err(String::new()));
    let shown = |kind| {
        let text = text(&answer(&model, kind, &Scope::All), Format::Table).unwrap();
        anstream::adapter::strip_str(&text).to_string()
    };
    let pods = shown(TopKind::Pods);
    let row = pods.lines().find(|it| it.contains("exporter")).unwrap();
    let cells: Vec<_> = row.split_whitespace().collect();
    assert_eq!(
        cells[3..],
        ["admin", "node-b", "GPU-b0000000", "-", "-", "-", "-", "-"]
    );
    assert!(shown(TopKind::Gpus).contains("1, 1 admin"));
    let map = crate::map::map(&model, true);
    let map = output_of(&map);
    assert!(
        map.contains("    admin access: monitoring/exporter\n"),
        "{map}"
    );
}

fn output_of(map: &crate::map::Map) -> String {
    let text = text(map, Format::Table).unwrap();
    anstream::adapter::strip_str(&text).to_string()
}

#[test]
fn a_gpu_that_is_withheld_shows_why() {
    let mut world = World::new();
    let status = world.gpu_nodes[1].status.as_mut().unwrap();
    let published = status.published.as_mut().unwrap();
    published
        .withheld
        .push(tranche_api::withheld::WithheldGpu::whole(
            &crate::testing::uuid('b', 0),
            "UnownedMemory",
            "9Gi of its memory is in use by no process".to_owned(),
        ));
    let model = Model::new(&world.snapshot(), &Err(String::new()));
    let gpus = text(&answer(&model, TopKind::Gpus, &Scope::All), Format::Table).unwrap();
    assert!(gpus.contains("not offered (UnownedMemory)"), "{gpus}");
    let map = output_of(&crate::map::map(&model, true));
    assert!(map.contains("free: not offered (UnownedMemory)"), "{map}");
    let question = crate::get::Question {
        kind: crate::args::Kind::Gpus,
        name: Some("GPU-b0".to_owned()),
        scope: Scope::All,
    };
    let got = text(
        &crate::get::answer(&model, &question).unwrap(),
        Format::Table,
    )
    .unwrap();
    assert!(got.contains("not offered (UnownedMemory)"), "{got}");
}

#[test]
fn sizes_are_short() {
    assert_eq!(size(0), "0");
    assert_eq!(size(1), "1Mi");
    assert_eq!(size(20 << 30), "20Gi");
    assert_eq!(size(78960 << 20), "77.1Gi");
    assert_eq!(size(u64::MAX), "17179869184Gi");
}
