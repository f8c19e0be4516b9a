//! Label selectors, evaluated like in the API server.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

/// An invalid selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// The operator does not exist.
    #[error(
        "matchExpressions[{index}].operator is {operator:?}, must be In, NotIn, Exists or DoesNotExist"
    )]
    Operator {
        /// The expression's position.
        index: usize,
        /// What is there.
        operator: String,
    },
    /// The operator compares with values, and there are none.
    #[error("matchExpressions[{index}].values is empty, though {operator} compares with values")]
    NoValues {
        /// The expression's position.
        index: usize,
        /// In or NotIn.
        operator: String,
    },
    /// The operator takes no values, and there are some.
    #[error("matchExpressions[{index}].values is not empty, though {operator} takes none")]
    Values {
        /// The expression's position.
        index: usize,
        /// Exists or DoesNotExist.
        operator: String,
    },
}

/// Whether an object with these labels is selected. An empty selector selects everything.
pub(super) fn matches(
    selector: &LabelSelector,
    labels: &BTreeMap<String, String>,
) -> Result<bool, SelectorError> {
    let mut all = selector
        .match_labels
        .iter()
        .flatten()
        .all(|(key, value)| labels.get(key) == Some(value));
    for (index, expression) in selector.match_expressions.iter().flatten().enumerate() {
        // Each expression is evaluated, even after a mismatch: whether a selector is valid must not depend on the
        // labels.
        all &= holds(index, expression, labels)?;
    }
    Ok(all)
}

fn holds(
    index: usize,
    expression: &LabelSelectorRequirement,
    labels: &BTreeMap<String, String>,
) -> Result<bool, SelectorError> {
    let value = labels.get(&expression.key);
    let values = expression.values.as_deref().unwrap_or_default();
    let operator = expression.operator.clone();
    let listed = || value.is_some_and(|value| values.contains(value));
    match (operator.as_str(), values.is_empty()) {
        ("In", false) => Ok(listed()),
        // An absent label is not in any list.
        ("NotIn", false) => Ok(!listed()),
        ("Exists", true) => Ok(value.is_some()),
        ("DoesNotExist", true) => Ok(value.is_none()),
        ("In" | "NotIn", true) => Err(SelectorError::NoValues { index, operator }),
        ("Exists" | "DoesNotExist", false) => Err(SelectorError::Values { index, operator }),
        _ => Err(SelectorError::Operator { index, operator }),
    }
}
