//! Which DeviceClasses are ours.

use k8s_openapi::api::resource::v1::DeviceClass;
use tranche_api::names::{DRIVER, is_class};

/// Whether a class selects our devices: by its name, or because a selector names our driver.
#[must_use]
pub fn is_ours(class: &DeviceClass) -> bool {
    if class.metadata.name.as_deref().is_some_and(is_class) {
        return true;
    }
    let selectors = class
        .spec
        .as_ref()
        .and_then(|spec| spec.selectors.as_deref());
    let mut expressions = selectors
        .into_iter()
        .flatten()
        .filter_map(|it| it.cel.as_ref());
    expressions.any(|cel| cel.expression.contains(DRIVER))
}
