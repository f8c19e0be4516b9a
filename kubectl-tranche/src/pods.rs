//! What a pod's status says about scheduling.

use k8s_openapi::api::core::v1::Pod;

/// Whether it has a node.
pub(crate) fn is_placed(pod: &Pod) -> bool {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    node.is_some_and(|name| !name.is_empty())
}

/// The scheduler's message on a pod that it did not place.
pub(crate) fn unscheduled(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    let unscheduled = conditions
        .iter()
        .find(|it| it.type_ == "PodScheduled" && it.status == "False");
    unscheduled?.message.as_deref()
}
