//! The chart, installed as a user does.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;

use crate::control_plane::ControlPlane;
use crate::process::{self, free_ports};

/// The namespace of the chart.
pub(crate) const NAMESPACE: &str = "tranche-system";
/// The node of the controller's pods. It has no GPUs, and no test removes it.
const NODE: &str = "hollow-system";

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/helm/tranche")
}

/// Installs the chart.
pub(crate) async fn install(control_plane: &ControlPlane, client: Client) -> anyhow::Result<()> {
    let nodes: Api<Node> = Api::all(client);
    let node = json!({"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}});
    nodes
        .create(&PostParams::default(), &serde_json::from_value(node)?)
        .await?;
    // Other programs on the machine may use the default ports.
    let [http, metrics] = free_ports()?;
    let chart = chart().display().to_string();
    let mut arguments = vec![
        "install",
        "tranche",
        &chart,
        "--namespace",
        NAMESPACE,
        "--create-namespace",
    ];
    let settings = [
        format!("controller.nodeSelector.kubernetes\\.io/hostname={NODE}"),
        format!("controller.httpPort={http}"),
        format!("controller.metricsPort={metrics}"),
        "controller.watchPendingPods=true".to_owned(),
        "controller.leaseDuration=5".to_owned(),
        // For its rights.
        "usageApi.enabled=true".to_owned(),
    ];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    run(control_plane, "helm", &arguments).await?;
    // The API server cannot reach it, because there is no cluster network. With an unreachable API no namespace can be removed.
    let usage_api = ["delete", "apiservice", "v1alpha1.usage.gpu.tranche.dev"];
    run(control_plane, "kubectl", &usage_api).await
}

/// Applies the chart's CustomResourceDefinitions.
pub(crate) async fn definitions(control_plane: &ControlPlane) -> anyhow::Result<()> {
    let crds = chart().join("crds").display().to_string();
    run(control_plane, "kubectl", &["apply", "--filename", &crds]).await?;
    run(
        control_plane,
        "kubectl",
        &[
            "wait",
            "--for",
            "condition=Established",
            "--filename",
            &crds,
        ],
    )
    .await
}

async fn run(
    control_plane: &ControlPlane,
    program: &str,
    arguments: &[&str],
) -> anyhow::Result<()> {
    let mut command = process::command(Path::new(program));
    command.args(arguments).envs(control_plane.environment());
    let output = command.output().await.with_context(|| program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
