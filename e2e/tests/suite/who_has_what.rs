//! The commands of docs/who-has-what.md, and the status that they read.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::process::Command;
use tranche_api::names::DRIVER;
use tranche_e2e::namespace::{IDLE, Source};
use tranche_e2e::{Case, Namespace, Request, run_on_a_node, wait};

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

/// The output of a command; empty where grep finds nothing.
async fn output(command: &str) -> anyhow::Result<String> {
    let output = Command::new("bash").args(["-c", command]).output().await?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(errors.is_empty(), "{command}: {errors}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn the_commands_of_the_page_find_devices_by_pod_and_pods_by_gpu() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("who").await?;
        let uuids = [&case.gpus[0].uuid, &case.gpus[1].uuid];
        for (name, uuid) in ["one", "two"].into_iter().zip(uuids) {
            let request = Request::capped("1Gi", "10").on(uuid);
            namespace.started(name, &request).await?;
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
        let all = command("tier}", &[])?;
        let line = format!("{}\tone\tcapped\t{}", namespace.name(), uuids[0]);
        wait::for_answer("the pod among all", wait::USUAL, async || {
            let found = output(&all).await?;
            Ok(found.lines().any(|it| it == line).then_some(()))
        })
        .await
    })
}

/// Claims whose pods come and go.
const CLAIMS: usize = 8;
/// How often each claim gets another pod: more than a hundred pods in total.
const PODS: usize = 13;

/// The shares that are allocated to a claim, and those in its status.
fn shares(claim: &ResourceClaim) -> [BTreeSet<Option<String>>; 2] {
    let status = claim.status.as_ref();
    let allocated =
        status.and_then(|it| it.allocation.as_ref()?.devices.as_ref()?.results.as_ref());
    let described = status.and_then(|it| it.devices.as_ref());
    [
        allocated
            .into_iter()
            .flatten()
            .map(|it| it.share_id.clone())
            .collect(),
        described
            .into_iter()
            .flatten()
            .filter(|it| it.driver == DRIVER && it.data.is_some())
            .map(|it| it.share_id.clone())
            .collect(),
    ]
}

/// Gives a claim one pod after the other.
async fn comes_and_goes(namespace: &Namespace, claim: &str) -> anyhow::Result<()> {
    let claims = namespace.claims();
    for round in 0..PODS {
        let name = format!("{claim}-{round}");
        let pod = namespace.pod(&name, &[Source::Claim(claim)], &IDLE).await?;
        pod.started().await?;
        wait::for_answer("the status of the pod's share", wait::USUAL, async || {
            let [allocated, described] = shares(&claims.get(claim).await?);
            let stale = described.difference(&allocated).count();
            // Not repeated until it is right, because it must never be wrong.
            assert_eq!(stale, 0, "{name}: {described:?}, allocated {allocated:?}");
            Ok((!described.is_empty() && described == allocated).then_some(()))
        })
        .await?;
        pod.delete().await?;
        wait::for_answer("a claim without a share", wait::USUAL, async || {
            let [allocated, described] = shares(&claims.get(claim).await?);
            Ok((allocated.is_empty() && described.is_empty()).then_some(()))
        })
        .await?;
    }
    Ok(())
}

#[test]
fn a_claims_status_is_never_that_of_an_earlier_share() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("status").await?;
        let names: Vec<_> = (0..CLAIMS).map(|nth| format!("claim-{nth}")).collect();
        for name in &names {
            let share = Request::capped("1Gi", "10");
            namespace.claim(name, &share.spec()).await?;
        }
        try_join_all(names.iter().map(|name| comes_and_goes(&namespace, name))).await?;
        Ok(())
    })
}
