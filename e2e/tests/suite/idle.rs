//! Claims whose programs hold memory but run no kernel are reported, and evicted if the policy says so.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tranche_api::SharingPolicy;
use tranche_api::conditions::IDLE;
use tranche_api::names::{IDLE_ANNOTATION, KEEP};
use tranche_e2e::namespace::{Source, manifest};
use tranche_e2e::{Case, Namespace, PodHandle, Request, policy, run_on_a_node, wait};

/// Seconds without a kernel after which a claim is idle, and seconds after that until it is evicted.
const AFTER: u64 = 10;
const GRACE: u64 = 3;

/// Holds memory, and does nothing more for an hour.
const HOLD: [&str; 6] = [
    "tranche-workload",
    "hold",
    "--bytes",
    "1Gi",
    "--beat",
    "3600000",
];
const WORK: [&str; 6] = [
    "tranche-workload",
    "spin",
    "--kernel",
    "1ms",
    "--time",
    "600s",
];

/// Status, reason and message of the condition of a pod's claim.
async fn condition(pod: &PodHandle) -> anyhow::Result<Option<(String, String, String)>> {
    let claim = pod.claim().await?;
    Ok(condition_of(&claim))
}

fn condition_of(claim: &ResourceClaim) -> Option<(String, String, String)> {
    let devices = claim.status.as_ref()?.devices.as_deref()?;
    let conditions = devices.first()?.conditions.as_deref()?;
    let idle = conditions.iter().find(|it| it.type_ == IDLE)?;
    Some((
        idle.status.clone(),
        idle.reason.clone(),
        idle.message.clone(),
    ))
}

async fn has_reason(pod: &PodHandle, reason: &str) -> anyhow::Result<String> {
    wait::for_answer(
        &format!("the condition Idle with {reason}"),
        wait::USUAL,
        async || {
            let found = condition(pod)
                .await?
                .filter(|(_, found, _)| found == reason);
            Ok(found.map(|(_, _, message)| message))
        },
    )
    .await
}

async fn is_gone(namespace: &Namespace, pod: &PodHandle) -> anyhow::Result<()> {
    let what = format!("{} evicted", pod.name());
    wait::for_one(namespace.pods(), pod.name(), &what, wait::USUAL, |pod| {
        pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
            .then_some(())
    })
    .await
}

#[test]
fn idle_pods_are_named_then_evicted_and_others_stay() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("idle").await?;
        let uuid = &case.gpus[0].uuid;
        let share = Request::capped("2Gi", "10").on(uuid);
        let holder = namespace.running("holder", &share, &HOLD).await?;
        let worker = namespace.running("worker", &share, &WORK).await?;
        let guarded = namespace.running("guarded", &share, &HOLD).await?;
        namespace.template("kept", &share.spec()).await?;
        let mut object = manifest("kept", &[Source::Template("kept")], &HOLD);
        object["metadata"]["annotations"] = json!({IDLE_ANNOTATION: KEEP});
        let kept = namespace.pod_from(object).await?;
        let all = [&holder, &worker, &guarded, &kept];
        for pod in all {
            pod.started().await?;
        }
        let budgets: Api<PodDisruptionBudget> =
            Api::namespaced(case.client.clone(), namespace.name());
        let labelled = json!({"metadata": {"labels": {"guarded": "yes"}}});
        namespace
            .pods()
            .patch("guarded", &PatchParams::default(), &Patch::Merge(&labelled))
            .await?;
        let budget = serde_json::from_value(json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "guarded"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"guarded": "yes"}}},
        }))?;
        budgets.create(&PostParams::default(), &budget).await?;

        // At first, an idle claim is only reported.
        let idle = json!({
            "namespaces": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name()}}, "afterSeconds": AFTER, "graceSeconds": GRACE,
        });
        let name = policy::idle(case, &idle).await?;
        let message = has_reason(&holder, "NoKernel").await?;
        ensure!(message.contains("nothing happens"), "{message}");
        has_reason(&guarded, "NoKernel").await?;
        holder.event("Idle").await?;

        let policies: Api<SharingPolicy> = Api::all(case.client.clone());
        let evict = json!({"spec": {"idle": {"action": "Evict"}}});
        policies
            .patch(&name, &PatchParams::default(), &Patch::Merge(&evict))
            .await?;
        is_gone(&namespace, &holder).await?;
        let told = holder.event("IdleEvicted").await?;
        ensure!(told.contains("ran no kernel"), "{told}");
        let refused = has_reason(&guarded, "EvictionRefused").await?;
        ensure!(refused.contains("disruption budget"), "{refused}");

        // Without the budget, the next eviction succeeds.
        budgets.delete("guarded", &DeleteParams::default()).await?;
        is_gone(&namespace, &guarded).await?;
        for pod in [&worker, &kept] {
            ensure!(condition(pod).await?.is_none(), "{}", pod.name());
            let now = namespace.pods().get(pod.name()).await?;
            ensure!(now.metadata.deletion_timestamp.is_none(), "{}", pod.name());
        }
        Ok(())
    })
}

#[test]
fn a_claim_that_works_again_is_named_no_more() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("idle-again").await?;
        let exclusive = Request::exclusive().on(&case.gpus[0].uuid);
        let pod = namespace.running("again", &exclusive, &HOLD).await?;
        pod.started().await?;
        let idle = json!({
            "namespaces": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name()}}, "afterSeconds": AFTER,
            "action": "Evict", "graceSeconds": 3600,
        });
        policy::idle(case, &idle).await?;
        let message = has_reason(&pod, "EvictionDue").await?;
        ensure!(message.contains("3600 s"), "{message}");
        let spin = [
            "tranche-workload",
            "spin",
            "--kernel",
            "1ms",
            "--time",
            "15s",
        ];
        pod.stdout(&spin).await?;
        let (status, _, _) = wait::for_answer("the condition withdrawn", wait::USUAL, async || {
            let found = condition(&pod).await?.context("a condition")?;
            Ok((found.1 == "Works").then_some(found))
        })
        .await?;
        ensure!(status == "False", "{status}");
        Ok(())
    })
}
