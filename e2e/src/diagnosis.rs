//! Prints the state of the cluster after a failed test.

use std::fmt::Write;

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, ListParams, LogParams};
use kube::{Client, ResourceExt};

use crate::SYSTEM;
use crate::node::Node;

const LOG_LINES: i64 = 40;

/// Prints the namespaces' pods, claims and events, and the logs of Tranche's own pods. Without a node no kubelet has logs.
pub async fn print(client: &Client, node: Option<&Node>, namespaces: &[String]) {
    let mut text = String::from("--- what there was when the test failed\n");
    for namespace in namespaces {
        if let Err(error) = describe(client, namespace, &mut text).await {
            let _ = writeln!(text, "{namespace}: {error:#}");
        }
    }
    let Some(node) = node else {
        eprintln!("{text}---");
        return;
    };
    if let Err(error) = logs(client, &mut text).await {
        let _ = writeln!(text, "{SYSTEM}: {error:#}");
    }
    match node.claim_files().await {
        Ok(files) => {
            let _ = writeln!(
                text,
                "claims' files on {}: {}",
                node.name(),
                files.join(" ")
            );
        }
        Err(error) => {
            let _ = writeln!(text, "{error:#}");
        }
    }
    eprintln!("{text}---");
}

async fn describe(client: &Client, namespace: &str, text: &mut String) -> anyhow::Result<()> {
    let all = ListParams::default();
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    for pod in pods.list(&all).await? {
        let status = pod.status.clone().unwrap_or_default();
        writeln!(
            text,
            "pod {namespace}/{}: {} {}",
            pod.name_any(),
            status.phase.as_deref().unwrap_or("?"),
            serde_json::to_string(&status.container_statuses)?
        )?;
    }
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    for claim in claims.list(&all).await? {
        writeln!(
            text,
            "claim {namespace}/{}: {}",
            claim.name_any(),
            serde_json::to_string(&claim.status)?
        )?;
    }
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    for event in events.list(&all).await? {
        writeln!(
            text,
            "event {}/{}: {}: {}",
            event.involved_object.kind.as_deref().unwrap_or("?"),
            event.involved_object.name.as_deref().unwrap_or("?"),
            event.reason.as_deref().unwrap_or("?"),
            event.message.as_deref().unwrap_or("?"),
        )?;
    }
    Ok(())
}

async fn logs(client: &Client, text: &mut String) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), SYSTEM);
    let tail = LogParams {
        tail_lines: Some(LOG_LINES),
        ..LogParams::default()
    };
    for pod in pods.list(&ListParams::default()).await? {
        let name = pod.name_any();
        let output = pods
            .logs(&name, &tail)
            .await
            .unwrap_or_else(|error| error.to_string());
        writeln!(text, "log of {name}:\n{output}")?;
    }
    Ok(())
}
