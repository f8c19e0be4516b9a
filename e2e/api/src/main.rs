//! Runs a command beside a Kubernetes control plane that consists of processes: etcd, the API server, the controller-manager and the
//! scheduler, with the chart installed and its controller running. Its nodes are hollow, as kubemark calls them: they have no machine, and their pods
//! only say that they run.
//!
//! ```text
//!  control_plane ─► chart ─► the command, with KUBECONFIG
//!        │
//!        └─► kubelet: starts pods of all nodes ─┬─► node_plugin: the real writer of GpuNodes, for made-up GPUs
//!                                               └─► controller: the real program
//! ```
//!
//! A node with GPUs is a Node object with the label `nvidia.com/gpu.present=true`: the chart's DaemonSet does the rest. Every process
//! ends with this one, even if this one is killed. Its folder is removed, unless the command failed.
//!
//! Started under the name of another program of Tranche, it is that program, so that one build makes all programs of the tests.
#![forbid(unsafe_code)]

mod account;
mod chart;
mod control_plane;
mod controller;
mod kubelet;
mod node_plugin;
mod process;
mod programs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

use crate::control_plane::ControlPlane;

/// Runs a command beside a Kubernetes control plane with hollow GPU nodes.
#[derive(Debug, Parser)]
struct Args {
    /// The folder of etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl.
    #[arg(long)]
    kubernetes: PathBuf,

    /// Starts only etcd and the API server, with the chart's CustomResourceDefinitions.
    #[arg(long)]
    only_api_server: bool,

    /// The command. It gets KUBECONFIG, and kubectl on its PATH.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

fn main() -> anyhow::Result<ExitCode> {
    match programs::called() {
        Some(program) => program.run(),
        None => hollow(),
    }
}

// One thread starts all processes, because they end with the thread that started them.
#[tokio::main(flavor = "current_thread")]
async fn hollow() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut stop = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let folder = tempfile::Builder::new()
        .prefix("tranche-hollow-")
        .tempdir()?;
    let outcome: anyhow::Result<ExitCode> = tokio::select! {
        outcome = run(&args, folder.path()) => outcome,
        _ = stop.recv() => Ok(ExitCode::from(143)),
        _ = interrupted.recv() => Ok(ExitCode::from(130)),
    };
    if !matches!(outcome, Ok(code) if code == ExitCode::SUCCESS) {
        eprintln!("the logs of the control plane: {}", folder.keep().display());
    }
    outcome
}

async fn run(args: &Args, folder: &Path) -> anyhow::Result<ExitCode> {
    let control_plane = ControlPlane::start(&args.kubernetes, folder).await?;
    let kubelet = if args.only_api_server {
        chart::definitions(&control_plane).await?;
        tokio::spawn(std::future::pending())
    } else {
        control_plane.schedule()?;
        let client = control_plane.client().await?;
        let kubelet = tokio::spawn(kubelet::run(client.clone(), control_plane.clone()));
        chart::install(&control_plane, client).await?;
        kubelet
    };
    let (program, arguments) = args.command.split_first().context("a command")?;
    let mut command = process::command(Path::new(program));
    command.args(arguments).envs(control_plane.environment());
    let status = tokio::select! {
        status = command.status() => status.with_context(|| program.clone())?,
        ended = kubelet => bail!("the kubelet of the hollow nodes ended: {:?}", ended?),
    };
    control_plane.stop().await?;
    Ok(match status.code() {
        Some(0) => ExitCode::SUCCESS,
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    })
}
