use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::preparation::plan;
use crate::testing::{allocation, capped, gpu, inventory, plain, with};

/// A record as version 1 writes it. Never change it: files like this lie on nodes.
const VERSION_1: &str = include_str!("../../testdata/journal-v1.json");

fn record() -> Record {
    let results = [
        capped("20Gi", "25"),
        with(plain("gpu-1"), &json!({"request": "whole"})),
        with(
            plain("gpu-2-timeshared"),
            &json!({"request": "any/slow", "shareID": "s"}),
        ),
        with(
            plain("gpu-1-capped"),
            &json!({"request": "look", "adminAccess": true}),
        ),
    ];
    let inventory = inventory(vec![gpu(0), gpu(1), gpu(2)]);
    let plan = plan(&allocation("a", &results), &inventory, []).unwrap();
    Record::new(plan)
}

fn tree() -> Value {
    serde_json::from_slice(&record().encode()).unwrap()
}

fn refusal(tree: &Value) -> String {
    Record::decode(tree.to_string().as_bytes())
        .unwrap_err()
        .to_string()
}

#[test]
fn version_1_is_read_and_written() {
    assert_eq!(Record::decode(VERSION_1.as_bytes()).unwrap(), record());
    let written: Value = serde_json::from_str(VERSION_1).unwrap();
    assert_eq!(
        tree(),
        written,
        "the format changed: that takes a new version"
    );
}

#[test]
fn other_versions_are_refused_by_number() {
    let mut newer = tree();
    newer["version"] = json!(2);
    // A newer version may have any other fields.
    newer["novelty"] = json!({"a": 1});
    assert_eq!(
        refusal(&newer),
        "the journal has version 2, this driver reads versions 1 to 1: run the driver that wrote it, or a newer one"
    );
    let mut older = tree();
    older["version"] = json!(0);
    assert_eq!(
        refusal(&older),
        "the journal has version 0, this driver reads versions 1 to 1: upgrade one version at a time"
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

/// Every object of the tree, by the way to it.
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

#[test]
fn unknown_fields_are_refused_everywhere() {
    let mut paths = Vec::new();
    objects(&tree(), "", &mut paths);
    assert!(paths.len() > 20, "{paths:?}");
    for path in paths {
        let mut strange = tree();
        strange.pointer_mut(&path).unwrap()["novelty"] = json!(1);
        let error = refusal(&strange);
        assert!(error.contains("unknown field `novelty`"), "{path}: {error}");
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
