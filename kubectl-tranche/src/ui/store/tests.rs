//! The page shows what the model of all objects shows, however the objects arrived.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::model::{self, Model};
use crate::testing::{World, object, share, uuid, whole};

/// Claims of the cluster of [`World::new`] that do not contradict each other.
const POSSIBLE: usize = 7;

/// A world with those of the [`POSSIBLE`] claims that `wanted` selects.
fn world(wanted: &[bool]) -> World {
    let mut world = World::new();
    let divided = "gpu-a0000001";
    let all = [
        (
            "team-a/notebook",
            vec![share("node-a", "gpu-a0000000-capped", "20Gi", "25")],
        ),
        (
            "team-b/training",
            vec![share("node-a", "gpu-a0000000-capped", "40Gi", "50")],
        ),
        (
            "team-a/left",
            vec![whole("node-a", &format!("{divided}-mig-3g40gb-0"))],
        ),
        (
            "team-a/right",
            vec![whole("node-a", &format!("{divided}-mig-3g40gb-4"))],
        ),
        // On both nodes.
        (
            "team-c/both",
            vec![
                share("node-a", "gpu-a0000000-capped", "1Gi", "5"),
                whole("node-b", "gpu-b0000000"),
            ],
        ),
        ("team-c/waits", Vec::new()),
        ("team-d/gone-node", vec![whole("node-z", "gpu-f0000000")]),
    ];
    for ((name, results), wanted) in all.iter().zip(wanted) {
        if *wanted {
            world.claim(name, &["pod"], results);
        }
    }
    world
}

fn objects(world: &World) -> Vec<Object> {
    let nodes = world.gpu_nodes.iter().cloned();
    let slices = world.slices.iter().cloned();
    let claims = world.claims.iter().cloned();
    let classes = world.classes.iter().cloned();
    nodes
        .map(|it| Object::GpuNode(Box::new(it)))
        .chain(slices.map(|it| Object::Slice(Box::new(it))))
        .chain(claims.map(|it| Object::Claim(Box::new(it))))
        .chain(classes.map(|it| Object::Class(Box::new(it))))
        .collect()
}

/// A list of everything.
fn list(store: &mut Store, world: &World) {
    for resource in WATCHED {
        store.apply(Change::Begin(resource));
    }
    for object in objects(world) {
        store.apply(Change::Set(object));
    }
    for resource in WATCHED {
        store.apply(Change::Complete(resource, Scope::All));
    }
}

/// The model of each node of the store, built from that node's objects alone.
fn nodes(store: &Store) -> Vec<model::Node> {
    let names = store.nodes();
    let nodes = names.iter().flat_map(|name| {
        let mut model = Model::new(&store.of_node(name), &Err(String::new()));
        model.nodes.retain(|node| node.name == *name);
        model.nodes
    });
    nodes.collect()
}

fn whole_model(world: &World) -> Model {
    Model::new(&world.snapshot(), &Err(String::new()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn trimmed_nodes_read_alone_equal_those_of_the_whole_model(
        before in prop::collection::vec(any::<bool>(), POSSIBLE),
        after in prop::collection::vec(any::<bool>(), POSSIBLE),
    ) {
        let (before, after) = (world(&before), world(&after));
        let mut store = Store::default();
        list(&mut store, &before);
        prop_assert_eq!(nodes(&store), whole_model(&before).nodes);
        store.take_dirty();
        let old = nodes(&store);
        // The same by single changes, and by a new list.
        for claim in &before.claims {
            if !after.claims.contains(claim) {
                store.apply(Change::Gone(Object::Claim(Box::new(claim.clone()))));
            }
        }
        for claim in &after.claims {
            store.apply(Change::Set(Object::Claim(Box::new(claim.clone()))));
        }
        prop_assert_eq!(nodes(&store), whole_model(&after).nodes);
        // Nodes that are not dirty look as before.
        let dirty = store.take_dirty();
        for node in nodes(&store) {
            prop_assert!(dirty.nodes.contains(&node.name) || old.contains(&node), "{}", node.name);
        }
        list(&mut store, &before);
        prop_assert_eq!(nodes(&store), whole_model(&before).nodes);
    }
}

#[test]
fn a_list_with_nothing_new_makes_nothing_dirty() {
    let world = world(&[true; POSSIBLE]);
    let mut store = Store::default();
    list(&mut store, &world);
    assert!(store.take_dirty().all);
    list(&mut store, &world);
    assert_eq!(store.take_dirty(), Dirty::default());
}

#[test]
fn it_is_ready_when_everything_is_read_or_cannot_be_read() {
    let mut store = Store::default();
    assert!(!store.is_ready());
    for resource in WATCHED
        .into_iter()
        .filter(|it| *it != Resource::ResourceClaims)
    {
        store.apply(Change::Complete(resource, Scope::All));
    }
    let gap = |is_partial| {
        Change::Gap(Gap {
            resource: Resource::ResourceClaims,
            cause: crate::snapshot::Cause::Forbidden,
            is_partial,
            message: "you may not list".into(),
        })
    };
    // The claims of one namespace are still to arrive.
    store.apply(gap(true));
    assert!(!store.is_ready());
    store.apply(Change::Complete(
        Resource::ResourceClaims,
        Scope::Namespace("team-a".into()),
    ));
    assert!(store.is_ready());
    assert_eq!(
        store.common().gaps.len(),
        1,
        "the other namespaces are missing"
    );
    assert_eq!(store.common().scope, Scope::Namespace("team-a".into()));
    store.apply(Change::Complete(Resource::ResourceClaims, Scope::All));
    assert!(store.common().gaps.is_empty());
}

#[test]
fn objects_that_the_page_does_not_need_are_not_kept() {
    let mut store = Store::default();
    let other =
        json!({"driver": "gpu.nvidia.com", "pool": "a", "request": "gpu", "device": "gpu-0"});
    let mut world = World::new();
    world.claim("team-a/other", &[], &[other]);
    for object in objects(&world) {
        store.apply(Change::Set(object));
    }
    let pod =
        json!({"metadata": {"namespace": "team-a", "name": "plain"}, "spec": {"containers": []}});
    store.apply(Change::Set(Object::Pod(Box::new(object(pod)))));
    assert!(store.kept[&Resource::ResourceClaims].objects.is_empty());
    assert!(store.kept[&Resource::Pods].objects.is_empty());
}

#[test]
fn a_gpu_takes_two_kilobytes() {
    let mut store = Store::default();
    list(&mut store, &World::new());
    let slices = &store.kept[&Resource::ResourceSlices].objects;
    let of_gpu = slices.iter().find(|(_, packed)| {
        let slice: ResourceSlice = packed.unpack().unwrap();
        let text = serde_json::to_string(&slice).unwrap();
        text.contains(&uuid('a', 0)) && text.contains("mig")
    });
    let (_, packed) = of_gpu.unwrap();
    assert!(packed.text.len() < 2_000, "{}", packed.text.len());
}
