//! CEL selectors of devices, as kube-scheduler evaluates them.
//!
//! The crate `cel` parses and evaluates them as the scheduler's library does. What Kubernetes adds is here:
//!
//! ```text
//!  device     the variable `device`; a domain that no attribute has is an empty map
//!  extra      the types Quantity and Semver
//!  functions  functions of these types, of lists and of sets; the macro `cel.bind`
//! ```
//!
//! The crate `kube-cel` has these functions, too. It needs an older `cel`, which does not accept an error on the left of `||`, and its
//! quantities overflow silently where ours are refused. A function that is not known here gives [`Fault::Unjudged`].

mod device;
mod extra;
mod functions;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use cel::common::ast::{Expr, operators};
use cel::common::types::{CelBool, CelMap};
use cel::common::value::Val;
use cel::{Context, DeclarationError, Env, ExecutionError, IdedExpr, Value, extensions};
use k8s_openapi::api::resource::v1::Device;

/// Why a selector has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The scheduler fails in the same way, and allocates nothing.
    #[error("{0}")]
    Runtime(String),
    /// The scheduler may have a result, but this program has none.
    #[error("{0}")]
    Unjudged(String),
}

/// Selectors that have been parsed, by their text. A cluster has few of them, and parsing takes longer than evaluating.
pub struct Selectors {
    context: Context<'static, 'static>,
    env: Arc<Env>,
    parsed: RefCell<HashMap<String, Rc<Result<IdedExpr, Fault>>>>,
}

impl Default for Selectors {
    fn default() -> Self {
        let env = Arc::new(self::language().expect("each function is declared once"));
        Self {
            context: Context::with_env(Arc::clone(&env)),
            env,
            parsed: RefCell::default(),
        }
    }
}

impl std::fmt::Debug for Selectors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Selectors").field(&self.parsed).finish()
    }
}

fn language() -> Result<Env, DeclarationError> {
    let mut env = Env::stdlib();
    extensions::strings(&mut env)?;
    functions::declare(&mut env)?;
    Ok(env)
}

/// A device as selectors see it.
#[derive(Debug)]
pub struct Subject(CelMap<'static>);

impl Subject {
    /// The variable `device`. Fails as the scheduler does if an attribute has no value or an invalid version.
    pub fn new(driver: &str, device: &Device) -> Result<Self, Fault> {
        device::variable(driver, device).map(Self)
    }
}

impl Selectors {
    /// Whether a selector accepts a device.
    pub fn accept(&self, expression: &str, subject: &Subject) -> Result<bool, Fault> {
        let result = self.parsed(expression);
        let parsed = result.as_ref().as_ref().map_err(Clone::clone)?;
        let mut scope = self.context.new_inner_scope();
        scope.add_variable_as_val("device", subject.0.clone_as_boxed());
        let outcome = Value::resolve_val(parsed, &scope);
        match outcome {
            Ok(value) => match value.downcast_ref::<CelBool>() {
                Some(accepted) => Ok(*accepted.inner()),
                None => Err(Fault::Runtime(format!(
                    "the result is a {}, not a bool",
                    value.get_type().name()
                ))),
            },
            Err(error) => Err(unknown_term(parsed, &scope).unwrap_or_else(|| fault(&error))),
        }
    }

    fn parsed(&self, expression: &str) -> Rc<Result<IdedExpr, Fault>> {
        if let Some(known) = self.parsed.borrow().get(expression) {
            return Rc::clone(known);
        }
        // The API server has accepted the expression, so this parser lacks something.
        let parser = self.env.parser().enable_ident_escape_syntax(true);
        let result = parser
            .parse(expression)
            .map_err(|error| Fault::Unjudged(format!("the selector {expression:?}: {error}")));
        let parsed = Rc::new(result);
        let known = &mut *self.parsed.borrow_mut();
        known.insert(expression.to_owned(), Rc::clone(&parsed));
        parsed
    }
}

/// The first term of `&&` and `||` that cannot be judged: it might decide the result, whatever the other terms are.
fn unknown_term(expression: &IdedExpr, scope: &Context<'_, '_>) -> Option<Fault> {
    let Expr::Call(call) = &expression.expr else {
        return None;
    };
    if ![operators::LOGICAL_AND, operators::LOGICAL_OR].contains(&call.func_name.as_str()) {
        return None;
    }
    call.args.iter().find_map(|term| {
        let error = Value::resolve_val(term, scope).err()?;
        let unknown = Some(fault(&error)).filter(|it| matches!(it, Fault::Unjudged(_)));
        unknown.or_else(|| unknown_term(term, scope))
    })
}

/// An error of the evaluation. The scheduler has the same error, unless the expression uses something that is not known here.
fn fault(error: &ExecutionError) -> Fault {
    let is_known = match error {
        ExecutionError::UndeclaredReference(_)
        | ExecutionError::InvalidArgumentCount { .. }
        | ExecutionError::NotSupportedAsMethod { .. }
        | ExecutionError::MissingArgumentOrTarget
        | ExecutionError::InternalError(_) => false,
        // The name of an operator does not begin with a letter. A function may belong to a type that is not known here.
        ExecutionError::NoSuchOverload(call) => !call
            .function()
            .starts_with(|first: char| first.is_alphabetic()),
        // Go's regular expressions have forms that Rust's do not have.
        ExecutionError::FunctionError { function, .. } => {
            ![functions::UNJUDGED, "matches"].contains(&function.as_str())
        }
        _ => true,
    };
    if is_known {
        Fault::Runtime(error.to_string())
    } else {
        Fault::Unjudged(format!("{error}, in a selector"))
    }
}

#[cfg(test)]
mod tests;
