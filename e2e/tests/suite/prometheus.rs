//! A real Prometheus scrapes the cluster. Our expressions, and those of dashboards that users already have, give data.

use anyhow::{Context as _, ensure};
use tranche_api::tier::Tier;
use tranche_docs::monitoring::{alerts, expressions, metrics};
use tranche_docs::repository;
use tranche_e2e::prometheus::{Prometheus, Series};
use tranche_e2e::{Case, Namespace, PodHandle, Request, policy, run, wait};

use crate::metrics::token;

/// The queries of the panels of dcgm-exporter's dashboard, at d5e5f51 of
/// <https://github.com/NVIDIA/dcgm-exporter>, `grafana/dcgm-exporter-dashboard.json`.
const OF_DCGM: [&str; 10] = [
    r#"DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"}"#,
    r#"avg(DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"})"#,
    r#"DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"}"#,
    r#"sum(DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"})"#,
    r#"DCGM_FI_DEV_SM_CLOCK{instance=~"$instance", gpu=~"$gpu"} * 1000000"#,
    r#"DCGM_FI_DEV_GPU_UTIL{instance=~"$instance", gpu=~"$gpu"}"#,
    r#"DCGM_FI_DEV_FB_USED{instance=~"$instance", gpu=~"$gpu"}"#,
    r#"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~"$instance", gpu=~"$gpu"}"#,
    "label_values(DCGM_FI_DEV_GPU_TEMP, instance)",
    "label_values(DCGM_FI_DEV_GPU_TEMP, gpu)",
];

/// The queries of the panels of HAMi's dashboard, at 4707fb02 of <https://github.com/Project-HAMi/HAMi>,
/// `dashboards/hami-vgpu-dashboard.json`, each with the same query for our metrics, because HAMi's names differ.
const OF_HAMI: [(&str, &str); 11] = [
    (
        "count(hami_gpu_memory_limit_bytes)",
        "count(count by (UUID) (DCGM_FI_DEV_FB_USED))",
    ),
    (
        "sum(hami_gpu_memory_limit_bytes)",
        "(sum(DCGM_FI_DEV_FB_USED) + sum(DCGM_FI_DEV_FB_FREE) + sum(DCGM_FI_DEV_FB_RESERVED)) * 1048576",
    ),
    (
        "sum by (node) (hami_gpu_memory_allocated_bytes)",
        "sum by (node) (tranche_claim_memory_allocated_bytes)",
    ),
    (
        "hami_host_gpu_memory_used_bytes",
        "sum by (UUID) (DCGM_FI_DEV_FB_USED) * 1048576",
    ),
    (
        "hami_host_gpu_utilization_ratio",
        "sum by (UUID) (DCGM_FI_DEV_GPU_UTIL) / 100",
    ),
    (
        "hami_container_device_utilization_ratio",
        r#"DCGM_FI_DEV_GPU_UTIL{namespace=~"$namespace", pod!=""} / 100"#,
    ),
    (
        "hami_gpu_core_allocated_ratio",
        "sum by (gpu_uuid) (tranche_share_compute_limit_ratio)",
    ),
    (
        "hami_gpu_shared_count",
        "count by (gpu_uuid) (tranche_share_memory_limit_bytes)",
    ),
    (
        "hami_vgpu_memory_limit_bytes",
        r#"tranche_share_memory_limit_bytes{namespace=~"$namespace"}"#,
    ),
    (
        "100 * hami_vgpu_memory_used_bytes / hami_vgpu_memory_limit_bytes",
        "100 * tranche_share_memory_used_bytes / tranche_share_memory_limit_bytes",
    ),
    (
        "topk(10, hami_vgpu_memory_used_bytes)",
        "topk(10, tranche_share_memory_used_bytes)",
    ),
];

/// Metrics of alerts that have series only while something is wrong. The tests of `docs/check` check their spelling.
const ONLY_IN_TROUBLE: [&str; 3] = [
    "tranche_zombie_memory_bytes",
    "tranche_gpu_last_xid_timestamp_seconds",
    "tranche_controller_slices_missing",
];

/// The expression as Grafana sends it with "All" in every variable, for the last minute.
fn sent(query: &str) -> String {
    let mut query = query.to_owned();
    for (variable, value) in [
        ("$__rate_interval", "1m"),
        ("$namespace", ".*"),
        ("$instance", ".*"),
        ("$price", "3.5"),
        ("$node", ".*"),
        ("$gpu", ".*"),
        ("$pod", ".*"),
    ] {
        query = query.replace(variable, value);
    }
    query
}

/// Whether the query gives a number now, or the values of a label.
async fn gives_data(prometheus: &Prometheus, query: &str) -> anyhow::Result<bool> {
    let values = query
        .strip_prefix("label_values(")
        .and_then(|rest| rest.strip_suffix(')'))
        .and_then(|rest| rest.rsplit_once(", "));
    let (query, label) = match values {
        Some((selector, label)) => (format!("count by ({label}) ({selector})"), Some(label)),
        None => (query.to_owned(), None),
    };
    let series = prometheus.query(&query).await?;
    let is_value = |it: &Series| label.is_none_or(|label| it.labels.contains_key(label));
    Ok(series.iter().any(|it| it.value.is_finite() && is_value(it)))
}

/// Waits until each of these queries gives data. A query has its place for messages.
async fn all_give_data(
    prometheus: &Prometheus,
    queries: impl IntoIterator<Item = (String, String)>,
) -> anyhow::Result<()> {
    let sent = queries
        .into_iter()
        .map(|(place, query)| (place, sent(&query)));
    let mut without: Vec<_> = sent.collect();
    let unknown = without.iter().find(|(_, query)| query.contains('$'));
    ensure!(
        unknown.is_none(),
        "a variable that nobody knows: {unknown:?}"
    );
    let result = wait::for_answer("data for every expression", wait::TRIED_AGAIN, async || {
        let mut still = Vec::new();
        for (place, query) in &without {
            if !gives_data(prometheus, query).await? {
                still.push((place.clone(), query.clone()));
            }
        }
        without = still;
        Ok(without.is_empty().then_some(()))
    })
    .await;
    result.with_context(|| format!("no data: {without:#?}"))
}

/// A pod that computes and holds memory on a share, one that has a partition of another GPU, and one that waits.
async fn in_use(
    case: &Case,
    namespace: &Namespace,
    prometheus: &Prometheus,
) -> anyhow::Result<PodHandle> {
    let share = |memory| Request::capped(memory, "25").on(&case.gpus[0].uuid);
    let tiers = [Tier::Capped, Tier::Partition, Tier::Exclusive];
    policy::tiers(case, &tiers).await?;
    let partition = Request::profile("3g.40gb").on(&case.gpus[1].uuid);
    namespace.started("divided", &partition).await?;
    // A counter grows only from its second value on.
    namespace.started("first", &share("1Gi")).await?;
    let prepared = r#"tranche_dra_claims_total{method="NodePrepareResources"}"#;
    prometheus.numbers(prepared).await?;
    let pod = namespace.started("works", &share("4Gi")).await?;
    let work = "tranche-workload hold --bytes 1Gi --beat 100 >/tmp/beats 2>&1 &
        until grep -q beat /tmp/beats; do usleep 20000; done
        tranche-workload spin --kernel 1ms --launch plain --time 600s >/tmp/spun 2>&1 &";
    pod.stdout(&["sh", "-c", work]).await?;
    let waits = Request::capped("900Gi", "25");
    namespace.idle("waits", &waits).await?.has_no_room().await?;
    Ok(pod)
}

#[test]
fn each_dashboard_query_gives_data_and_each_alert_is_evaluated() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("prometheus").await?;
        let token = token(case, namespace.name(), true).await?;
        let prometheus = Prometheus::start(case, &token).await?;
        let pod = in_use(case, &namespace, &prometheus).await?;

        let of_dashboards = expressions(&repository())?
            .into_iter()
            .map(|it| (it.place, it.query));
        all_give_data(&prometheus, of_dashboards).await?;
        // An alert never fires without the metrics that it compares.
        let alerts = alerts(&repository())?;
        let of_alerts = alerts.iter().flat_map(|alert| {
            let names = metrics(&alert.expr)
                .into_iter()
                .filter(|name| !ONLY_IN_TROUBLE.contains(name));
            names.map(|name| (alert.alert.clone(), name.to_owned()))
        });
        all_give_data(&prometheus, of_alerts).await?;

        let rules = prometheus.rules().await?;
        for alert in alerts {
            let error = rules
                .get(&alert.alert)
                .with_context(|| format!("{} is not loaded", alert.alert))?;
            ensure!(error.is_empty(), "{}: {error}", alert.alert);
        }
        // The labels of tenants stay beside those of the targets.
        let used = prometheus
            .numbers("tranche_share_memory_used_bytes > 0")
            .await?;
        let labels = used
            .iter()
            .map(|it| &it.labels)
            .find(|it| {
                it.get("namespace").map(String::as_str) == Some(namespace.name())
                    && it.get("pod").map(String::as_str) == Some(pod.name())
            })
            .with_context(|| format!("the pod's labels: {used:?}"))?;
        ensure!(
            labels.get("node").map(String::as_str) == Some(case.node.name())
                && labels.get("component").map(String::as_str) == Some("tranche-node-plugin"),
            "{labels:?}"
        );
        // In a healthy cluster no alert fires that calls somebody.
        let firing = prometheus
            .query(r#"ALERTS{alertstate="firing", severity="critical"}"#)
            .await?;
        ensure!(firing.is_empty(), "{firing:?}");
        Ok(())
    })
}

#[test]
fn the_dashboards_that_users_have_give_data() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("dashboards").await?;
        let token = token(case, namespace.name(), true).await?;
        let prometheus = Prometheus::start(case, &token).await?;
        in_use(case, &namespace, &prometheus).await?;
        let of_dcgm = OF_DCGM.map(|query| (query.to_owned(), query.to_owned()));
        let of_hami = OF_HAMI.map(|(theirs, ours)| (theirs.to_owned(), ours.to_owned()));
        all_give_data(&prometheus, of_dcgm.into_iter().chain(of_hami)).await
    })
}
