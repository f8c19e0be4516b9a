//! What the API server does with an object of a custom resource before it stores it: it removes fields and nulls that the
//! schema does not have, sets defaults, and validates. Rules in CEL are not evaluated.

use regex::Regex;
use serde_json::{Map, Value, json};

/// The object as it is stored, or the path of the first field that is refused.
pub(crate) fn stored(schema: &Value, object: &Value) -> Result<Value, String> {
    let mut object = object.clone();
    store(schema, &mut object, "")?;
    Ok(object)
}

/// The part of the schema that describes the field at `path`, if there may be one.
pub(crate) fn at<'a>(schema: &'a Value, path: &str) -> Option<&'a Value> {
    let mut here = schema;
    for step in path.split('.') {
        let mut parts = step.split('[');
        here = here["properties"].get(parts.next()?)?;
        for index in parts {
            index.strip_suffix(']')?.parse::<usize>().ok()?;
            here = here.get("items")?;
        }
    }
    Some(here)
}

fn store(schema: &Value, value: &mut Value, path: &str) -> Result<(), String> {
    let refused = || Err(path.trim_start_matches('.').to_owned());
    if value.is_null() {
        return if schema["nullable"] == json!(true) {
            Ok(())
        } else {
            refused()
        };
    }
    // The server reads 1.0 and 1e3 as integers, and stores them as 1 and 1000.
    if let Some(float) = value.as_f64().filter(|_| value.is_f64()) {
        const LARGEST: f64 = 9_007_199_254_740_991.0;
        if float.fract() == 0.0 && float.abs() <= LARGEST {
            #[expect(clippy::cast_possible_truncation, reason = "whole, and in range")]
            let whole = float as i64;
            *value = json!(whole);
        }
    }
    let is_integer = value.is_i64();
    let fits = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => is_integer,
        Some("boolean") => value.is_boolean(),
        Some(other) => panic!("{other}"),
        None => value.is_string() || is_integer,
    };
    let is_listed = |allowed: &Vec<Value>| allowed.contains(value);
    if !fits || !schema["enum"].as_array().is_none_or(is_listed) {
        return refused();
    }
    let number = value.as_f64();
    let is_below = |bound: &str, than: f64| schema[bound].as_f64().is_some_and(|it| than < it);
    let is_above = |bound: &str, than: f64| schema[bound].as_f64().is_some_and(|it| than > it);
    if number.is_some_and(|it| is_below("minimum", it) || is_above("maximum", it)) {
        return refused();
    }
    if let (Some(pattern), Some(text)) = (schema["pattern"].as_str(), value.as_str())
        && !Regex::new(pattern).expect("a pattern").is_match(text)
    {
        return refused();
    }
    if let Value::Array(items) = value {
        #[expect(clippy::cast_precision_loss, reason = "a few items")]
        let length = items.len() as f64;
        let is_twice = |at: usize| items[..at].contains(&items[at]);
        let is_set = schema["x-kubernetes-list-type"] == json!("set");
        if is_below("minItems", length)
            || is_above("maxItems", length)
            || is_set && (0..items.len()).any(is_twice)
        {
            return refused();
        }
        for (index, item) in items.iter_mut().enumerate() {
            store(&schema["items"], item, &format!("{path}[{index}]"))?;
        }
    }
    if let Value::Object(fields) = value {
        store_fields(schema, fields, path)?;
    }
    Ok(())
}

fn store_fields(schema: &Value, fields: &mut Map<String, Value>, path: &str) -> Result<(), String> {
    if let Some(values) = schema.get("additionalProperties") {
        for (name, value) in fields {
            store(values, value, &format!("{path}.{name}"))?;
        }
        return Ok(());
    }
    let none = Map::new();
    let known = schema["properties"].as_object().unwrap_or(&none);
    fields.retain(|name, value| {
        let schema = known.get(name);
        schema.is_some_and(|it| !value.is_null() || it["nullable"] == json!(true))
    });
    for (name, schema) in known {
        if let (None, Some(default)) = (fields.get(name), schema.get("default")) {
            fields.insert(name.clone(), default.clone());
        }
    }
    let required = schema["required"].as_array().into_iter().flatten();
    for name in required.filter_map(Value::as_str) {
        if !fields.contains_key(name) {
            return Err(format!("{path}.{name}").trim_start_matches('.').to_owned());
        }
    }
    for (name, value) in fields {
        store(&known[name], value, &format!("{path}.{name}"))?;
    }
    Ok(())
}
