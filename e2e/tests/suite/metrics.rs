//! What operators see of the shares in use.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tranche_e2e::{Case, Request, run, wait};

const GI: u64 = 1 << 30;
/// A second until the node looks, and what a busy machine adds.
const SWEPT: Duration = Duration::from_secs(5);

/// The lines of the plugin's metrics about shares of a namespace.
async fn shares(case: &Case, namespace: &str) -> anyhow::Result<Vec<String>> {
    let plugin = case.plugin().ready(None).await?;
    let name = plugin
        .metadata
        .name
        .context("the plugin's pod has a name")?;
    let own = plugin.metadata.namespace.unwrap_or_default();
    let path = format!("/api/v1/namespaces/{own}/pods/{name}:8085/proxy/metrics");
    let request = http::Request::get(path).body(Vec::new())?;
    let text = case.client.request_text(request).await?;
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
    run(async |case: &Case| {
        let namespace = case.namespace("metrics").await?;
        let share = Request::capped("4Gi", "25").on(&case.gpus[0].uuid);
        let pod = namespace.idle("pod", &share).await?;
        pod.started().await?;
        let used = async |wanted: u64, limit: Duration| {
            wait::for_answer("the memory in use", limit, async || {
                let lines = shares(case, namespace.name()).await?;
                let used = value(&lines, "tranche_share_memory_used_bytes");
                #[expect(clippy::cast_precision_loss, reason = "whole GiB")]
                Ok((used == Some(wanted as f64)).then_some(lines))
            })
            .await
        };
        let hold =
            "tranche-workload hold --bytes 1Gi --beat 100 >/tmp/beats 2>&1 & echo $! >/tmp/pid
            until grep -q beat /tmp/beats; do usleep 20000; done";
        pod.say(&["sh", "-c", hold]).await?;
        let lines = used(GI, wait::USUAL).await?;
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
        // Nobody else of the share asks for anything: the node notices.
        pod.say(&["sh", "-c", "kill -KILL $(cat /tmp/pid)"]).await?;
        used(0, SWEPT).await?;
        pod.delete().await?;
        wait::for_answer("the share's end", wait::USUAL, async || {
            let lines = shares(case, namespace.name()).await?;
            Ok(lines.is_empty().then_some(()))
        })
        .await
    })
}
