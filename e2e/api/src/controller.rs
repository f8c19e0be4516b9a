//! The controller: the real program, with the arguments and the rights of its pod.

use std::path::Path;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::account;
use crate::control_plane::ControlPlane;
use crate::process;

/// Runs the program at the pod's address. It is killed when this future is dropped.
pub(crate) async fn run(
    control_plane: &ControlPlane,
    pod: &Pod,
    address: &str,
) -> anyhow::Result<()> {
    let name = pod.name_any();
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let container = containers.into_iter().next().context("a container")?;
    let mut command = process::command(&control_plane.program("tranche-controller"));
    for argument in container.args.iter().flatten() {
        command.arg(argument.replace("0.0.0.0", address));
    }
    for variable in container.env.iter().flatten() {
        let source = variable
            .value_from
            .as_ref()
            .and_then(|from| from.field_ref.as_ref());
        let value = match source.map(|source| source.field_path.as_str()) {
            Some("metadata.name") => pod.name_any(),
            Some("metadata.namespace") => pod.namespace().unwrap_or_default(),
            Some(path) => bail!("{}: the field {path} is not known here", variable.name),
            None => variable.value.clone().unwrap_or_default(),
        };
        command.env(&variable.name, value);
    }
    let kubeconfig = control_plane.path(&format!("{name}.kubeconfig"));
    control_plane.write_kubeconfig(&kubeconfig, &account::token(control_plane, pod).await?)?;
    command.env("KUBECONFIG", &kubeconfig);
    let log = control_plane.path(&format!("{name}.log"));
    let mut child = process::start(command, Path::new(&log))?;
    bail!("it ended, {}: see {log}", child.wait().await?)
}
