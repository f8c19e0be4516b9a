//! Whether two slices mean the same, and where they do not.
//!
//! The API server gives back what it was given in its own words: quantities in canonical form,
//! empty lists left out, times filled in. Comparing words would find a change for ever; here
//! meanings are compared. The comparison walks the JSON of both, so that it covers every field
//! that there is, and fields to come.

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use serde_json::Value;
use tranche_api::Quantity;

/// A place at which two specs differ.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// The way to it: names of fields, keys and positions.
    pub(super) path: Vec<String>,
    /// Whether something is there in the first spec and nothing in the second.
    pub(super) lost: bool,
}

/// Whether two specs mean the same: quantities by value, what is left out equal to what is empty,
/// the order of devices significant. The time at which a taint was added counts only where both
/// name one.
#[must_use]
pub fn same(desired: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> bool {
    differences(desired, stored).is_empty()
}

/// All places at which two specs differ.
pub(super) fn differences(
    desired: &ResourceSliceSpec,
    stored: &ResourceSliceSpec,
) -> Vec<Difference> {
    let json = |spec| serde_json::to_value(spec).expect("a spec has only strings for keys");
    let mut walk = Walk::default();
    walk.compare(&json(desired), &json(stored));
    walk.found
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

    /// Whether strings here are quantities: everything of a capacity, and the value of a counter.
    fn at_quantity(&self) -> bool {
        let path: Vec<&str> = self.path.iter().map(String::as_str).collect();
        matches!(
            path[..],
            ["devices", _, "capacity", ..]
                | ["devices", _, "consumesCounters", .., "value"]
                | ["sharedCounters", .., "value"]
        )
    }
}

/// What a reader of the API cannot tell from a field that was left out.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}
