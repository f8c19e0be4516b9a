//! Removes from objects the fields that the page does not read: pure. A test compares the model of trimmed objects with that of
//! whole ones.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, Pod, PodSpec, PodStatus, ResourceRequirements,
};
use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tranche_api::GpuNode;
use tranche_api::names::{attribute, capacity};

/// The attributes that the model reads.
const ATTRIBUTES: [&str; 5] = [
    attribute::UUID,
    attribute::PARENT_UUID,
    attribute::INDEX,
    attribute::PRODUCT_NAME,
    attribute::PCI_BUS_ID,
];
/// The capacities that the model reads.
const CAPACITIES: [&str; 3] = [capacity::MEMORY, capacity::CORES, capacity::SHARERS];

/// Name, namespace, UID and age.
fn metadata(full: &ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: full.name.clone(),
        namespace: full.namespace.clone(),
        uid: full.uid.clone(),
        creation_timestamp: full.creation_timestamp.clone(),
        ..ObjectMeta::default()
    }
}

/// A node's GPUs, without labels and field managers.
pub(super) fn gpu_node(full: &GpuNode) -> GpuNode {
    GpuNode {
        metadata: ObjectMeta {
            creation_timestamp: None,
            ..metadata(&full.metadata)
        },
        spec: full.spec.clone(),
        status: full.status.clone(),
    }
}

/// A slice's devices, with the attributes and capacities that the model reads.
pub(super) fn slice(full: &ResourceSlice) -> ResourceSlice {
    let mut slice = full.clone();
    slice.metadata = ObjectMeta {
        name: full.metadata.name.clone(),
        ..ObjectMeta::default()
    };
    slice.spec.shared_counters = None;
    for device in slice.spec.devices.iter_mut().flatten() {
        *device = trimmed(device);
    }
    slice
}

fn trimmed(device: &Device) -> Device {
    let mut attributes = device.attributes.clone().unwrap_or_default();
    attributes.retain(|name, _| ATTRIBUTES.contains(&name.as_str()));
    let mut capacities: BTreeMap<_, _> = device.capacity.clone().unwrap_or_default();
    capacities.retain(|name, _| CAPACITIES.contains(&name.as_str()));
    Device {
        name: device.name.clone(),
        allow_multiple_allocations: device.allow_multiple_allocations,
        attributes: Some(attributes),
        capacity: Some(capacities),
        taints: device.taints.clone(),
        ..Device::default()
    }
}

/// A claim without labels, annotations and field managers.
pub(super) fn claim(full: &ResourceClaim) -> ResourceClaim {
    ResourceClaim {
        metadata: metadata(&full.metadata),
        spec: full.spec.clone(),
        status: full.status.clone(),
    }
}

/// A class with its selectors.
pub(super) fn class(full: &DeviceClass) -> DeviceClass {
    let mut class = full.clone();
    class.metadata = metadata(&full.metadata);
    class
}

fn asking(containers: &[Container]) -> Vec<Container> {
    let containers = containers.iter();
    containers
        .map(|container| Container {
            name: container.name.clone(),
            restart_policy: container.restart_policy.clone(),
            resources: container.resources.as_ref().map(|it| ResourceRequirements {
                requests: it.requests.clone(),
                ..ResourceRequirements::default()
            }),
            ..Container::default()
        })
        .collect()
}

/// A pod, with the fields that say why it does not run.
pub(super) fn pod(full: &Pod) -> Pod {
    let status = full.status.clone().unwrap_or_default();
    let waiting = |all: Option<Vec<ContainerStatus>>| {
        all.map(|all| {
            let all = all.into_iter();
            all.map(|container| ContainerStatus {
                name: container.name,
                state: container.state,
                ..ContainerStatus::default()
            })
            .collect()
        })
    };
    Pod {
        metadata: metadata(&full.metadata),
        spec: full.spec.as_ref().map(|spec| PodSpec {
            node_name: spec.node_name.clone(),
            resource_claims: spec.resource_claims.clone(),
            init_containers: spec.init_containers.as_deref().map(asking),
            containers: asking(&spec.containers),
            ..PodSpec::default()
        }),
        status: Some(PodStatus {
            phase: status.phase,
            conditions: status.conditions,
            container_statuses: waiting(status.container_statuses),
            init_container_statuses: waiting(status.init_container_statuses),
            resource_claim_statuses: status.resource_claim_statuses,
            extended_resource_claim_status: status.extended_resource_claim_status,
            ..PodStatus::default()
        }),
    }
}
