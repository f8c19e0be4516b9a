//! Reads from an API server that refuses, and what is said of it.

use crate::snapshot::{Cause, Resource, Scope};
use crate::testing::{World, share};

const ALL: [Resource; 8] = [
    Resource::GpuNodes,
    Resource::SharingPolicies,
    Resource::ResourceSlices,
    Resource::ResourceClaims,
    Resource::DeviceClasses,
    Resource::Pods,
    Resource::Nodes,
    Resource::Prices,
];

fn refusing(paths: &[(&str, u16)]) -> World {
    let mut world = World::new();
    for name in ["team-a/one", "team-b/two"] {
        world.claim(
            name,
            &["pod"],
            &[share("node-a", "gpu-a0000000-capped", "1Gi", "1")],
        );
    }
    world.refused = paths
        .iter()
        .map(|(path, code)| ((*path).to_owned(), *code))
        .collect();
    world
}

const GPU_NODES: &str = "/apis/gpu.tranche.dev/v1alpha1/gpunodes";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
const CLAIMS_HERE: &str = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims";

#[tokio::test]
async fn all_is_read_and_what_was_not_asked_for_is_not() {
    let world = refusing(&[]);
    let read = world.cluster().read(&ALL, Scope::All).await;
    assert_eq!(read.gaps, []);
    assert_eq!(
        (read.gpu_nodes.len(), read.claims.len(), read.policies.len()),
        (2, 2, 1)
    );
    assert_eq!(world.asked.lock().unwrap().len(), ALL.len());
    let world = refusing(&[]);
    let read = world
        .cluster()
        .read(&[Resource::ResourceSlices], Scope::All)
        .await;
    assert!(!read.slices.is_empty() && read.claims.is_empty());
    let asked = world.asked.lock().unwrap().clone();
    assert_eq!(
        asked,
        [format!(
            "{SLICES}?&fieldSelector=spec.driver%3Dgpu.tranche.dev&limit=500"
        )]
    );
}

#[tokio::test]
async fn a_missing_right_is_one_line_and_the_rest_works() {
    let read = refusing(&[(GPU_NODES, 403)])
        .cluster()
        .read(&ALL, Scope::All)
        .await;
    let [gap] = &read.gaps[..] else {
        panic!("{:?}", read.gaps)
    };
    assert_eq!(
        (gap.resource, gap.cause),
        (Resource::GpuNodes, Cause::Forbidden)
    );
    for word in ["list", "gpunodes.gpu.tranche.dev", "ask an administrator"] {
        assert!(gap.message.contains(word), "{}", gap.message);
    }
    assert!(!gap.message.contains('\n'));
    assert!(read.obstacle().is_none() && !read.slices.is_empty());
}

#[tokio::test]
async fn who_may_list_one_namespace_sees_that_one() {
    let read = refusing(&[(CLAIMS, 403)])
        .cluster()
        .read(&ALL, Scope::All)
        .await;
    assert_eq!(read.scope, Scope::Namespace("team-a".into()));
    let names: Vec<_> = read
        .claims
        .iter()
        .filter_map(|it| it.metadata.name.as_deref())
        .collect();
    assert_eq!(names, ["one"]);
    let [gap] = &read.gaps[..] else {
        panic!("{:?}", read.gaps)
    };
    assert!(
        gap.is_partial && gap.message.contains("only those of team-a"),
        "{}",
        gap.message
    );
    assert!(read.obstacle().is_none());

    let read = refusing(&[(CLAIMS, 403), (CLAIMS_HERE, 403)])
        .cluster()
        .read(&ALL, Scope::All)
        .await;
    let obstacle = read.obstacle().unwrap();
    assert!(
        obstacle
            .message
            .starts_with("you may not list resourceclaims"),
        "{}",
        obstacle.message
    );
}

#[tokio::test]
async fn a_cluster_without_tranche_or_with_an_old_api_server_is_said() {
    for (paths, words) in [
        (&[(GPU_NODES, 404)][..], "Tranche is not installed"),
        (&[(SLICES, 404)], "Kubernetes 1.36 or later"),
        (&[(CLAIMS, 404)], "Kubernetes 1.36 or later"),
        (&[(GPU_NODES, 401)], "does not accept your credentials"),
    ] {
        let read = refusing(paths).cluster().read(&ALL, Scope::All).await;
        let obstacle = read.obstacle().unwrap();
        assert!(obstacle.message.contains(words), "{}", obstacle.message);
        assert!(!obstacle.message.contains('\n'));
    }
}

#[tokio::test]
async fn objects_of_another_release_are_said() {
    let mut world = refusing(&[]);
    let list = serde_json::json!({"metadata": {}, "items": [{"metadata": {"name": "n"}, "status": {"inventory": 3}, "spec": {}}]});
    world.others.insert(GPU_NODES.into(), list);
    let read = world.cluster().read(&ALL, Scope::All).await;
    let gap = read.gap(Resource::GpuNodes).unwrap();
    assert_eq!(gap.cause, Cause::Unreadable);
    assert!(
        gap.message
            .contains("use the kubectl-tranche of the release"),
        "{}",
        gap.message
    );
}

#[tokio::test]
async fn an_api_server_that_is_not_there_is_said() {
    let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
        let refused =
            std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "connection refused");
        Err::<http::Response<kube::client::Body>, _>(refused)
    });
    let cluster = super::Cluster::new(
        kube::Client::new(service, "default"),
        "default",
        "tranche-system",
    );
    let read = cluster.read(&ALL, Scope::All).await;
    let obstacle = read.obstacle().unwrap();
    assert!(
        obstacle
            .message
            .starts_with("cannot reach the API server (connection refused)"),
        "{}",
        obstacle.message
    );
}
