//! Container runtimes take the specs that we write, and would take none of a lower version.

use std::collections::BTreeSet;

use container_device_interface::device::Device;
use container_device_interface::spec::{Spec, read_spec};
use serde_json::{Value, json};

const CLAIM: &str = include_str!("../../testdata/cdi-claim.json");
const DRIVER: &str = include_str!("../../testdata/cdi-driver.json");
/// A claim whose UID begins with a digit, on a node with a containerised driver.
const CLAIM_DIGIT: &str = include_str!("../../testdata/cdi-claim-digit.json");
/// Device names, each with `yes` or `no`: whether we take it.
const NAMES: &str = include_str!("../../testdata/cdi-names.tsv");

/// The versions of CDI, in order.
const VERSIONS: [&str; 6] = ["0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "1.0.0"];

fn load(spec: &Value) -> Result<Spec, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("spec.json");
    std::fs::write(&path, spec.to_string()).unwrap();
    read_spec(&path, 0).map_err(|error| format!("{error:#}"))
}

fn specs() -> [Value; 3] {
    [CLAIM, CLAIM_DIGIT, DRIVER].map(|text| serde_json::from_str(text).unwrap())
}

fn with_version(spec: &Value, version: &str) -> Value {
    let mut spec = spec.clone();
    spec["cdiVersion"] = json!(version);
    spec
}

#[test]
fn what_we_write_is_taken_under_the_names_that_the_kubelet_is_told() {
    let mut names = BTreeSet::new();
    for spec in specs() {
        let loaded = load(&spec).unwrap();
        names.extend(loaded.devices.values().map(Device::get_qualified_name));
    }
    for expected in [
        "gpu.tranche.dev/claim=uid-of-a-gpu-0",
        "gpu.tranche.dev/claim=uid-of-a-whole-1",
        "gpu.tranche.dev/claim=0f4a3c1e-6f55-4b6a-9a3d-2d7f8f0b1c2d-gpu-0",
        "gpu.tranche.dev/driver=full",
        "gpu.tranche.dev/driver=capped",
    ] {
        assert!(names.contains(expected), "{expected} is none of {names:?}");
    }
}

#[test]
fn no_lower_version_would_do() {
    for spec in specs() {
        let own = spec["cdiVersion"].as_str().unwrap();
        let position = VERSIONS.iter().position(|version| *version == own).unwrap();
        for lower in &VERSIONS[..position] {
            let refusal = load(&with_version(&spec, lower)).expect_err(lower);
            assert!(refusal.contains("version"), "{refusal}");
        }
        for higher in &VERSIONS[position..] {
            load(&with_version(&spec, higher)).expect(higher);
        }
    }
    // Something was lowered at all.
    assert!(specs().iter().any(|spec| spec["cdiVersion"] == "0.5.0"));
}

#[test]
fn unknown_fields_and_empty_devices_are_refused() {
    for spec in specs() {
        let mut novel = spec.clone();
        novel["devices"][0]["containerEdits"]["novelty"] = json!(1);
        assert!(load(&novel).is_err());
        let mut empty = spec.clone();
        empty["devices"][0]["containerEdits"] = json!({});
        assert!(load(&empty).is_err());
    }
}

#[test]
fn names_that_we_take_are_taken() {
    let mut taken = 0;
    for line in NAMES.lines() {
        let (name, ours) = line.split_once('\t').unwrap();
        let spec = json!({
            "cdiVersion": "0.5.0",
            "kind": "gpu.tranche.dev/claim",
            "devices": [{"name": name, "containerEdits": {"env": ["A=b"]}}],
        });
        match (ours, load(&spec)) {
            ("yes", loaded) => {
                loaded.expect(name);
                taken += 1;
            }
            // We limit the length, CDI does not.
            ("no", Ok(_)) => assert!(name.len() > 200, "{name:?}"),
            ("no", Err(_)) => {}
            (other, _) => panic!("{other}"),
        }
    }
    assert!(taken > 5);
}
