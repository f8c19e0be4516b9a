//! What `get` shows of claims, pods and GPUs.

use crate::output::{Format, text};
use crate::testing::{World, share, uuid, whole};

use super::*;

fn world() -> World {
    let mut world = World::new();
    world.claim(
        "team-a/notebook",
        &["one", "two"],
        &[share("node-a", "gpu-a0000000-capped", "20Gi", "25")],
    );
    world.claim(
        "team-b/part",
        &["part"],
        &[whole("node-a", "gpu-a0000001-mig-1g10gb-6")],
    );
    world.claim("team-a/waits", &[], &[]);
    world
}

fn shown(kind: Kind, name: Option<&str>, scope: Scope, format: Format) -> Result<String, NotFound> {
    let model = Model::new(&world().snapshot(), &Err(String::new()));
    let question = Question {
        kind,
        name: name.map(str::to_owned),
        scope,
    };
    let text = text(&answer(&model, &question)?, format).unwrap();
    Ok(anstream::adapter::strip_str(&text).to_string())
}

#[test]
fn claims_show_what_they_hold_or_want() {
    let text = shown(Kind::Claims, None, Scope::All, Format::Table).unwrap();
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines,
        [
            vec![
                "NAMESPACE",
                "CLAIM",
                "STATE",
                "TIER",
                "MEMORY",
                "CORES",
                "NODE",
                "GPU",
                "PODS"
            ],
            vec![
                "team-a",
                "notebook",
                "allocated",
                "capped",
                "20Gi",
                "25",
                "node-a",
                "GPU-a0000000",
                "one,two"
            ],
            vec![
                "team-a",
                "waits",
                "waiting",
                "capped.gpu.tranche.dev",
                "-",
                "-",
                "-",
                "-",
                "-"
            ],
            vec![
                "team-b",
                "part",
                "allocated",
                "partition",
                "1g.10gb",
                "9984Mi",
                "14",
                "node-a",
                "GPU-a0000001",
                "part"
            ],
        ]
    );
}

#[test]
fn a_pods_devices_and_a_gpus_pods_are_found() {
    let here = || Scope::Namespace("team-a".into());
    let text = shown(Kind::Pods, Some("two"), here(), Format::Json).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let item = &json["items"][0];
    assert_eq!(
        (&item["gpuUUID"], &item["claim"]),
        (&uuid('a', 0).into(), &"notebook".into())
    );
    assert_eq!(json["items"].as_array().unwrap().len(), 1);
    // The beginning of the UUID and the device's name both find it.
    for name in ["GPU-a0000001", "gpu-a0000001-mig-1g10gb-6"] {
        let text = shown(Kind::Gpus, Some(name), Scope::All, Format::Table).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("part"), "{text}");
    }
    let text = shown(Kind::Gpus, None, Scope::All, Format::Table).unwrap();
    assert!(
        text.lines()
            .any(|line| line.contains("GPU-b0000000") && line.contains("free")),
        "{text}"
    );
}

#[test]
fn the_error_for_a_missing_object_says_where_it_was_looked_for() {
    let here = Scope::Namespace("team-b".into());
    let error = shown(Kind::Claims, Some("notebook"), here, Format::Table).unwrap_err();
    assert!(error.to_string().contains("in namespace team-b"), "{error}");
    // A prefix of all UUIDs is refused.
    let error = shown(Kind::Gpus, Some("GPU-"), Scope::All, Format::Table).unwrap_err();
    assert_eq!(error, NotFound::Gpu("GPU-".into()));
}
