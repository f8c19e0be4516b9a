//! Two nodes with GPUs: each offers its own, and failures of one do not affect the other.

use anyhow::ensure;
use kube::ResourceExt;
use tranche_api::names::pool;
use tranche_e2e::system::{NodePlugin, text};
use tranche_e2e::{Case, Request, run};

use crate::plugin::renew_plugin;

#[test]
fn each_node_offers_its_own_gpus() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let (second, gpus) = case.second_node().await?;
        let others = NodePlugin::new(case.client.clone(), second.name().to_owned());
        for (plugin, node, own) in [
            (&case.plugin(), &case.node, &case.gpus),
            (&others, &second, &gpus),
        ] {
            for slice in plugin.published().await?.values() {
                ensure!(
                    slice.spec.pool.name == pool(node.name()),
                    "{}: {:?}",
                    slice.name_any(),
                    slice.spec.pool
                );
                for device in slice.spec.devices.iter().flatten() {
                    let uuid = text(device, "uuid");
                    ensure!(
                        own.iter().any(|gpu| Some(gpu.uuid.as_str()) == uuid),
                        "{} of {}: {uuid:?}",
                        device.name,
                        node.name()
                    );
                }
            }
        }
        Ok(())
    })
}

#[test]
fn pods_that_do_not_fit_on_one_node_go_to_the_other() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let (second, gpus) = case.second_node().await?;
        let namespace = case.namespace("nodes").await?;
        let mut nodes = Vec::new();
        let mut uuids = Vec::new();
        for index in 0..4 {
            let pod = namespace
                .idle(&format!("pod-{index}"), &Request::exclusive())
                .await?;
            let started = pod.started().await?;
            nodes.extend(started.spec.and_then(|spec| spec.node_name));
            uuids.extend(pod.seen().await?.into_iter().map(|gpu| gpu.uuid));
        }
        for name in [case.node.name(), second.name()] {
            let there = nodes.iter().filter(|node| *node == name).count();
            ensure!(there == 2, "{there} of four pods on {name}: {nodes:?}");
        }
        let mut all: Vec<_> = case.gpus.iter().chain(&gpus).map(|gpu| &gpu.uuid).collect();
        all.sort();
        uuids.sort();
        ensure!(uuids.iter().eq(all), "{uuids:?}");
        namespace
            .idle("fifth", &Request::exclusive())
            .await?
            .has_no_room()
            .await?;
        Ok(())
    })
}

/// The plugin of one node dies repeatedly; pods of the other node start and have their caps.
#[test]
fn a_plugin_that_dies_on_one_node_does_not_affect_the_other() -> anyhow::Result<()> {
    run(async |case: &Case| {
        renew_plugin(case);
        let (second, gpus) = case.second_node().await?;
        let plugin = case.plugin();
        case.afterwards("the killed plugin", async move {
            plugin.ready(None).await?;
            plugin.published().await?;
            Ok(())
        });
        let namespace = case.namespace("dies").await?;
        case.node.kill_plugin().await?;
        for gpu in &gpus {
            let name = format!("pod-{}", gpu.minor);
            let share = Request::capped("2Gi", "10").on(&gpu.uuid);
            let pod = namespace.started(&name, &share).await?;
            let seen = pod.seen().await?;
            ensure!(
                seen.len() == 1 && seen[0].uuid == gpu.uuid && seen[0].total == 2 << 30,
                "on {}: {seen:?}",
                second.name()
            );
        }
        Ok(())
    })
}
