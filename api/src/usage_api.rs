//! The objects of the API `usage.gpu.tranche.dev`. People and tools read [`NodeUsage`](crate::usage::NodeUsage) in them
//! with their own rights. Nothing stores the objects: each read asks the nodes. They can be read and listed, not
//! watched.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{ClusterResourceScope, ListableResource, Metadata, NamespaceResourceScope};
use kube::core::TypeMeta;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::usage::{NodeUsage, ShareUsage};

/// The API group.
pub const GROUP: &str = "usage.gpu.tranche.dev";
/// The API version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of everything in [`GROUP`].
pub const API_VERSION: &str = "usage.gpu.tranche.dev/v1alpha1";

/// `nodeusages`: a node's whole usage. It names the tenants of all namespaces. It has the name of the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeUsageObject {
    /// `apiVersion` and `kind`.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub types: Option<TypeMeta>,
    /// The object's name.
    pub metadata: ObjectMeta,
    /// The answer of the node's plugin. Absent if there is no answer.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<NodeUsage>,
    /// Why the usage is not known. Absent if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl<'de> Deserialize<'de> for NodeUsageObject {
    /// Reads the usage by itself: a flattened optional field that cannot be read is absent without an error, and a flattened map
    /// cannot have numbers as keys. A usage that cannot be read becomes a problem, because one node must not hide the others.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct WithoutUsage {
            #[serde(flatten, default)]
            types: Option<TypeMeta>,
            metadata: ObjectMeta,
            problem: Option<String>,
        }
        let value = Value::deserialize(deserializer)?;
        let WithoutUsage {
            types,
            metadata,
            mut problem,
        } = WithoutUsage::deserialize(&value).map_err(serde::de::Error::custom)?;
        let mut usage = None;
        if problem.is_none() {
            match NodeUsage::deserialize(&value) {
                Ok(read) => usage = Some(read),
                Err(error) => {
                    problem = Some(format!("the plugin's answer cannot be read: {error}"));
                }
            }
        }
        Ok(Self {
            types,
            metadata,
            usage,
            problem,
        })
    }
}

/// `claimusages`: the usage of a ResourceClaim's devices, without anything about its neighbours. It has the namespace,
/// name and labels of the claim. Each claim with devices of this driver has one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimUsage {
    /// `apiVersion` and `kind`.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub types: Option<TypeMeta>,
    /// The namespace, name and labels of the claim.
    pub metadata: ObjectMeta,
    /// The claim's UID.
    #[serde(default, rename = "claimUID")]
    pub claim_uid: String,
    /// The nodes of the claim's devices.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub nodes: BTreeSet<String>,
    /// The claim's devices, in the order of the node's GPUs. Empty until the claim is prepared on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceUsage>,
    /// Why the usage, or a part of it, is not known. Absent if all of it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A device of a claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceUsage {
    /// When NVML was read: Unix time in milliseconds.
    pub unix_millis: u64,
    /// The GPU's UUID, `GPU-…`.
    #[serde(rename = "gpuUUID")]
    pub gpu_uuid: String,
    /// The product name (`nvmlDeviceGetName`).
    pub product_name: String,
    /// The MIG instance of the partition or of the share. Absent if the device is not on a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<PartitionName>,
    /// The claim's part of the device, and its usage. `memory.free` is absent, because it depends on what neighbours
    /// use.
    #[serde(flatten)]
    pub share: ShareUsage,
}

/// A MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionName {
    /// The UUID of the MIG device, `MIG-…`.
    pub uuid: String,
    /// The profile, for example `1g.10gb`.
    pub profile: String,
}

/// Implements the traits of a kind that clients such as `kube::Api` need.
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
    use crate::usage::{GpuUsage, Xids};

    #[test]
    fn an_object_reads_as_written_and_a_silent_node_has_no_usage() {
        let mut xids = Xids::default();
        xids.add(79, 5);
        let object = NodeUsageObject {
            metadata: ObjectMeta {
                name: Some("a".into()),
                ..ObjectMeta::default()
            },
            usage: Some(NodeUsage {
                node: "a".into(),
                unix_millis: 7,
                gpus: vec![GpuUsage {
                    xids: Some(xids),
                    ..GpuUsage::default()
                }],
                ..NodeUsage::default()
            }),
            ..NodeUsageObject::default()
        };
        let written = serde_json::to_value(&object).unwrap();
        assert_eq!(written["gpus"][0]["xids"]["counts"], json!({"79": 1}));
        let read: NodeUsageObject = serde_json::from_value(written).unwrap();
        assert_eq!(read, object);
        let dead = json!({"metadata": {"name": "a"}, "problem": "connect"});
        let read: NodeUsageObject = serde_json::from_value(dead).unwrap();
        assert_eq!(
            (read.usage, read.problem.as_deref()),
            (None, Some("connect"))
        );
        let newer = json!({"metadata": {"name": "a"}, "node": "a", "unixMillis": 7, "gpus": 5});
        let read: NodeUsageObject = serde_json::from_value(newer).unwrap();
        assert_eq!(read.usage, None);
        assert!(read.problem.unwrap().contains("cannot be read"));
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
