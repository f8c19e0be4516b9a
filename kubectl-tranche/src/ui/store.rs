//! The cluster's objects, by node so that a change updates only that node, and small so that a thousand nodes fit: pure.
//!
//! A ResourceSlice of a GPU with partitions has dozens of devices and takes about a hundred kilobytes as a value. The store keeps
//! the JSON text of the few fields that the model reads, compressed because the devices are alike, and parses it only while it
//! builds the model of the node.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tranche_api::GpuNode;
use tranche_api::names::{DRIVER, node_of};
use tranche_driver::extended_resources;
use tranche_driver::pod::claims_of;

use super::history::Read;
use super::trim;
use crate::snapshot::{Gap, Resource, Scope, Snapshot};

/// A change that a watch reports.
#[derive(Debug)]
pub enum Change {
    /// A list begins. At its end, objects that are not in it are removed.
    Begin(Resource),
    /// An object exists, with its current content.
    Set(Object),
    /// An object is gone.
    Gone(Object),
    /// The list is complete, and covers this scope.
    Complete(Resource, Scope),
    /// The resource, or a part of it, cannot be read.
    Gap(Gap),
    /// The prices, where an administrator wrote some.
    Prices(Option<BTreeMap<String, String>>),
}

/// An object that a watch reports.
#[derive(Debug)]
pub enum Object {
    GpuNode(Box<GpuNode>),
    /// Devices of ours.
    Slice(Box<ResourceSlice>),
    /// A claim, of any driver.
    Claim(Box<ResourceClaim>),
    /// A class, of any driver.
    Class(Box<DeviceClass>),
    /// A pod that does not run yet.
    Pod(Box<Pod>),
}

/// An object as compressed JSON text, and the nodes to which it belongs.
#[derive(Debug, PartialEq, Eq)]
struct Packed {
    text: Box<[u8]>,
    nodes: Vec<String>,
}

/// The objects of a resource, by namespace and name.
#[derive(Debug, Default)]
struct ResourceObjects {
    objects: BTreeMap<String, Packed>,
    /// The keys of the objects of each node.
    by_node: BTreeMap<String, BTreeSet<String>>,
    /// While a list arrives: the keys that it had so far.
    listing: Option<BTreeSet<String>>,
}

/// The parts of the page that may be out of date.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    pub nodes: BTreeSet<String>,
    /// Whether the waiting pods may be out of date.
    pub waiting: bool,
    /// Whether everything may be, because prices or rights changed.
    pub all: bool,
    /// Whether the use of GPUs was read.
    pub read: Read,
}

#[derive(Debug, Default)]
pub struct Store {
    kept: BTreeMap<Resource, ResourceObjects>,
    prices: Option<BTreeMap<String, String>>,
    gaps: BTreeMap<Resource, Gap>,
    complete: BTreeMap<Resource, Scope>,
    dirty: Dirty,
}

/// What the page watches.
pub const WATCHED: [Resource; 5] = [
    Resource::GpuNodes,
    Resource::ResourceSlices,
    Resource::ResourceClaims,
    Resource::DeviceClasses,
    Resource::Pods,
];

impl Store {
    /// Applies a change.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Begin(resource) => {
                self.kept.entry(resource).or_default().listing = Some(BTreeSet::new());
            }
            Change::Set(object) => self.set(&object),
            Change::Gone(object) => {
                let (resource, key) = object.key();
                self.remove(resource, &key);
            }
            Change::Complete(resource, scope) => self.complete(resource, scope),
            Change::Gap(gap) => {
                let resource = gap.resource;
                if self.gaps.get(&resource) != Some(&gap) {
                    self.dirty.all = true;
                    self.gaps.insert(resource, gap);
                }
            }
            Change::Prices(prices) => {
                self.gaps.remove(&Resource::Prices);
                self.dirty.all |= self.prices != prices;
                self.prices = prices;
            }
        }
    }

    fn set(&mut self, object: &Object) {
        let (resource, key) = object.key();
        let kept = self.kept.entry(resource).or_default();
        if let Some(listing) = &mut kept.listing {
            listing.insert(key.clone());
        }
        match object.pack() {
            Some(packed) if kept.objects.get(&key) == Some(&packed) => {}
            Some(packed) => {
                self.remove(resource, &key);
                self.add(resource, key, packed);
            }
            None => self.remove(resource, &key),
        }
    }

    fn add(&mut self, resource: Resource, key: String, packed: Packed) {
        self.mark(resource, &packed);
        let kept = self.kept.entry(resource).or_default();
        for node in &packed.nodes {
            let keys = kept.by_node.entry(node.clone()).or_default();
            keys.insert(key.clone());
        }
        kept.objects.insert(key, packed);
    }

    fn remove(&mut self, resource: Resource, key: &str) {
        let kept = self.kept.entry(resource).or_default();
        let Some(packed) = kept.objects.remove(key) else {
            return;
        };
        for node in &packed.nodes {
            if let Some(keys) = kept.by_node.get_mut(node) {
                keys.remove(key);
                if keys.is_empty() {
                    kept.by_node.remove(node);
                }
            }
        }
        self.mark(resource, &packed);
    }

    fn mark(&mut self, resource: Resource, packed: &Packed) {
        self.dirty.nodes.extend(packed.nodes.iter().cloned());
        // A waiting pod's claim may be allocated or not, so each claim counts.
        self.dirty.waiting |= matches!(
            resource,
            Resource::ResourceClaims | Resource::DeviceClasses | Resource::Pods
        );
    }

    fn complete(&mut self, resource: Resource, scope: Scope) {
        let kept = self.kept.entry(resource).or_default();
        let listed = kept.listing.take().unwrap_or_default();
        let gone: Vec<String> = kept
            .objects
            .keys()
            .filter(|key| !listed.contains(*key))
            .cloned()
            .collect();
        for key in gone {
            self.remove(resource, &key);
        }
        // The gap of a list of one namespace stays: it says that the others are missing.
        if scope == Scope::All && self.gaps.remove(&resource).is_some() {
            self.dirty.all = true;
        }
        if self.complete.insert(resource, scope).is_none() {
            self.dirty.all = true;
        }
    }

    /// Whether everything has been read once, or cannot be read. Before that, GPUs in use would look free.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let mut watched = WATCHED.iter();
        watched.all(|it| {
            self.complete.contains_key(it) || self.gaps.get(it).is_some_and(|gap| !gap.is_partial)
        })
    }

    /// The parts that changed since the last call.
    pub fn take_dirty(&mut self) -> Dirty {
        std::mem::take(&mut self.dirty)
    }

    /// The nodes that objects name.
    #[must_use]
    pub fn nodes(&self) -> BTreeSet<String> {
        let kept = self.kept.values();
        kept.flat_map(|kept| kept.by_node.keys().cloned()).collect()
    }

    /// The objects that concern a node's GPUs and their holders.
    #[must_use]
    pub fn of_node(&self, node: &str) -> Snapshot {
        Snapshot {
            gpu_nodes: self.of(Resource::GpuNodes, node),
            slices: self.of(Resource::ResourceSlices, node),
            claims: self.of(Resource::ResourceClaims, node),
            ..self.common()
        }
    }

    /// The pods that do not run, and the claims of these pods.
    #[must_use]
    pub fn waiting(&self) -> Snapshot {
        let pods: Vec<Pod> = self.all(Resource::Pods, |_| true);
        let wanted: BTreeSet<String> = pods
            .iter()
            .flat_map(|pod| {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                let claims = claims_of(pod).into_iter();
                claims.map(move |name| key(Some(namespace), name))
            })
            .collect();
        Snapshot {
            pods,
            claims: self.all(Resource::ResourceClaims, |key| wanted.contains(key)),
            classes: self.all(Resource::DeviceClasses, |_| true),
            ..self.common()
        }
    }

    /// What could not be read, of all resources.
    #[must_use]
    pub fn common(&self) -> Snapshot {
        let narrowed = self.complete.values().find(|scope| **scope != Scope::All);
        Snapshot {
            asked: WATCHED.into_iter().chain([Resource::Prices]).collect(),
            prices: self.prices.clone(),
            gaps: self.gaps.values().cloned().collect(),
            scope: narrowed.cloned().unwrap_or_default(),
            ..Snapshot::default()
        }
    }

    fn of<T: DeserializeOwned>(&self, resource: Resource, node: &str) -> Vec<T> {
        let Some(kept) = self.kept.get(&resource) else {
            return Vec::new();
        };
        let keys = kept.by_node.get(node).into_iter().flatten();
        keys.filter_map(|key| kept.objects.get(key)?.unpack())
            .collect()
    }

    fn all<T: DeserializeOwned>(
        &self,
        resource: Resource,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Vec<T> {
        let objects = self
            .kept
            .get(&resource)
            .into_iter()
            .flat_map(|it| &it.objects);
        objects
            .filter(|(key, _)| is_wanted(key))
            .filter_map(|(_, packed)| packed.unpack())
            .collect()
    }
}

impl Object {
    /// Its resource, and its namespace and name.
    fn key(&self) -> (Resource, String) {
        let (resource, metadata) = match self {
            Self::GpuNode(it) => (Resource::GpuNodes, &it.metadata),
            Self::Slice(it) => (Resource::ResourceSlices, &it.metadata),
            Self::Claim(it) => (Resource::ResourceClaims, &it.metadata),
            Self::Class(it) => (Resource::DeviceClasses, &it.metadata),
            Self::Pod(it) => (Resource::Pods, &it.metadata),
        };
        let name = metadata.name.as_deref().unwrap_or_default();
        (resource, key(metadata.namespace.as_deref(), name))
    }

    /// `None` for an object that the page does not need.
    fn pack(&self) -> Option<Packed> {
        match self {
            Self::GpuNode(it) => {
                let name = it.metadata.name.clone().unwrap_or_default();
                packed(&trim::gpu_node(it), vec![name])
            }
            Self::Slice(it) => {
                let node = it
                    .spec
                    .node_name
                    .clone()
                    .unwrap_or_else(|| node_of(&it.spec.pool.name).to_owned());
                packed(&trim::slice(it), vec![node])
            }
            Self::Claim(it) => {
                let status = it.status.as_ref();
                let allocation = status.and_then(|it| it.allocation.as_ref());
                let results = allocation.and_then(|it| it.devices.as_ref()?.results.as_ref());
                let ours = results
                    .into_iter()
                    .flatten()
                    .filter(|it| it.driver == DRIVER);
                let nodes: BTreeSet<String> = ours.map(|it| node_of(&it.pool).to_owned()).collect();
                // Another driver allocated it, which does not change.
                if allocation.is_some() && nodes.is_empty() {
                    return None;
                }
                packed(&trim::claim(it), nodes.into_iter().collect())
            }
            Self::Class(it) => packed(&trim::class(it), Vec::new()),
            Self::Pod(it) => {
                if claims_of(it).is_empty() && extended_resources::names(it).is_empty() {
                    return None;
                }
                packed(&trim::pod(it), Vec::new())
            }
        }
    }
}

fn key(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

/// `None` for an object that cannot be written as JSON; objects of the API server can.
fn packed(object: &impl Serialize, nodes: Vec<String>) -> Option<Packed> {
    let text = serde_json::to_vec(object).ok()?;
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&text).ok()?;
    let text = encoder.finish().ok()?.into_boxed_slice();
    Some(Packed { text, nodes })
}

impl Packed {
    fn unpack<T: DeserializeOwned>(&self) -> Option<T> {
        let mut text = Vec::new();
        DeflateDecoder::new(&*self.text)
            .read_to_end(&mut text)
            .ok()?;
        serde_json::from_slice(&text).ok()
    }
}

#[cfg(test)]
mod tests;
