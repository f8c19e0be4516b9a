//! The tools of the cluster: `kubectl`, `helm`.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, ensure};
use tokio::process::Command;

/// Runs a tool with `options` followed by `files`. An error contains its stderr.
pub async fn run(program: &str, options: &[&str], files: &[&Path]) -> anyhow::Result<()> {
    output(program, options, files).await.map(drop)
}

/// The same; returns its stdout.
pub async fn output(program: &str, options: &[&str], files: &[&Path]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(options)
        .args(files)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("running {program}: source target/cluster/env"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        options.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}
