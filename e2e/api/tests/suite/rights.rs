//! A node's token can write only that node's objects; the usage API and the controller share no rights.

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Config, ResourceExt};
use serde_json::{Value, json};
use tranche_api::gpu_node::GpuNode;
use tranche_e2e::{Case, SYSTEM, account, run_on_a_hollow_node, system};

/// A client with the node plugin's rights, with a token that is bound to `pod`, or to no pod.
async fn as_plugin(case: &Case, pod: Option<&Pod>) -> anyhow::Result<Client> {
    as_account(case, system::NODE_PLUGIN_NAME, pod).await
}

/// A client with the rights of one of our ServiceAccounts, with a token that is bound to `pod`, or to no pod.
async fn as_account(case: &Case, name: &str, pod: Option<&Pod>) -> anyhow::Result<Client> {
    let token = account::token(&case.client, SYSTEM, name, pod).await?;
    let mut config = Config::infer().await?;
    config.auth_info = serde_json::from_value(json!({"token": token}))?;
    Ok(Client::try_from(config)?)
}

fn status(name: &str, status: &Value) -> Patch<Value> {
    Patch::Apply(json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1",
        "kind": "GpuNode",
        "metadata": {"name": name},
        "status": status,
    }))
}

/// The API server's message for a forbidden request.
fn forbidden<T: std::fmt::Debug>(what: &str, answer: kube::Result<T>) -> anyhow::Result<String> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(status.message.clone()),
        other => bail!("{what}: not forbidden: {other:?}"),
    }
}

#[test]
fn a_nodes_token_writes_only_its_own_gpu_node() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let admin: Api<GpuNode> = Api::all(case.client.clone());
        let other = case.unique("node");
        let object = serde_json::from_value(json!({"metadata": {"name": other}, "spec": {}}))?;
        admin.create(&PostParams::default(), &object).await?;
        let (api, name) = (admin.clone(), other.clone());
        case.afterwards("the other GpuNode", async move {
            api.delete(&name, &DeleteParams::default()).await?;
            Ok(())
        });

        let pod = case.plugin().ready(None).await?;
        let nodes: Api<GpuNode> = Api::all(as_plugin(case, Some(&pod)).await?);
        let apply = PatchParams::apply("tranche-kubelet-plugin").force();
        let registered = json!({"registration": {"epoch": 1_000_000, "pluginVersion": "e2e"}});
        let message = forbidden(
            "the status of another node's GpuNode",
            nodes
                .patch_status(&other, &apply, &status(&other, &registered))
                .await,
        )?;
        ensure!(
            message.contains(case.node.name()) && message.contains(&other),
            "{message}"
        );
        let created =
            serde_json::from_value(json!({"metadata": {"name": case.unique("new")}, "spec": {}}))?;
        forbidden(
            "a GpuNode of no node",
            nodes.create(&PostParams::default(), &created).await,
        )?;
        forbidden(
            "deleting its own",
            nodes
                .delete(case.node.name(), &DeleteParams::default().dry_run())
                .await,
        )?;
        let published = json!({"published": {"epoch": 1_000_000, "poolGeneration": 1, "slices": [], "sliceCount": 0}});
        forbidden(
            "what only the controller says",
            nodes
                .patch_status(
                    case.node.name(),
                    &apply.clone().dry_run(),
                    &status(case.node.name(), &published),
                )
                .await,
        )?;
        // The plugin's normal write is allowed.
        nodes
            .patch_status(
                case.node.name(),
                &apply.clone().dry_run(),
                &status(case.node.name(), &registered),
            )
            .await
            .context("its own GpuNode")?;

        // A token without a node can write no GpuNode.
        let nodes: Api<GpuNode> = Api::all(as_plugin(case, None).await?);
        forbidden(
            "a token of no pod",
            nodes
                .patch_status(
                    case.node.name(),
                    &apply.dry_run(),
                    &status(case.node.name(), &registered),
                )
                .await,
        )?;
        Ok(())
    })
}

#[test]
fn a_nodes_token_writes_no_slices_and_reads_no_secrets() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let pod = case.plugin().ready(None).await?;
        let plugin = as_plugin(case, Some(&pod)).await?;
        let slices: Api<ResourceSlice> = Api::all(plugin.clone());
        let all = slices
            .list(&ListParams::default())
            .await
            .context("reading slices")?;
        let slice = all.items.first().context("a slice")?;
        forbidden(
            "deleting a slice",
            slices
                .delete(&slice.name_any(), &DeleteParams::default().dry_run())
                .await,
        )?;
        let mut copy = slice.clone();
        copy.metadata = serde_json::from_value(json!({"name": case.unique("slice")}))?;
        forbidden(
            "a slice of its own",
            slices.create(&PostParams::default(), &copy).await,
        )?;
        let secrets: Api<Secret> = Api::all(plugin.clone());
        forbidden("secrets", secrets.list(&ListParams::default()).await)?;
        let pods: Api<Pod> = Api::all(plugin);
        forbidden("pods", pods.list(&ListParams::default()).await)?;
        Ok(())
    })
}

#[test]
fn the_usage_api_and_the_controller_share_no_rights() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        const AUTHORITIES: &str = "extension-apiserver-authentication";
        let list = ListParams::default().limit(1);
        let usage_api = as_account(case, "tranche-usage-api", None).await?;
        let claims: Api<ResourceClaim> = Api::all(usage_api.clone());
        claims.list(&list).await.context("listing claims")?;
        let authorities: Api<ConfigMap> = Api::namespaced(usage_api.clone(), "kube-system");
        authorities.get(AUTHORITIES).await.context(AUTHORITIES)?;
        let slices: Api<ResourceSlice> = Api::all(usage_api.clone());
        forbidden("slices", slices.list(&list).await)?;
        let nodes: Api<GpuNode> = Api::all(usage_api.clone());
        forbidden("GpuNodes", nodes.list(&list).await)?;
        let pods: Api<Pod> = Api::all(usage_api.clone());
        forbidden("all pods", pods.list(&list).await)?;
        let secrets: Api<Secret> = Api::namespaced(usage_api.clone(), SYSTEM);
        forbidden("secrets", secrets.list(&list).await)?;
        let leases: Api<Lease> = Api::namespaced(usage_api, SYSTEM);
        forbidden("leases", leases.list(&list).await)?;

        let controller = as_account(case, "tranche-controller", None).await?;
        let slices: Api<ResourceSlice> = Api::all(controller.clone());
        slices.list(&list).await.context("listing slices")?;
        let authorities: Api<ConfigMap> = Api::namespaced(controller, "kube-system");
        forbidden(AUTHORITIES, authorities.get(AUTHORITIES).await)?;
        Ok(())
    })
}
