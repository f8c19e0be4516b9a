use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::mig::{Placement, tables};
use crate::preparation::{MigDevice, PreparationPlan, plan};
use crate::testing::{allocation, capped, gpu, inventory, plain, with};

/// A record as version 1 writes it. Once that version is released, never change it: nodes have such files.
const VERSION_1: &str = include_str!("../../testdata/journal-v1.json");

fn planned() -> PreparationPlan {
    let results = [
        capped("20Gi", "25"),
        with(plain("gpu-00000001"), &json!({"request": "whole"})),
        with(
            plain("gpu-00000002-timeshared"),
            &json!({"request": "any/slow", "shareID": "s"}),
        ),
        with(
            plain("gpu-00000001-capped"),
            &json!({"request": "look", "adminAccess": true}),
        ),
        with(
            plain("gpu-00000003-mig-1g10gb-6"),
            &json!({"request": "partition"}),
        ),
    ];
    let mut inventory = inventory((0..4).map(gpu).collect());
    inventory.mig_geometries = vec![tables::h100(&[&gpu(3).uuid])];
    let mig = MigDevice {
        uuid: "MIG-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d".to_owned(),
        gpu_instance: 9,
        compute_instance: 0,
        capabilities: [84, 85],
    };
    let plan = plan(&allocation("a", &results), &inventory, []).unwrap();
    plan.on_gpu(&gpu(3).uuid, Some(3), |_| Some(mig.clone()))
}

fn record() -> ClaimRecord {
    let since = json!("2026-11-25T10:00:00.123456Z");
    ClaimRecord::new(planned(), Some(serde_json::from_value(since).unwrap()))
}

fn tree() -> Value {
    serde_json::from_slice(&record().encode()).unwrap()
}

fn refusal(tree: &Value) -> String {
    ClaimRecord::decode(tree.to_string().as_bytes())
        .unwrap_err()
        .to_string()
}

const CHANGED: &str =
    "the format changed: that takes a new version, or a field that older readers may ignore";

#[test]
fn version_1_is_read_and_written() {
    assert_eq!(ClaimRecord::decode(VERSION_1.as_bytes()).unwrap(), record());
    let written: Value = serde_json::from_str(VERSION_1).unwrap();
    assert_eq!(tree(), written, "{CHANGED}");
}

#[test]
fn a_claim_keeps_since_when_it_has_its_devices() {
    let record = record();
    assert!(record.since.is_some());
    let other = record.with_plan(planned());
    assert_eq!(ClaimRecord::decode(&other.encode()).unwrap(), record);
    let nobody = ClaimRecord::new(planned(), None);
    assert_eq!(ClaimRecord::decode(&nobody.encode()).unwrap(), nobody);
}

#[test]
fn the_record_of_a_gpu_is_read_back() {
    let changes = gpu_state::GpuChanges {
        switched_mig_on: true,
        ..gpu_state::GpuChanges::default()
    };
    let record = GpuRecord::new("GPU-1".to_owned(), "boot-1".to_owned(), changes);
    assert_eq!(GpuRecord::decode(&record.encode()).unwrap(), record);
    assert_eq!(
        String::from_utf8(record.encode()).unwrap(),
        "{\"version\":1,\"minReader\":1,\"gpuUuid\":\"GPU-1\",\"boot\":\"boot-1\",\"changes\":{\"switchedMigOn\":true,\"instances\":[]}}\n",
        "{CHANGED}"
    );
}

/// An instance that is there after a boot belongs to somebody else, also at the same placement and with the same id.
#[test]
fn the_record_of_an_earlier_boot_names_no_instance() {
    let changes = gpu_state::GpuChanges {
        switched_mig_on: true,
        instances: vec![gpu_state::Owned {
            placement: Placement {
                start: 4,
                profile: "2g.20gb".parse().unwrap(),
            },
            id: Some(1),
        }],
        ..gpu_state::GpuChanges::default()
    };
    let record = GpuRecord::new("GPU-1".to_owned(), "boot-1".to_owned(), changes.clone());
    assert_eq!(record.clone().changes_in("boot-1"), changes);
    let after = gpu_state::GpuChanges {
        instances: Vec::new(),
        ..changes.clone()
    };
    assert_eq!(record.clone().changes_in("boot-2"), after);
    // A release that did not write the boot.
    let text = String::from_utf8(record.encode()).unwrap();
    let old = text.replace("\"boot\":\"boot-1\",", "");
    let old = GpuRecord::decode(old.as_bytes()).unwrap();
    assert_eq!(old.changes_in("boot-2"), changes);
}

/// What a later release might write: version 2, with unknown fields in every object, and a `minReader` that allows
/// readers to ignore them.
#[test]
fn what_a_later_version_added_is_ignored_where_it_says_so() {
    let mut newer = tree();
    let mut paths = Vec::new();
    objects(&newer, "", &mut paths);
    assert!(paths.len() > 20, "{paths:?}");
    for path in paths {
        newer.pointer_mut(&path).unwrap()["novelty"] = json!({"a": [1]});
    }
    newer["version"] = json!(2);
    let read = ClaimRecord::decode(newer.to_string().as_bytes()).unwrap();
    assert_eq!(read.plan, planned());
    // When this release writes it, it is a record of this version.
    assert_eq!(ClaimRecord::new(read.plan, read.since), record());
}

#[test]
fn a_later_version_s_literal_record_is_read() {
    let text = r#"{
        "version": 2, "minReader": 1, "writer": "tranche 0.4.0",
        "plan": {
            "allocation": {"uid": "u", "namespace": "n", "name": "c", "class": "new", "devices": []},
            "pages": 1,
            "devices": [],
            "steps": [
                {"step": "writeCapPage", "key": "k", "gpuUuid": "GPU-1", "cap": {"kind": "none", "bandwidth": 5}},
                {"step": "writeCdiSpec", "format": "cbor"}
            ]
        },
        "results": {"0": {"kind": "daemon", "pid": 7, "started": 42, "socket": "/run/x"}}
    }"#;
    let record = ClaimRecord::decode(text.as_bytes()).unwrap();
    assert_eq!(record.plan.undo().len(), 2);
}

#[test]
fn other_versions_are_refused_by_number() {
    let mut newer = tree();
    newer["version"] = json!(3);
    newer["minReader"] = json!(2);
    // This version may not even be able to parse the parts that readers must understand.
    newer["plan"] = json!({"steps": [{"step": "createMigInstance"}]});
    assert_eq!(
        refusal(&newer),
        "the journal has version 3 and needs a driver that reads version 2, this one reads versions up to 1: run the driver that wrote it, or a newer one"
    );
    let mut older = tree();
    older["version"] = json!(0);
    assert_eq!(
        refusal(&older),
        "the journal has version 0, this driver reads versions from 1 on: upgrade one version at a time"
    );
}

#[test]
fn corrupt_records_are_refused() {
    let bytes = record().encode();
    for length in 0..bytes.len() - 1 {
        assert!(
            matches!(
                ClaimRecord::decode(&bytes[..length]),
                Err(JournalError::Corrupt(_))
            ),
            "{length}"
        );
    }
    let mut doubled = bytes.clone();
    doubled.extend(bytes);
    assert!(matches!(
        ClaimRecord::decode(&doubled),
        Err(JournalError::Corrupt(_))
    ));
    for version in [json!("1"), json!(-1), json!(1.5), Value::Null] {
        let mut strange = tree();
        strange["version"] = version;
        assert!(
            refusal(&strange).starts_with("corrupt journal: "),
            "{strange}"
        );
    }
}

/// Every object of the tree, by its path.
fn objects(tree: &Value, path: &str, found: &mut Vec<String>) {
    match tree {
        Value::Object(fields) => {
            found.push(path.to_owned());
            for (name, field) in fields {
                objects(field, &format!("{path}/{name}"), found);
            }
        }
        Value::Array(list) => {
            for (index, item) in list.iter().enumerate() {
                objects(item, &format!("{path}/{index}"), found);
            }
        }
        _ => {}
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = ClaimRecord::decode(&bytes);
    }

    #[test]
    fn a_flipped_byte_does_not_make_it_panic(at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = record().encode();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = ClaimRecord::decode(&bytes);
    }
}
