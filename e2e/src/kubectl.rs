//! Runs `kubectl tranche` as users do.

use std::path::PathBuf;
use std::process::{Output, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;
use tokio::process::Command;

/// The output of `kubectl tranche`.
#[derive(Debug)]
pub struct Written {
    /// Whether its exit code was 0.
    pub is_success: bool,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// The plugin that `TRANCHE_KUBECTL` names, or this checkout's, which is compiled with the suite.
pub fn binary() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("TRANCHE_KUBECTL") {
        return Ok(named.into());
    }
    let binary = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/debug/kubectl-tranche");
    ensure!(
        binary.exists(),
        "{} is missing: run the suite by `make e2e`",
        binary.display()
    );
    Ok(binary)
}

/// Runs the plugin, without a terminal.
pub async fn tranche(arguments: &[&str]) -> anyhow::Result<Written> {
    let binary = binary()?;
    let run = Command::new(&binary)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let Output {
        status,
        stdout,
        stderr,
    } = run.await.context("running kubectl-tranche")?;
    Ok(Written {
        is_success: status.success(),
        stdout: String::from_utf8(stdout)?,
        stderr: String::from_utf8(stderr)?,
    })
}

impl Written {
    /// Standard output of a command that must work.
    pub fn output(self) -> anyhow::Result<String> {
        ensure!(self.is_success, "{self:?}");
        Ok(self.stdout)
    }

    /// The value of a command with `--output json` that must work.
    pub fn json(self) -> anyhow::Result<Value> {
        let text = self.output()?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
    }

    /// The one line of a command that must not work.
    pub fn error(self) -> anyhow::Result<String> {
        let is_one_line = self.stderr.lines().count() == 1 && self.stderr.starts_with("error: ");
        ensure!(
            !self.is_success && self.stdout.is_empty() && is_one_line,
            "{self:?}"
        );
        Ok(self.stderr)
    }
}
