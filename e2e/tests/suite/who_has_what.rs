//! The commands of docs/who-has-what.md.

use anyhow::{Context, ensure};
use tokio::process::Command;
use tranche_e2e::{Case, Request, run, wait};

const PAGE: &str = include_str!("../../../docs/who-has-what.md");

/// The page's command that mentions `word`, with its placeholders replaced.
fn command(word: &str, placeholders: &[(&str, &str)]) -> anyhow::Result<String> {
    let mut commands = PAGE
        .lines()
        .filter_map(|line| line.strip_prefix("    kubectl "));
    let command = commands
        .find(|line| line.contains(word))
        .context("no such command")?;
    let command = placeholders
        .iter()
        .fold(command.to_owned(), |command, (from, to)| {
            command.replace(from, to)
        });
    Ok(format!("kubectl {command}"))
}

/// What a command prints; nothing where grep finds nothing.
async fn output(command: &str) -> anyhow::Result<String> {
    let output = Command::new("bash").args(["-c", command]).output().await?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(errors.is_empty(), "{command}: {errors}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn the_commands_of_the_page_find_devices_by_pod_and_pods_by_gpu() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("who").await?;
        let uuids = [&case.gpus[0].uuid, &case.gpus[1].uuid];
        for (name, uuid) in ["one", "two"].into_iter().zip(uuids) {
            let request = Request::capped("1Gi", "10").on(uuid);
            namespace.idle(name, &request).await?.started().await?;
        }
        let pod = |name: &str| format!("{}/{name}", namespace.name());
        let of_gpu = command("grep GPU-UUID", &[("GPU-UUID", uuids[1].as_str())])?;
        // The node writes the status after the pod's start.
        let found = wait::for_answer("the GPU's pods", wait::USUAL, async || {
            let found = output(&of_gpu).await?;
            Ok((!found.is_empty()).then_some(found))
        })
        .await?;
        ensure!(
            found.trim_end() == format!("{}\t{}", uuids[1], pod("two")),
            "{found}"
        );
        let placeholders = [("NAMESPACE", namespace.name()), ("POD", "one")];
        let of_pod = command("grep --word-regexp POD", &placeholders)?;
        let found = wait::for_answer("the pod's devices", wait::USUAL, async || {
            let found = output(&of_pod).await?;
            Ok(found.contains("gpuUUID").then_some(found))
        })
        .await?;
        ensure!(
            found.lines().count() == 1 && found.contains(uuids[0]),
            "{found}"
        );
        let all = output(&command("tier}", &[])?).await?;
        let line = format!("{}\tone\tcapped\t{}", namespace.name(), uuids[0]);
        ensure!(all.lines().any(|it| it == line), "{all}");
        Ok(())
    })
}
