//! A node's token can write only that node's objects.

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Config, ResourceExt};
use serde_json::{Value, json};
use tranche_api::gpu_node::GpuNode;
use tranche_e2e::{Case, SYSTEM, account, run, system};

/// A client with the node plugin's rights, with a token that is bound to `pod`, or to no pod.
async fn as_plugin(case: &Case, pod: Option<&Pod>) -> anyhow::Result<Client> {
    let token = account::token(&case.client, SYSTEM, system::NODE_PLUGIN_NAME, pod).await?;
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
    run(async |case: &Case| {
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
    run(async |case: &Case| {
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
