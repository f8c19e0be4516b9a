//! Functions of Kubernetes, and of CEL's extensions that the crate `cel` does not have.
#![allow(
    clippy::trivially_copy_pass_by_ref,
    clippy::needless_pass_by_value,
    clippy::unnecessary_wraps,
    reason = "the signatures are those that `cel` calls"
)]

use std::cmp::Ordering;

use cel::common::ast::{ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue};
use cel::common::types::{CelBool, CelInt, CelList, CelString, LIST_TYPE};
use cel::common::value::{CowVal, Val};
use cel::parser::{Macro, MacroExprHelper};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};
use semver::Version;
use tranche_api::Quantity;
use tranche_api::quantity::{Overflow, ParseError};

use super::extra::{Amount, Ordered, Semver};

/// The function name in errors of expressions for which the scheduler may have a result.
pub(super) const UNJUDGED: &str = "unjudged";

type Result<T> = std::result::Result<T, ExecutionError>;

pub(super) fn declare(env: &mut Env) -> std::result::Result<(), DeclarationError> {
    self::declare_amounts(env)?;
    self::declare_versions(env)?;
    self::declare_lists(env)?;
    env.add_macro(Macro::receiver("bind", 3, bind))
}

fn declare_amounts(env: &mut Env) -> std::result::Result<(), DeclarationError> {
    add_overload!(env, fn quantity: (CelString) -> Result<Amount>)?;
    add_overload!(env, fn is_quantity: (CelString) -> Result<CelBool>)?;
    add_member_overload!(env, fn compare_to: (Amount, Amount) -> CelInt)?;
    add_member_overload!(env, fn is_greater_than: (Amount, Amount) -> CelBool)?;
    add_member_overload!(env, fn is_less_than: (Amount, Amount) -> CelBool)?;
    add_member_overload!(env, fn add: (Amount, Amount) -> Result<Amount>)?;
    add_member_overload!(env, fn add_int: (Amount, CelInt) -> Result<Amount>, name = "add")?;
    add_member_overload!(env, fn sub: (Amount, Amount) -> Result<Amount>)?;
    add_member_overload!(env, fn sub_int: (Amount, CelInt) -> Result<Amount>, name = "sub")?;
    add_member_overload!(env, fn sign: (Amount) -> CelInt)?;
    add_member_overload!(env, fn is_integer: (Amount) -> CelBool)?;
    add_member_overload!(env, fn as_integer: (Amount) -> Result<CelInt>)
}

fn declare_versions(env: &mut Env) -> std::result::Result<(), DeclarationError> {
    add_overload!(env, fn semver: (CelString) -> Result<Semver>)?;
    add_overload!(env, fn semver_of: (CelString, CelBool) -> Result<Semver>, name = "semver")?;
    add_overload!(env, fn is_semver: (CelString) -> CelBool)?;
    add_overload!(env, fn is_semver_of: (CelString, CelBool) -> CelBool, name = "isSemver")?;
    add_member_overload!(env, fn compare_to: (Semver, Semver) -> CelInt)?;
    add_member_overload!(env, fn is_greater_than: (Semver, Semver) -> CelBool)?;
    add_member_overload!(env, fn is_less_than: (Semver, Semver) -> CelBool)?;
    add_member_overload!(env, fn major: (Semver) -> Result<CelInt>)?;
    add_member_overload!(env, fn minor: (Semver) -> Result<CelInt>)?;
    add_member_overload!(env, fn patch: (Semver) -> Result<CelInt>)
}

fn declare_lists(env: &mut Env) -> std::result::Result<(), DeclarationError> {
    let any = || cel::common::types::DYN_TYPE;
    env.add_member_overload("sum", "list.sum()", LIST_TYPE, vec![], sum)?;
    env.add_member_overload("min", "list.min()", LIST_TYPE, vec![], min)?;
    env.add_member_overload("max", "list.max()", LIST_TYPE, vec![], max)?;
    env.add_member_overload("isSorted", "list.isSorted()", LIST_TYPE, vec![], is_sorted)?;
    env.add_member_overload(
        "indexOf",
        "list.indexOf(dyn)",
        LIST_TYPE,
        vec![any()],
        index_of,
    )?;
    env.add_member_overload(
        "includes",
        "list.includes(dyn)",
        LIST_TYPE,
        vec![any()],
        includes,
    )?;
    add_overload!(env, fn contains: (CelList, CelList) -> CelBool, name = "sets.contains")?;
    add_overload!(env, fn equivalent: (CelList, CelList) -> CelBool, name = "sets.equivalent")?;
    add_overload!(env, fn intersects: (CelList, CelList) -> CelBool, name = "sets.intersects")
}

fn compare_to<T: Ordered>(a: &T, b: &T) -> CelInt {
    CelInt::from(a.order(b) as i64)
}

fn is_greater_than<T: Ordered>(a: &T, b: &T) -> CelBool {
    CelBool::from(a.order(b).is_gt())
}

fn is_less_than<T: Ordered>(a: &T, b: &T) -> CelBool {
    CelBool::from(a.order(b).is_lt())
}

fn quantity(text: &CelString<'_>) -> Result<Amount> {
    let parsed = text.inner().parse().map(Amount);
    parsed.map_err(|error| match error {
        ParseError::Syntax { .. } | ParseError::Suffix { .. } => {
            ExecutionError::function_error("quantity", error)
        }
        // Go rounds such amounts; this program refuses them.
        ParseError::TooPrecise { .. } | ParseError::OutOfRange { .. } => {
            ExecutionError::function_error(UNJUDGED, error)
        }
    })
}

fn is_quantity(text: &CelString<'_>) -> Result<CelBool> {
    match self::quantity(text) {
        Ok(_) => Ok(CelBool::from(true)),
        Err(ExecutionError::FunctionError { function, .. }) if function == "quantity" => {
            Ok(CelBool::from(false))
        }
        Err(error) => Err(error),
    }
}

fn amount(sum: std::result::Result<Quantity, Overflow>) -> Result<Amount> {
    sum.map(Amount)
        .map_err(|error| ExecutionError::function_error(UNJUDGED, error))
}

fn add(a: &Amount, b: &Amount) -> Result<Amount> {
    amount(a.0.checked_add(b.0))
}

fn sub(a: &Amount, b: &Amount) -> Result<Amount> {
    amount(a.0.checked_sub(b.0))
}

fn of_int(int: &CelInt) -> Result<Amount> {
    amount(Quantity::from_count(1).checked_mul(*int.inner()))
}

fn add_int(a: &Amount, b: &CelInt) -> Result<Amount> {
    add(a, &of_int(b)?)
}

fn sub_int(a: &Amount, b: &CelInt) -> Result<Amount> {
    sub(a, &of_int(b)?)
}

fn sign(amount: &Amount) -> CelInt {
    compare_to(amount, &Amount(Quantity::ZERO))
}

fn is_integer(amount: &Amount) -> CelBool {
    CelBool::from(integer(amount.0).is_some())
}

fn as_integer(amount: &Amount) -> Result<CelInt> {
    let error = || ExecutionError::function_error("asInteger", "cannot convert value to integer");
    integer(amount.0).map(CelInt::from).ok_or_else(error)
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

fn semver(text: &CelString<'_>) -> Result<Semver> {
    semver_of(text, &CelBool::from(false))
}

fn semver_of(text: &CelString<'_>, normalizes: &CelBool) -> Result<Semver> {
    let version = version(text.inner(), *normalizes.inner()).map(Semver);
    version.map_err(|error| ExecutionError::function_error("semver", error))
}

fn is_semver(text: &CelString<'_>) -> CelBool {
    CelBool::from(semver(text).is_ok())
}

fn is_semver_of(text: &CelString<'_>, normalizes: &CelBool) -> CelBool {
    CelBool::from(semver_of(text, normalizes).is_ok())
}

fn major(version: &Semver) -> Result<CelInt> {
    part(version.0.major)
}

fn minor(version: &Semver) -> Result<CelInt> {
    part(version.0.minor)
}

fn patch(version: &Semver) -> Result<CelInt> {
    part(version.0.patch)
}

fn part(part: u64) -> Result<CelInt> {
    let part = i64::try_from(part).map(CelInt::from);
    part.map_err(|error| ExecutionError::function_error(UNJUDGED, error))
}

/// With `normalizes`, removes a leading `v` and leading zeros, and adds `.0` for missing numbers.
fn version(text: &str, normalizes: bool) -> std::result::Result<Version, String> {
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

type CelResult<'b, 'v> = Result<CowVal<'b, 'v>>;

fn list<'a, 'b, 'v>(arguments: &'a [CowVal<'b, 'v>]) -> Result<&'a [Box<dyn Val + 'v>]> {
    let list = arguments
        .first()
        .and_then(|it| it.downcast_ref::<CelList<'v>>());
    let unknown = || ExecutionError::function_error(UNJUDGED, "a function of another list");
    list.map(CelList::inner).ok_or_else(unknown)
}

fn order(a: &dyn Val, b: &dyn Val) -> Result<Ordering> {
    let unknown = || ExecutionError::function_error(UNJUDGED, "the order of such a list");
    a.as_comparer().ok_or_else(unknown)?.compare(b)
}

fn sum<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> CelResult<'b, 'v> {
    let unknown = || ExecutionError::function_error(UNJUDGED, "the sum of such a list");
    let (first, rest) = list(&arguments)?.split_first().ok_or_else(unknown)?;
    let mut sum = first.clone();
    for value in rest {
        let next = sum.as_adder().ok_or_else(unknown)?.add(&**value)?;
        sum = next.into_owned();
    }
    Ok(CowVal::Owned(sum))
}

fn min<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> CelResult<'b, 'v> {
    extreme("min", Ordering::Less, list(&arguments)?)
}

fn max<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> CelResult<'b, 'v> {
    extreme("max", Ordering::Greater, list(&arguments)?)
}

fn extreme<'b, 'v>(
    function: &str,
    wanted: Ordering,
    list: &[Box<dyn Val + 'v>],
) -> CelResult<'b, 'v> {
    let empty = || ExecutionError::function_error(function, "the list is empty");
    let (mut found, rest) = list.split_first().ok_or_else(empty)?;
    for value in rest {
        if order(&**value, &**found)? == wanted {
            found = value;
        }
    }
    Ok(CowVal::Owned(found.clone()))
}

fn is_sorted<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> CelResult<'b, 'v> {
    let mut sorted = true;
    for pair in list(&arguments)?.windows(2) {
        sorted &= order(&*pair[0], &*pair[1])?.is_le();
    }
    Ok(CowVal::owned(CelBool::from(sorted)))
}

fn position(arguments: &[CowVal<'_, '_>]) -> Result<Option<usize>> {
    let wanted = &arguments[1];
    let mut values = list(arguments)?.iter();
    Ok(values.position(|own| own.equals(wanted.as_ref())))
}

fn index_of<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> CelResult<'b, 'v> {
    let position = position(&arguments)?.and_then(|it| i64::try_from(it).ok());
    Ok(CowVal::owned(CelInt::from(position.unwrap_or(-1))))
}

fn includes<'b, 'v>(arguments: Vec<CowVal<'b, 'v>>) -> CelResult<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(
        position(&arguments)?.is_some(),
    )))
}

fn has(all: &CelList<'_>, value: &dyn Val) -> bool {
    all.inner().iter().any(|own| own.equals(value))
}

fn has_all(all: &CelList<'_>, some: &CelList<'_>) -> bool {
    some.inner().iter().all(|value| has(all, &**value))
}

fn contains(all: &CelList<'_>, some: &CelList<'_>) -> CelBool {
    CelBool::from(has_all(all, some))
}

fn equivalent(a: &CelList<'_>, b: &CelList<'_>) -> CelBool {
    CelBool::from(has_all(a, b) && has_all(b, a))
}

fn intersects(a: &CelList<'_>, b: &CelList<'_>) -> CelBool {
    CelBool::from(b.inner().iter().any(|value| has(a, &**value)))
}

/// `cel.bind(name, value, body)`: a loop over nothing that results in the body.
fn bind(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    arguments: &mut Vec<IdedExpr>,
) -> std::result::Result<Option<IdedExpr>, cel::ParseError> {
    let is_ours = matches!(target, Some(IdedExpr { expr: Expr::Ident(name), .. }) if name == "cel");
    let Some(IdedExpr {
        expr: Expr::Ident(name),
        ..
    }) = arguments.first().filter(|_| is_ours)
    else {
        return Ok(None);
    };
    let name = name.clone();
    let (Some(body), Some(value)) = (arguments.pop(), arguments.pop()) else {
        return Ok(None);
    };
    let bound = ComprehensionExpr {
        iter_range: helper.next_expr(Expr::List(ListExpr::new(Vec::new()))),
        iter_var: "#unused".to_owned(),
        iter_var2: None,
        accu_init: value,
        loop_cond: helper.next_expr(Expr::Literal(LiteralValue::Boolean(false.into()))),
        loop_step: helper.next_expr(Expr::Ident(name.clone())),
        accu_var: name,
        result: body,
    };
    Ok(Some(helper.next_expr(Expr::Comprehension(Box::new(bound)))))
}
