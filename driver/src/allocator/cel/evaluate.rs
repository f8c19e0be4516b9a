//! The evaluation of an expression: operators, selections, macros and bindings.

use std::cmp::Ordering;
use std::rc::Rc;

use cel::IdedExpr;
use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, LiteralValue, SelectExpr, operators,
};

use super::functions;
use super::value::{Fault, Map, Value};

/// Steps of one macro and those inside of it; the scheduler limits the cost of a selector too.
const MOST_ELEMENTS: usize = 10_000;

/// What names mean. A name may stand for a fault: it is one only where its value decides.
pub(super) struct Scope<'a> {
    name: &'a str,
    value: Result<Value, Fault>,
    outer: Option<&'a Scope<'a>>,
}

impl<'a> Scope<'a> {
    /// The only name that a selector is given.
    pub fn device(device: &Value) -> Self {
        Self {
            name: "device",
            value: Ok(device.clone()),
            outer: None,
        }
    }

    fn with(&'a self, name: &'a str, value: Result<Value, Fault>) -> Self {
        Self {
            name,
            value,
            outer: Some(self),
        }
    }

    fn get(&self, name: &str) -> Result<Value, Fault> {
        if self.name == name {
            return self.value.clone();
        }
        match self.outer {
            Some(outer) => outer.get(name),
            None => Err(Fault::Unjudged(format!("the name {name:?} in a selector"))),
        }
    }
}

pub(super) fn evaluate(expression: &IdedExpr, scope: &Scope<'_>) -> Result<Value, Fault> {
    match &expression.expr {
        Expr::Literal(literal) => self::literal(literal),
        Expr::Ident(name) => scope.get(name),
        Expr::Select(select) => self::select(select, scope),
        Expr::Call(call) => self::call(call, scope),
        Expr::Comprehension(comprehension) => self::comprehension(comprehension, scope),
        Expr::List(list) if list.optional_indices.is_empty() => {
            let elements = list.elements.iter();
            let elements = elements.map(|element| evaluate(element, scope));
            Ok(Value::List(elements.collect::<Result<_, _>>()?))
        }
        Expr::Map(map) => {
            let mut entries = Vec::new();
            for entry in &map.entries {
                match &entry.expr {
                    EntryExpr::MapEntry(entry) if !entry.optional => {
                        let key = evaluate(&entry.key, scope)?;
                        entries.push((key, evaluate(&entry.value, scope)?));
                    }
                    _ => return Err(unknown("an optional entry")),
                }
            }
            Ok(Value::Map(Rc::new(Map {
                entries,
                otherwise: None,
            })))
        }
        Expr::List(_) => Err(unknown("an optional element")),
        Expr::Struct(_) => Err(unknown("an object")),
        Expr::Unspecified => Err(unknown("an empty expression")),
    }
}

fn unknown(what: &str) -> Fault {
    Fault::Unjudged(format!("{what} in a selector"))
}

fn literal(literal: &LiteralValue) -> Result<Value, Fault> {
    Ok(match literal {
        LiteralValue::Boolean(bool) => Value::Bool(*bool.inner()),
        LiteralValue::Int(int) => Value::Int(*int.inner()),
        LiteralValue::UInt(uint) => Value::Uint(*uint.inner()),
        LiteralValue::Double(double) => Value::Double(*double.inner()),
        LiteralValue::String(text) => Value::text(text.inner()),
        LiteralValue::Null => Value::Null,
        LiteralValue::Bytes(_) => return Err(unknown("bytes")),
    })
}

/// `a.b`, and `has(a.b)`. Of an optional, the result is optional.
fn select(select: &SelectExpr, scope: &Scope<'_>) -> Result<Value, Fault> {
    let operand = evaluate(&select.operand, scope)?;
    let key = Value::text(&select.field);
    if !select.test {
        return self::index(&operand, &key);
    }
    match operand {
        Value::Map(map) => Ok(Value::Bool(map.get(&key).is_some())),
        Value::Optional(None) => Ok(Value::Bool(false)),
        Value::Optional(Some(value)) => match &*value {
            Value::Map(map) => Ok(Value::Bool(map.get(&key).is_some())),
            other => Err(no_overload("has", &[other])),
        },
        other => Err(no_overload("has", &[&other])),
    }
}

/// `a[b]`.
fn index(operand: &Value, key: &Value) -> Result<Value, Fault> {
    match operand {
        Value::Optional(_) => self::optional_index(operand, key),
        Value::Map(map) => map.get(key).cloned().ok_or_else(|| {
            let key = match key {
                Value::Text(text) => text.to_string(),
                other => format!("{other:?}"),
            };
            Fault::Runtime(format!("no such key: {key}"))
        }),
        Value::List(list) => position(key)
            .and_then(|position| list.get(position).cloned())
            .ok_or_else(|| Fault::Runtime("index out of bounds".to_owned())),
        other => Err(no_overload("[]", &[other, key])),
    }
}

/// `a[?b]` and `a.?b`.
fn optional_index(operand: &Value, key: &Value) -> Result<Value, Fault> {
    let found = match operand {
        Value::Optional(None) => return Ok(Value::Optional(None)),
        Value::Optional(Some(value)) => return self::optional_index(value, key),
        Value::Map(map) => map.get(key),
        Value::List(list) => position(key).and_then(|position| list.get(position)),
        other => return Err(no_overload("[?]", &[other, key])),
    };
    Ok(Value::Optional(found.cloned().map(Rc::new)))
}

fn position(key: &Value) -> Option<usize> {
    match key {
        Value::Int(int) => usize::try_from(*int).ok(),
        Value::Uint(uint) => usize::try_from(*uint).ok(),
        _ => None,
    }
}

pub(super) fn no_overload(function: &str, arguments: &[&Value]) -> Fault {
    let kinds: Vec<&str> = arguments.iter().map(|value| value.kind()).collect();
    let kinds = kinds.join(" and ");
    Fault::Runtime(format!("no such overload: {function} of {kinds}"))
}

fn call(call: &CallExpr, scope: &Scope<'_>) -> Result<Value, Fault> {
    match (call.func_name.as_str(), &*call.args) {
        (operators::LOGICAL_AND, terms) => self::logical(terms, false, scope),
        (operators::LOGICAL_OR, terms) => self::logical(terms, true, scope),
        (operators::CONDITIONAL, [condition, then, otherwise]) => {
            match evaluate(condition, scope)? {
                Value::Bool(true) => evaluate(then, scope),
                Value::Bool(false) => evaluate(otherwise, scope),
                other => Err(no_overload("?:", &[&other])),
            }
        }
        (operators::NOT_STRICTLY_FALSE, [term]) => {
            let value = evaluate(term, scope);
            Ok(Value::Bool(!matches!(value, Ok(Value::Bool(false)))))
        }
        ("bind", [name, value, body]) if is_name(call.target.as_deref(), "cel") => {
            let name = self::name(name)?;
            evaluate(body, &scope.with(name, evaluate(value, scope)))
        }
        (function @ ("optMap" | "optFlatMap"), [name, body]) if call.target.is_some() => {
            let target = call.target.as_deref().map(|it| evaluate(it, scope));
            match target.transpose()? {
                Some(Value::Optional(None)) => Ok(Value::Optional(None)),
                Some(Value::Optional(Some(value))) => {
                    let inner = scope.with(self::name(name)?, Ok((*value).clone()));
                    let mapped = evaluate(body, &inner)?;
                    Ok(match function {
                        "optMap" => Value::Optional(Some(Rc::new(mapped))),
                        _ => mapped,
                    })
                }
                other => Err(no_overload(function, &other.iter().collect::<Vec<_>>())),
            }
        }
        (function, arguments) => {
            // `optional.of(a)` and the like have a name in front, not a value.
            let target = call.target.as_deref();
            let (function, target) = match target.filter(|it| is_name(Some(it), "optional")) {
                Some(_) => (format!("optional.{function}"), None),
                None => match target.filter(|it| is_name(Some(it), "sets")) {
                    Some(_) => (format!("sets.{function}"), None),
                    None => (function.to_owned(), target),
                },
            };
            let target = target.map(|it| evaluate(it, scope)).transpose()?;
            let values = arguments.iter().map(|it| evaluate(it, scope));
            let values = values.collect::<Result<Vec<_>, _>>()?;
            self::operator(&function, target.as_ref(), &values)
        }
    }
}

fn is_name(expression: Option<&IdedExpr>, name: &str) -> bool {
    matches!(expression, Some(IdedExpr { expr: Expr::Ident(own), .. }) if own == name)
}

fn name(expression: &IdedExpr) -> Result<&str, Fault> {
    match &expression.expr {
        Expr::Ident(name) => Ok(name),
        _ => Err(unknown("a variable that is no name")),
    }
}

/// `&&` is false if one side is false, whatever the other is; `||` is true if one side is true.
fn logical(terms: &[IdedExpr], decides: bool, scope: &Scope<'_>) -> Result<Value, Fault> {
    let mut fault = None;
    for term in terms {
        let problem = match evaluate(term, scope) {
            Ok(Value::Bool(value)) if value == decides => return Ok(Value::Bool(decides)),
            Ok(Value::Bool(_)) => continue,
            Ok(other) => no_overload(if decides { "||" } else { "&&" }, &[&other]),
            Err(problem) => problem,
        };
        // What cannot be judged might have decided.
        if fault.is_none() || matches!(problem, Fault::Unjudged(_)) {
            fault = Some(problem);
        }
    }
    match fault {
        Some(fault) => Err(fault),
        None => Ok(Value::Bool(!decides)),
    }
}

/// What a macro such as `exists` becomes.
fn comprehension(loops: &ComprehensionExpr, scope: &Scope<'_>) -> Result<Value, Fault> {
    if loops.iter_var2.is_some() {
        return Err(unknown("a macro with two variables"));
    }
    let elements: Vec<Value> = match evaluate(&loops.iter_range, scope)? {
        Value::List(list) => list.to_vec(),
        Value::Map(map) => map.entries.iter().map(|(key, _)| key.clone()).collect(),
        other => return Err(no_overload("a macro", &[&other])),
    };
    if elements.len() > MOST_ELEMENTS {
        return Err(unknown("a macro over a long list"));
    }
    let mut result = evaluate(&loops.accu_init, scope);
    for element in elements {
        let scope = scope.with(&loops.accu_var, result.clone());
        let scope = scope.with(&loops.iter_var, Ok(element));
        match evaluate(&loops.loop_cond, &scope)? {
            Value::Bool(true) => {}
            _ => break,
        }
        result = evaluate(&loops.loop_step, &scope);
    }
    let scope = scope.with(&loops.accu_var, result);
    evaluate(&loops.result, &scope)
}

fn operator(function: &str, target: Option<&Value>, values: &[Value]) -> Result<Value, Fault> {
    let compare = |a: &Value, b: &Value, accept: fn(Ordering) -> bool| match a.order(b) {
        // There is no operator for these, only functions.
        Some(_) if matches!(a, Value::Quantity(_) | Value::Semver(_)) => {
            Err(no_overload(function, &[a, b]))
        }
        Some(order) => Ok(Value::Bool(accept(order))),
        None => Err(no_overload(function, &[a, b])),
    };
    match (function, target, values) {
        (operators::EQUALS, None, [a, b]) => Ok(Value::Bool(a.equals(b))),
        (operators::NOT_EQUALS, None, [a, b]) => Ok(Value::Bool(!a.equals(b))),
        (operators::LESS, None, [a, b]) => compare(a, b, Ordering::is_lt),
        (operators::LESS_EQUALS, None, [a, b]) => compare(a, b, Ordering::is_le),
        (operators::GREATER, None, [a, b]) => compare(a, b, Ordering::is_gt),
        (operators::GREATER_EQUALS, None, [a, b]) => compare(a, b, Ordering::is_ge),
        (operators::INDEX, None, [operand, key]) => self::index(operand, key),
        (operators::OPT_INDEX | operators::OPT_SELECT, None, [operand, key]) => {
            self::optional_index(operand, key)
        }
        (operators::LOGICAL_NOT, None, [Value::Bool(value)]) => Ok(Value::Bool(!value)),
        (operators::IN, None, [key, container]) => match container {
            Value::List(list) => Ok(Value::Bool(list.iter().any(|own| own.equals(key)))),
            Value::Map(map) => Ok(Value::Bool(map.own(key).is_some())),
            other => Err(no_overload("in", &[key, other])),
        },
        (
            operators::ADD
            | operators::SUBSTRACT
            | operators::MULTIPLY
            | operators::DIVIDE
            | operators::MODULO
            | operators::NEGATE,
            None,
            values,
        ) => functions::arithmetic(function, values),
        (operators::LOGICAL_NOT, None, [other]) => Err(no_overload("!", &[other])),
        (function, target, values) => functions::call(function, target, values),
    }
}
