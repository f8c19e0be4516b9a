//! Pods that ask for devices by a container's resources instead of by a claim (KEP-5004). A DeviceClass can name such a
//! resource, for example `nvidia.com/gpu`; its own name behind a prefix is a resource, too. The scheduler creates the
//! claim when it has found a node, so a pod that waits has no claim. [`claim`] is the claim that the scheduler looks
//! for.
//!
//! The rules are those of kube-scheduler 1.37 (`extendeddynamicresources.go` of its plugin dynamicresources).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClass, DeviceRequest, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Wire;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tranche_api::Quantity;

/// A DeviceClass's name behind this prefix is a resource, too.
pub const IMPLICIT: &str = "deviceclass.resource.kubernetes.io/";
/// The name that the scheduler gives to a claim that is not created yet.
pub const NOT_MADE: &str = "<extended-resources>";

/// The resources of a pod's containers that a DeviceClass may provide.
#[must_use]
pub fn names(pod: &Pod) -> BTreeSet<&str> {
    let spec = pod.spec.as_ref();
    let containers = spec
        .map(|spec| {
            let init = spec.init_containers.iter().flatten();
            init.chain(&spec.containers)
        })
        .into_iter()
        .flatten();
    let asked = containers.filter_map(requested).flatten();
    let names = asked.map(|(name, _)| name.as_str());
    names.filter(|name| is_extended(name)).collect()
}

/// The DeviceClass that provides a resource: the newest that names it; if several are equally new, the first by name.
#[must_use]
pub fn class_of<'a>(resource: &str, classes: &'a [DeviceClass]) -> Option<&'a DeviceClass> {
    if let Some(implicit) = resource.strip_prefix(IMPLICIT) {
        return classes.iter().find(|class| name(class) == implicit);
    }
    let named = classes.iter().filter(|class| {
        let spec = class.spec.as_ref();
        spec.and_then(|spec| spec.extended_resource_name.as_deref()) == Some(resource)
    });
    let created = |class: &DeviceClass| class.metadata.creation_timestamp.as_ref().map(|it| it.0);
    named.max_by_key(|class| (created(class), std::cmp::Reverse(name(class))))
}

fn name(class: &DeviceClass) -> &str {
    class.metadata.name.as_deref().unwrap_or_default()
}

/// The claim that the scheduler looks for in place of a pod's extended resources. `None` if no class provides a
/// resource that the pod asks for, or if the pod has the claim already.
#[must_use]
pub fn claim(pod: &Pod, classes: &[DeviceClass]) -> Option<ResourceClaim> {
    let status = pod.status.as_ref();
    if status.is_some_and(|it| it.extended_resource_claim_status.is_some()) {
        return None;
    }
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let containers: Vec<&Container> = init.iter().chain(&spec.containers).collect();
    let resources: BTreeMap<&str, &str> = names(pod)
        .into_iter()
        .filter_map(|resource| Some((resource, name(class_of(resource, classes)?))))
        .collect();
    let requests: Vec<DeviceRequest> = resources
        .into_iter()
        .flat_map(|(resource, class)| requests(resource, class, &containers, init.len()))
        .collect();
    (!requests.is_empty()).then(|| ResourceClaim {
        metadata: ObjectMeta {
            name: Some(NOT_MADE.to_owned()),
            namespace: pod.metadata.namespace.clone(),
            ..ObjectMeta::default()
        },
        spec: Some(ResourceClaimSpec {
            devices: Some(DeviceClaim {
                requests: Some(requests),
                ..DeviceClaim::default()
            }),
        }),
        status: None,
    })
}

/// The requests for one resource, the first `init` containers being init containers.
fn requests(
    resource: &str,
    class: &str,
    containers: &[&Container],
    init: usize,
) -> Vec<DeviceRequest> {
    let mut requests = Vec::new();
    let mut ends = Vec::new();
    for (nth, container) in containers.iter().enumerate() {
        let count = count(container, resource);
        if count == 0 {
            continue;
        }
        let is_sidecar = container.restart_policy.as_deref() == Some("Always");
        if nth < init && !is_sidecar {
            ends.push((nth, count));
        } else {
            requests.push((nth, count));
        }
    }
    // A later container can use the devices of a container that ends before it starts.
    let later = |nth: usize| {
        let later = requests.iter().filter(|(other, _)| *other > nth);
        later.map(|(_, count)| count).sum::<u64>()
    };
    let more = ends
        .iter()
        .map(|(nth, count)| (*nth, count.saturating_sub(later(*nth))));
    if let Some(most) = more
        .max_by_key(|(_, more)| *more)
        .filter(|(_, more)| *more > 0)
    {
        requests.push(most);
    }
    requests
        .into_iter()
        .map(|(nth, count)| DeviceRequest {
            name: format!("{} of container {}", resource, containers[nth].name),
            exactly: Some(ExactDeviceRequest {
                device_class_name: class.to_owned(),
                allocation_mode: Some("ExactCount".to_owned()),
                count: i64::try_from(count).ok(),
                ..ExactDeviceRequest::default()
            }),
            ..DeviceRequest::default()
        })
        .collect()
}

fn count(container: &Container, resource: &str) -> u64 {
    let asked = requested(container)
        .and_then(|requests| requests.get(resource))
        .and_then(|it| Quantity::try_from(it).ok());
    asked.and_then(|it| it.to_count().ok()).unwrap_or(0)
}

fn requested(container: &Container) -> Option<&BTreeMap<String, Wire>> {
    container.resources.as_ref()?.requests.as_ref()
}

/// Whether a resource is an extended one, not one of Kubernetes' own.
fn is_extended(resource: &str) -> bool {
    let Some((domain, _)) = resource.split_once('/') else {
        return false;
    };
    resource.starts_with(IMPLICIT)
        || !(domain == "kubernetes.io" || domain.ends_with(".kubernetes.io"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn class(name: &str, resource: Option<&str>, second: u32) -> DeviceClass {
        serde_json::from_value(json!({
            "metadata": {"name": name, "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")},
            "spec": {"extendedResourceName": resource},
        }))
        .unwrap()
    }

    fn pod(init: &Value, containers: &Value) -> Pod {
        let container = |(name, count, policy): (&str, u64, Option<&str>)| {
            json!({
                "name": name, "restartPolicy": policy,
                "resources": {"requests": {"cpu": "1", "nvidia.com/gpu": count.to_string()}},
            })
        };
        let all = |list: &Value| {
            let list: Vec<(String, u64, Option<String>)> =
                serde_json::from_value(list.clone()).unwrap();
            list.iter()
                .map(|(name, count, policy)| container((name, *count, policy.as_deref())))
                .collect::<Vec<_>>()
        };
        serde_json::from_value(json!({
            "metadata": {"name": "pod", "namespace": "team"},
            "spec": {"initContainers": all(init), "containers": all(containers)},
        }))
        .unwrap()
    }

    fn asked(pod: &Pod, classes: &[DeviceClass]) -> Vec<(String, i64)> {
        let claim = claim(pod, classes);
        let requests = claim
            .and_then(|it| it.spec?.devices?.requests)
            .into_iter()
            .flatten();
        requests
            .map(|it| (it.name, it.exactly.unwrap().count.unwrap()))
            .collect()
    }

    #[test]
    fn the_newest_class_of_a_name_wins_and_its_own_name_works() {
        let classes = [
            class("old", Some("nvidia.com/gpu"), 1),
            class("new-b", Some("nvidia.com/gpu"), 2),
            class("new-a", Some("nvidia.com/gpu"), 2),
            class("plain", None, 3),
        ];
        let stands = |resource| class_of(resource, &classes).map(name);
        assert_eq!(stands("nvidia.com/gpu"), Some("new-a"));
        let implicit = "deviceclass.resource.kubernetes.io/plain";
        assert_eq!(stands(implicit), Some("plain"));
        assert_eq!(stands("amd.com/gpu"), None);
    }

    #[test]
    fn init_containers_reuse_what_later_containers_request() {
        let classes = [class("gpus", Some("nvidia.com/gpu"), 1)];
        let of = |container: &str| format!("nvidia.com/gpu of container {container}");
        let two = pod(&json!([]), &json!([["a", 1, null], ["b", 2, null]]));
        assert_eq!(
            names(&two),
            ["nvidia.com/gpu"].into(),
            "cpu is no such resource"
        );
        assert_eq!(asked(&two, &classes), [(of("a"), 1), (of("b"), 2)]);
        let init = json!([["first", 2, null], ["beside", 1, "Always"]]);
        let enough = pod(&init, &json!([["a", 1, null]]));
        assert_eq!(asked(&enough, &classes), [(of("beside"), 1), (of("a"), 1)]);
        let more = pod(&json!([["first", 3, null]]), &json!([["a", 1, null]]));
        assert_eq!(asked(&more, &classes), [(of("a"), 1), (of("first"), 2)]);
        assert_eq!(
            asked(&pod(&json!([]), &json!([["a", 0, null]])), &classes),
            []
        );
        assert_eq!(asked(&two, &[]), [], "no class stands for it");
    }

    #[test]
    fn a_pod_that_has_its_claim_asks_for_no_more() {
        let classes = [class("gpus", Some("nvidia.com/gpu"), 1)];
        let mut pod = pod(&json!([]), &json!([["a", 1, null]]));
        let status = json!({"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": []}});
        pod.status = serde_json::from_value(status).unwrap();
        assert_eq!(asked(&pod, &classes), []);
    }
}
