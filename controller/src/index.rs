//! The controller's copy of the cluster, by node.
//!
//! ```text
//!  [ GpuNode ] ────┐
//!  [ Node ] ───────┤
//!                  ├──► NodeView ──► reconcile
//!  [ Policies ] ───┤
//!  [ Slices ] ─────┘
//! ```
//!
//! It is synchronous and has no client. Every event returns the nodes that must be reconciled again; an event
//! that changes nothing a plan depends on (a node's heartbeat) returns no node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::Event;
use tranche_api::{GpuNode, SharingPolicy};

use crate::known::KnownSlice;
use crate::mirror::{Change, Mirror, Version};

/// The key of slices of our driver without a node. We never publish such slices.
pub const NO_NODE: &str = "";

/// One event of one of the watches.
#[derive(Debug)]
pub enum Observation {
    /// What a node has.
    GpuNode(Event<GpuNode>),
    /// What is offered.
    Policy(Event<SharingPolicy>),
    /// Labels and UID of a node.
    Node(Event<PartialObjectMeta<Node>>),
    /// A slice of our driver.
    Slice(Event<KnownSlice>),
}

impl Observation {
    /// Whether it may concern many nodes at once: a policy, or the end of a list.
    #[must_use]
    pub fn concerns_many(&self) -> bool {
        matches!(
            self,
            Self::Policy(_)
                | Self::GpuNode(Event::InitDone)
                | Self::Node(Event::InitDone)
                | Self::Slice(Event::InitDone)
        )
    }
}

/// An object that was read by itself; `None` if it is gone.
#[derive(Debug)]
pub enum Found {
    GpuNode(Option<Box<GpuNode>>),
    Slice(Option<KnownSlice>),
}

/// Everything that decides what one node publishes.
#[derive(Clone, Debug)]
pub struct NodeView {
    /// The node's name; [`NO_NODE`] for slices without a node.
    pub name: String,
    /// The Node, where it exists.
    pub node: Option<Arc<PartialObjectMeta<Node>>>,
    /// What its plugin says of it.
    pub gpu_node: Option<Arc<GpuNode>>,
    /// All policies, by name.
    pub policies: Arc<[SharingPolicy]>,
    /// The slices of our driver on this node, by name.
    pub slices: Vec<Arc<KnownSlice>>,
}

/// How far the watches were when writes were answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    slices: u64,
    gpu_nodes: u64,
}

/// The cluster as the watches deliver it.
#[derive(Debug, Default)]
pub struct Index {
    gpu_nodes: Mirror<GpuNode>,
    policies: Mirror<SharingPolicy>,
    nodes: Mirror<PartialObjectMeta<Node>>,
    slices: Mirror<KnownSlice>,
    slices_by_node: BTreeMap<String, BTreeSet<String>>,
    /// The policies as every view gets them.
    all_policies: Arc<[SharingPolicy]>,
}

impl Index {
    /// Applies an event and returns the nodes to reconcile again.
    pub fn observe(&mut self, observation: Observation) -> BTreeSet<String> {
        match observation {
            Observation::GpuNode(event) => changed_gpu_nodes(self.gpu_nodes.apply(event)),
            Observation::Policy(event) => {
                let changed = self.policies.apply(event).into_iter().any(|c| {
                    c.before.as_ref().map(|p| &p.spec) != c.after.as_ref().map(|p| &p.spec)
                });
                if changed {
                    self.all_policies = self.policies.iter().map(|p| (**p).clone()).collect();
                    self.node_names()
                } else {
                    BTreeSet::new()
                }
            }
            Observation::Node(event) => self
                .nodes
                .apply(event)
                .into_iter()
                .filter(|c| {
                    c.before.as_ref().map(|n| (n.uid(), n.labels()))
                        != c.after.as_ref().map(|n| (n.uid(), n.labels()))
                })
                .filter_map(|c| c.after.or(c.before))
                .map(|n| n.name_any())
                .filter(|name| {
                    self.gpu_nodes.get(name).is_some() || self.slices_by_node.contains_key(name)
                })
                .collect(),
            Observation::Slice(event) => {
                let changes = self.slices.apply(event);
                self.changed_slices(changes)
            }
        }
    }

    /// Takes an object of this name that was read by itself, and returns the nodes to reconcile again. Not while its kind is
    /// listed ([`Self::is_listing`]).
    pub fn read(&mut self, name: &str, found: Found) -> BTreeSet<String> {
        match found {
            Found::GpuNode(found) => {
                let found = found.map(|node| *node);
                changed_gpu_nodes(self.gpu_nodes.read(name, found))
            }
            Found::Slice(found) => {
                let change = self.slices.read(name, found);
                self.changed_slices(change)
            }
        }
    }

    /// Whether a list of slices or GpuNodes is not complete yet.
    #[must_use]
    pub fn is_listing(&self) -> bool {
        self.slices.is_listing() || self.gpu_nodes.is_listing()
    }

    fn changed_slices(
        &mut self,
        changes: impl IntoIterator<Item = Change<KnownSlice>>,
    ) -> BTreeSet<String> {
        let mut dirty = BTreeSet::new();
        for change in changes {
            // `spec.nodeName` is immutable, but a new slice of another node can have a deleted slice's name.
            if let Some(before) = change.before {
                let node = node_of(&before);
                if let Some(names) = self.slices_by_node.get_mut(node) {
                    names.remove(&*before.name);
                    if names.is_empty() {
                        self.slices_by_node.remove(node);
                    }
                }
                dirty.insert(node.to_owned());
            }
            if let Some(after) = change.after {
                let node = node_of(&after);
                self.slices_by_node
                    .entry(node.to_owned())
                    .or_default()
                    .insert(after.name.to_string());
                dirty.insert(node.to_owned());
            }
        }
        dirty
    }

    /// Whether every watch has delivered its first list. Before that nothing may be written, because
    /// unknown objects look like deleted ones.
    #[must_use]
    pub fn synced(&self) -> bool {
        self.gpu_nodes.synced()
            && self.policies.synced()
            && self.nodes.synced()
            && self.slices.synced()
    }

    /// Every node with something to publish or to remove.
    #[must_use]
    pub fn node_names(&self) -> BTreeSet<String> {
        self.gpu_nodes
            .iter()
            .map(|g| g.name_any())
            .chain(self.slices_by_node.keys().cloned())
            .collect()
    }

    /// Whether the node's plugin registered and nothing is recorded for that registration.
    #[must_use]
    pub fn asks(&self, name: &str) -> bool {
        let status = self.gpu_nodes.get(name).and_then(|g| g.status.as_ref());
        let registered = status.and_then(|s| s.registration.as_ref());
        let published = status.and_then(|s| s.published.as_ref());
        registered.map_or(0, |r| r.epoch) != published.map_or(0, |p| p.epoch)
    }

    /// Everything that decides what one node publishes.
    #[must_use]
    pub fn view(&self, name: &str) -> NodeView {
        NodeView {
            name: name.to_owned(),
            node: self.nodes.get(name).cloned(),
            gpu_node: self.gpu_nodes.get(name).cloned(),
            policies: self.all_policies.clone(),
            slices: self
                .slices_by_node
                .get(name)
                .into_iter()
                .flatten()
                .filter_map(|slice| self.slices.get(slice).cloned())
                .collect(),
        }
    }

    /// The present position of the watches. Read before a write, compared after it.
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark {
            slices: self.slices.lists_begun(),
            gpu_nodes: self.gpu_nodes.lists_begun(),
        }
    }

    /// Whether the watch of slices has delivered the write that was answered with this version.
    #[must_use]
    pub fn has_slice_write(&self, version: Version, mark: Mark) -> bool {
        self.slices.caught_up(version, mark.slices)
    }

    /// Whether the watch of GpuNodes has delivered the write that was answered with this version.
    #[must_use]
    pub fn has_gpu_node_write(&self, version: Version, mark: Mark) -> bool {
        self.gpu_nodes.caught_up(version, mark.gpu_nodes)
    }

    /// Whether a slice of this name and UID is still known.
    #[must_use]
    pub fn has_slice(&self, name: &str, uid: &str) -> bool {
        self.slices.get(name).is_some_and(|s| &*s.uid == uid)
    }
}

/// The nodes whose GpuNodes changed in what a plan depends on.
fn changed_gpu_nodes(changes: impl IntoIterator<Item = Change<GpuNode>>) -> BTreeSet<String> {
    changes
        .into_iter()
        .filter(|c| {
            c.before.as_ref().map(|g| (g.uid(), &g.status))
                != c.after.as_ref().map(|g| (g.uid(), &g.status))
        })
        .filter_map(|c| c.after.or(c.before))
        .map(|g| g.name_any())
        .collect()
}

fn node_of(slice: &KnownSlice) -> &str {
    slice.node.as_deref().unwrap_or(NO_NODE)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::ResourceSlice;
    use serde_json::{Value, json};

    use super::*;

    fn object<K: serde::de::DeserializeOwned>(value: Value) -> K {
        serde_json::from_value(value).expect("a well-formed object")
    }

    fn gpu_node(name: &str, epoch: i64, version: u32) -> GpuNode {
        object(json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode", "spec": {},
            "metadata": {"name": name, "uid": name, "resourceVersion": version.to_string()},
            "status": {"registration": {"epoch": epoch, "pluginVersion": "0.1.0"}},
        }))
    }

    fn node(name: &str, labels: &Value, version: u32) -> PartialObjectMeta<Node> {
        object(json!({"metadata": {
            "name": name, "uid": name, "labels": labels, "resourceVersion": version.to_string(),
        }}))
    }

    fn slice(name: &str, node: Option<&str>) -> KnownSlice {
        KnownSlice::from(&object::<ResourceSlice>(json!({
            "metadata": {"name": name, "uid": name, "resourceVersion": "1"},
            "spec": {
                "driver": "gpu.tranche.dev", "nodeName": node,
                "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
            },
        })))
    }

    fn policy(tiers: &Value) -> SharingPolicy {
        object(json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy",
            "metadata": {"name": "default"}, "spec": {"tiers": tiers},
        }))
    }

    /// An index that knows two GPU nodes and one other.
    fn index() -> Index {
        let mut index = Index::default();
        for observation in [
            Observation::GpuNode(Event::Init),
            Observation::GpuNode(Event::InitApply(gpu_node("a", 1, 1))),
            Observation::GpuNode(Event::InitApply(gpu_node("b", 1, 1))),
            Observation::GpuNode(Event::InitDone),
            Observation::Node(Event::Init),
            Observation::Node(Event::InitApply(node("a", &json!({}), 1))),
            Observation::Node(Event::InitApply(node("other", &json!({}), 1))),
            Observation::Node(Event::InitDone),
            Observation::Policy(Event::Init),
            Observation::Policy(Event::InitDone),
        ] {
            index.observe(observation);
        }
        index
    }

    fn names(set: &BTreeSet<String>) -> Vec<&str> {
        set.iter().map(String::as_str).collect()
    }

    #[test]
    fn it_is_synced_when_every_watch_has_delivered_its_list() {
        let mut index = index();
        index.observe(Observation::Slice(Event::Init));
        assert!(!index.synced());
        index.observe(Observation::Slice(Event::InitDone));
        assert!(index.synced());
    }

    #[test]
    fn a_heartbeat_marks_no_node() {
        let mut index = index();
        let heartbeat = node("a", &json!({}), 2);
        assert!(
            index
                .observe(Observation::Node(Event::Apply(heartbeat)))
                .is_empty()
        );
        let labelled = node("a", &json!({"zone": "1"}), 3);
        let dirty = index.observe(Observation::Node(Event::Apply(labelled)));
        assert_eq!(names(&dirty), ["a"]);
        let without_gpus = node("other", &json!({"zone": "1"}), 4);
        assert!(
            index
                .observe(Observation::Node(Event::Apply(without_gpus)))
                .is_empty()
        );
    }

    #[test]
    fn a_changed_policy_marks_every_node() {
        let mut index = index();
        let dirty = index.observe(Observation::Policy(Event::Apply(policy(&json!([
            "capped"
        ])))));
        assert_eq!(names(&dirty), ["a", "b"]);
        assert_eq!(index.view("a").policies.len(), 1);
        let again = index.observe(Observation::Policy(Event::Apply(policy(&json!([
            "capped"
        ])))));
        assert!(again.is_empty());
    }

    #[test]
    fn a_gpu_node_marks_only_its_own_node() {
        let mut index = index();
        let dirty = index.observe(Observation::GpuNode(Event::Apply(gpu_node("b", 2, 2))));
        assert_eq!(names(&dirty), ["b"]);
        let unchanged = index.observe(Observation::GpuNode(Event::Apply(gpu_node("b", 2, 3))));
        assert!(unchanged.is_empty());
    }

    #[test]
    fn slices_are_found_by_node_also_when_the_node_is_gone() {
        let mut index = index();
        index.observe(Observation::Slice(Event::Apply(slice("s", Some("gone")))));
        index.observe(Observation::Slice(Event::Apply(slice("t", None))));
        assert_eq!(names(&index.node_names()), [NO_NODE, "a", "b", "gone"]);
        assert_eq!(index.view("gone").slices.len(), 1);
        assert!(index.view("gone").node.is_none());

        // The name is taken again for another node.
        let dirty = index.observe(Observation::Slice(Event::Apply(slice("s", Some("a")))));
        assert_eq!(names(&dirty), ["a", "gone"]);
        assert!(index.view("gone").slices.is_empty());
        let dirty = index.observe(Observation::Slice(Event::Delete(slice("s", Some("a")))));
        assert_eq!(names(&dirty), ["a"]);
        assert!(index.view("a").slices.is_empty());
    }
}
