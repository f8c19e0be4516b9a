//! `kubectl tranche cordon`, `drain` and `uncordon`.

use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use tranche_e2e::kubectl::tranche;
use tranche_e2e::{Case, Request, run_on_a_hollow_node};

#[test]
fn a_cordoned_gpu_gets_no_claim_and_is_drained_as_budgets_allow() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("cordon").await?;
        let (gpu, name) = (case.gpus[0].uuid.clone(), namespace.name());
        let on_it = Request::capped("1Gi", "10").on(&gpu);
        namespace.started("first", &on_it).await?;

        let shown = tranche(&["drain", &gpu, "--dry-run", "--force"])
            .await?
            .output()?;
        ensure!(shown.contains("it would be evicted"), "{shown}");
        let cordoned = tranche(&["cordon", &gpu]).await?.output()?;
        ensure!(
            cordoned.contains("cordoned: no new claim gets any of it"),
            "{cordoned}"
        );
        let again = gpu.clone();
        case.afterwards("the rules", async move {
            tranche(&["uncordon", &again]).await?.output()?;
            Ok(())
        });
        let second = namespace.idle("second", &on_it).await?;
        second.unschedulable().await?;
        let arguments = [
            "explain",
            "pod",
            "second",
            "--namespace",
            name,
            "--output",
            "wide",
        ];
        let explained = tranche(&arguments).await?.output()?;
        let part = "gpu.tranche.dev/cordoned:NoSchedule of the DeviceTaintRule tranche-cordon-";
        ensure!(explained.contains(part), "{explained}");

        let left = tranche(&["drain", &gpu, "--timeout", "3"]).await?;
        let is_said = left.stdout.contains("no controller makes it again");
        ensure!(!left.is_success && is_said, "{left:?}");
        let budgets: Api<PodDisruptionBudget> = Api::namespaced(case.client.clone(), name);
        let budget = serde_json::from_value(json!({
            "metadata": {"name": "all"}, "spec": {"minAvailable": 1, "selector": {}},
        }))?;
        budgets.create(&PostParams::default(), &budget).await?;
        // The client would repeat what the budget refuses for minutes.
        let drain = ["drain", &gpu, "--force", "--timeout", "3"];
        let left = tokio::time::timeout(Duration::from_mins(1), tranche(&drain))
            .await
            .context("drain does not keep its timeout")??;
        let is_said = left.stdout.contains("first") && left.stdout.contains("disruption budget");
        ensure!(!left.is_success && is_said, "{left:?}");
        budgets.delete("all", &DeleteParams::default()).await?;

        let drained = tranche(&["drain", &gpu, "--force", "--output", "json"])
            .await?
            .json()?;
        ensure!(
            drained["left"] == json!([]) && drained["evicted"] == json!([format!("{name}/first")]),
            "{drained}"
        );
        second.unschedulable().await?;
        tranche(&["uncordon", &gpu]).await?.output()?;
        second.started().await?;
        Ok(())
    })
}

#[test]
fn a_cordoned_node_gets_no_claim() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("cordon-node").await?;
        let node = case.node.name().to_owned();
        tranche(&["cordon", &node]).await?.output()?;
        let again = node.clone();
        case.afterwards("the rule", async move {
            tranche(&["uncordon", &again]).await?.output()?;
            Ok(())
        });
        let pod = namespace
            .idle(
                "waits",
                &Request::capped("1Gi", "10").on(&case.gpus[0].uuid),
            )
            .await?;
        pod.unschedulable().await?;
        let already = tranche(&["cordon", &node]).await?.output()?;
        ensure!(already.contains("already cordoned"), "{already}");
        let wrong = tranche(&["cordon", "gpu-none"]).await?.error()?;
        ensure!(
            wrong.contains("there is no node and no GPU gpu-none"),
            "{wrong}"
        );
        tranche(&["uncordon", &node]).await?.output()?;
        pod.started().await?;
        Ok(())
    })
}

#[test]
fn versions_and_objects_are_named_as_for_kubectl() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let version = tranche(&["version"]).await?.output()?;
        ensure!(
            version.contains("Kubernetes v1.") && version.contains("node plugin "),
            "{version}"
        );
        let namespace = case.namespace("words").await?;
        namespace
            .started("one", &Request::capped("1Gi", "10"))
            .await?;
        let name = namespace.name();
        for words in [
            &["get", "pod/one"][..],
            &["get", "pod", "one"],
            &["explain", "pod/one"],
        ] {
            let text = tranche(&[words, &["--namespace", name]].concat())
                .await?
                .output()?;
            ensure!(text.contains("one"), "{words:?}: {text}");
        }
        let node = case.node.name();
        let nodes = tranche(&["get", "node", node]).await?.output()?;
        ensure!(
            nodes.lines().count() == 2 && nodes.contains(node),
            "{nodes}"
        );
        let cost = tranche(&["cost", "--by", "node"]).await?.output()?;
        ensure!(cost.starts_with("NODE") && cost.contains(node), "{cost}");
        Ok(())
    })
}
