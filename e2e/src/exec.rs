//! Commands in containers.

use anyhow::{Context, anyhow, ensure};
use futures::future::OptionFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, AttachParams};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The result of a command.
#[derive(Clone, Debug)]
pub struct Exit {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Exit {
    /// Its standard output, if it succeeded.
    pub fn ok(self) -> anyhow::Result<String> {
        ensure!(
            self.code == 0,
            "exit status {}: {}{}",
            self.code,
            self.stdout,
            self.stderr
        );
        Ok(self.stdout)
    }
}

/// Runs a command in a container of the pod, by default its first.
pub async fn run(
    pods: &Api<Pod>,
    name: &str,
    container: Option<&str>,
    command: &[&str],
) -> anyhow::Result<Exit> {
    let context = || format!("running {command:?} in {name}");
    let params = AttachParams {
        container: container.map(str::to_owned),
        stdin: false,
        stdout: true,
        stderr: true,
        ..AttachParams::default()
    };
    let mut process = pods
        .exec(name, command.iter().copied(), &params)
        .await
        .with_context(context)?;
    let end = process.take_status();
    let (output, errors) = (process.stdout(), process.stderr());
    let (stdout, stderr, ended) = tokio::join!(all(output), all(errors), OptionFuture::from(end));
    let status = ended
        .flatten()
        .ok_or_else(|| anyhow!("no exit status"))
        .with_context(context)?;
    let code = match status.status.as_deref() {
        Some("Success") => 0,
        _ => status
            .details
            .iter()
            .flat_map(|details| details.causes.iter().flatten())
            .find(|cause| cause.reason.as_deref() == Some("ExitCode"))
            .and_then(|cause| cause.message.as_deref()?.parse().ok())
            .ok_or_else(|| anyhow!("{}", status.message.clone().unwrap_or_default()))
            .with_context(context)?,
    };
    Ok(Exit {
        code,
        stdout: stdout?,
        stderr: stderr?,
    })
}

async fn all(stream: Option<impl AsyncRead + Unpin>) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    if let Some(mut stream) = stream {
        stream.read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
