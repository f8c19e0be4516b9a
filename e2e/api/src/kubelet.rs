//! The kubelet of all nodes: it reports room on nodes, and starts pods as soon as they have a node.

use std::collections::HashMap;
use std::pin::pin;
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::control_plane::ControlPlane;
use crate::{controller, node_plugin};

/// The pause before a pod's program is started again.
const AGAIN: Duration = Duration::from_secs(1);

/// A pod's program. It ends when this is dropped.
struct Running(JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves all nodes and pods, for ever.
pub(crate) async fn run(client: Client, control_plane: ControlPlane) -> anyhow::Result<()> {
    let all = watcher::Config::default;
    let nodes: Api<Node> = Api::all(client.clone());
    let pods: Api<Pod> = Api::all(client.clone());
    let mut of_nodes = pin!(watcher(nodes, all()).default_backoff());
    let mut of_pods = pin!(watcher(pods, all()).default_backoff());
    let mut running = HashMap::new();
    loop {
        tokio::select! {
            Some(event) = of_nodes.next() => if let Event::InitApply(node) | Event::Apply(node) = event? {
                report(&client, &node).await?;
            },
            Some(event) = of_pods.next() => match event? {
                Event::InitApply(pod) | Event::Apply(pod) => serve(&client, &control_plane, &mut running, pod),
                Event::Delete(pod) => drop(running.remove(&uid(&pod))),
                Event::Init | Event::InitDone => {}
            },
        }
    }
}

fn uid(pod: &Pod) -> String {
    pod.uid().unwrap_or_default()
}

/// Reports the room of a node that has not reported it.
async fn report(client: &Client, node: &Node) -> anyhow::Result<()> {
    if node
        .status
        .as_ref()
        .is_some_and(|status| status.allocatable.is_some())
    {
        return Ok(());
    }
    let room = json!({"cpu": "1000", "memory": "1000Gi", "pods": "1000"});
    let ready = json!({"type": "Ready", "status": "True", "reason": "Hollow", "message": "it has no machine"});
    let status = json!({"status": {"capacity": room, "allocatable": room, "conditions": [ready]}});
    let nodes: Api<Node> = Api::all(client.clone());
    nodes
        .patch_status(
            &node.name_any(),
            &PatchParams::default(),
            &Patch::Strategic(status),
        )
        .await?;
    Ok(())
}

/// Starts a pod that has a node, or ends one that is being deleted.
fn serve(
    client: &Client,
    control_plane: &ControlPlane,
    running: &mut HashMap<String, Running>,
    pod: Pod,
) {
    let uid = uid(&pod);
    if pod
        .spec
        .as_ref()
        .is_none_or(|spec| spec.node_name.is_none())
    {
        return;
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    if pod.metadata.deletion_timestamp.is_some() {
        running.remove(&uid);
        tokio::spawn(async move {
            let preconditions = Preconditions {
                uid: pod.uid(),
                resource_version: None,
            };
            let now = DeleteParams::default()
                .grace_period(0)
                .preconditions(preconditions);
            // It may already be gone.
            let _ = pods.delete(&pod.name_any(), &now).await;
        });
        return;
    }
    running.entry(uid).or_insert_with(|| {
        let control_plane = control_plane.clone();
        Running(tokio::spawn(async move {
            loop {
                let Err(error) = start(&control_plane, &pods, &pod).await else {
                    return;
                };
                eprintln!("pod {}: {error:#}", pod.name_any());
                tokio::time::sleep(AGAIN).await;
            }
        }))
    });
}

/// Reports that the pod runs, and runs its program if tests need the real one.
async fn start(control_plane: &ControlPlane, pods: &Api<Pod>, pod: &Pod) -> anyhow::Result<()> {
    let address = address(pod);
    let status = json!({"status": started(pod, &address)});
    pods.patch_status(
        &pod.name_any(),
        &PatchParams::default(),
        &Patch::Strategic(status),
    )
    .await
    .context("its status")?;
    match pod
        .labels()
        .get("app.kubernetes.io/component")
        .map(String::as_str)
    {
        Some("node-plugin") => node_plugin::run(control_plane, pod).await,
        Some("controller") => controller::run(control_plane, pod, &address).await,
        _ => Ok(()),
    }
}

/// A loopback address for this pod only, because replicas listen on the same ports.
fn address(pod: &Pod) -> String {
    let digits = u32::from_str_radix(&uid(pod)[..6], 16).unwrap_or(1);
    std::net::Ipv4Addr::from_bits(0x7f00_0000 | digits).to_string()
}

/// The status of a running pod.
fn started(pod: &Pod, address: &str) -> Value {
    let now = Timestamp::now().strftime("%FT%TZ").to_string();
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers).map(|container| json!({
        "name": container.name, "image": container.image, "imageID": "", "ready": true, "started": true, "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    }));
    let conditions = ["Initialized", "ContainersReady", "Ready"]
        .map(|kind| json!({"type": kind, "status": "True"}));
    json!({
        "phase": "Running", "startTime": now, "podIP": address, "podIPs": [{"ip": address}],
        "containerStatuses": containers.collect::<Vec<_>>(), "conditions": conditions,
    })
}
