//! The node's driver is installed late, removed, restored and updated; the node's GpuNode is deleted.

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::Device;
use kube::api::{Api, DeleteParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use tranche_api::conditions::DRIVER_READY;
use tranche_api::gpu_node::GpuNode;
use tranche_api::names::{attribute, taint};
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::node::{LIBRARIES, Node};
use tranche_e2e::system::NodePlugin;
use tranche_e2e::{Case, Request, SYSTEM, run_on_a_node, system, wait, workload};

/// Where the driver's libraries and device nodes are moved while there is no driver.
const AWAY: &str = "/usr/lib/x86_64-linux-gnu/away";

/// The status and reason of the GpuNode's condition for the driver.
fn driver_ready(node: &GpuNode) -> Option<(bool, String)> {
    let conditions = &node.status.as_ref()?.conditions;
    let ready = conditions.iter().find(|c| c.type_ == DRIVER_READY)?;
    Some((ready.status == "True", ready.reason.clone()))
}

async fn until_driver(case: &Case, what: &str, ready: bool) -> anyhow::Result<GpuNode> {
    let nodes: Api<GpuNode> = Api::all(case.client.clone());
    wait::for_one(nodes, case.node.name(), what, wait::USUAL, |node| {
        let node = node?;
        (driver_ready(node)?.0 == ready).then(|| node.clone())
    })
    .await
}

/// Waits until the slices offer no device: the controller writes them a moment after the `GpuNode` changes.
async fn nothing_offered(plugin: &NodePlugin) -> anyhow::Result<()> {
    plugin
        .slices("no device offered", wait::USUAL, |slices| {
            let mut devices = slices
                .values()
                .flat_map(|slice| slice.spec.devices.iter().flatten());
            devices
                .all(|device| {
                    let mut taints = device.taints.iter().flatten();
                    taints.any(|taint| taint.key == taint::WITHDRAWN)
                })
                .then_some(())
        })
        .await
}

/// Moves the driver's libraries away until the test ends; the returned script restores them.
async fn unload(case: &Case) -> anyhow::Result<String> {
    let back = format!("if [ -d {AWAY} ]; then mv {AWAY}/* {LIBRARIES}/; rmdir {AWAY}; fi");
    let (node, script, plugin) = (case.node.clone(), back.clone(), case.plugin());
    case.afterwards("the driver", async move {
        node.shell(&script).await?;
        plugin.published().await.map(drop)
    });
    case.node
        .shell(&format!(
            "mkdir {AWAY}; mv {LIBRARIES}/libnvidia-ml.so* {LIBRARIES}/libcuda.so* {AWAY}/"
        ))
        .await?;
    Ok(back)
}

#[test]
fn devices_leave_with_the_driver_and_return_with_it() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let plugin = case.plugin();
        let before = plugin.published().await?;
        let namespace = case.namespace("driver").await?;
        let hold = workload::hold("2Gi");
        let share = Request::capped("3Gi", "10");
        let holder = namespace.running("holder", &share, &hold).await?;
        holder.started().await?;
        let beat = holder.next_beat().await?;

        let back = unload(case).await?;
        let node = until_driver(case, "no driver", false).await?;
        let inventory = node.status.as_ref().and_then(|s| s.inventory.as_ref());
        ensure!(inventory.is_none(), "{inventory:?}");
        ensure!(
            driver_ready(&node) == Some((false, "DriverNotFound".into())),
            "{:?}",
            node.status
        );
        nothing_offered(&plugin).await?;
        let late = namespace.idle("late", &share).await?;
        late.unschedulable().await?;
        let events: Api<Event> = Api::namespaced(case.client.clone(), "default");
        let about = watcher::Config::default().fields(&format!(
            "involvedObject.kind=GpuNode,involvedObject.name={},reason=DriverNotFound",
            case.node.name()
        ));
        wait::for_all(events, about, "the event", wait::USUAL, |events| {
            (!events.is_empty()).then_some(())
        })
        .await?;
        // The allocated device stays, so that its GPU is not allocated to others.
        plugin
            .slices("the allocated device alone", wait::USUAL, |slices| {
                let slices = system::complete(slices)?;
                let devices = slices
                    .values()
                    .flat_map(|slice| slice.spec.devices.iter().flatten());
                (devices.count() == 1).then_some(())
            })
            .await?;
        let after = holder.next_beat().await?;
        ensure!(after.beat > beat.beat && after.errors == 0, "{after:?}");

        // Without a driver, a deleted GpuNode returns without an inventory.
        let nodes: Api<GpuNode> = Api::all(case.client.clone());
        nodes
            .delete(case.node.name(), &DeleteParams::default())
            .await?;
        let uid = node.uid();
        let again = wait::for_one(
            nodes,
            case.node.name(),
            "the GpuNode back",
            wait::USUAL,
            |node| {
                let node = node.filter(|node| node.uid() != uid)?;
                driver_ready(node).map(|_| node.clone())
            },
        )
        .await?;
        let inventory = again.status.as_ref().and_then(|s| s.inventory.as_ref());
        ensure!(inventory.is_none(), "{inventory:?}");
        // Unprepare needs no driver.
        holder.delete().await?;

        case.node.shell(&back).await?;
        until_driver(case, "the driver back", true).await?;
        late.started().await?;
        let now = plugin.published().await?;
        ensure!(
            now.keys().eq(before.keys()),
            "{:?} {:?}",
            now.keys(),
            before.keys()
        );
        Ok(())
    })
}

#[test]
fn a_driver_that_hangs_withholds_all_gpus_until_it_answers() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let plugin = case.plugin();
        plugin.published().await?;
        let namespace = case.namespace("hangs").await?;
        let share = Request::capped("3Gi", "10");
        let holder = namespace
            .running("holder", &share, &workload::hold("2Gi"))
            .await?;
        holder.started().await?;
        let beat = holder.next_beat().await?;

        let back = case.node.hang("call = \"nvmlInitWithFlags\"").await?;
        let (node, script, restored) = (case.node.clone(), back.clone(), case.plugin());
        case.afterwards("the driver", async move {
            node.shell(&script).await?;
            restored.published().await.map(drop)
        });
        let node = until_driver(case, "a driver that hangs", false).await?;
        ensure!(
            driver_ready(&node) == Some((false, "DriverHangs".into())),
            "{:?}",
            node.status
        );
        let status = node.status.context("no status")?;
        ensure!(status.inventory.is_some(), "the GPUs are still known");
        let withheld = status.withheld.iter().map(|it| &it.gpu);
        let gpus = case.gpus.iter().map(|gpu| &gpu.uuid);
        ensure!(withheld.eq(gpus), "{:?}", status.withheld);
        nothing_offered(&plugin).await?;
        let late = namespace.idle("late", &share).await?;
        late.unschedulable().await?;
        let after = holder.next_beat().await?;
        ensure!(after.beat > beat.beat && after.errors == 0, "{after:?}");
        // Unprepare needs no driver.
        holder.delete().await?;

        case.node.shell(&back).await?;
        until_driver(case, "the driver back", true).await?;
        late.started().await.map(drop)
    })
}

/// The plugin's own /dev is filled when its container starts and lacks the nodes of a driver that is loaded later.
#[test]
fn a_driver_that_is_loaded_after_the_plugin_started_is_found() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        case.changes("plugin of");
        let plugin = case.plugin();
        plugin.published().await?;
        let back = "if [ -d /dev/away ]; then mv /dev/away/* /dev/; rmdir /dev/away; fi";
        let (node, restored) = (case.node.clone(), case.plugin());
        case.afterwards("the device nodes", async move {
            node.shell(back).await?;
            restored.published().await.map(drop)
        });
        let old = plugin.ready(None).await?;
        case.node
            .shell("mkdir /dev/away; mv /dev/nvidia* /dev/away/")
            .await?;
        until_driver(case, "no device nodes", false).await?;
        let epoch = system::epoch(&plugin.gpu_node().await?);
        let pods: Api<Pod> = Api::namespaced(case.client.clone(), SYSTEM);
        pods.delete(&old.name_any(), &DeleteParams::default())
            .await?;
        // The new plugin registers, without a driver.
        let nodes: Api<GpuNode> = Api::all(case.client.clone());
        wait::for_one(
            nodes,
            case.node.name(),
            "a new registration",
            wait::USUAL,
            |node| (system::epoch(node?) > epoch).then_some(()),
        )
        .await?;
        let ready = driver_ready(&plugin.gpu_node().await?).context("no condition")?;
        ensure!(!ready.0, "{ready:?}");

        case.node.shell(back).await?;
        until_driver(case, "the driver", true).await?;
        plugin.published().await?;
        let namespace = case.namespace("late-driver").await?;
        let pod = namespace.idle("pod", &Request::capped("1Gi", "10")).await?;
        pod.started().await.map(drop)
    })
}

/// Waits until the node has this driver.
async fn until_version(client: &Client, node: &Node, version: &str) -> anyhow::Result<()> {
    let what = format!("the driver {version}");
    let nodes: Api<GpuNode> = Api::all(client.clone());
    wait::for_one(nodes, node.name(), &what, wait::USUAL, |node| {
        let node = node?;
        let inventory = node.status.as_ref()?.inventory.as_ref()?;
        (driver_ready(node)?.0 && inventory.driver_version == version).then_some(())
    })
    .await
}

#[test]
fn another_driver_version_serves_the_claims_that_are_allocated() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let plugin = case.plugin();
        plugin.published().await?;
        let namespace = case.namespace("other-driver").await?;
        let claim = Request::capped("3Gi", "10").spec();
        namespace.claim("held", &claim).await?;
        let sources = [Source::Claim("held")];
        let mut object = manifest("holder", &sources, &IDLE);
        object["spec"]["restartPolicy"] = "Always".into();
        let holder = namespace.pod_from(object).await?;
        holder.started().await?;
        ensure!(holder.nvidia_smi().await?[0].1 == 3 << 10, "before");

        let node = plugin.gpu_node().await?;
        let inventory = node.status.and_then(|status| status.inventory);
        let old = inventory.context("no inventory")?.driver_version;
        let version = "550.163.01";
        let edit = format!(
            "s/^driver_version = .*/driver_version = \"{version}\"/; s/^cuda_version = .*/cuda_version = 12040/"
        );
        let back = case.node.change_machine(&edit).await?;
        let (client, node) = (case.client.clone(), case.node.clone());
        case.afterwards("the driver of before", async move {
            node.shell(&back).await?;
            until_version(&client, &node, &old).await
        });
        until_version(&case.client, &case.node, version).await?;
        plugin
            .slices("slices with the new version", wait::USUAL, |slices| {
                let slices = system::complete(slices)?;
                let mut devices = slices
                    .values()
                    .flat_map(|slice| slice.spec.devices.iter().flatten());
                let is_new = |device: &Device| {
                    let attributes = device.attributes.as_ref();
                    let version = attributes.and_then(|all| all.get(attribute::DRIVER_VERSION));
                    version.and_then(|version| version.version.as_deref()) == Some("550.163.1")
                };
                devices.all(is_new).then_some(())
            })
            .await?;

        // A container that was started before has the old driver's files, which the new one refuses.
        let refused = holder.exec(&["nvidia-smi"]).await?;
        ensure!(refused.stdout.contains("version mismatch"), "{refused:?}");
        holder.restart_container(&case.node).await?;
        let second = namespace.pod("second", &sources, &IDLE).await?;
        second.started().await?;
        for pod in [&holder, &second] {
            ensure!(pod.nvidia_smi().await?[0].1 == 3 << 10, "{}", pod.name());
            let filled = pod.fill(&[]).await?;
            ensure!(filled[0].filled == 3 << 30, "{}: {filled:?}", pod.name());
        }
        // The plugin changes GPUs with the new driver, although it never stops watching the allocated claim.
        let other = Request::profile("1g.10gb").on(&case.gpus[1].uuid);
        namespace.started("partition", &other).await?;
        Ok(())
    })
}

#[test]
fn a_deleted_gpu_node_returns_in_seconds_and_its_slices_stay() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let plugin = case.plugin();
        let before = plugin.published().await?;
        let old = plugin.gpu_node().await?;
        let nodes: Api<GpuNode> = Api::all(case.client.clone());
        nodes
            .delete(case.node.name(), &DeleteParams::default())
            .await?;
        let new = wait::for_one(
            nodes,
            case.node.name(),
            "the GpuNode back and published",
            wait::HEALED,
            |node| {
                let node = node.filter(|node| node.uid() != old.uid())?;
                let status = node.status.as_ref()?;
                let published = status.published.as_ref()?;
                (published.epoch == system::epoch(node)).then(|| node.clone())
            },
        )
        .await?;
        ensure!(
            system::epoch(&new) > system::epoch(&old),
            "{:?}",
            new.status
        );
        let after = plugin.published().await?;
        let same = before
            .iter()
            .all(|(name, slice)| after.get(name).is_some_and(|now| now.uid() == slice.uid()));
        ensure!(same && after.len() == before.len(), "slices were made anew");
        Ok(())
    })
}
