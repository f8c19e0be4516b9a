//! Bad input and broken nodes: there is a visible error, and no pod runs without its cap.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tranche_e2e::namespace::{IDLE, Source};
use tranche_e2e::node::PLUGIN_DIR;
use tranche_e2e::request::with_parameters;
use tranche_e2e::{Case, Namespace, Request, pulse, run, run_on_a_node, wait};

fn parameters(rest: &Value) -> Value {
    let mut all = json!({"apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "ShareConfig"});
    if let (Some(all), Some(rest)) = (all.as_object_mut(), rest.as_object()) {
        all.extend(rest.clone());
    }
    with_parameters(Request::capped("1Gi", "10").spec(), &all)
}

/// Invalid parameters, and what the error message must name.
fn wrong() -> [(&'static str, Value, &'static str); 3] {
    [
        ("field", json!({"compute": {"mod": "strict"}}), "compute"),
        (
            "value",
            json!({"compute": {"mode": "generous"}}),
            "compute.mode",
        ),
        ("other", json!({"memory": "2Gi"}), "memory"),
    ]
}

/// Removes the admission policy until the test ends.
async fn without_admission(case: &Case) -> anyhow::Result<()> {
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(case.client.clone());
    let name = "shareconfig.gpu.tranche.dev";
    let mut binding = bindings
        .get(name)
        .await
        .context("the chart's admission policy")?;
    bindings.delete(name, &DeleteParams::default()).await?;
    binding.metadata.resource_version = None;
    binding.metadata.uid = None;
    // Created again by whom the chart's upgrades know as its owner.
    let managed = binding.metadata.managed_fields.take().unwrap_or_default();
    let owner = managed.into_iter().find_map(|entry| entry.manager);
    let owner = PatchParams::apply(&owner.context("the policy's field manager")?);
    let claims: Api<ResourceClaim> = Api::namespaced(case.client.clone(), "default");
    case.afterwards("the admission policy", async move {
        bindings
            .patch(name, &owner, &Patch::Apply(&binding))
            .await?;
        refuses_again(&claims).await
    });
    Ok(())
}

/// Waits until a policy that was bound again takes effect, for the tests that follow.
async fn refuses_again(claims: &Api<ResourceClaim>) -> anyhow::Result<()> {
    let spec = parameters(&json!({"memory": "2Gi"}));
    let claim = serde_json::from_value(json!({"metadata": {"name": "refused"}, "spec": spec}))?;
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    // Steps after a test must be `Send`, and `for_answer` is not.
    let until_refused = async {
        while claims.create(&dry_run, &claim).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    pulse::within(wait::USUAL, until_refused)
        .await
        .context("the admission policy has no effect")
}

/// The removal of a policy takes effect after a moment.
async fn let_in(namespace: &Namespace, name: &str, spec: &Value) -> anyhow::Result<()> {
    wait::for_answer("a claim past admission", wait::USUAL, async || {
        namespace.claim(name, spec).await.map(|_| Some(()))
    })
    .await
}

#[test]
fn a_wrong_share_config_that_got_in_shows_on_the_pod() -> anyhow::Result<()> {
    run(async |case: &Case| {
        without_admission(case).await?;
        let namespace = case.namespace("wrong").await?;
        for (name, rest, path) in wrong() {
            let_in(&namespace, name, &parameters(&rest)).await?;
            let pod = namespace.pod(name, &[Source::Claim(name)], &IDLE).await?;
            let message = pod.event("PrepareFailed").await?;
            ensure!(
                message.contains(path) && message.contains(name),
                "{rest}: {message}"
            );
            pod.delete().await?;
        }
        Ok(())
    })
}

#[test]
fn without_the_shim_no_capped_pod_starts() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("shim").await?;
        let file = format!("{PLUGIN_DIR}/lib/1/libcuda.so.1");
        let back = case.node.hide(Path::new(&file)).await?;
        let (node, script) = (case.node.clone(), back.clone());
        case.afterwards(
            "the shim",
            async move { node.shell(&script).await.map(drop) },
        );
        let pod = namespace.idle("pod", &Request::capped("1Gi", "10")).await?;
        let message = pod.event("PrepareFailed").await?;
        ensure!(message.contains(&file), "{message}");
        let phase = namespace
            .pods()
            .get(pod.name())
            .await?
            .status
            .and_then(|status| status.phase);
        ensure!(phase.as_deref() == Some("Pending"), "{phase:?}");
        // An exclusive pod needs no shim.
        namespace
            .started("exclusive", &Request::exclusive())
            .await?;
        case.node.shell(&back).await?;
        // The kubelet tries the first pod again only at its next resync, after a minute.
        let next = namespace
            .pod("next", &[Source::Template("pod")], &IDLE)
            .await?;
        next.started().await?;
        let filled = next.fill(&[]).await?;
        ensure!(filled[0].filled == 1 << 30, "{filled:?}");
        Ok(())
    })
}

#[test]
fn without_its_page_a_container_gets_no_gpu() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let pod = case
            .namespace("page")
            .await?
            .idle("pod", &Request::capped("1Gi", "10"))
            .await?;
        pod.started().await?;
        pod.seen().await?;
        // Overwrites the page with random bytes.
        case.node
            .shell("for cap in /run/tranche/shares/*/*/cap; do chmod u+w $cap; head -c 4096 /dev/urandom >$cap; done")
            .await?;
        let exit = pod.exec(&["tranche-workload", "info"]).await?;
        ensure!(exit.code != 0, "CUDA started with a broken page: {exit:?}");
        ensure!(
            exit.stderr
                .lines()
                .any(|line| line.contains("tranche") && line.contains("cap")),
            "{exit:?}"
        );
        Ok(())
    })
}
