//! What the page shows, as records by key, and the difference between two sets of records: pure.
//!
//! A record is the JSON text of one thing: a node with its GPUs, a pod that waits, the summary. The page keeps the records that it
//! received, so a change sends one record, and a comparison of texts finds the changes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use serde::Serialize;

/// All records at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records(BTreeMap<Arc<str>, Arc<str>>);

/// The difference between two sets of records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// Records that are new or different.
    pub set: BTreeMap<Arc<str>, Arc<str>>,
    /// Keys of records that are gone.
    pub gone: Vec<Arc<str>>,
}

/// A value that cannot be written as JSON.
#[derive(Debug, thiserror::Error)]
#[error("cannot write record {key} as JSON: {problem}; report it as a bug")]
pub struct RecordError {
    key: String,
    problem: serde_json::Error,
}

impl Records {
    /// Adds or replaces a record. A record with the same text keeps its allocation in memory.
    pub fn set(&mut self, key: &str, value: &impl Serialize) -> Result<(), RecordError> {
        let text = serde_json::to_string(value).map_err(|problem| RecordError {
            key: key.to_owned(),
            problem,
        })?;
        match self.0.get_mut(key) {
            Some(old) if **old == *text => {}
            Some(old) => *old = text.into(),
            None => {
                self.0.insert(key.into(), text.into());
            }
        }
        Ok(())
    }

    /// Removes a record.
    pub fn remove(&mut self, key: &str) {
        self.0.remove(key);
    }

    /// Removes the records whose key begins with `prefix` unless `is_kept` returns true for the rest of the key.
    pub fn retain(&mut self, prefix: &str, is_kept: impl Fn(&str) -> bool) {
        self.0.retain(|key, _| match key.strip_prefix(prefix) {
            Some(rest) => is_kept(rest),
            None => true,
        });
    }

    #[cfg(test)]
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(AsRef::as_ref)
    }

    /// The difference from `self` to `new`.
    #[must_use]
    pub fn delta(&self, new: &Self) -> Delta {
        let is_same =
            |old: &Arc<str>, new: &Arc<str>| Arc::ptr_eq(old, new) || old.as_ref() == new.as_ref();
        let set = new.0.iter().filter(|(key, text)| {
            let old = self.0.get(*key);
            !old.is_some_and(|old| is_same(old, text))
        });
        let gone = self.0.keys().filter(|key| !new.0.contains_key(*key));
        Delta {
            set: set.map(|(key, text)| (key.clone(), text.clone())).collect(),
            gone: gone.cloned().collect(),
        }
    }

    /// The message that sends a page all records. `seq` is their number.
    #[must_use]
    pub fn message(&self, seq: u64) -> String {
        format!("{{\"seq\":{seq},\"records\":{}}}", object(&self.0))
    }
}

impl Delta {
    /// Whether nothing changed.
    #[cfg(test)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.gone.is_empty()
    }

    /// The message that updates a page from the records with number `since` to those with number `seq`.
    #[must_use]
    pub fn message(&self, since: u64, seq: u64) -> String {
        let gone: Vec<String> = self.gone.iter().map(|key| quoted(key)).collect();
        format!(
            "{{\"since\":{since},\"seq\":{seq},\"set\":{},\"gone\":[{}]}}",
            object(&self.set),
            gone.join(",")
        )
    }
}

fn object(records: &BTreeMap<Arc<str>, Arc<str>>) -> String {
    let size = records.iter().map(|(key, text)| key.len() + text.len() + 8);
    let mut object = String::with_capacity(size.sum::<usize>() + 2);
    object.push('{');
    for (nth, (key, text)) in records.iter().enumerate() {
        let comma = if nth == 0 { "" } else { "," };
        // Writing to a String does not fail.
        let _ = write!(object, "{comma}{}:{text}", quoted(key));
    }
    object.push('}');
    object
}

/// A string in JSON.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn any_records() -> impl Strategy<Value = Records> {
        // Few keys and values, so that two sets have some in common.
        let key = prop_oneof!["[a-c]", "node/[\"\\\\a\u{e9}]{0,2}"];
        prop::collection::btree_map(key, "[xy\"\n]{0,2}", 0..6).prop_map(|values| {
            let mut records = Records::default();
            for (key, value) in values {
                records.set(&key, &value).unwrap();
            }
            records
        })
    }

    /// What the page does with a message.
    fn apply(page: &mut BTreeMap<String, Value>, message: &str) {
        let message: Value = serde_json::from_str(message).unwrap();
        for key in message["gone"].as_array().into_iter().flatten() {
            page.remove(key.as_str().unwrap());
        }
        let set = message.get("records").unwrap_or(&message["set"]);
        for (key, value) in set.as_object().unwrap() {
            page.insert(key.clone(), value.clone());
        }
    }

    proptest! {
        #[test]
        fn a_page_with_the_old_records_has_the_new_ones_after_the_delta(
            old in any_records(),
            new in any_records(),
        ) {
            let (mut page, mut wanted) = (BTreeMap::new(), BTreeMap::new());
            apply(&mut page, &old.message(1));
            let delta = old.delta(&new);
            apply(&mut page, &delta.message(1, 2));
            apply(&mut wanted, &new.message(2));
            prop_assert_eq!(page, wanted);
            prop_assert_eq!(delta.is_empty(), old == new);
        }

        #[test]
        fn a_delta_has_only_what_differs(old in any_records(), new in any_records()) {
            let delta = old.delta(&new);
            for (key, text) in &delta.set {
                prop_assert_ne!(old.get(key), Some(text.as_ref()));
            }
            for key in &delta.gone {
                prop_assert!(old.get(key).is_some() && new.get(key).is_none());
            }
        }
    }

    #[test]
    fn a_message_has_no_line_break_which_would_end_its_field() {
        let mut records = Records::default();
        records.set("pod/a", &"two\nlines\r").unwrap();
        assert!(!records.message(1).contains(['\n', '\r']));
    }
}
