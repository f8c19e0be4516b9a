//! What the controller keeps of the objects that it watches: what decisions need, and no more.
//!
//! A node of 8 GPUs has 9 ResourceSlices, some 200 KB as typed objects. To compare what is stored with
//! what is planned, the controller needs a digest and the devices' identities. It needs a whole device
//! only when that is no longer offered, and reads it again then.

use std::hash::{DefaultHasher, Hash, Hasher};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use kube::api::ObjectMeta;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::Event;
use tranche_api::names::taint;
use tranche_api::{GpuNode, SharingPolicy};
use tranche_driver::slices::{Digest, PublishedDevice};

/// The field manager of the node plugin.
pub const PLUGIN: &str = "tranche-kubelet-plugin";

/// A stored ResourceSlice of our driver.
#[derive(Clone, Debug)]
pub struct KnownSlice {
    pub name: Box<str>,
    pub uid: Box<str>,
    /// `metadata.resourceVersion`.
    pub version: Box<str>,
    /// `spec.nodeName`.
    pub node: Option<Box<str>>,
    /// `spec.pool.name`.
    pub pool: Box<str>,
    /// `spec.pool.generation`.
    pub generation: i64,
    /// `spec.pool.resourceSliceCount`.
    pub count: i64,
    /// The rest of the spec.
    pub content: Digest,
    /// Our devices in it.
    pub devices: Box<[KnownDevice]>,
    owners: u64,
    /// Labels, annotations and finalizers, which others wrote; a replacement keeps them.
    others: Option<Box<ObjectMeta>>,
}

#[derive(Clone, Debug)]
pub struct KnownDevice {
    pub identity: PublishedDevice,
    /// Set if it is no longer offered and therefore closed to new claims.
    pub withdrawn: Option<Box<Withdrawn>>,
}

/// A device that is no longer offered. There are few of these, so all of it is kept.
#[derive(Clone, Debug)]
pub struct Withdrawn {
    /// When it was tainted; the API server fills the time in.
    pub at: Timestamp,
    /// The device as deflated JSON, some 3 percent of the typed one's size. With two such devices on each of 6,000 nodes, plain
    /// JSON takes 20 MiB more.
    packed: Box<[u8]>,
}

impl Withdrawn {
    fn pack(device: &Device) -> Option<Box<[u8]>> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
        serde_json::to_writer(&mut encoder, device).ok()?;
        Some(encoder.finish().ok()?.into_boxed_slice())
    }

    /// The device; `None` if it cannot be unpacked.
    fn device(&self) -> Option<Device> {
        serde_json::from_reader(DeflateDecoder::new(&*self.packed)).ok()
    }
}

impl KnownDevice {
    /// The device, with its content if that is kept.
    #[must_use]
    pub fn published(&self) -> PublishedDevice {
        PublishedDevice {
            content: self.withdrawn.as_ref().and_then(|it| it.device()),
            ..self.identity.clone()
        }
    }
}

impl KnownSlice {
    /// Whether its owners are exactly these.
    #[must_use]
    pub fn is_owned_by(&self, owners: &[OwnerReference]) -> bool {
        self.owners == hash(owners)
    }

    /// The metadata of a slice with these owners that replaces this one: it has this one's UID and version, and keeps what
    /// others wrote there.
    #[must_use]
    pub fn replacement(&self, owners: Option<Vec<OwnerReference>>) -> ObjectMeta {
        let others = self.others.as_deref().cloned().unwrap_or_default();
        ObjectMeta {
            name: Some(self.name.to_string()),
            uid: Some(self.uid.to_string()),
            resource_version: Some(self.version.to_string()),
            owner_references: owners,
            annotations: others.annotations,
            labels: others.labels,
            finalizers: others.finalizers,
            ..ObjectMeta::default()
        }
    }
}

impl From<&ResourceSlice> for KnownSlice {
    fn from(slice: &ResourceSlice) -> Self {
        let (metadata, spec) = (&slice.metadata, &slice.spec);
        let text = |text: Option<String>| text.unwrap_or_default().into_boxed_str();
        let others = ObjectMeta {
            labels: metadata.labels.clone(),
            annotations: metadata.annotations.clone(),
            finalizers: metadata.finalizers.clone(),
            ..ObjectMeta::default()
        };
        Self {
            name: text(metadata.name.clone()),
            uid: text(metadata.uid.clone()),
            version: text(metadata.resource_version.clone()),
            node: spec.node_name.clone().map(String::into_boxed_str),
            pool: spec.pool.name.clone().into_boxed_str(),
            generation: spec.pool.generation,
            count: spec.pool.resource_slice_count,
            content: Digest::of(spec),
            devices: spec
                .devices
                .iter()
                .flatten()
                .filter_map(known_device)
                .collect(),
            owners: hash(metadata.owner_references.as_deref().unwrap_or_default()),
            others: (others != ObjectMeta::default()).then(|| Box::new(others)),
        }
    }
}

/// `None` for a device that this driver never publishes.
fn known_device(device: &Device) -> Option<KnownDevice> {
    let identity = PublishedDevice::identify(device)?;
    let taints = device.taints.iter().flatten();
    let taint = taints
        .into_iter()
        .find(|taint| taint.key == taint::WITHDRAWN);
    let withdrawn = taint.and_then(|taint| {
        Some(Box::new(Withdrawn {
            // A server that does not know this field knows no taints; then the claims may be listed at once.
            at: taint
                .time_added
                .as_ref()
                .map_or(Timestamp::UNIX_EPOCH, |time| time.0),
            packed: Withdrawn::pack(device)?,
        }))
    });
    Some(KnownDevice {
        identity,
        withdrawn,
    })
}

fn hash(owners: &[OwnerReference]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for owner in owners {
        (&owner.api_version, &owner.kind, &owner.name, &owner.uid).hash(&mut hasher);
        (owner.controller, owner.block_owner_deletion).hash(&mut hasher);
    }
    hasher.finish()
}

/// An event with what `keep` leaves of its object.
#[must_use]
pub fn kept<K, L>(event: Event<K>, keep: impl Fn(K) -> L) -> Event<L> {
    match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(object) => Event::InitApply(keep(object)),
        Event::Apply(object) => Event::Apply(keep(object)),
        Event::Delete(object) => Event::Delete(keep(object)),
    }
}

/// A GpuNode with only what the controller reads. Its managed fields keep only the time of the plugin's last write.
#[must_use]
pub fn trimmed_gpu_node(mut node: GpuNode) -> GpuNode {
    if let Some(fields) = &mut node.metadata.managed_fields {
        fields.retain(|entry| entry.manager.as_deref() == Some(PLUGIN));
        for entry in &mut *fields {
            entry.fields_v1 = None;
        }
        fields.shrink_to_fit();
    }
    node.metadata.annotations = None;
    node.metadata.labels = None;
    node
}

/// A Node's name, UID, version and labels.
#[must_use]
pub fn trimmed_node(mut node: PartialObjectMeta<Node>) -> PartialObjectMeta<Node> {
    let metadata = std::mem::take(&mut node.metadata);
    node.metadata = ObjectMeta {
        name: metadata.name,
        uid: metadata.uid,
        resource_version: metadata.resource_version,
        labels: metadata.labels,
        ..ObjectMeta::default()
    };
    node
}

/// A SharingPolicy without its managed fields.
#[must_use]
pub fn trimmed_policy(mut policy: SharingPolicy) -> SharingPolicy {
    policy.metadata.managed_fields = None;
    policy
}

/// The name and the version by which a local copy is ordered and compared.
pub trait Stored {
    fn name(&self) -> &str;
    /// `metadata.resourceVersion`, if there is one.
    fn resource_version(&self) -> Option<&str>;
}

impl<K: ResourceExt> Stored for K {
    fn name(&self) -> &str {
        self.meta().name.as_deref().unwrap_or_default()
    }

    fn resource_version(&self) -> Option<&str> {
        self.meta().resource_version.as_deref()
    }
}

impl Stored for KnownSlice {
    fn name(&self) -> &str {
        &self.name
    }

    fn resource_version(&self) -> Option<&str> {
        Some(&self.version)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(change: impl FnOnce(&mut serde_json::Value)) -> KnownSlice {
        let mut slice = json!({
            "metadata": {
                "name": "s", "uid": "u", "resourceVersion": "7",
                "managedFields": [{"manager": "tranche-controller", "fieldsV1": {"f:spec": {}}}],
            },
            "spec": {
                "driver": "gpu.tranche.dev", "nodeName": "a",
                "pool": {"name": "a/gpu", "generation": 3, "resourceSliceCount": 1},
                "devices": [{
                    "name": "gpu-00000001",
                    "attributes": {
                        "uuid": {"string": "GPU-00000001-0000-0000-0000-000000000001"},
                        "resource.kubernetes.io/pciBusID": {"string": "0000:01:00.0"},
                    },
                }, {"name": "mine"}],
            },
        });
        change(&mut slice);
        KnownSlice::from(&serde_json::from_value::<ResourceSlice>(slice).expect("a slice"))
    }

    #[test]
    fn a_device_is_kept_whole_only_where_it_is_withdrawn() {
        let offered = slice(|_| {});
        assert_eq!(offered.devices.len(), 1, "one is ours");
        assert_eq!(offered.devices[0].published().content, None);
        let taint = json!([{
            "key": taint::WITHDRAWN, "effect": "NoSchedule", "timeAdded": "2026-11-22T08:00:00Z",
        }]);
        let withdrawn = slice(|slice| slice["spec"]["devices"][0]["taints"] = taint);
        let content = withdrawn.devices[0].published().content.expect("all of it");
        assert_eq!(content.name, "gpu-00000001");
        assert_eq!(content.attributes.expect("attributes").len(), 2);
        let at = withdrawn.devices[0].withdrawn.as_ref().expect("since").at;
        assert_eq!(at.to_string(), "2026-11-22T08:00:00Z");
    }

    #[test]
    fn a_replacement_keeps_fields_of_others_but_not_of_the_server() {
        let known = slice(|slice| {
            slice["metadata"]["labels"] = json!({"team": "a"});
            slice["metadata"]["annotations"] = json!({"note": "b"});
            slice["metadata"]["creationTimestamp"] = json!("2026-11-22T08:00:00Z");
        });
        let metadata = known.replacement(None);
        assert_eq!(metadata.labels.expect("labels")["team"], "a");
        assert_eq!(metadata.annotations.expect("annotations")["note"], "b");
        assert_eq!(metadata.resource_version.as_deref(), Some("7"));
        assert_eq!(metadata.uid.as_deref(), Some("u"));
        assert_eq!(metadata.managed_fields, None);
        assert!(
            slice(|_| {}).others.is_none(),
            "nothing of it is kept in memory"
        );
    }

    #[test]
    fn owners_are_compared_whole() {
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "1", "controller": true});
        let known = slice(|slice| slice["metadata"]["ownerReferences"] = json!([owner]));
        let mut ours: OwnerReference = serde_json::from_value(owner).expect("an owner");
        assert!(known.is_owned_by(std::slice::from_ref(&ours)));
        assert!(!known.is_owned_by(&[]));
        ours.uid = "2".to_owned();
        assert!(!known.is_owned_by(&[ours]));
    }

    #[test]
    fn only_the_plugins_time_is_kept_of_managed_fields() {
        let node: GpuNode = serde_json::from_value(json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode", "spec": {},
            "metadata": {"name": "a", "annotations": {"x": "y"}, "managedFields": [
                {"manager": PLUGIN, "time": "2026-11-22T08:00:00Z", "fieldsV1": {"f:status": {}}},
                {"manager": "tranche-controller", "fieldsV1": {"f:status": {}}},
            ]},
        }))
        .expect("a GpuNode");
        let metadata = trimmed_gpu_node(node).metadata;
        let fields = metadata.managed_fields.expect("the plugin's");
        assert_eq!(fields.len(), 1);
        assert_eq!(fields[0].fields_v1, None);
        assert!(fields[0].time.is_some());
    }
}
