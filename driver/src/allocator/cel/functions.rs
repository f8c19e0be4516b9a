//! Arithmetic, and the functions of CEL and of Kubernetes that selectors use.

use std::rc::Rc;

use cel::common::ast::operators;
use regex::Regex;
use semver::Version;
use tranche_api::Quantity;

use super::evaluate::no_overload;
use super::value::{Fault, Value};

pub(super) fn arithmetic(operator: &str, values: &[Value]) -> Result<Value, Fault> {
    let overflow = || Fault::Runtime("integer overflow".to_owned());
    match values {
        [Value::Int(a), Value::Int(b)] => {
            let result = match operator {
                operators::ADD => a.checked_add(*b),
                operators::SUBSTRACT => a.checked_sub(*b),
                operators::MULTIPLY => a.checked_mul(*b),
                operators::DIVIDE => a.checked_div(*b),
                operators::MODULO => a.checked_rem(*b),
                _ => None,
            };
            result.map(Value::Int).ok_or_else(overflow)
        }
        [Value::Uint(a), Value::Uint(b)] => {
            let result = match operator {
                operators::ADD => a.checked_add(*b),
                operators::SUBSTRACT => a.checked_sub(*b),
                operators::MULTIPLY => a.checked_mul(*b),
                operators::DIVIDE => a.checked_div(*b),
                operators::MODULO => a.checked_rem(*b),
                _ => None,
            };
            result.map(Value::Uint).ok_or_else(overflow)
        }
        [Value::Double(a), Value::Double(b)] => match operator {
            operators::ADD => Ok(Value::Double(a + b)),
            operators::SUBSTRACT => Ok(Value::Double(a - b)),
            operators::MULTIPLY => Ok(Value::Double(a * b)),
            operators::DIVIDE => Ok(Value::Double(a / b)),
            _ => Err(no_overload(operator, &values.iter().collect::<Vec<_>>())),
        },
        [Value::Text(a), Value::Text(b)] if operator == operators::ADD => {
            Ok(Value::text(&format!("{a}{b}")))
        }
        [Value::List(a), Value::List(b)] if operator == operators::ADD => {
            Ok(Value::List(a.iter().chain(b.iter()).cloned().collect()))
        }
        [Value::Int(a)] => a.checked_neg().map(Value::Int).ok_or_else(overflow),
        [Value::Double(a)] => Ok(Value::Double(-a)),
        values => Err(no_overload(operator, &values.iter().collect::<Vec<_>>())),
    }
}

/// A function or a method.
pub(super) fn call(
    function: &str,
    target: Option<&Value>,
    values: &[Value],
) -> Result<Value, Fault> {
    let result = match target {
        Some(Value::Text(text)) => self::of_text(function, text, values),
        Some(Value::List(list)) => self::of_list(function, list, values),
        Some(Value::Map(map)) if function == "size" && values.is_empty() => {
            Some(self::count(map.entries.len()))
        }
        Some(Value::Quantity(quantity)) => self::of_quantity(function, *quantity, values),
        Some(Value::Semver(version)) => self::of_version(function, version, values),
        Some(Value::Optional(inner)) => self::of_optional(function, inner.as_ref(), values),
        Some(_) => None,
        None => self::global(function, values),
    };
    result.unwrap_or_else(|| {
        let arguments = values.iter().map(Value::kind).collect::<Vec<_>>();
        let arguments = arguments.join(", ");
        let target = target.map_or(String::new(), |target| format!("{}.", target.kind()));
        Err(Fault::Unjudged(format!(
            "the function {target}{function}({arguments}) in a selector"
        )))
    })
}

type Answer = Option<Result<Value, Fault>>;

fn count(count: usize) -> Result<Value, Fault> {
    let count = i64::try_from(count);
    count
        .map(Value::Int)
        .map_err(|_| Fault::Runtime("integer overflow".to_owned()))
}

fn global(function: &str, values: &[Value]) -> Answer {
    Some(match (function, values) {
        ("size", [target]) => self::call("size", Some(target), &[]),
        ("quantity", [Value::Text(text)]) => self::quantity(text).map(Value::Quantity),
        ("isQuantity", [Value::Text(text)]) => match self::quantity(text) {
            Ok(_) => Ok(Value::Bool(true)),
            Err(Fault::Runtime(_)) => Ok(Value::Bool(false)),
            Err(fault) => Err(fault),
        },
        ("semver", [Value::Text(text), rest @ ..]) => {
            let version = self::version(text, self::normalizes(rest)?);
            let version = version.map(|version| Value::Semver(Rc::new(version)));
            version.map_err(|error| Fault::Runtime(format!("semver({text:?}): {error}")))
        }
        ("isSemver", [Value::Text(text), rest @ ..]) => {
            let version = self::version(text, self::normalizes(rest)?);
            Ok(Value::Bool(version.is_ok()))
        }
        ("optional.none", []) => Ok(Value::Optional(None)),
        ("optional.of", [value]) => Ok(Value::Optional(Some(Rc::new(value.clone())))),
        ("sets.contains", [Value::List(all), Value::List(some)]) => {
            Ok(Value::Bool(self::contains_all(all, some)))
        }
        ("sets.equivalent", [Value::List(a), Value::List(b)]) => Ok(Value::Bool(
            self::contains_all(a, b) && self::contains_all(b, a),
        )),
        ("sets.intersects", [Value::List(a), Value::List(b)]) => Ok(Value::Bool(
            a.iter().any(|it| b.iter().any(|other| other.equals(it))),
        )),
        ("string", [Value::Int(int)]) => Ok(Value::text(&int.to_string())),
        ("string", [Value::Uint(uint)]) => Ok(Value::text(&uint.to_string())),
        ("string", [Value::Bool(bool)]) => Ok(Value::text(&bool.to_string())),
        ("string", [Value::Text(text)]) => Ok(Value::Text(Rc::clone(text))),
        ("int", [Value::Int(int)]) => Ok(Value::Int(*int)),
        ("int", [Value::Text(text)]) => text
            .parse()
            .map(Value::Int)
            .map_err(|error| Fault::Runtime(format!("int({text:?}): {error}"))),
        ("bool", [Value::Bool(bool)]) => Ok(Value::Bool(*bool)),
        ("dyn", [value]) => Ok(value.clone()),
        _ => return None,
    })
}

fn contains_all(all: &[Value], some: &[Value]) -> bool {
    let contains = |value: &Value| all.iter().any(|own| own.equals(value));
    some.iter().all(contains)
}

fn of_text(function: &str, text: &str, values: &[Value]) -> Answer {
    let chars = || text.chars();
    Some(Ok(match (function, values) {
        ("size", []) => return Some(self::count(chars().count())),
        ("startsWith", [Value::Text(part)]) => Value::Bool(text.starts_with(&**part)),
        ("endsWith", [Value::Text(part)]) => Value::Bool(text.ends_with(&**part)),
        ("contains", [Value::Text(part)]) => Value::Bool(text.contains(&**part)),
        ("matches", [Value::Text(pattern)]) => match Regex::new(pattern) {
            Ok(regex) => Value::Bool(regex.is_match(text)),
            // Go's syntax has forms that this crate does not know.
            Err(_) => return None,
        },
        ("lowerAscii", []) => Value::text(&text.to_ascii_lowercase()),
        ("upperAscii", []) => Value::text(&text.to_ascii_uppercase()),
        ("trim", []) => Value::text(text.trim()),
        ("replace", [Value::Text(from), Value::Text(to)]) => {
            Value::text(&text.replace(&**from, to))
        }
        ("split", [Value::Text(separator)]) if !separator.is_empty() => {
            Value::List(text.split(&**separator).map(Value::text).collect())
        }
        ("substring", [Value::Int(start)]) => {
            let start = usize::try_from(*start).ok();
            match start.filter(|start| *start <= chars().count()) {
                Some(start) => Value::text(&chars().skip(start).collect::<String>()),
                None => return Some(Err(Fault::Runtime("index out of range".to_owned()))),
            }
        }
        _ => return None,
    }))
}

fn of_list(function: &str, list: &[Value], values: &[Value]) -> Answer {
    Some(match (function, values) {
        ("size", []) => self::count(list.len()),
        ("includes", [value]) => Ok(Value::Bool(list.iter().any(|own| own.equals(value)))),
        ("isSorted", []) => {
            Ok(Value::Bool(list.is_sorted_by(|a, b| {
                a.order(b).is_some_and(std::cmp::Ordering::is_le)
            })))
        }
        ("sum", []) => match list {
            [
                first @ (Value::Int(_) | Value::Uint(_) | Value::Double(_)),
                rest @ ..,
            ] => rest.iter().try_fold(first.clone(), |sum, value| {
                self::arithmetic(operators::ADD, &[sum, value.clone()])
            }),
            _ => return None,
        },
        ("indexOf", [value]) => match list.iter().position(|own| own.equals(value)) {
            Some(position) => self::count(position),
            None => Ok(Value::Int(-1)),
        },
        ("min" | "max", []) => {
            let order = |a: &&Value, b: &&Value| a.order(b).unwrap_or(std::cmp::Ordering::Equal);
            let found = match function {
                "min" => list.iter().min_by(order),
                _ => list.iter().max_by(order),
            };
            let empty = || Fault::Runtime(format!("{function} of an empty list"));
            found.cloned().ok_or_else(empty)
        }
        ("join", [] | [Value::Text(_)]) => {
            let separator = match values {
                [Value::Text(separator)] => separator,
                _ => "",
            };
            let texts = list.iter().map(|value| match value {
                Value::Text(text) => Ok(&**text),
                other => Err(no_overload("join", &[other])),
            });
            let texts = texts.collect::<Result<Vec<_>, _>>();
            texts.map(|texts| Value::text(&texts.join(separator)))
        }
        _ => return None,
    })
}

fn of_optional(function: &str, inner: Option<&Rc<Value>>, values: &[Value]) -> Answer {
    Some(match (function, values) {
        ("hasValue", []) => Ok(Value::Bool(inner.is_some())),
        ("value", []) => inner
            .map(|inner| (**inner).clone())
            .ok_or_else(|| Fault::Runtime("optional.none() dereference".to_owned())),
        ("orValue", [otherwise]) => Ok(inner.map_or(otherwise, |inner| &**inner).clone()),
        ("or", [otherwise @ Value::Optional(_)]) => Ok(match inner {
            Some(inner) => Value::Optional(Some(Rc::clone(inner))),
            None => otherwise.clone(),
        }),
        _ => return None,
    })
}

fn of_quantity(function: &str, quantity: Quantity, values: &[Value]) -> Answer {
    let other = match values {
        [Value::Quantity(other)] => Some(*other),
        [Value::Int(int)] if matches!(function, "add" | "sub") => {
            Quantity::from_count(1).checked_mul(*int).ok()
        }
        _ => None,
    };
    let sum = |sum: Result<Quantity, _>| {
        sum.map(Value::Quantity)
            .map_err(|error: tranche_api::quantity::Overflow| Fault::Unjudged(error.to_string()))
    };
    Some(Ok(match (function, other, values) {
        ("compareTo", Some(other), _) => Value::Int(quantity.cmp(&other) as i64),
        ("isGreaterThan", Some(other), _) => Value::Bool(quantity > other),
        ("isLessThan", Some(other), _) => Value::Bool(quantity < other),
        ("add", Some(other), _) => return Some(sum(quantity.checked_add(other))),
        ("sub", Some(other), _) => return Some(sum(quantity.checked_sub(other))),
        ("sign", None, []) => Value::Int(quantity.cmp(&Quantity::ZERO) as i64),
        ("isInteger", None, []) => Value::Bool(self::integer(quantity).is_some()),
        ("asInteger", None, []) => {
            let error = || Fault::Runtime("cannot convert value to integer".to_owned());
            let integer = self::integer(quantity).ok_or_else(error);
            return Some(integer.map(Value::Int));
        }
        _ => return None,
    }))
}

/// A whole number that a Go `int64` holds.
fn integer(quantity: Quantity) -> Option<i64> {
    if let Ok(count) = quantity.to_count() {
        return i64::try_from(count).ok();
    }
    let positive = Quantity::ZERO.checked_sub(quantity).ok()?;
    let count = i64::try_from(positive.to_count().ok()?).ok()?;
    count.checked_neg()
}

/// Go rounds amounts that this program refuses.
fn quantity(text: &str) -> Result<Quantity, Fault> {
    use tranche_api::quantity::ParseError;
    text.parse().map_err(|error| match error {
        ParseError::Syntax { .. } | ParseError::Suffix { .. } => Fault::Runtime(error.to_string()),
        ParseError::TooPrecise { .. } | ParseError::OutOfRange { .. } => {
            Fault::Unjudged(error.to_string())
        }
    })
}

fn of_version(function: &str, version: &Version, values: &[Value]) -> Answer {
    let part = |part: u64| {
        let part = i64::try_from(part);
        part.map_or(Value::Null, Value::Int)
    };
    Some(Ok(match (function, values) {
        ("major", []) => part(version.major),
        ("minor", []) => part(version.minor),
        ("patch", []) => part(version.patch),
        ("compareTo", [Value::Semver(other)]) => Value::Int(version.cmp_precedence(other) as i64),
        ("isGreaterThan", [Value::Semver(other)]) => {
            Value::Bool(version.cmp_precedence(other).is_gt())
        }
        ("isLessThan", [Value::Semver(other)]) => {
            Value::Bool(version.cmp_precedence(other).is_lt())
        }
        _ => return None,
    }))
}

fn normalizes(rest: &[Value]) -> Option<bool> {
    match rest {
        [] => Some(false),
        [Value::Bool(normalizes)] => Some(*normalizes),
        _ => None,
    }
}

/// With `normalizes`: without a leading `v`, with `.0` for missing numbers, without leading zeros.
fn version(text: &str, normalizes: bool) -> Result<Version, String> {
    let parse = |text: &str| Version::parse(text).map_err(|error| error.to_string());
    if !normalizes {
        return parse(text);
    }
    let text = text.strip_prefix('v').unwrap_or(text);
    let mut parts: Vec<String> = text.splitn(3, '.').map(without_zeros).collect();
    let short = parts.len() < 3;
    if short && parts.last().is_some_and(|last| last.contains(['+', '-'])) {
        return Err("a short version cannot have pre-release or build metadata".to_owned());
    }
    while parts.len() < 3 {
        parts.push("0".to_owned());
    }
    parse(&parts.join("."))
}

fn without_zeros(part: &str) -> String {
    let stripped = part.trim_start_matches('0');
    match stripped.starts_with(|first: char| first.is_ascii_digit()) {
        true => stripped.to_owned(),
        false if part.len() > 1 => format!("0{stripped}"),
        false => part.to_owned(),
    }
}
