//! Reads from an API server that refuses, and the messages about it.

use crate::snapshot::{Cause, Resource, Scope};
use crate::testing::{World, share};
use crate::usage::{Usage, UsageResult};

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

/// `--namespace` is no way out for who gave it, nor for objects without a namespace.
#[tokio::test]
async fn a_way_out_that_was_taken_is_not_advised() {
    let refused = refusing(&[(CLAIMS_HERE, 403), (GPU_NODES, 403)]);
    let here = Scope::Namespace("team-a".into());
    let read = refused.cluster().read(&ALL, here).await;
    let claims = read.gap(Resource::ResourceClaims).unwrap();
    assert!(
        claims.message.contains("in namespace team-a: ask"),
        "{}",
        claims.message
    );
    for gap in &read.gaps {
        assert!(!gap.message.contains("--namespace"), "{}", gap.message);
    }
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

const NODE_USAGES: &str = "/apis/usage.gpu.tranche.dev/v1alpha1/nodeusages";
const CLAIM_USAGES: &str = "/apis/usage.gpu.tranche.dev/v1alpha1/claimusages";
const CLAIM_USAGES_HERE: &str =
    "/apis/usage.gpu.tranche.dev/v1alpha1/namespaces/team-a/claimusages";

/// A cluster that serves these paths of the usage API.
fn serving(served: &[&str], refused: &[(&str, u16)]) -> World {
    let mut world = refusing(refused);
    for path in served {
        let object = serde_json::json!({"metadata": {"namespace": "team-a", "name": "it"}});
        let list = serde_json::json!({"metadata": {}, "items": [object]});
        world.others.insert((*path).to_owned(), list);
    }
    world
}

async fn usage(world: &World, scope: Scope) -> UsageResult {
    Box::pin(world.cluster().usage(&scope)).await
}

#[tokio::test]
async fn use_is_read_of_nodes_and_where_that_is_not_allowed_of_claims() {
    let world = serving(&[NODE_USAGES], &[]);
    let read = usage(&world, Scope::All).await;
    // The node of this world does not answer.
    let notes = crate::usage::notes(&read);
    assert_eq!(notes, ["usage of it is not shown: the node said nothing"]);
    let asked = world.asked.lock().unwrap().clone();
    assert_eq!(asked, [format!("{NODE_USAGES}?&limit=250")]);

    for (refused, whose) in [
        (
            &[(NODE_USAGES, 403)][..],
            "usage is shown of all claims only",
        ),
        (
            &[(NODE_USAGES, 403), (CLAIM_USAGES, 403)],
            "usage is shown of claims in team-a only",
        ),
    ] {
        let world = serving(&[CLAIM_USAGES, CLAIM_USAGES_HERE], refused);
        let read = usage(&world, Scope::All).await;
        let [line] = &crate::usage::notes(&read)[..] else {
            panic!("{read:?}")
        };
        assert!(read.is_ok());
        for word in [
            whose,
            "you may not list nodeusages.usage.gpu.tranche.dev",
            "tranche-usage-reader",
        ] {
            assert!(line.contains(word), "{line}");
        }
    }

    // For one namespace there is no request for the usage of all nodes.
    let world = serving(&[CLAIM_USAGES_HERE], &[]);
    let read = usage(&world, Scope::Namespace("team-a".into())).await;
    assert_eq!(read, Ok(Usage::default()));
    assert_eq!(world.asked.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn where_use_cannot_be_read_one_line_says_why() {
    let all = |code| {
        vec![
            (NODE_USAGES, code),
            (CLAIM_USAGES, code),
            (CLAIM_USAGES_HERE, code),
        ]
    };
    for (code, words) in [
        (404, "chart's usageApi.enabled"),
        (
            403,
            "you may not list nodeusages.usage.gpu.tranche.dev; ask an administrator",
        ),
        (401, "see the log of Tranche's usage API"),
        (503, "kubectl get apiservice v1alpha1.usage.gpu.tranche.dev"),
    ] {
        let read = usage(&refusing(&all(code)), Scope::All).await;
        let line = read.unwrap_err();
        assert!(line.starts_with("usage is not shown: "), "{line}");
        assert!(line.contains(words) && !line.contains('\n'), "{line}");
    }
    let world = refusing(&[(CLAIM_USAGES_HERE, 403)]);
    let read = usage(&world, Scope::Namespace("team-a".into())).await;
    let line = read.unwrap_err();
    assert!(
        line.contains("you may not list claimusages.usage.gpu.tranche.dev"),
        "{line}"
    );
}

#[tokio::test]
async fn use_is_read_page_by_page() {
    let pages = tower::service_fn(|request: http::Request<kube::client::Body>| async move {
        let query = request.uri().query().unwrap_or_default();
        let (name, next) = if query.contains("continue=a") {
            ("b", "")
        } else {
            ("a", "a")
        };
        let list = serde_json::json!({
            "metadata": {"continue": next},
            "items": [{"metadata": {"name": name}, "problem": "no answer"}],
        });
        let body = kube::client::Body::from(list.to_string().into_bytes());
        Ok::<_, std::io::Error>(http::Response::new(body))
    });
    let client = kube::Client::new(pages, "default");
    let cluster = super::Cluster::new(client, "default", "tranche-system");
    let read = Box::pin(cluster.usage(&Scope::All)).await;
    let notes = crate::usage::notes(&read);
    assert_eq!(
        notes,
        ["usage of a and 1 more nodes is not shown: no answer"]
    );
}

/// The server behind the aggregated API may hang.
#[tokio::test(start_paused = true)]
async fn an_api_of_use_that_does_not_answer_is_not_waited_for() {
    let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<std::io::Result<http::Response<kube::client::Body>>>()
    });
    let client = kube::Client::new(service, "default");
    let cluster = super::Cluster::new(client, "default", "tranche-system");
    let line = Box::pin(cluster.usage(&Scope::All)).await.unwrap_err();
    assert!(line.contains("did not answer within 15 s"), "{line}");
}
