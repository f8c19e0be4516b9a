//! The metrics of shares in use.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use tranche_e2e::{Case, Request, SYSTEM, account, run_on_a_node, wait};

const GI: u64 = 1 << 30;
/// The port on which the plugin and the controller serve their metrics.
const PORT: u16 = 8443;

/// The pod's answer to a GET of its metrics with this token.
async fn scrape(case: &Case, pod: &Pod, token: Option<&str>) -> anyhow::Result<(u16, String)> {
    get(case, pod, "/metrics", token).await
}

/// The response of the node's plugin to a reader of this path.
pub async fn read(case: &Case, path: &str, token: &str) -> anyhow::Result<String> {
    let plugin = case.plugin().ready(None).await?;
    let (code, text) = get(case, &plugin, path, Some(token)).await?;
    ensure!(code == 200, "{code}: {text}");
    Ok(text)
}

async fn controller(case: &Case) -> anyhow::Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(case.client.clone(), SYSTEM);
    let controllers = ListParams::default().labels("app.kubernetes.io/component=controller");
    let first = pods.list(&controllers).await?.items.into_iter().next();
    first.context("a controller")
}

/// The pod's answer to a GET of a path of its metrics' port.
async fn get(
    case: &Case,
    pod: &Pod,
    path: &str,
    token: Option<&str>,
) -> anyhow::Result<(u16, String)> {
    let pods: Api<Pod> = Api::namespaced(case.client.clone(), SYSTEM);
    let mut forwarded = pods.portforward(&pod.name_any(), &[PORT]).await?;
    let stream = forwarded.take_stream(PORT).context("a stream")?;
    Ok(tranche_serving::testing::get(stream, path, token).await?)
}

/// The token of a new ServiceAccount, with or without the rights to read metrics and usage.
pub async fn token(case: &Case, namespace: &str, reader: bool) -> anyhow::Result<String> {
    let name = if reader { "reader" } else { "other" };
    if reader {
        for role in ["tranche-metrics-reader", "tranche-node-usage-reader"] {
            account::bind(case, namespace, name, role).await?;
        }
    }
    account::create(&case.client, namespace, name).await
}

/// The lines of the plugin's metrics about shares of a namespace.
async fn shares(case: &Case, token: &str, namespace: &str) -> anyhow::Result<Vec<String>> {
    let text = read(case, "/metrics", token).await?;
    let label = format!("namespace=\"{namespace}\"");
    let ours = |line: &&str| line.starts_with("tranche_share_") && line.contains(&label);
    Ok(text.lines().filter(ours).map(str::to_owned).collect())
}

/// The value of a metric in these lines.
fn value(lines: &[String], name: &str) -> Option<f64> {
    let line = lines
        .iter()
        .find(|line| line.starts_with(&format!("{name}{{")))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

#[test]
fn a_shares_numbers_are_its_own_and_the_dead_are_swept() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("metrics").await?;
        let token = token(case, namespace.name(), true).await?;
        let share = Request::capped("4Gi", "25").on(&case.gpus[0].uuid);
        let pod = namespace.started("pod", &share).await?;
        let used = async |wanted: u64| {
            wait::for_answer("the memory in use", wait::USUAL, async || {
                let lines = shares(case, &token, namespace.name()).await?;
                let used = value(&lines, "tranche_share_memory_used_bytes");
                #[expect(clippy::cast_precision_loss, reason = "whole GiB")]
                Ok((used == Some(wanted as f64)).then_some(lines))
            })
            .await
        };
        let hold =
            "tranche-workload hold --bytes 1Gi --beat 100 >/tmp/beats 2>&1 & echo $! >/tmp/pid
            until grep -q beat /tmp/beats; do usleep 20000; done";
        pod.stdout(&["sh", "-c", hold]).await?;
        let lines = used(GI).await?;
        for (name, expected) in [
            ("tranche_share_memory_limit_bytes", 4.0 * 1_073_741_824.0),
            ("tranche_share_compute_limit_ratio", 0.25),
            ("tranche_share_processes", 1.0),
            ("tranche_share_account_readable", 1.0),
        ] {
            ensure!(value(&lines, name) == Some(expected), "{name}: {lines:#?}");
        }
        let labels = format!("pod=\"{}\"", pod.name());
        let gpu = format!("gpu_uuid=\"{}\"", case.gpus[0].uuid);
        ensure!(
            lines
                .iter()
                .all(|line| line.contains(&labels) && line.contains(&gpu)),
            "{lines:#?}"
        );
        // No other process of the share runs, so the node must reclaim the memory.
        pod.stdout(&["sh", "-c", "kill -KILL $(cat /tmp/pid)"])
            .await?;
        used(0).await?;
        // Without a claim the numbers would be up to a minute old.
        namespace.started("other", &share).await?;
        pod.delete().await?;
        wait::for_answer("the share's end", wait::USUAL, async || {
            let lines = shares(case, &token, namespace.name()).await?;
            let is_there = lines.iter().any(|line| line.contains(&labels));
            Ok((!is_there).then_some(()))
        })
        .await
    })
}

/// Metrics name tenants' pods and claims, nodes and policies.
#[test]
fn only_who_may_read_them_gets_the_metrics() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("readers").await?;
        let reader = token(case, namespace.name(), true).await?;
        let other = token(case, namespace.name(), false).await?;
        let plugin = case.plugin().ready(None).await?;
        for pod in [plugin, controller(case).await?] {
            let name = pod.name_any();
            for (token, expected) in [
                (None, 401),
                (Some("forged"), 401),
                (Some(other.as_str()), 403),
            ] {
                let (code, text) = scrape(case, &pod, token).await?;
                ensure!(code == expected, "{name}: {code} for {expected}: {text}");
                ensure!(!text.contains("tranche_"), "{name}: {text}");
            }
            // A new binding takes effect after a moment.
            wait::for_answer("the metrics", wait::USUAL, async || {
                let (code, text) = scrape(case, &pod, Some(&reader)).await?;
                Ok((code == 200 && text.contains("# TYPE tranche_")).then_some(()))
            })
            .await
            .with_context(|| name.clone())?;
            // The open port of the health checks does not serve them.
            let port = if name.contains("node-plugin") {
                8085
            } else {
                8086
            };
            let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{name}:{port}/proxy/metrics");
            let request = http::Request::get(path).body(Vec::new())?;
            let open = case.client.request_text(request).await;
            ensure!(
                matches!(&open, Err(kube::Error::Api(status)) if status.code == 404),
                "{name}: {open:?}"
            );
        }
        Ok(())
    })
}

/// Waits until the plugin hears of a GPU's Xids. NVML reports an Xid to those who have it open, and for some seconds after an earlier
/// test changed a GPU's MIG mode or made the driver hang the plugin has not. An Xid without consequences shows that it has.
pub(crate) async fn xids_are_counted(case: &Case, token: &str, uuid: &str) -> anyhow::Result<()> {
    let series = format!("tranche_gpu_xids_total{{gpu_uuid=\"{uuid}\",xid=\"13\"}}");
    let count = async || {
        let text = read(case, "/metrics", token).await?;
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(&series)?.trim().parse::<f64>().ok());
        anyhow::Ok(value.unwrap_or(0.0))
    };
    let before = count().await?;
    wait::for_answer("the GPU's errors counted", wait::USUAL, async || {
        case.node.inject_xid(uuid, 13).await?;
        Ok((count().await? > before).then_some(()))
    })
    .await
}
