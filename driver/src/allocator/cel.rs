//! CEL selectors of devices, as kube-scheduler evaluates them.
//!
//! The text is parsed by the crate `cel`. The evaluation is ours, because the scheduler's differs from the crate's: an
//! attribute's domain that no attribute has is an empty map, `&&` and `||` accept an error on either side, and there are the
//! types `Quantity` and `Semver`. What is not implemented here ends as [`Fault::Unjudged`], never as an answer.

mod evaluate;
mod functions;
mod value;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use cel::parser::Parser;
use k8s_openapi::api::resource::v1::Device;

use evaluate::Scope;
pub use value::Fault;
use value::Value;

/// Selectors that have been parsed, by their text. A cluster has few of them, and parsing takes longer than evaluating.
#[derive(Debug, Default)]
pub struct Selectors(RefCell<HashMap<String, Rc<Result<cel::IdedExpr, Fault>>>>);

/// A device as selectors see it.
#[derive(Debug)]
pub struct Subject(Value);

impl Subject {
    /// The variable `device`. Fails as the scheduler does if an attribute has no value or a version that is none.
    pub fn new(driver: &str, device: &Device) -> Result<Self, Fault> {
        value::device(driver, device).map(Self)
    }
}

impl Selectors {
    /// Whether a selector accepts a device.
    pub fn accept(&self, expression: &str, subject: &Subject) -> Result<bool, Fault> {
        let parsed = self.parsed(expression);
        let parsed = parsed.as_ref().as_ref().map_err(Clone::clone)?;
        match evaluate::evaluate(parsed, &Scope::device(&subject.0))? {
            Value::Bool(accepted) => Ok(accepted),
            other => Err(Fault::Runtime(format!(
                "the result is {}, not a bool",
                other.kind()
            ))),
        }
    }

    fn parsed(&self, expression: &str) -> Rc<Result<cel::IdedExpr, Fault>> {
        if let Some(known) = self.0.borrow().get(expression) {
            return Rc::clone(known);
        }
        // The API server has accepted the expression, so it is the parser here that does not know something.
        let parsed = Parser::new()
            .enable_optional_syntax(true)
            .enable_ident_escape_syntax(true)
            .parse(expression)
            .map_err(|error| Fault::Unjudged(format!("the selector {expression:?}: {error}")));
        let parsed = Rc::new(parsed);
        let known = &mut *self.0.borrow_mut();
        known.insert(expression.to_owned(), Rc::clone(&parsed));
        parsed
    }
}

#[cfg(test)]
mod tests;
