//! Valid JSON that is then changed anywhere: keys, values, types and depth.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// One change of one node of a tree.
#[derive(Clone, Debug)]
pub(crate) struct Mutation {
    node: prop::sample::Index,
    change: Change,
}

#[derive(Clone, Debug)]
enum Change {
    /// Another value, of any type.
    Replace(Value),
    /// Another text for a text, another number for a number.
    Other(String, Value),
    /// Add or replace a field.
    Insert(String, Value),
    /// Remove a field or an item.
    Remove(prop::sample::Index),
    /// Rename a field.
    Rename(prop::sample::Index, String),
    /// Repeat an item, or copy a field's value under another name.
    Copy(prop::sample::Index, String),
    /// Replace it by one of its parts.
    Unwrap(prop::sample::Index),
    /// Wrap it in this many lists, or objects with this field.
    Wrap(Option<String>, usize),
    /// Text with a suffix, or a number that is close.
    Nudge(String, i64),
}

/// One to four changes. Names of fields and texts are often some of `words`.
pub(crate) fn any_mutations(
    words: &'static [&'static str],
) -> impl Strategy<Value = Vec<Mutation>> {
    let word = prop_oneof![
        3 => prop::sample::select(words).prop_map(str::to_owned),
        1 => "\\PC{0,6}",
        1 => "[a-z.\\[\\]]{0,4}",
    ];
    let number = prop_oneof![
        (-2..200_i64).prop_map(|it| json!(it)),
        any::<i64>().prop_map(|it| json!(it)),
        any::<u64>().prop_map(|it| json!(it)),
        any::<f64>().prop_map(|it| json!(it)),
        prop::sample::select(vec![1.0, 2.5, 1e15, -1.0]).prop_map(|it| json!(it)),
    ];
    let other =
        (word.clone(), number.clone()).prop_map(|(text, number)| Change::Other(text, number));
    let leaf = prop_oneof![
        3 => word.clone().prop_map(|it| json!(it)),
        3 => number,
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(|it| json!(it)),
    ];
    let value = leaf.prop_recursive(3, 8, 4, {
        let word = word.clone();
        move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
                prop::collection::btree_map(word.clone(), inner, 0..4).prop_map(|it| json!(it)),
            ]
        }
    });
    let index = any::<prop::sample::Index>;
    let change = prop_oneof![
        16 => other,
        4 => value.clone().prop_map(Change::Replace),
        4 => (word.clone(), value).prop_map(|(name, value)| Change::Insert(name, value)),
        2 => index().prop_map(Change::Remove),
        2 => (index(), word.clone()).prop_map(|(at, name)| Change::Rename(at, name)),
        2 => (index(), word.clone()).prop_map(|(at, name)| Change::Copy(at, name)),
        1 => index().prop_map(Change::Unwrap),
        1 => (prop::option::of(word.clone()), 1..60_usize).prop_map(|(name, depth)| Change::Wrap(name, depth)),
        3 => (word, -2..3_i64).prop_map(|(text, by)| Change::Nudge(text, by)),
    ];
    let one = (index(), change).prop_map(|(node, change)| Mutation { node, change });
    // If there are several, one often hides the effect of the others.
    prop_oneof![
        3 => prop::collection::vec(one.clone(), 1),
        1 => prop::collection::vec(one, 2..5),
    ]
}

/// The tree with all changes, one after the other.
pub(crate) fn mutated(mut tree: Value, mutations: &[Mutation]) -> Value {
    for Mutation { node, change } in mutations {
        let mut left = node.index(count(&tree));
        change.apply(nth(&mut tree, &mut left).expect("a node"));
    }
    tree
}

fn count(tree: &Value) -> usize {
    1 + match tree {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum::<usize>(),
        _ => 0,
    }
}

/// The node of this number; the tree itself is the first.
fn nth<'a>(tree: &'a mut Value, left: &mut usize) -> Option<&'a mut Value> {
    if *left == 0 {
        return Some(tree);
    }
    *left -= 1;
    match tree {
        Value::Array(items) => items.iter_mut().find_map(|it| nth(it, left)),
        Value::Object(fields) => fields.values_mut().find_map(|it| nth(it, left)),
        _ => None,
    }
}

fn key(fields: &Map<String, Value>, at: prop::sample::Index) -> Option<String> {
    let names: Vec<&String> = fields.keys().collect();
    (!names.is_empty()).then(|| (*at.get(&names)).clone())
}

impl Change {
    fn apply(&self, node: &mut Value) {
        match (self, node) {
            (Self::Replace(value), node) => *node = value.clone(),
            (Self::Other(text, _), Value::String(old)) => old.clone_from(text),
            (Self::Other(_, number), node @ Value::Number(_)) => *node = number.clone(),
            (Self::Insert(name, value), Value::Object(fields)) => {
                fields.insert(name.clone(), value.clone());
            }
            (Self::Insert(_, value), Value::Array(items)) => items.push(value.clone()),
            (Self::Remove(at), Value::Object(fields)) => {
                key(fields, *at).and_then(|it| fields.remove(&it));
            }
            (Self::Remove(at), Value::Array(items)) if !items.is_empty() => {
                items.remove(at.index(items.len()));
            }
            (Self::Rename(at, name), Value::Object(fields)) => {
                if let Some(value) = key(fields, *at).and_then(|it| fields.remove(&it)) {
                    fields.insert(name.clone(), value);
                }
            }
            (Self::Copy(at, name), Value::Object(fields)) => {
                if let Some(it) = key(fields, *at) {
                    fields.insert(name.clone(), fields[&it].clone());
                }
            }
            (Self::Copy(at, _), Value::Array(items)) if !items.is_empty() => {
                items.push(at.get(items).clone());
            }
            (Self::Unwrap(at), node) => {
                let parts: Vec<Value> = match node {
                    Value::Array(items) => items.clone(),
                    Value::Object(fields) => fields.values().cloned().collect(),
                    _ => Vec::new(),
                };
                if !parts.is_empty() {
                    *node = at.get(&parts).clone();
                }
            }
            (Self::Wrap(name, depth), node) => {
                for _ in 0..*depth {
                    let inner = node.take();
                    *node = match name {
                        Some(name) => json!({name.as_str(): inner}),
                        None => json!([inner]),
                    };
                }
            }
            (Self::Nudge(suffix, _), Value::String(text)) => text.push_str(suffix),
            (Self::Nudge(_, by), node) => {
                if let Some(number) = node.as_i64() {
                    *node = json!(number.wrapping_add(*by));
                }
            }
            _ => {}
        }
    }
}
