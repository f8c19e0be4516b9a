//! Live usage through the API server, with users' own rights.

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Config, ResourceExt as _};
use serde_json::{Value, json};
use std::process::Stdio;
use tokio::process::Command;
use tranche_api::usage::NodeUsage;
use tranche_api::usage_api::{ClaimUsage, NodeUsageObject};
use tranche_e2e::kubectl::tranche;
use tranche_e2e::{Case, Request, SYSTEM, account, run, wait};

use crate::metrics;

const GI: u64 = 1 << 30;
/// The pods that serve the API.
const REPLICAS: &str = "app.kubernetes.io/component=usage-api";

/// The output of kubectl as the owner of a token, or its stderr.
async fn kubectl(token: &str, arguments: &[&str]) -> anyhow::Result<Result<String, String>> {
    let server = Config::infer().await?.cluster_url.to_string();
    // Without the suite's kubeconfig, whose client certificate would override the token.
    let output = Command::new("kubectl")
        .args([
            "--kubeconfig",
            "/dev/null",
            "--insecure-skip-tls-verify",
            "--server",
            &server,
            "--token",
            token,
        ])
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .context("running kubectl: source target/cluster/env")?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Ok(if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    })
}

/// The response of the node's plugin itself.
async fn of_the_plugin(case: &Case, token: &str) -> anyhow::Result<NodeUsage> {
    let text = metrics::read(case, tranche_api::usage::PATH, token).await?;
    Ok(serde_json::from_str(&text)?)
}

/// The suite's administrator reads with the library's client.
async fn of_the_claim(case: &Case, name: &str, claim: &str) -> anyhow::Result<()> {
    let usages: Api<ClaimUsage> = Api::namespaced(case.client.clone(), name);
    let usage = wait::for_answer("the memory in use", wait::USUAL, async || {
        let usage = usages.get(claim).await?;
        let holds = usage
            .devices
            .first()
            .is_some_and(|device| device.share.memory.used >= GI);
        Ok(holds.then_some(usage))
    })
    .await?;
    let device = &usage.devices[0];
    ensure!(
        device.gpu_uuid == case.gpus[0].uuid && usage.devices.len() == 1,
        "{usage:?}"
    );
    ensure!(
        device.share.memory.allocated == Some(4 * GI) && device.share.processes == 1,
        "{usage:?}"
    );
    ensure!(
        usage.nodes.iter().eq([case.node.name()]) && usage.problem.is_none(),
        "{usage:?}"
    );
    Ok(())
}

/// A tenant who may view its namespace reads with kubectl.
async fn a_tenant_sees_its_own(
    case: &Case,
    name: &str,
    claim: &str,
    neighbour: &str,
) -> anyhow::Result<()> {
    let tenant = account::create(&case.client, name, "tenant").await?;
    account::bind_here(case, name, "tenant", ("ClusterRole", "view")).await?;
    let table = wait::for_answer("the tenant's right", wait::USUAL, async || {
        Ok(
            kubectl(&tenant, &["get", "claimusages", "--namespace", name])
                .await?
                .ok(),
        )
    })
    .await?;
    let lines: Vec<&str> = table.lines().collect();
    ensure!(lines.len() == 2 && lines[0].starts_with("NAME"), "{table}");
    ensure!(
        lines[1].starts_with(claim) && lines[1].contains("4096Mi") && lines[1].contains("capped"),
        "{table}"
    );
    let json = kubectl(
        &tenant,
        &[
            "get",
            "claimusage",
            claim,
            "--namespace",
            name,
            "--output",
            "json",
        ],
    )
    .await?;
    let json: Value = serde_json::from_str(&json.map_err(anyhow::Error::msg)?)?;
    ensure!(json["devices"][0]["claim"]["name"] == claim, "{json}");
    let text = json.to_string();
    ensure!(
        !text.contains(neighbour) && !text.contains("remainder"),
        "{text}"
    );
    for arguments in [
        vec!["get", "claimusages", "--namespace", neighbour],
        vec!["get", "claimusages", "--all-namespaces"],
        vec!["get", "nodeusages"],
        vec!["get", "nodeusage", case.node.name()],
    ] {
        match kubectl(&tenant, &arguments).await? {
            Err(error) => ensure!(error.contains("Forbidden"), "{arguments:?}: {error}"),
            Ok(output) => bail!("{arguments:?}: {output}"),
        }
    }
    Ok(())
}

/// A user bound to the reader's role sees all; returns the token.
async fn a_reader_sees_all(case: &Case, name: &str, neighbour: &str) -> anyhow::Result<String> {
    let reader = account::create(&case.client, name, "reader").await?;
    account::bind(case, name, "reader", "tranche-usage-reader").await?;
    account::bind(case, name, "reader", "tranche-node-usage-reader").await?;
    let nodes = wait::for_answer("the reader's right", wait::USUAL, async || {
        Ok(kubectl(&reader, &["get", "nodeusages"]).await?.ok())
    })
    .await?;
    ensure!(
        nodes.lines().any(|line| line.starts_with(case.node.name())),
        "{nodes}"
    );
    let all = kubectl(&reader, &["get", "claimusages", "--all-namespaces"])
        .await?
        .map_err(anyhow::Error::msg)?;
    ensure!(all.contains(name) && all.contains(neighbour), "{all}");
    Ok(reader)
}

/// The API reports the plugin's numbers.
async fn as_the_plugin_says(case: &Case, reader: &str) -> anyhow::Result<()> {
    let objects: Api<NodeUsageObject> = Api::all(case.client.clone());
    wait::for_answer("the plugin's numbers", wait::USUAL, async || {
        let object = objects.get(case.node.name()).await?;
        let direct = of_the_plugin(case, reader).await?;
        let shares = |usage: &NodeUsage| -> Vec<(String, u64)> {
            let shares = usage.gpus.iter().flat_map(|gpu| &gpu.shares);
            shares
                .map(|it| (it.claim.uid.clone(), it.memory.used))
                .collect()
        };
        let usage = object
            .usage
            .with_context(|| format!("{:?}", object.problem))?;
        ensure!(shares(&direct).len() == 2, "{direct:?}");
        Ok((shares(&usage) == shares(&direct)).then_some(()))
    })
    .await?;
    Ok(())
}

/// The API's description of itself, and its errors for what it does not have.
async fn what_the_api_says(case: &Case, reader: &str) -> anyhow::Result<()> {
    let explained = kubectl(reader, &["explain", "claimusages.devices"]).await?;
    ensure!(
        explained
            .as_ref()
            .is_ok_and(|text| text.contains("ClaimUsage")),
        "{explained:?}"
    );
    let resources = kubectl(
        reader,
        &["api-resources", "--api-group", "usage.gpu.tranche.dev"],
    )
    .await?;
    ensure!(
        resources
            .as_ref()
            .is_ok_and(|text| text.contains("nodeusages")),
        "{resources:?}"
    );
    let watch = http::Request::get("/apis/usage.gpu.tranche.dev/v1alpha1/nodeusages?watch=true")
        .body(Vec::new())?;
    match case.client.request_text(watch).await {
        Err(kube::Error::Api(status)) => ensure!(status.code == 405, "{status:?}"),
        other => bail!("a watch: {other:?}"),
    }
    Ok(())
}

#[test]
fn a_tenant_reads_its_claims_and_an_administrator_every_node() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("usage").await?;
        let neighbour = case.namespace("neighbour").await?;
        let share = Request::capped("4Gi", "25").on(&case.gpus[0].uuid);
        let (pod, other) = (
            namespace.idle("pod", &share).await?,
            neighbour.idle("other", &share).await?,
        );
        pod.started().await?;
        other.started().await?;
        let hold = "tranche-workload hold --bytes 1Gi --beat 100 >/tmp/beats 2>&1 &
            until grep -q beat /tmp/beats; do usleep 20000; done";
        pod.stdout(&["sh", "-c", hold]).await?;
        let name = namespace.name();
        let claims = namespace.claims().list(&ListParams::default()).await?;
        let claim = claims.items.first().context("a claim")?.name_any();

        of_the_claim(case, name, &claim).await?;
        a_tenant_sees_its_own(case, name, &claim, neighbour.name()).await?;
        let reader = a_reader_sees_all(case, name, neighbour.name()).await?;
        as_the_plugin_says(case, &reader).await?;
        what_the_api_says(case, &reader).await?;
        Ok(())
    })
}

/// A program holds 1 GiB in a share of 4 GiB. `kubectl tranche` shows it to an administrator and to a tenant, but not to a user without
/// the right.
#[test]
fn kubectl_tranche_shows_use_with_the_users_own_rights() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("shown").await?;
        let name = namespace.name();
        let uuid = &case.gpus[0].uuid;
        let pod = namespace
            .idle("holder", &Request::capped("4Gi", "25").on(uuid))
            .await?;
        pod.started().await?;
        let hold = "tranche-workload hold --bytes 1Gi --beat 100 >/tmp/beats 2>&1 &
            until grep -q beat /tmp/beats; do usleep 20000; done";
        pod.stdout(&["sh", "-c", hold]).await?;

        let pods = ["top", "pods", "--namespace", name, "--output", "json"];
        let holds = |json: &Value| json["pods"][0]["used"]["memory"].as_u64() >= Some(GI);
        let row = wait::for_answer("the memory in use", wait::USUAL, async || {
            let json = tranche(&pods).await?.json()?;
            Ok(holds(&json).then_some(json))
        })
        .await?;
        ensure!(row["pods"][0]["pod"] == "holder", "{row}");
        let top = tranche(&["top", "gpus", "--output", "json"]).await?;
        ensure!(!top.stderr.contains("usage is"), "{top:?}");
        let gpus = top.json()?;
        let mut rows = gpus["gpus"].as_array().context("rows")?.iter();
        let of_gpu = rows.find(|row| row["uuid"] == **uuid).context("the GPU")?;
        ensure!(of_gpu["used"]["memory"].as_u64() >= Some(GI), "{of_gpu}");
        let claims = namespace.claims().list(&ListParams::default()).await?;
        let claim = claims.items.first().context("a claim")?.name_any();
        let holder = format!("{name}/{claim}");
        let map = tranche(&["map", "--ascii"]).await?.output()?;
        let shown = format!("{holder} 4Gi 25% (uses 1");
        ensure!(map.contains(&shown), "{map}");
        let by_claim = ["cost", "--by", "claim", "--output", "json"];
        let cost = tranche(&by_claim).await?.json()?;
        let mut sizes = cost["rightSizes"].as_array().context("sizes")?.iter();
        let size = sizes
            .find(|it| it["claim"] == *holder)
            .with_context(|| format!("no size of {holder}: {cost}"))?;
        ensure!(
            size["requestedMemory"] == 4 * GI && size["suggestedMemory"].as_u64() < Some(4 * GI),
            "{size}"
        );

        // Both users may list the claims of the namespace; only one may also view the use.
        let (tenant, blind) = (case.unique("tenant"), case.unique("blind"));
        for (role, group, resource, users) in [
            (
                "claims",
                "resource.k8s.io",
                "resourceclaims",
                &[&tenant, &blind][..],
            ),
            ("usage", "usage.gpu.tranche.dev", "claimusages", &[&tenant]),
        ] {
            let made: Role = serde_json::from_value(json!({
                "metadata": {"name": role},
                "rules": [{"apiGroups": [group], "resources": [resource], "verbs": ["list"]}],
            }))?;
            let subjects: Vec<Value> = users
                .iter()
                .map(|user| json!({"kind": "User", "name": user}))
                .collect();
            let binding: RoleBinding = serde_json::from_value(json!({
                "metadata": {"name": role},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
                "subjects": subjects,
            }))?;
            let post = PostParams::default();
            Api::namespaced(case.client.clone(), name)
                .create(&post, &made)
                .await?;
            Api::namespaced(case.client.clone(), name)
                .create(&post, &binding)
                .await?;
        }
        let as_tenant = [&pods[..], &["--as", &tenant]].concat();
        let only_its = format!("usage is shown of claims in {name} only, and not of GPUs");
        wait::for_answer("the tenant's rights", wait::USUAL, async || {
            let seen = tranche(&as_tenant).await?;
            let is_told = seen.stderr.contains(&only_its);
            Ok((is_told && holds(&seen.json()?)).then_some(()))
        })
        .await?;
        let seen = tranche(&[&pods[..], &["--as", &blind]].concat()).await?;
        let why = "usage is not shown: you may not list nodeusages.usage.gpu.tranche.dev";
        ensure!(seen.stderr.contains(why), "{seen:?}");
        let json = seen.json()?;
        ensure!(
            json["pods"][0]["pod"] == "holder" && json["pods"][0].get("used").is_none(),
            "{json}"
        );
        Ok(())
    })
}

#[test]
fn a_killed_replica_is_not_missed() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let pods: Api<Pod> = Api::namespaced(case.client.clone(), SYSTEM);
        let of_the_api = ListParams::default().labels(REPLICAS);
        let replicas = pods.list(&of_the_api).await?.items;
        ensure!(replicas.len() >= 2, "{} replicas", replicas.len());
        let objects: Api<NodeUsageObject> = Api::all(case.client.clone());
        let node = case.node.name();
        // One after the other, so that each replica answers alone once.
        for replica in replicas {
            pods.delete(
                &replica.name_any(),
                &DeleteParams::default().grace_period(0),
            )
            .await?;
            wait::for_answer("usage again", wait::SERVED_AGAIN, async || {
                let usage = objects.get(node).await.ok().and_then(|object| object.usage);
                Ok(usage.map(drop))
            })
            .await?;
            wait::for_all(
                pods.clone(),
                kube::runtime::watcher::Config::default().labels(REPLICAS),
                "two ready replicas",
                wait::USUAL,
                |pods| {
                    let ready = pods
                        .values()
                        .filter(|pod| tranche_e2e::system::is_ready(pod))
                        .count();
                    (ready >= 2).then_some(())
                },
            )
            .await?;
        }
        Ok(())
    })
}
