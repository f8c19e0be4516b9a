use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::cdi::DriverDevice;
use crate::mig::tables;
use crate::preparation::{MigDevice, PreparationPlan, plan};
use crate::testing::{allocation, capped, gpu, inventory, plain, with};

/// A record as version 1 writes it. Never change it: nodes have such files.
const VERSION_1: &str = include_str!("../../testdata/journal-v1.json");
/// A record as version 2 writes it. Never change it: nodes have such files.
const VERSION_2: &str = include_str!("../../testdata/journal-v2.json");
/// A record with a partition as version 3 writes it. Never change it: nodes have such files.
const VERSION_3: &str = include_str!("../../testdata/journal-v3.json");

fn record() -> Record {
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
    ];
    let inventory = inventory(vec![gpu(0), gpu(1), gpu(2)]);
    let plan = plan(&allocation("a", &results), &inventory, []).unwrap();
    Record::new(of_first_pages(plan), None)
}

/// As a release with the first version of the pages made the plan.
fn of_first_pages(mut plan: PreparationPlan) -> PreparationPlan {
    let [own, first] = [plan.pages, 1].map(|pages| DriverDevice::Capped { pages }.id());
    plan.pages = 1;
    let ids = plan.devices.iter_mut().flat_map(|d| &mut d.cdi_ids);
    for id in ids.filter(|id| **id == own) {
        id.clone_from(&first);
    }
    plan
}

fn tree() -> Value {
    serde_json::from_slice(&record().encode()).unwrap()
}

fn refusal(tree: &Value) -> String {
    Record::decode(tree.to_string().as_bytes())
        .unwrap_err()
        .to_string()
}

/// A claim that holds a partition, as it was prepared.
fn with_partition() -> Record {
    let mut gpus = inventory(vec![gpu(0)]);
    gpus.mig_geometries = vec![tables::h100(&[&gpu(0).uuid])];
    let results = [plain("gpu-00000000-mig-1g10gb-6")];
    let plan = plan(&allocation("b", &results), &gpus, []).unwrap();
    let mig = MigDevice {
        uuid: "MIG-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d".to_owned(),
        gpu_instance: 9,
        compute_instance: 0,
        capabilities: [84, 85],
    };
    Record::new(
        of_first_pages(plan).on_gpu(&gpu(0).uuid, Some(0), |_| Some(mig.clone())),
        None,
    )
}

const CHANGED: &str =
    "the format changed: that takes a new version, or a field that older readers may ignore";

/// What version 2 knew is written so that it can read it.
#[test]
fn version_2_is_read_and_can_read() {
    assert_eq!(
        Record::decode(VERSION_2.as_bytes()).unwrap().plan,
        record().plan
    );
    let mut written: Value = serde_json::from_str(VERSION_2).unwrap();
    written["version"] = json!(4);
    assert_eq!(tree(), written, "{CHANGED}");
}

/// Version 2 would give the containers of a partition the whole GPU.
#[test]
fn a_partition_is_for_readers_of_version_3() {
    let written: Value = serde_json::from_slice(&with_partition().encode()).unwrap();
    assert_eq!(written["minReader"], json!(3));
    let mut expected: Value = serde_json::from_str(VERSION_3).unwrap();
    expected["version"] = json!(4);
    assert_eq!(written, expected, "{CHANGED}");
    let read = Record::decode(VERSION_3.as_bytes()).unwrap();
    assert_eq!((read.since, read.plan), (None, with_partition().plan));
}

/// Version 3 ignores it, and what it writes has none.
#[test]
fn since_when_a_claim_has_its_devices_is_read_back() {
    let since = "2026-11-25T10:00:00.123456Z";
    let moment: Moment = serde_json::from_value(json!(since)).unwrap();
    let plan = with_partition().plan;
    let record = Record::new(plan.clone(), Some(moment));
    let written: Value = serde_json::from_slice(&record.encode()).unwrap();
    assert_eq!(written["since"], json!(since), "{CHANGED}");
    assert_eq!(written["minReader"], json!(3));
    let read = Record::decode(&record.encode()).unwrap();
    assert_eq!(read, record);
    assert_eq!(read.with_plan(plan).since, Some(moment));
}

#[test]
fn the_record_of_a_gpu_is_read_back() {
    let changes = gpu_state::Record {
        switched_mig_on: true,
        ..gpu_state::Record::default()
    };
    let record = GpuRecord::new("GPU-1".to_owned(), changes);
    assert_eq!(GpuRecord::decode(&record.encode()).unwrap(), record);
    assert_eq!(
        String::from_utf8(record.encode()).unwrap(),
        "{\"version\":4,\"minReader\":3,\"gpuUuid\":\"GPU-1\",\"changes\":{\"switchedMigOn\":true,\"instances\":[]}}\n",
        "{CHANGED}"
    );
}

#[test]
fn version_1_is_read_with_its_names_by_minor_number() {
    let old = Record::decode(VERSION_1.as_bytes()).unwrap();
    let devices: Vec<_> = old.plan.devices.iter().map(|d| &*d.device).collect();
    assert_eq!(
        devices,
        ["gpu-0-capped", "gpu-1", "gpu-2-timeshared", "gpu-1-capped"]
    );
    // The journal, not the name, says which GPU it is: all three have other minor numbers now.
    let mut moved = inventory(vec![gpu(0), gpu(1), gpu(2)]);
    for (gpu, device) in moved.gpus.iter_mut().zip(&old.plan.devices) {
        gpu.uuid.clone_from(&device.gpu_uuid);
        gpu.minor += 10;
    }
    let plan = old.plan.located(&moved).unwrap();
    let minors: Vec<_> = plan.devices.iter().map(|device| device.minor).collect();
    assert_eq!(minors, [10, 11, 12, 11]);
    assert_eq!(plan.undo(), old.plan.undo());
    // When it is written again, it is a record of this version.
    let rewritten = Record::new(plan, None);
    let bytes = rewritten.encode();
    assert_eq!(Record::decode(&bytes).unwrap(), rewritten);
    let tree: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(
        (&tree["version"], &tree["minReader"]),
        (&json!(4), &json!(2))
    );
}

/// What a later release might write: version 5, with unknown fields in every object, and a
/// `minReader` that allows to ignore them.
#[test]
fn what_a_later_version_added_is_ignored_where_it_says_so() {
    let mut newer = tree();
    let mut paths = Vec::new();
    objects(&newer, "", &mut paths);
    assert!(paths.len() > 20, "{paths:?}");
    for path in paths {
        newer.pointer_mut(&path).unwrap()["novelty"] = json!({"a": [1]});
    }
    newer["version"] = json!(5);
    let read = Record::decode(newer.to_string().as_bytes()).unwrap();
    assert_eq!(read.plan, record().plan);
    // When this release writes it, it is a record of this version.
    assert_eq!(Record::new(read.plan, None), record());
}

#[test]
fn a_later_version_s_literal_record_is_read() {
    let text = r#"{
        "version": 5, "minReader": 2, "writer": "tranche 0.4.0",
        "plan": {
            "allocation": {"uid": "u", "namespace": "n", "name": "c", "class": "new", "devices": []},
            "devices": [],
            "steps": [
                {"step": "writeCapPage", "key": "k", "gpuUuid": "GPU-1", "cap": {"kind": "none", "bandwidth": 5}},
                {"step": "writeCdiSpec", "format": "cbor"}
            ]
        },
        "results": {"0": {"kind": "daemon", "pid": 7, "started": 42, "socket": "/run/x"}}
    }"#;
    let record = Record::decode(text.as_bytes()).unwrap();
    assert_eq!(record.plan.undo().len(), 2);
}

#[test]
fn other_versions_are_refused_by_number() {
    let mut newer = tree();
    newer["version"] = json!(6);
    newer["minReader"] = json!(5);
    // This version may not even be able to parse what readers must understand.
    newer["plan"] = json!({"steps": [{"step": "createMigInstance"}]});
    assert_eq!(
        refusal(&newer),
        "the journal has version 6 and needs a driver that reads version 5, this one reads versions 1 to 4: run the driver that wrote it, or a newer one"
    );
    // A version without `minReader`.
    let mut newer = tree();
    newer["version"] = json!(5);
    newer.as_object_mut().unwrap().remove("minReader");
    assert!(refusal(&newer).contains("needs a driver that reads version 5"));
    let mut older = tree();
    older["version"] = json!(0);
    assert_eq!(
        refusal(&older),
        "the journal has version 0, this driver reads versions 1 to 4: upgrade one version at a time"
    );
}

#[test]
fn corrupt_records_are_refused() {
    let bytes = record().encode();
    for length in 0..bytes.len() - 1 {
        assert!(
            matches!(
                Record::decode(&bytes[..length]),
                Err(JournalError::Corrupt(_))
            ),
            "{length}"
        );
    }
    let mut doubled = bytes.clone();
    doubled.extend(bytes);
    assert!(matches!(
        Record::decode(&doubled),
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
        let _ = Record::decode(&bytes);
    }

    #[test]
    fn a_flipped_byte_does_not_make_it_panic(at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = record().encode();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = Record::decode(&bytes);
    }
}
