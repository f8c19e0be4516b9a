//! Compares two slices by meaning, and finds where they differ.
//!
//! The API server returns objects in another form: quantities are canonical, empty lists are left
//! out, times are filled in. A literal comparison would always find a change, so values are
//! compared by meaning. The comparison walks the JSON of both, so that it covers every field, also
//! future ones.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use serde_json::Value;
use tranche_api::Quantity;

/// A position at which two specs differ.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// Its path: names of fields, keys and positions.
    pub(super) path: Vec<String>,
    /// Whether only the first spec has a value there.
    pub(super) lost: bool,
}

/// Whether two specs mean the same: quantities are compared by value, a missing field equals an empty one, and the
/// order of devices is significant. The time at which a taint was added is compared only if both have one.
#[must_use]
pub fn same(desired: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> bool {
    differences(desired, stored).is_empty()
}

/// All positions at which two specs differ.
pub(super) fn differences(
    desired: &ResourceSliceSpec,
    stored: &ResourceSliceSpec,
) -> Vec<Difference> {
    let mut walk = Walk::default();
    walk.compare(&tree(desired), &tree(stored));
    walk.found
}

/// The spec as JSON.
fn tree(spec: &ResourceSliceSpec) -> Value {
    serde_json::to_value(spec).expect("a spec has only strings for keys")
}

#[derive(Default)]
struct Walk {
    path: Vec<String>,
    found: Vec<Difference>,
}

impl Walk {
    fn compare(&mut self, desired: &Value, stored: &Value) {
        match (desired, stored) {
            (desired, stored) if is_nothing(desired) && is_nothing(stored) => {}
            (Value::Object(desired), Value::Object(stored)) => {
                let only_stored = stored.keys().filter(|key| !desired.contains_key(*key));
                for key in desired.keys().chain(only_stored) {
                    let side =
                        |map: &serde_json::Map<_, _>| map.get(key).cloned().unwrap_or_default();
                    self.step(key.clone(), &side(desired), &side(stored));
                }
            }
            (Value::Array(desired), Value::Array(stored)) => {
                for index in 0..desired.len().max(stored.len()) {
                    let side = |list: &[Value]| list.get(index).cloned().unwrap_or_default();
                    self.step(index.to_string(), &side(desired), &side(stored));
                }
            }
            (desired, stored) if self.equal(desired, stored) => {}
            (_, stored) => self.found.push(Difference {
                path: self.path.clone(),
                lost: is_nothing(stored),
            }),
        }
    }

    fn step(&mut self, segment: String, desired: &Value, stored: &Value) {
        self.path.push(segment);
        self.compare(desired, stored);
        self.path.pop();
    }

    fn equal(&self, desired: &Value, stored: &Value) -> bool {
        if self.path.last().is_some_and(|field| field == "timeAdded")
            && (is_nothing(desired) || is_nothing(stored))
        {
            return true;
        }
        match (desired, stored) {
            (Value::String(desired), Value::String(stored)) if self.at_quantity() => {
                match (desired.parse::<Quantity>(), stored.parse::<Quantity>()) {
                    (Ok(desired), Ok(stored)) => desired == stored,
                    _ => desired == stored,
                }
            }
            (desired, stored) => desired == stored,
        }
    }

    fn at_quantity(&self) -> bool {
        let path: Vec<&str> = self.path.iter().map(String::as_str).collect();
        is_quantity(&path)
    }
}

/// Whether strings at this path are quantities: everything in a capacity, and the value of a counter.
fn is_quantity(path: &[&str]) -> bool {
    matches!(
        path,
        ["devices", _, "capacity", ..]
            | ["devices", _, "consumesCounters", .., "value"]
            | ["sharedCounters", .., "value"]
    )
}

/// A 64-bit hash of the meaning of a slice's spec, without its pool. It is equal for two specs that are [`same`] except
/// for the pool and the times at which taints were added.
///
/// It replaces the slice where many slices are compared and none is kept. It is valid only within one process, so it is
/// never stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(u64);

impl Digest {
    /// The digest of a spec.
    #[must_use]
    pub fn of(spec: &ResourceSliceSpec) -> Self {
        let mut json = tree(spec);
        if let Some(fields) = json.as_object_mut() {
            fields.remove("pool");
        }
        let mut hasher = DefaultHasher::new();
        digest(&json, &mut Vec::new(), &mut hasher);
        Self(hasher.finish())
    }
}

/// Adds the meaning of a value to the hash; empty values add nothing.
fn digest<'a>(value: &'a Value, path: &mut Vec<&'a str>, hasher: &mut DefaultHasher) {
    match value {
        Value::Null => {}
        Value::Bool(value) => (1_u8, value).hash(hasher),
        Value::Number(number) => (2_u8, number).hash(hasher),
        Value::String(text) => match text.parse::<Quantity>() {
            Ok(amount) if is_quantity(path) => (3_u8, amount).hash(hasher),
            _ => (4_u8, text).hash(hasher),
        },
        Value::Array(list) => {
            for (index, value) in list.iter().enumerate().filter(|(_, it)| !is_nothing(it)) {
                (5_u8, index).hash(hasher);
                path.push("");
                digest(value, path, hasher);
                path.pop();
            }
            6_u8.hash(hasher);
        }
        Value::Object(map) => {
            let fields = map
                .iter()
                .filter(|(key, value)| !is_nothing(value) && *key != "timeAdded");
            for (key, value) in fields {
                (7_u8, key).hash(hasher);
                path.push(key);
                digest(value, path, hasher);
                path.pop();
            }
            8_u8.hash(hasher);
        }
    }
}

/// Whether the value means the same as a missing field.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}
