//! The scheduler allocates for each example what its README says. `e2e/tests/suite/examples.rs` checks that it runs on a node.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{Namespace as CoreNamespace, Node, ServiceAccount};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tranche_e2e::{Case, Namespace, run_on_a_hollow_node, tool, wait};

use crate::support::{Allocated, allocated};

/// An example and what it gets.
#[derive(Clone, Copy)]
struct Example {
    folder: &'static str,
    namespaces: &'static [&'static str],
    /// The devices of its pods, in order.
    has: &'static [&'static str],
    /// The number of GPUs with these devices.
    gpus: usize,
    /// The label of the nodes to which its policy applies.
    label: Option<&'static str>,
}

const fn example(
    folder: &'static str,
    namespaces: &'static [&'static str],
    has: &'static [&'static str],
    gpus: usize,
) -> Example {
    Example {
        folder,
        namespaces,
        has,
        gpus,
        label: None,
    }
}

const fn labelled(label: &'static str, example: Example) -> Example {
    Example {
        label: Some(label),
        ..example
    }
}

const EXAMPLES: [Example; 16] = [
    example("01-exclusive", &["example-exclusive"], &["exclusive"], 1),
    example(
        "02-capped-share",
        &["team-a", "team-b"],
        &["capped 20Gi", "capped 40Gi"],
        1,
    ),
    example(
        "03-two-gpus",
        &["example-two-gpus"],
        &["capped 12Gi", "capped 6Gi"],
        2,
    ),
    example(
        "04-partition",
        &["example-partition"],
        &["partition 1g.10gb"],
        1,
    ),
    example(
        "05-partition-by-size",
        &["example-partition-by-size"],
        &["partition 1g.20gb"],
        1,
    ),
    example("06-hard", &["example-hard"], &["partition 1g.20gb"], 1),
    example("07-any", &["example-any"], &["capped 10Gi"], 1),
    example(
        "08-first-available",
        &["example-first-available"],
        &["partition 1g.20gb"],
        1,
    ),
    example(
        "09-two-partitions",
        &["example-two-partitions"],
        &["partition 1g.10gb", "partition 1g.10gb"],
        2,
    ),
    example(
        "10-replicas",
        &["example-replicas"],
        &["capped 10Gi", "capped 10Gi"],
        2,
    ),
    example(
        "11-timeshared",
        &["example-timeshared"],
        &["timeshared", "timeshared"],
        1,
    ),
    example(
        "12-extended-resources",
        &["example-extended-resources"],
        &["exclusive", "partition 1g.10gb"],
        2,
    ),
    example(
        "13-concurrent",
        &["example-concurrent-a", "example-concurrent-b"],
        &["concurrent 10Gi", "concurrent 20Gi"],
        1,
    ),
    labelled(
        "virtual-machines",
        example(
            "14-virtual-machine",
            &["example-virtual-machine"],
            &["passthrough"],
            1,
        ),
    ),
    labelled(
        "oversubscribed",
        example(
            "15-oversubscribed",
            &["example-oversubscribed"],
            &["oversubscribed 60Gi", "oversubscribed 60Gi"],
            1,
        ),
    ),
    example(
        "16-priority",
        &["example-priority"],
        &["capped 20Gi", "capped 20Gi"],
        1,
    ),
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

#[test]
fn every_example_gets_the_devices_that_it_asks_for() -> anyhow::Result<()> {
    let entries =
        std::fs::read_dir(folder())?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut found: Vec<_> = entries
        .filter(|name| name.starts_with(|first: char| first.is_ascii_digit()))
        .collect();
    found.sort();
    ensure!(
        found == EXAMPLES.each_ref().map(|example| example.folder),
        "{found:?}"
    );
    run_on_a_hollow_node(async |case: &Case| {
        try_join_all(EXAMPLES.iter().map(|example| placed(case, example)))
            .await
            .map(drop)
    })
}

async fn placed(case: &Case, example: &Example) -> anyhow::Result<()> {
    gets_its_devices(case, example)
        .await
        .with_context(|| example.folder.to_owned())
}

async fn gets_its_devices(case: &Case, example: &Example) -> anyhow::Result<()> {
    // A node with two GPUs for each example, because the READMEs assume a cluster that nobody else uses.
    let node = case.unique(example.folder);
    case.hollow_node(&node).await?;
    if let Some(label) = example.label {
        let nodes: Api<Node> = Api::all(case.client.clone());
        let label =
            json!({"metadata": {"labels": {format!("example.tranche.dev/{label}"): "true"}}});
        nodes
            .patch(&node, &PatchParams::default(), &Patch::Merge(label))
            .await?;
    }
    let mut namespaces = Vec::new();
    for name in example.namespaces {
        namespaces.push(namespace_on(case, name, &node).await?);
    }
    let file = folder().join(example.folder);
    let removed = file.clone();
    case.afterwards(example.folder, async move {
        let options = ["delete", "--ignore-not-found", "--wait=false", "--filename"];
        tool::run("kubectl", &options, &[&removed]).await
    });
    tool::run("kubectl", &["apply", "--filename"], &[&file]).await?;
    let mut has: Vec<Allocated> = Vec::new();
    let all = wait::for_answer("the devices", wait::USUAL, async || {
        has.clear();
        for namespace in &namespaces {
            has.extend(allocated(case, namespace, None).await?);
            let pods = namespace.pods().list(&ListParams::default()).await?;
            ensure!(
                pods.items.iter().all(is_running),
                "not all pods run; there is {has:?}"
            );
        }
        has.sort();
        let told: Vec<_> = has.iter().map(ToString::to_string).collect();
        ensure!(told == example.has, "{told:?}, not {:?}", example.has);
        Ok(Some(()))
    });
    all.await?;
    let mut gpus: Vec<_> = has.iter().map(|device| &device.uuid).collect();
    gpus.sort();
    gpus.dedup();
    ensure!(
        gpus.len() == example.gpus,
        "on {} GPUs: {has:?}",
        gpus.len()
    );
    Ok(())
}

fn is_running(pod: &k8s_openapi::api::core::v1::Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    phase == Some("Running")
}

/// A namespace whose pods run on one node.
async fn namespace_on(case: &Case, name: &str, node: &str) -> anyhow::Result<Namespace> {
    let selector = format!("kubernetes.io/hostname={node}");
    let annotations = json!({"scheduler.alpha.kubernetes.io/node-selector": selector});
    let namespace: CoreNamespace =
        serde_json::from_value(json!({"metadata": {"name": name, "annotations": annotations}}))?;
    Api::all(case.client.clone())
        .create(&PostParams::default(), &namespace)
        .await?;
    let namespace = case.adopt(name);
    let accounts: Api<ServiceAccount> = Api::namespaced(case.client.clone(), name);
    wait::for_one(
        accounts,
        "default",
        "the namespace's account",
        wait::USUAL,
        |it| it.map(drop),
    )
    .await?;
    Ok(namespace)
}
