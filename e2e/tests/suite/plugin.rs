//! The node plugin is killed during its work, and is removed for some time.

use std::path::Path;

use anyhow::ensure;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::system::NodePlugin;
use tranche_e2e::{Case, Request, SYSTEM, policy, run, run_on_a_node, system, wait, workload};

const PODS: usize = 50;
/// Replaces the plugin's pod, and waits until the new one is ready.
pub(crate) async fn start_again(client: &Client, plugin: &NodePlugin) -> anyhow::Result<()> {
    let old = plugin.ready(None).await?;
    replace(client, plugin, &old).await
}

/// Replaces this pod of the plugin, which may have ended, and waits until the new one is ready.
async fn replace(client: &Client, plugin: &NodePlugin, old: &Pod) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), SYSTEM);
    pods.delete(&old.name_any(), &DeleteParams::default())
        .await?;
    plugin.ready(old.metadata.uid.as_deref()).await?;
    Ok(())
}

/// Gives the next test a new pod, because the kubelet's restart delay grows with each failure of a container.
pub(crate) fn renew_plugin(case: &Case) {
    case.changes("plugin of");
    let (client, plugin) = (case.client.clone(), case.plugin());
    case.afterwards("a new plugin pod", async move {
        start_again(&client, &plugin).await?;
        plugin.published().await?;
        Ok(())
    });
}

#[test]
fn killed_in_fifty_prepares_all_pods_start_and_nothing_is_left() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        renew_plugin(case);
        policy::offer(case, 32, 4).await?;
        let namespace = case.namespace("kill").await?;
        let starting = stream::iter(0..PODS)
            .map(|index| {
                let share = Request::capped("1Gi", "2").on(&case.gpus[index % 2].uuid);
                let namespace = &namespace;
                async move { namespace.idle(&format!("pod-{index}"), &share).await }
            })
            .buffered(10)
            .try_collect::<Vec<_>>();
        let pods = case
            .node
            .kill_plugin_in_a_prepare(starting, async |pods| pods[PODS / 2].claim().await)
            .await?;
        let begun = case.node.claim_files().await?;
        println!("killed with {} files of claims on the node", begun.len());
        for pod in &pods {
            pod.started_within(wait::BURST).await?;
        }
        let totals: Vec<_> = stream::iter(&pods)
            .map(async |pod| {
                pod.seen()
                    .await
                    .map(|seen| seen.iter().map(|gpu| gpu.total).sum::<u64>())
            })
            .buffered(8)
            .try_collect()
            .await?;
        ensure!(totals.iter().all(|total| *total == 1 << 30), "{totals:?}");
        let all = namespace.pods().list(&ListParams::default()).await?;
        ensure!(all.items.len() == PODS, "{}", all.items.len());
        namespace
            .pods()
            .delete_collection(&DeleteParams::default(), &ListParams::default())
            .await?;
        wait::for_none(
            namespace.pods(),
            kube::runtime::watcher::Config::default(),
            "all pods gone",
            wait::BURST,
        )
        .await?;
        case.node.no_claim_files(wait::USUAL).await
    })
}

#[test]
fn killed_while_pods_run_and_end() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        renew_plugin(case);
        let namespace = case.namespace("killed").await?;
        let hold = workload::hold("2Gi");
        let share = Request::capped("3Gi", "10");
        let stays = namespace.running("stays", &share, &hold).await?;
        let goes = namespace.running("goes", &share, &hold).await?;
        stays.started().await?;
        goes.started().await?;
        let before = stays.next_beat().await?;
        case.node.kill_plugin().await?;
        // Deleted while the plugin is down: released when the plugin is back.
        goes.delete().await?;
        let after = stays.next_beat().await?;
        ensure!(
            after.beat > before.beat && after.errors == 0 && after.moved == 0,
            "{before:?} {after:?}"
        );
        case.plugin().ready(None).await?;
        namespace.started("new", &share).await?;
        let claims = case
            .node
            .shell(&format!("ls {}/claims", tranche_e2e::node::PLUGIN_DIR))
            .await?;
        ensure!(
            claims.lines().count() == 2,
            "of `stays` and `new`: {claims}"
        );
        Ok(())
    })
}

/// The pods of a Deployment that has replaced all of them by those of its newest template; `None` while it replaces them.
fn replaced(deployment: Option<&Deployment>, replicas: i32) -> Option<()> {
    let deployment = deployment?;
    let status = deployment.status.as_ref()?;
    let is_seen = status.observed_generation == deployment.metadata.generation;
    let counts = [
        status.replicas,
        status.updated_replicas,
        status.available_replicas,
    ];
    (is_seen && counts == [Some(replicas); 3]).then_some(())
}

/// Each kill comes while pods with claims start and end: whenever the Deployment has replaced its pods, it begins again.
#[test]
fn killed_twenty_times_in_rolling_updates_the_end_is_that_without() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        case.changes("plugin of");
        let namespace = case.namespace("rolling").await?;
        let share = Request::capped("1Gi", "5").on(&case.gpus[0].uuid);
        namespace.template("share", &share.spec()).await?;
        let replicas = 6;
        let mut pod = manifest("rolling", &[Source::Template("share")], &IDLE);
        pod["metadata"] = json!({"labels": {"app": "rolling"}});
        pod["spec"]["restartPolicy"] = "Always".into();
        pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": case.node.name()});
        let deployment = serde_json::from_value(json!({
            "metadata": {"name": "rolling"},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "rolling"}},
                "strategy": {"rollingUpdate": {"maxSurge": 2, "maxUnavailable": 2}},
                "template": pod,
            },
        }))?;
        let api: Api<Deployment> = Api::namespaced(case.client.clone(), namespace.name());
        api.create(&PostParams::default(), &deployment).await?;
        let settled = async || {
            let is_done = |it: Option<&Deployment>| replaced(it, replicas);
            wait::for_one(
                api.clone(),
                "rolling",
                "all pods replaced",
                wait::BURST,
                is_done,
            )
            .await
        };
        settled().await?;

        for kill in 0..20 {
            if replaced(Some(&api.get("rolling").await?), replicas).is_some() {
                let version = json!({"spec": {"template": {"metadata": {"annotations": {"version": kill.to_string()}}}}});
                api.patch("rolling", &PatchParams::default(), &Patch::Merge(&version))
                    .await?;
            }
            let old = case.plugin().ready(None).await?;
            case.node.kill_plugin().await?;
            // A new pod, because the kubelet would wait longer with each kill until it starts the container again.
            replace(&case.client, &case.plugin(), &old).await?;
        }

        settled().await?;
        wait::for_answer("a journal for each pod", wait::TRIED_AGAIN, async || {
            let script = format!("ls {}/claims", tranche_e2e::node::PLUGIN_DIR);
            let journals = case.node.shell(&script).await?;
            ensure!(journals.lines().count() == 6, "{journals}");
            Ok(Some(()))
        })
        .await?;
        for pod in namespace.pods().list(&ListParams::default()).await? {
            ensure!(
                pod.metadata.deletion_timestamp.is_some() || runs(&pod),
                "{pod:?}"
            );
        }
        let none = json!({"spec": {"replicas": 0}});
        api.patch("rolling", &PatchParams::default(), &Patch::Merge(&none))
            .await?;
        case.node.no_claim_files(wait::TRIED_AGAIN).await?;
        let slices = case.plugin().published().await?;
        ensure!(system::complete(&slices).is_some(), "{slices:?}");
        Ok(())
    })
}

/// Whether all containers of a pod run and have never run before.
fn runs(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|it| it.container_statuses.as_ref());
    containers.is_some_and(|all| all.iter().all(|it| it.ready && it.restart_count == 0))
}

#[test]
fn slices_of_a_plugin_that_is_gone_stay_away_until_it_is_back() -> anyhow::Result<()> {
    run(async |case: &Case| {
        case.changes("plugin of");
        case.changes("plugin's DaemonSet");
        let before = case.plugin().published().await?;
        let sets: Api<DaemonSet> = Api::namespaced(case.client.clone(), SYSTEM);
        let nowhere = |value: Option<&str>| {
            Patch::Merge(
                json!({"spec": {"template": {"spec": {"nodeSelector": {"gpu.tranche.dev/nowhere": value}}}}}),
            )
        };
        let (api, plugin) = (sets.clone(), case.plugin());
        let back = nowhere(None);
        case.afterwards("the plugin's DaemonSet", async move {
            api.patch(system::NODE_PLUGIN_NAME, &PatchParams::default(), &back)
                .await?;
            plugin.ready(None).await?;
            plugin.published().await?;
            Ok(())
        });
        sets.patch(
            system::NODE_PLUGIN_NAME,
            &PatchParams::default(),
            &nowhere(Some("yes")),
        )
        .await?;
        case.plugin()
            .slices("no slices", wait::WIPED, |slices| {
                slices.is_empty().then_some(())
            })
            .await?;
        let came = case
            .plugin()
            .slices("slices of nobody", wait::STILL_AWAY, |slices| {
                (!slices.is_empty()).then(|| slices.keys().cloned().collect::<Vec<_>>())
            })
            .await;
        if let Ok(names) = came {
            anyhow::bail!("slices without a plugin: {names:?}");
        }
        sets.patch(
            system::NODE_PLUGIN_NAME,
            &PatchParams::default(),
            &nowhere(None),
        )
        .await?;
        case.plugin().ready(None).await?;
        case.plugin()
            .slices("slices back", wait::USUAL, |slices| {
                (system::complete(slices)?.len() == before.len()).then_some(())
            })
            .await
    })
}

/// A rollout of the DaemonSet waits for ready pods: a node without devices must not block it.
#[test]
fn a_node_without_a_driver_stops_no_update() -> anyhow::Result<()> {
    run(async |case: &Case| {
        case.changes("plugin's DaemonSet");
        renew_plugin(case);
        let find = "find /usr/lib* -xdev -name libnvidia-ml.so.1";
        let libraries = case.node.shell(find).await?;
        for library in libraries.lines() {
            let back = case.node.hide(Path::new(library)).await?;
            let node = case.node.clone();
            case.afterwards(
                "the driver",
                async move { node.shell(&back).await.map(drop) },
            );
        }
        ensure!(!libraries.is_empty(), "no driver on the node");
        let sets: Api<DaemonSet> = Api::namespaced(case.client.clone(), SYSTEM);
        let stamp = json!({"spec": {"template": {"metadata": {"annotations": {"e2e": case.unique("update")}}}}});
        let updated = sets
            .patch(
                system::NODE_PLUGIN_NAME,
                &PatchParams::default(),
                &Patch::Merge(stamp),
            )
            .await?;
        let generation = updated.metadata.generation;
        wait::for_one(
            sets,
            system::NODE_PLUGIN_NAME,
            "the update done",
            wait::BURST,
            |set| {
                let status = set?.status.as_ref()?;
                let wanted = status.desired_number_scheduled;
                let done = status.observed_generation >= generation
                    && status.updated_number_scheduled == Some(wanted)
                    && status.number_available == Some(wanted);
                done.then_some(())
            },
        )
        .await
    })
}
