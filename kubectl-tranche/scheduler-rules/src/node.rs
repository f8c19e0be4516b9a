//! Which nodes a selector selects, as `nodeaffinity` of Kubernetes' component helpers decides.

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};

/// Whether one of the selector's terms matches. A term without requirements matches no node.
#[must_use]
pub fn selects(selector: &NodeSelector, node: &Node) -> bool {
    let terms = selector.node_selector_terms.iter();
    terms.into_iter().any(|term| self::matches(term, node))
}

/// Whether all requirements of a term hold.
#[must_use]
pub fn matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let label = |key: &str| node.metadata.labels.as_ref()?.get(key).map(String::as_str);
    let field = |key: &str| match key {
        "metadata.name" => node.metadata.name.as_deref(),
        _ => None,
    };
    expressions.iter().all(|it| holds(it, label(&it.key)))
        && fields.iter().all(|it| holds(it, field(&it.key)))
}

fn holds(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = |value: &str| values.iter().any(|it| it == value);
    let number = |text: &str| text.parse::<i64>().ok();
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        operator @ ("Gt" | "Lt") => {
            let (Some(own), [limit]) = (value.and_then(number), values) else {
                return false;
            };
            let limit = number(limit);
            limit.is_some_and(|limit| match operator {
                "Gt" => own > limit,
                _ => own < limit,
            })
        }
        _ => false,
    }
}
