//! The objects of the API `usage.gpu.tranche.dev`, in which people and tools read
//! [`NodeUsage`](crate::usage::NodeUsage) with their own rights. Nothing stores them: each read asks the nodes. They
//! can be read and listed, not watched.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{ClusterResourceScope, ListableResource, Metadata, NamespaceResourceScope};
use kube::core::TypeMeta;
use serde::{Deserialize, Serialize};

use crate::usage::{NodeUsage, ShareUsage};

/// The API group.
pub const GROUP: &str = "usage.gpu.tranche.dev";
/// The API version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of everything in [`GROUP`].
pub const API_VERSION: &str = "usage.gpu.tranche.dev/v1alpha1";

/// `nodeusages`: a node's whole usage. It names the tenants of all namespaces. Its name is the node's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeUsageObject {
    /// `apiVersion` and `kind`.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub types: Option<TypeMeta>,
    /// Its name.
    pub metadata: ObjectMeta,
    /// The answer of the node's plugin; absent without an answer.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<NodeUsage>,
    /// Why the usage is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// `claimusages`: what a ResourceClaim uses of its devices, without anything about its neighbours. Its namespace, name
/// and labels are the claim's. Each claim with devices of ours has one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimUsage {
    /// `apiVersion` and `kind`.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub types: Option<TypeMeta>,
    /// Namespace, name and labels.
    pub metadata: ObjectMeta,
    /// The claim's UID.
    #[serde(default, rename = "claimUID")]
    pub claim_uid: String,
    /// The nodes whose devices it has.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub nodes: BTreeSet<String>,
    /// Its devices, in the order of the node's GPUs; empty before it is prepared on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceUsage>,
    /// Why the usage, or a part of it, is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A device of a claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceUsage {
    /// When NVML was read: Unix time in milliseconds.
    pub unix_millis: u64,
    /// The GPU: `GPU-…`.
    #[serde(rename = "gpuUUID")]
    pub gpu_uuid: String,
    /// `nvmlDeviceGetName`.
    pub product_name: String,
    /// The MIG instance of the partition or of the share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<PartitionName>,
    /// What the claim has and uses of it. `memory.free` is absent, because it depends on what neighbours use.
    #[serde(flatten)]
    pub share: ShareUsage,
}

/// A MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionName {
    /// `MIG-…`.
    pub uuid: String,
    /// As `1g.10gb`.
    pub profile: String,
}

/// What clients need to know of a kind, such as `kube::Api`.
macro_rules! kind {
    ($type:ty, $kind:literal, $resource:literal, $scope:ty) => {
        impl k8s_openapi::Resource for $type {
            const API_VERSION: &'static str = API_VERSION;
            const GROUP: &'static str = GROUP;
            const KIND: &'static str = $kind;
            const VERSION: &'static str = VERSION;
            const URL_PATH_SEGMENT: &'static str = $resource;
            type Scope = $scope;
        }

        impl ListableResource for $type {
            const LIST_KIND: &'static str = concat!($kind, "List");
        }

        impl Metadata for $type {
            type Ty = ObjectMeta;

            fn metadata(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn metadata_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

kind!(
    NodeUsageObject,
    "NodeUsage",
    "nodeusages",
    ClusterResourceScope
);
kind!(
    ClaimUsage,
    "ClaimUsage",
    "claimusages",
    NamespaceResourceScope
);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_reads_as_written_and_a_silent_node_has_no_usage() {
        let object = NodeUsageObject {
            metadata: ObjectMeta {
                name: Some("a".into()),
                ..ObjectMeta::default()
            },
            usage: Some(NodeUsage {
                node: "a".into(),
                unix_millis: 7,
                ..NodeUsage::default()
            }),
            ..NodeUsageObject::default()
        };
        let written = serde_json::to_value(&object).unwrap();
        assert_eq!(written["gpus"], json!([]));
        let read: NodeUsageObject = serde_json::from_value(written).unwrap();
        assert_eq!(read, object);
        let dead = json!({"metadata": {"name": "a"}, "problem": "connect"});
        let read: NodeUsageObject = serde_json::from_value(dead).unwrap();
        assert_eq!(
            (read.usage, read.problem.as_deref()),
            (None, Some("connect"))
        );
    }

    #[test]
    fn a_devices_fields_are_those_of_its_share_and_of_its_gpu() {
        let device = json!({
            "unixMillis": 7, "gpuUUID": "GPU-1", "productName": "H100",
            "partition": {"uuid": "MIG-1", "profile": "1g.10gb"},
            "claim": {"namespace": "n", "name": "c", "uid": "u"}, "request": "gpu", "pool": "a/gpu",
            "device": "gpu-1-capped", "shareId": "s", "tier": "capped",
            "memory": {"allocated": 4, "reserved": 1, "used": 2},
            "utilization": {"gpu": 2500}, "processes": 1, "idleSeconds": 3,
        });
        let read: DeviceUsage = serde_json::from_value(device.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), device);
    }
}
